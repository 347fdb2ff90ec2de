"""``minivllm report``: one file that asks for nothing else, whose charts show the values that they are given."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as xml

import pytest

from minivllm.cli import main
from minivllm.lab.bench import charts, repeats, report
from minivllm.lab.bench.charts import Bar, DrawnLine

ROW = {
    "intervals": {"output_throughput": [90.0, 110.0]},
    "output_throughput": 100.0,
    "median_ttft_ms": 5.0,
    "failed": 0,
}
TIMES = {"request_throughput": 2.0, "p99_ttft_ms": 9.0, "median_tpot_ms": 1.0, "p99_tpot_ms": 2.0}
REQUESTED = {"ttfts": [0.001, 0.002, 0.0], "e2els": [0.1, 0.2, 0.0], "errors": ["", "", "gone"]}
WORTH = {"output_throughput": {"ratio": 1.5, "low": 1.2, "high": 1.9, "p": 0.01, "says": "a difference"}}
NAME = '<script>alert("x")</script> & co'


def result(kind, **more):
    return {**repeats.result(kind, [ROW], [{"energy_joules": None}], {}, None), **more}


LOADED = {**ROW, **TIMES, "max_concurrency": None, "requests": REQUESTED}
BATCH = {**ROW, "input_len": 4, "batch_size": 2, "latency": 0.1, "median_tpot_ms": 1.0}
FIRST = {**ROW, "name": NAME, "quality": None, "against_first": {}, "weight_bytes": 1 << 20}
SECOND = {**FIRST, "name": "b", "quality": {"perplexity": 3.0, "kl": 0.1}, "against_first": WORTH}
TIMED = {**LOADED, "requests": {**REQUESTED, "start_times": [0.0, 0.05, 0.1]}}
KERNEL = {
    "operation": NAME, "batch_size": 1, "tokens": 1, "context": 8, "calls": 2, "us": 9.0, "floor_us": 3.0,
    "bound_by": "memory", "share_of_floor": 1 / 3, "torch_us": None, "torch_over_own": None,
    "intervals": {"us": [8.0, 10.0]},
}  # fmt: skip
POLICY = {**ROW, **dict.fromkeys(("mean_e2el_ms", "p99_e2el_ms", "mean_ttft_ms", "mean_tpot_ms"), 5.0), **TIMES}
REPLAYED = {
    "config": NAME, "scheduler": "fcfs", "evictor": "lru", "blocks": 9, "block_size": 16, "hit_rate": 0.25,
    "evictions": 40, "preemptions": 0, "steps": 7, "queue_steps": {"p50": 1.0, "p99": 2.0, "max": 3.0},
}  # fmt: skip
TRACE = {**repeats.head("replay"), "trace": NAME, "requests": 3, "prompt_tokens": 9, "output_tokens": 4, "seconds": 5.0}
BEST = {**REPLAYED, "evictor": "optimum", "hit_rate": 0.5, "evictions": 20, "of_optimum": 1.0}
ALONE = [{k: v for k, v in one.items() if k not in ("steps", "queue_steps")} for one in (REPLAYED, BEST)]
LATENCIES = {f"{q}_{key}_ms": 2.0 for key in ("ttft", "tpot", "e2el") for q in ("p50", "p90", "p99")}
SIMULATED = {
    "config": NAME, "scheduler": "fcfs", "evictor": "lru", "rate": 1.0, "output_throughput": 90.0, "failed": 0,
    "request_throughput": 2.0, "prefix_hit_rate": 0.5, "evictions": 3, "preemptions": 1, **LATENCIES,
}  # fmt: skip
RESULTS = {
    "simulate": {
        **TRACE,
        "kind": "simulate",
        "costs": NAME,
        "costs_about": {"model": NAME},
        "goodput": {},
        "runs": [SIMULATED, {**SIMULATED, "rate": "inf", "real": SIMULATED}],
    },
    "replay": {**TRACE, "step_ms": 50.0, "runs": [REPLAYED, {**BEST, "preemptions": 2}]},
    "alone": {**TRACE, "step_ms": None, "runs": ALONE},
    "serve": result("serve", rows=[{**TIMED, "request_rate": rate} for rate in (1.0, 2.0)]),
    "kernels": result("kernels", rows=[KERNEL, {**KERNEL, "us": None}]),
    "batching": result(
        "batching",
        rows=[
            {**POLICY, "policy": NAME, "request_rate": 1.0},
            {**POLICY, "policy": "b", "request_rate": 1.0, "against": WORTH["output_throughput"]},
        ],
    ),
    "closed": result("serve", rows=[{**LOADED, "request_rate": "inf"}]),
    "ablate": result("ablate", model_id=NAME, rows=[{**ROW, "part": NAME, "worth": WORTH, "sets": ["a=b"]}]),
    "compare": result("compare", rows=[FIRST, SECOND], runs_by_name={NAME: [], "b": []}),
    "latency": result("latency", rows=[BATCH]),
    "memory": result("memory", weight_bytes=1 << 20, kv_peak_bytes=2 << 20, rest_bytes=1 << 20),
    "throughput": result("throughput"),
}


def test_a_report_of_every_kind_is_whole_asks_for_nothing_and_shows_names_as_text(tmp_path, capsys):
    paths = []
    for name, found in RESULTS.items():
        paths.append(tmp_path / f"{name}.json")
        repeats.write(str(paths[-1]), found)
    out = tmp_path / "r.html"
    assert main(["report", *map(str, paths), "-o", str(out)]) == 0
    page = out.read_text()
    assert page.count("<h2>") == len(RESULTS) and "nan" not in page and "Traceback" not in page
    assert not re.search(r"https?:|src=|@import|url\(|<script|<link|onload|javascript", page)
    assert "&lt;script&gt;" in page and "prefers-color-scheme:dark" in page and "width=device-width" in page
    drawings = re.findall(r"<svg.*?</svg>", page, re.S)
    assert len(drawings) >= 10
    for one in drawings:
        root = xml.fromstring(one)
        assert root.get("aria-label") and root.get("viewBox").startswith("0 0 640 ")
        for rect in root.iter("rect"):
            assert 0 <= float(rect.get("x")) <= 640 and 0 <= float(rect.get("width")) <= 640


def test_bars_are_as_long_as_their_values_and_error_bars_where_the_interval_is():
    root = xml.fromstring(charts.BarChart("x", [Bar("a", 1.0, 0.5, 2.0), Bar("b", 2.0)], 1.0).svg())
    a, b = (float(rect.get("width")) for rect in root.iter("rect"))
    assert b == pytest.approx(2 * a, rel=1e-3)
    error = next(path.get("d") for path in root.iter("path") if path.get("class") == "e")
    low, high = re.match(r"M([\d.]+) [\d.]+H([\d.]+)", error).groups()
    assert float(low) == pytest.approx(charts.LEFT + a / 2, abs=0.1)
    assert float(high) == pytest.approx(charts.LEFT + b, abs=0.1)


WIDE = [Bar("a", 1.0, -40.0, 42.0), Bar("b", 2.0, 1.9, 2.1), Bar("c", 0.0, None, None, 90.0), Bar("d", 1.0, 0.2, 1.8)]


def test_every_whisker_is_within_the_picture_with_a_cap_at_both_ends():
    root = xml.fromstring(charts.BarChart("x", WIDE, 1.0).svg())
    errors = [path.get("d") for path in root.iter("path") if path.get("class") == "e"]
    assert len(errors) == 3
    for one in errors:
        low, high, *caps = map(float, re.findall(r"[MH]([\d.-]+)", one))
        assert charts.LEFT - 0.1 <= low < high <= charts.WIDTH and caps == [low, high], one
    line = DrawnLine("l", ((1.0, 10.0), (2.0, 5.0)), upward=((-30.0, 50.0), (4.0, 6.0)), across=(None, (1.5, 9.0)))
    root = xml.fromstring(charts.LineChart("", [line, DrawnLine("m", ((1.0, 1.0),))], "x", "y").svg())
    found = [path.get("d") for path in root.iter("path") if path.get("class") == "la"][1:]
    assert len(found) == 3 and all(one.count("M") == 3 for one in found)
    for one in found:
        (x1, y1), (x2, y2) = [tuple(map(float, pair)) for pair in re.findall(r"[ML]([\d.-]+) ([\d.-]+)", one)][:2]
        assert all(0 <= x <= charts.WIDTH for x in (x1, x2)) and all(0 <= y <= charts.LOW + 0.1 for y in (y1, y2)), one


@pytest.mark.parametrize("log", [False, True])
def test_matplotlib_draws_whiskers_over_the_points_and_within_the_axes(log):
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    from minivllm.lab.bench import plot

    line = DrawnLine("l", ((1.0, 10.0), (2.0, 5.0)), upward=((-30.0, 50.0), (4.0, 6.0)))
    for chart in (charts.BarChart("t", WIDE), charts.LineChart("t", [line], "x", "y", log=log)):
        axes = Figure().add_subplot()
        plot._draw(axes, chart)
        whiskers = [one for one in axes.lines if one.get_marker() in ("|", "_") and one.get_zorder() == plot.OVER]
        assert len(whiskers) == (3 if isinstance(chart, charts.BarChart) else 2)
        (left, right), (bottom, top) = axes.get_xlim(), sorted(axes.get_ylim())
        for one in whiskers:
            xs, ys = one.get_data()
            assert left <= min(xs) and max(xs) <= right and bottom <= min(ys) and max(ys) <= top
            others = [line for line in axes.lines if line.get_marker() == "o"]
            assert not one.get_clip_on() and all(one.get_zorder() > point.get_zorder() for point in others)


def test_points_lie_where_their_values_are_and_a_stack_fills_its_width():
    root = xml.fromstring(charts.LineChart("", [DrawnLine("l", ((1.0, 10.0), (2.0, 5.0)))], "x", "y").svg())
    (x1, y1), (x2, y2) = [(float(c.get("cx")), float(c.get("cy"))) for c in root.iter("circle")]
    assert x2 - 60 == pytest.approx(2 * (x1 - 60)) and charts.LOW - y1 == pytest.approx(2 * (charts.LOW - y2))
    wide = [
        float(r.get("width"))
        for r in xml.fromstring(charts.StackChart("m", [Bar("a", 3), Bar("b", 1)]).svg()).iter("rect")
    ]
    assert wide[0] + wide[2] == pytest.approx(620) or sum(wide) == pytest.approx(620 + 24)


def test_a_logarithmic_axis_has_a_decade_where_the_other_has_its_logarithm():
    root = xml.fromstring(
        charts.LineChart("", [DrawnLine("l", ((1.0, 1.0), (2.0, 10.0), (3.0, 100.0)))], "x", "y", log=True).svg()
    )
    first, second, third = [float(c.get("cy")) for c in root.iter("circle")]
    assert first - second == pytest.approx(second - third, abs=0.1) and first > third


def test_an_axis_ends_at_its_last_mark_and_holds_all_values():
    for most in (0.003, 0.9, 1.0, 6.1, 17.0, 99.0, 1234.0):
        low, high = charts._range([most], True)
        marks = charts._marks(low, high, True)
        assert low == 0 and most <= high * (1 + 1e-9) and marks[-1] == pytest.approx(high) and 3 <= len(marks) <= 8


def test_a_timeline_has_each_request_where_its_times_are():
    root = xml.fromstring(
        charts.TimelineChart("t", [charts.AxisSpan(1.0, 2.0, 4.0), charts.AxisSpan(0.0, 1.0, 2.0)]).svg()
    )
    first, second, third, fourth = list(root.iter("rect"))[:4]
    wide = charts.WIDTH - 20
    for rect, start, seconds in ((first, 0, 1), (second, 1, 1), (third, 1, 1), (fourth, 2, 2)):
        assert float(rect.get("x")) == pytest.approx(10 + wide * start / 4, abs=0.1)
        assert float(rect.get("width")) == pytest.approx(wide * seconds / 4, abs=0.1)


def test_png_and_svg_have_the_charts_of_a_report(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    paths = []
    for name in ("serve", "ablate", "memory", "compare", "kernels", "batching", "replay", "simulate"):
        paths.append(str(tmp_path / f"{name}.json"))
        repeats.write(paths[-1], RESULTS[name])
    for ending, head in (("png", b"\x89PNG"), ("svg", b"<?xml")):
        out = tmp_path / f"r.{ending}"
        assert main(["report", *paths, "-o", str(out)]) == 0
        count = len(re.findall("<figure>", "".join(report.section(p, repeats.read(p)) for p in paths)))
        assert f"{count} charts" in capsys.readouterr().out
        assert out.read_bytes().startswith(head)
    assert len(re.findall(r'id="axes_\d+"', out.read_text())) == count


def test_a_figure_without_matplotlib_or_without_charts_is_refused_and_so_is_another_ending(
    tmp_path, capsys, monkeypatch
):
    from minivllm.lab.bench import plot

    path, plain = str(tmp_path / "a.json"), str(tmp_path / "t.json")
    repeats.write(path, RESULTS["ablate"])
    repeats.write(plain, RESULTS["throughput"])
    assert main(["report", path, "-o", str(tmp_path / "r.pdf")]) == 2
    assert "expected a file that ends in .html, .png or .svg" in capsys.readouterr().err
    monkeypatch.setattr(plot, "require", lambda: None)
    assert main(["report", plain, "-o", str(tmp_path / "r.png")]) == 2
    assert "no charts" in capsys.readouterr().err
    monkeypatch.undo()
    monkeypatch.setattr(plot.importlib.util, "find_spec", lambda name: None)
    assert main(["report", path, "-o", str(tmp_path / "r.png")]) == 2
    assert 'pip install "minivllm[plot]"' in capsys.readouterr().err
    assert not list(tmp_path.glob("r.*"))


@pytest.mark.parametrize("alone", [[], ["--cache-only"]])
def test_what_a_replay_writes_is_drawn_a_bar_a_run_under_what_tells_it_apart(tmp_path, capsys, alone):
    trace = "synthetic:requests=60,seed=3,question=30,answer=20,node=40,longest=600"
    flags = ["--blocks", "20%", "--evictor", "lru,fifo", *alone, *([] if alone else ["--scheduler", "fcfs,fair"])]
    path, out = tmp_path / "replay.json", tmp_path / "r.html"
    assert main(["replay", trace, *flags, "--json", "--output-json", str(path)]) == 0
    found = repeats.read(str(path))
    assert json.loads(capsys.readouterr().out) == found
    names = [one["evictor"] if alone else f"{one['scheduler']} {one['evictor']}" for one in found["runs"]]
    assert names == ["lru", "fifo"] if alone else ["fcfs lru", "fcfs fifo", "fair lru", "fair fifo"]
    drawn = [one for one in report.blocks(found) if isinstance(one, charts.BarChart)]
    for chart, key, scale in zip(drawn, ("hit_rate", "evictions"), (100, 1), strict=False):
        assert [(bar.name, bar.value) for bar in chart.rows] == [
            (name, scale * one[key]) for name, one in zip(names, found["runs"], strict=True)
        ]
    assert main(["report", str(path), "-o", str(out)]) == 0
    page = out.read_text()
    assert "Evictions" in page and "energy" not in page and f"% of {'blocks' if alone else 'prompt tokens'}" in page


def test_of_a_replay_without_preemptions_none_are_drawn():
    titles = [[one.title for _, one in report.charts_of("r", RESULTS[name])] for name in ("replay", "alone")]
    assert titles[0][2:] == ["Preemptions"] and [one[0] for one in titles] == [
        "Found in the cache, % of prompt tokens",
        "Found in the cache, % of blocks",
    ]
    assert len(titles[1]) == 2 and titles[1][1] == "Evictions"


def test_hits_evictions_and_preemptions_of_a_comparison_are_drawn_with_their_intervals_where_any_run_has_some():
    runs = {name: [{"figures": {"prefix_hit_rate": 0.0, "evictions": n}} for n in (0, 0, 6)] for name in "ab"}
    runs["a"][2]["figures"]["prefix_hit_rate"] = 0.25
    rows = [{**FIRST, **repeats.merged([run["figures"] for run in own]), "name": name} for name, own in runs.items()]
    found = json.loads(repeats.dumps(result("compare", rows=rows, runs_by_name=runs)))
    drawn = {one.title: one.rows for _, one in report.charts_of("r", found)}
    assert list(drawn) == ["Tokens a second", "Prefix hits", "Evictions"], "no preemption came"
    for row, bar in zip(rows, drawn["Evictions"], strict=True):
        low, high = row["intervals"]["evictions"]
        assert (bar.name, bar.value) == (row["name"], 0.0) and bar.high == pytest.approx((high - low) / 2)
    ends = re.findall(
        r'class="e" d="M([\d.]+) [\d.]+H([\d.]+)M', charts.BarChart("medians of 0", drawn["Evictions"]).svg()
    )
    whole = {(float(charts.LEFT), charts.WIDTH - 70.0)}
    assert {tuple(map(float, one)) for one in ends} == whole, "intervals fill the axis where no bar has a length"
    for gone in runs.values():
        gone[2]["figures"] |= {"prefix_hit_rate": 0.0, "evictions": 0}
    none = result("compare", rows=rows, runs_by_name=runs)
    assert [one.title for _, one in report.charts_of("r", none)] == ["Tokens a second"]


def test_failed_requests_are_no_fast_ones_and_loads_that_are_not_drawn_are_mentioned():
    assert report._times_of(LOADED, "ttfts") == [0.001, 0.002]
    five = report.section("r", result("serve", rows=[{**LOADED, "request_rate": float(i)} for i in range(1, 6)]))
    assert "first 4 of 5 loads" in five and "loads" not in report.section("r", RESULTS["serve"])
    nothing = {**RESULTS["closed"], "knee": 4.0, "knee_below": None}
    assert "Knee: above 4.00 requests/s" in report.section("r", nothing)


def test_a_distribution_ends_at_one_and_is_thinned():
    found = report._distribution("d", [i / 1000 for i in range(5000)])
    assert len(found.points) == report.MOST_STEPS + 1 and found.points[-1] == (4999.0, 1.0)
    assert found.points[0] == (0.0, 1 / 5000)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "not a result of a measurement"),
        ('{"format": "minivllm-bench", "format_version": 9}', "format 9; this minivllm reads 1"),
        (json.dumps({"format": "minivllm-bench", "format_version": 1, "kind": "ablate"}), "not a whole result"),
        (json.dumps({**TRACE, "runs": [{}]}), "not a whole result, edited by hand? KeyError: 'step_ms'"),
        (
            '{"trace": "a", "costs": "c.json", "runs": []}',
            "expected a file that bench, ablate, compare, replay or simulate",
        ),
        ("{", "r.json"),
    ],
)
def test_what_is_no_result_is_refused_and_nothing_is_written(tmp_path, capsys, text, message):
    path, out = tmp_path / "r.json", tmp_path / "r.html"
    path.write_text(text)
    assert main(["report", str(path), "-o", str(out)]) == 2
    assert message in capsys.readouterr().err and not out.exists()
