"""What ``minivllm simulate`` says of its runs, and what ``minivllm report`` draws of it."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
from simulated_costs import COSTS

from minivllm.cli import main
from minivllm.lab.bench import charts, repeats, report
from minivllm.plugins.evictor.options import CostAwareOptions

TRACE = "synthetic:like=pocket,requests=40,seed=3,rate=20"
SIZES = ["--set", "max_num_seqs=8", "--set", "max_num_batched_tokens=64"]
OPTIONS = [f'{{name="cost-aware",options={{horizon={h},ghosts=2}}}}' for h in ("2.0", "3.0")]
CHECK = {"steps": 60, "median_error": 0.1, "p90_error": 0.2, "sum_error": -0.05}
SHOWN = [f"cost-aware (horizon={h}, ghosts=2)" for h in ("2.0", "3.0")]


@pytest.fixture
def simulated(tmp_path, capsys):
    """Return the result of ``simulate`` with flags, and its file."""
    costs, path = tmp_path / "costs.json", tmp_path / "simulated.json"
    costs.write_text(json.dumps(replace(COSTS, fit={"check": CHECK}).as_json()))

    def simulate(*flags):
        given = ["--trace", TRACE, "--costs", str(costs), *SIZES, *flags, "--json", "--output-json", str(path)]
        assert main(["simulate", *given]) == 0
        found = repeats.read(str(path))
        assert json.loads(capsys.readouterr().out) == found
        return found, str(path)

    return simulate


def drawn(found):
    return {one.title: one for _, one in report.charts_of("s", found)}


def test_a_result_begins_as_others_do_and_says_what_was_run_with_which_costs(simulated):
    found, _ = simulated("--goodput", "ttft:200")
    assert list(found)[:4] == ["format", "format_version", "kind", "date"] and found["kind"] == "simulate"
    assert (found["requests"], found["goodput"]) == (40, {"ttft": 200.0})
    assert found["trace"].startswith("synthetic:") and found["costs"].endswith("costs.json")


def test_every_figure_has_a_band_that_holds_it_and_grows_with_the_error_of_the_costs(tmp_path, capsys):
    wide = {}
    for error in (0.0, 0.1, 0.54):
        costs = tmp_path / "costs.json"
        costs.write_text(json.dumps(replace(COSTS, fit={"check": {**CHECK, "median_error": error}}).as_json()))
        given = ["simulate", "--trace", TRACE, "--costs", str(costs), *SIZES]
        assert main([*given, "--json"]) == 0
        output = capsys.readouterr()
        found = json.loads(output.out)
        run = found["runs"][0]
        figures = {key for key, value in run.items() if type(value) in (int, float)}
        assert set(run["band"]) == figures - {"rate", "run_seconds", "run_cpu_seconds"}
        assert all(low <= run[key] <= high for key, (low, high) in run["band"].items())
        low, high = run["band"]["mean_e2el_ms"]
        wide[error] = high / low
        rough = error > 0.2
        assert ("54 % off in the median" in output.err) == rough == bool(found["uncertainty"]["warning"])
        assert main(given) == 0
        lines = capsys.readouterr().out.splitlines()
        assert [line.split()[0] for line in lines[3:5]] == ["from", "to"] and lines[5].startswith("bands (from, to)")
        assert any(line.startswith("rough: ") for line in lines) == rough
        page = report.section("s", found)
        assert ("Rough: " in page) == rough and "Bands: all steps may be" in page
    assert 1 < wide[0.0] < wide[0.1] < wide[0.54]  # of no error in the median the sum's is left
    assert wide[0.54] > 2.17 / 0.65 * 0.9, "steps alone make a band of 0.65 to 2.17, and queues more"


def test_costs_without_a_check_have_no_band_and_say_so(tmp_path, capsys):
    costs = tmp_path / "costs.json"
    for fit in ({}, {"check": {"steps": "many"}}, {"check": {"steps": 0, "median_error": 0, "sum_error": 0}}):
        costs.write_text(json.dumps(replace(COSTS, fit=fit).as_json()))
        assert main(["simulate", "--trace", TRACE, "--costs", str(costs), *SIZES]) == 0
        output = capsys.readouterr()
        assert "its error is unknown" in output.err and "bands: unknown" in output.out


def test_no_band_runs_once_and_still_says_the_error(simulated, tmp_path, capsys):
    found, path = simulated("--no-band")
    assert "band" not in found["runs"][0] and found["uncertainty"]["error"] == 0.1
    assert main(["report", path, "-o", str(tmp_path / "r.html")]) == 0


def test_real_runs_are_repeated_and_their_intervals_are_in_text_json_and_report(tmp_path, capsys, monkeypatch):
    from minivllm.lab.simulate import cases

    runs = iter([1.0, 1.1, 1.2] * 2)
    real = cases.simulate

    class Engine:
        engine = None

        def __init__(self, config):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

    def run_really(engine, trace, clock=None):
        return real(now[0], trace, COSTS.scaled(next(runs)), False)

    now, own = [], cases.cases
    monkeypatch.setattr("minivllm.LLM", Engine)
    monkeypatch.setattr(cases, "warm", lambda *_: None)
    monkeypatch.setattr(cases, "run_really", run_really)
    monkeypatch.setattr(cases, "cases", lambda *given: now.extend(own(*given)) or now)
    costs = tmp_path / "costs.json"
    costs.write_text(json.dumps(replace(COSTS, fit={"check": CHECK}).as_json()))
    given = ["simulate", "--trace", TRACE, "--costs", str(costs), *SIZES, "--real"]
    assert main([*given, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    run = found["runs"][0]
    assert len(run["real"]["repeats"]) == 3
    low, high = run["real"]["intervals"]["mean_e2el_ms"]
    assert low < run["real"]["mean_e2el_ms"] < high
    off = run["off_intervals"]["mean_e2el_ms"]
    assert off[0] < run["off"]["mean_e2el_ms"] < off[1]
    page = report.section("s", found)
    assert "95 % of real runs" in page and re.search(r"-\d+\.\d % \[-\d", page)
    now.clear()
    assert main(given) == 0
    out = capsys.readouterr().out
    assert "± of 3 runs" in out and re.search(r"off by .*% \[", out)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--repeats", "3"], "only runs of the real engine vary; add --real"),
        (["--real", "--repeats", "0"], "--repeats 0: expected 1 to 100"),
    ],
)
def test_repeats_are_of_the_real_engine(tmp_path, capsys, flags, message):
    costs = tmp_path / "costs.json"
    costs.write_text(json.dumps(COSTS.as_json()))
    assert main(["simulate", "--trace", TRACE, "--costs", str(costs), *flags]) == 2
    assert message in capsys.readouterr().err


def test_rows_that_differ_in_options_alone_say_them(simulated):
    def run_simulate(*flags):
        return [(run["scheduler"], run["evictor"]) for run in simulated(*flags)[0]["runs"]]

    met = run_simulate("--evictor", ",".join(["cost-aware", *OPTIONS]), "--scheduler", "fcfs,static")
    assert met == [(one, evictor) for one in ("fcfs", "static") for evictor in ("cost-aware", *SHOWN)]
    met = run_simulate("--scheduler", 'static,{name="static",options={max_hold=7.0}}', "--oracle")
    hold, shortest = "static (max_hold=7.0)", "shortest-job (lengths known)"
    assert met == [("static", "lru"), ("static", "optimum"), (shortest, "lru"), (hold, "lru"), (hold, "optimum")]


def test_a_part_with_an_option_at_its_default_is_a_run_beside_the_one_without(simulated):
    default = CostAwareOptions().horizon
    found, _ = simulated("--evictor", f'cost-aware,{{name="cost-aware",options={{horizon={default}}}}}')
    runs = found["runs"]
    assert [run["evictor"] for run in runs] == ["cost-aware", f"cost-aware (horizon={default})"]
    assert runs[0]["mean_e2el_ms"] == runs[1]["mean_e2el_ms"]


def test_bars_hold_the_percentiles_of_each_run_under_what_tells_it_apart(simulated):
    found, _ = simulated("--evictor", "lru,fifo", "--rate", "x1", "--rate", "xinf")
    names = ["lru x1", "lru xinf", "fifo x1", "fifo xinf"]
    latencies = [one for title, one in drawn(found).items() if "p50, p90 and p99" in title]
    for key, chart in zip(("ttft", "tpot", "e2el"), latencies, strict=True):
        want = [
            (f"{q} {name}", run[f"{q}_{key}_ms"], *run["band"][f"{q}_{key}_ms"])
            for name, run in zip(names, found["runs"], strict=True)
            for q in ("p50", "p90", "p99")
        ]
        assert [(bar.name, bar.value, bar.low, bar.high) for bar in chart.rows] == want
    for title, key, scale in (
        ("Found in the cache, % of prompt tokens", "prefix_hit_rate", 100),
        ("Joules for each output token", "joules_per_output_token", 1),
        ("Throughput, tokens/s", "output_throughput", 1),
    ):
        bars = [(bar.name, bar.value) for bar in drawn(found)[title].rows]
        assert bars == [(name, scale * run[key]) for name, run in zip(names, found["runs"], strict=True)]


def test_throughput_and_goodput_are_lines_over_the_rates_whatever_their_order(simulated):
    rates = [word for rate in ("x40", "x1", "xinf", "x7.5") for word in ("--rate", rate)]
    found, _ = simulated("--evictor", "lru,fifo", "--goodput", "ttft:1e5", *rates)
    for title, key in (("Throughput", "output_throughput"), ("Goodput", "request_goodput")):
        chart = drawn(found)[f"{title} against the rate"]
        for line in chart.lines:
            own = {run["rate"]: run[key] for run in found["runs"] if run["evictor"] == line.name}
            assert list(line.points) == [(rate, own[rate]) for rate in (1.0, 7.5, 40.0)]
        assert [line.name for line in chart.lines] == ["lru", "fifo"]
    output = [one for one in report.blocks(found) if isinstance(one, str)]
    assert any("(xinf) have no finite rate" in one for one in output)
    assert "Good are requests with ttft of at most 100000 ms." in output


def test_more_lines_than_colours_are_drawn_in_several_charts():
    run = {"config": "a", "scheduler": "fcfs", "output_throughput": 1.0}
    runs = [{**run, "evictor": f"e{i}", "rate": rate} for i in range(8) for rate in (1.0, 2.0)]
    about = {"trace": "t", "requests": 1, "prompt_tokens": 1, "output_tokens": 1, "seconds": 1.0, "costs": "c"}
    found = {**repeats.head("simulate"), **about, "costs_about": {}, "goodput": {}, "runs": runs}
    own = [one for _, one in report.charts_of("s", found) if isinstance(one, charts.LineChart)]
    assert [[line.name for line in one.lines] for one in own] == [[f"e{i}" for i in range(6)], ["e6", "e7"]]


def test_long_names_of_bars_are_apart_where_they_are_cut(simulated):
    found, _ = simulated("--evictor", ",".join(OPTIONS), "--rate", "x1", "--rate", "x4")
    bars = next(iter(drawn(found).values())).rows
    assert len({charts.short(bar.name) for bar in bars}) == len(bars) == 12
    cells = [row[:4] for one in report.blocks(found) if isinstance(one, charts.Table) for row in one.rows]
    for i, bar in enumerate(bars):
        q, row = ("p50", "p90", "p99")[i % 3], i // 3
        assert bar.name.startswith(f"{q} row {row + 1}: ") and cells[row][3] in bar.name


def test_what_a_table_does_not_know_is_not_drawn_and_what_the_real_engine_did_is_a_run_of_its_own(simulated):
    found, _ = simulated()
    run = {key: value for key, value in found["runs"][0].items() if "joules" not in key}
    found["runs"] = [{**run, "real": {**run, "p50_ttft_ms": 1.5}}]
    shown = drawn(found)
    assert not [title for title in shown if "Joules" in title or "Goodput" in title or title == "Preemptions"]
    first = next(iter(shown.values())).rows
    output = [(bar.name, bar.value) for bar in first if bar.name.startswith("p50")]
    assert output == [("p50 fcfs", run["p50_ttft_ms"]), ("p50 fcfs, really", 1.5)]


def test_how_far_a_simulation_is_off_is_a_table_of_its_own(simulated):
    found, _ = simulated("--no-band")
    tables = lambda: [one for one in report.blocks(found) if isinstance(one, charts.Table)]  # noqa: E731
    (alone,) = tables()
    found["runs"][0]["off"] = {"mean_ttft_ms": -0.1234, "output_throughput": 0.02}
    first, off = tables()
    assert first == alone and off.heads == ("config", "rate", "scheduler", "evictor", "tokens/s", "TTFT mean")
    assert off.rows == [(*first.rows[0][:4], "+2.0 %", "-12.3 %")]


def test_a_page_of_a_simulation_has_its_charts_and_a_row_for_each_run(simulated, tmp_path, capsys):
    found, path = simulated("--evictor", "lru,fifo", "--rate", "x1", "--rate", "x4", "--goodput", "e2el:1e6")
    out = tmp_path / "r.html"
    assert main(["report", path, "-o", str(out)]) == 0
    page = out.read_text()
    assert "simulate: synthetic:" in page and "energy unknown" not in page and "nan" not in page
    assert page.count("<figure>") == len(report.charts_of(path, found)) and page.count("<tr>") == 2 * (
        1 + 4
    )  # and of bands
    assert re.search(r"<td>\d+\.\d %</td>", page) and "<th>good/s</th>" in page
