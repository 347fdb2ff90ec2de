"""Write results of ``bench``, ``ablate``, ``compare``, ``replay`` and ``simulate`` as one self-contained HTML file.

The file loads no scripts, fonts or images.  It follows the reader's setting of light or dark colours, and fits the
width of a phone.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from html import escape
from typing import Any

from minivllm.runtime.hooks.figures import FIGURE

from . import Row, Rows, report_traces
from .charts import (
    AxisSpan,
    Bar,
    BarChart,
    Block,
    Chart,
    DrawnLine,
    LineChart,
    StackChart,
    Table,
    TimelineChart,
    number,
)
from .comparing import QUALITY
from .pareto import SPEED, Front
from .repeats import with_bounds
from .serving import knee_text
from .trials import Metric, counted, ratio_text

MOST_STEPS = 200  # largest number of points of the line of a distribution
MOST_LINES = 4  # largest number of lines of distributions in a chart
MOST_SPANS = 40  # largest number of requests in a timeline
WHOLE_STEP = "step: all layers"  # name of the row in ``bench kernels`` that is the sum of all other rows
STYLE = """
:root{--f:#1b1f24;--g:#fff;--h:#667;--r:#d5dae1;--a:#2f6fb3;--b:#c2571a;--c:#2e8b57;--d:#8a4fa3;
--i:#b0851f;--j:#c2417c}
@media(prefers-color-scheme:dark){:root{--f:#e6e9ee;--g:#14171b;--h:#99a;--r:#343b45;--a:#6aa9e9;--b:#f0955c;--c:#6cc596;
--d:#c59be0;--i:#e0bb5a;--j:#f08ab8}}
body{font:16px/1.5 system-ui,sans-serif;color:var(--f);background:var(--g);max-width:52rem;margin:auto;padding:1rem}
h1{font-size:1.5rem}h2{font-size:1.2rem;margin-top:2.5rem;border-top:1px solid var(--r);padding-top:1rem}
h3{font-size:1rem}.t{overflow-x:auto}table{border-collapse:collapse;font-size:.85rem;width:100%}
td,th{padding:.25rem .6rem;text-align:right;border-bottom:1px solid var(--r)}
td:first-child,th:first-child{text-align:left;white-space:nowrap}
svg{width:100%;height:auto;max-width:40rem;display:block}text{font:12px system-ui,sans-serif;fill:var(--f)}
figure{margin:1.5rem 0}figcaption{font-weight:600;margin-bottom:.5rem}
@media(max-width:40rem){svg{min-width:32rem}text{font-size:14px}}
small,p.s{color:var(--h);font-size:.85rem;overflow-wrap:anywhere}
.a{fill:var(--a)}.b{fill:var(--b)}.c{fill:var(--c)}.d{fill:var(--d)}.e{fill:var(--i)}.f{fill:var(--j)}
path{fill:none}
.la{stroke:var(--a)}.lb{stroke:var(--b)}.lc{stroke:var(--c)}.ld{stroke:var(--d)}.le{stroke:var(--i)}
.lf{stroke:var(--j)}.la,.lb,.lc,.ld,.le,.lf{stroke-width:2}.g{stroke:var(--r)}.k{stroke:var(--b);stroke-width:3}
path.e{fill:none;stroke:var(--f);stroke-width:1.5}.m{stroke:var(--h);stroke-dasharray:4 3}.x{stroke:var(--h)}
"""


def page(results: Sequence[tuple[str, Row]]) -> str:
    """Return the HTML page of (name, result) pairs."""
    body = "".join(section(name, found) for name, found in results)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>minivllm measurements</title><style>{STYLE}</style></head>\n"
        f"<body><h1>Measurements</h1>{body}</body></html>\n"
    )


def blocks(found: Row) -> list[Block]:
    """Return the charts, tables and paragraphs of a result of any kind."""
    kind = found["kind"]
    if kind in ("replay", "simulate"):
        return getattr(report_traces, kind)(found)
    kinds = {
        "serve": _serve, "ablate": _ablate, "compare": _compare, "latency": _latency, "memory": _memory,
        "kernels": _kernels, "batching": _batching,
    }  # fmt: skip
    return kinds.get(kind, _figures)(found)


def section(name: str, found: Row) -> str:
    """Return the HTML of a result: its title, its blocks, and the machine that it was measured on."""
    inside = "".join(map(_html, blocks(found)))
    title = escape(title_of(name, found))
    about = escape(_about(name, found))
    return f"<h2>{title}</h2>{inside}<p class=s>{about}</p>"


def title_of(name: str, found: Row) -> str:
    """Return the title of a result: its kind, and the model, the trace or the name."""
    return f"{found['kind']}: {found.get('model_id') or found.get('trace') or name}"


def charts_of(name: str, found: Row) -> list[tuple[str, Chart]]:
    """Return the charts of a result, each with the title of the result."""
    charts = [block for block in blocks(found) if not isinstance(block, (str, Table))]
    return [(title_of(name, found), chart) for chart in charts]


def _html(block: Block) -> str:
    """Return the HTML of a block."""
    if isinstance(block, str):
        return f"<p class=s>{escape(block)}</p>"
    if isinstance(block, Table):
        return table(block.heads, block.rows)
    return f'<figure><figcaption>{escape(block.title)}</figcaption><div class="t">{block.svg()}</div></figure>'


def table(heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return the HTML of a table."""
    lines = [[f"<th>{escape(head)}</th>" for head in heads]]
    for row in rows:
        lines.append([f"<td>{escape(_cell(value))}</td>" for value in row])
    inside = "".join(f"<tr>{''.join(line)}</tr>" for line in lines)
    return f'<div class="t"><table>{inside}</table></div>'


def _cell(value: Any) -> str:
    """Return a value as text, "-" for None."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return number(value)
    return str(value)


def _bar(name: str, row: Row, key: str) -> Bar:
    """Return the bar of a median with half of the width of its interval on both sides, as in the tables."""
    value = math.nan
    if row.get(key) is not None:
        value = float(row[key])
    intervals = row.get("intervals") or {}
    bounds = intervals.get(key)
    if not bounds:
        return Bar(name, value)
    low, high = bounds
    half = (high - low) / 2
    return Bar(name, value, value - half, value + half)


def _figures(found: Row) -> list[Block]:
    """Return a table of all numbers of a result."""
    intervals = found.get("intervals", {})
    rows = []
    for key, value in found.items():
        if type(value) in (int, float) and key != "format_version":
            low, high = intervals.get(key) or (None, None)
            rows.append((key, value, low, high))
    return [Table(("figure", "median", "95 % from", "to"), rows)]


def _distribution(name: str, seconds: Sequence[float]) -> DrawnLine:
    """Return the cumulative distribution of times as a line: x is milliseconds, y the share of requests that took at
    most x.
    """
    if not seconds:
        return DrawnLine(name, ())
    ordered = sorted(1e3 * value for value in seconds)
    n = len(ordered)
    drawn = {round(i * (n - 1) / MOST_STEPS) for i in range(MOST_STEPS + 1)}
    points = [(ordered[i], (i + 1) / n) for i in sorted(drawn)]
    return DrawnLine(name, tuple(points))


def _times_of(row: Row, key: str) -> list[float]:
    """Return a time, in seconds, of each request of a load that did not fail."""
    requests = row["requests"]
    pairs = zip(requests[key], requests["errors"], strict=True)
    return [seconds for seconds, error in pairs if not error]


def _serve(found: Row) -> list[Block]:
    """Return the report of ``bench serve``: results over the loads, distributions, a timeline and a table."""
    rows = found["rows"]
    rated = all(not isinstance(row["request_rate"], str) for row in rows)
    load = "max_concurrency"
    name = unit = "streams"
    axis = "concurrency"
    if rated:
        load = "request_rate"
        name = "requests/s offered"
        unit = "a second"
        axis = "offered rate"
    labels = [f"{number(float(row[load]))} {unit}" if row[load] else "all" for row in rows]
    out: list[Block] = []
    if len(rows) > 1:
        line = functools.partial(_line, rows, load)
        throughput = [line("output_throughput", "")]
        out.append(LineChart(f"Throughput against {axis}", throughput, name, "tokens/s"))
        times = []
        for time in ("ttft", "tpot"):
            for q in ("median", "p99"):
                times.append(line(f"{q}_{time}_ms", f"{time} {q}"))
        out.append(LineChart(f"Latency against {axis}", times, name, "milliseconds"))
    for key, text in (("ttfts", "to the first token"), ("e2els", "to the last")):
        drawn = []
        labelled = list(zip(rows, labels, strict=True))
        for row, label in labelled[:MOST_LINES]:
            seconds = _times_of(row, key)
            if seconds:
                drawn.append(_distribution(label, seconds))
        out.append(LineChart(f"Share of requests, time {text}", drawn, "milliseconds", "share"))
    if len(rows) > MOST_LINES:
        out.append(f"Distributions are those of the first {MOST_LINES} of {len(rows)} loads.")
    out += _timeline(rows[-1], labels[-1])
    if "knee" in found:
        out.append(f"Knee: {knee_text(found['knee'], found['knee_below'])}")
    heads = (name, "requests/s", "tokens/s", "TTFT p50 ms", "p99", "TPOT p50 ms", "p99", "failed")
    keys = ("request_throughput", "output_throughput", "median_ttft_ms", "p99_ttft_ms", "median_tpot_ms", "p99_tpot_ms")
    cells = []
    for row, label in zip(rows, labels, strict=True):
        cells.append((label, *_values(row, keys), row["failed"]))
    return [*out, Table(heads, cells)]


def _values(row: Row, keys: Sequence[str]) -> tuple[Any, ...]:
    """Return the values of a row under some keys."""
    return tuple(row[key] for key in keys)


def _line(rows: Rows, x: str, y: str, name: str) -> DrawnLine:
    """Return the line of a result y over x, with its intervals; rows without it are left out."""
    points = []
    spans = []
    for row in rows:
        if row.get(y) is not None:
            bar = _bar("", row, y)
            points.append((float(row[x]), bar.value))
            spans.append(report_traces.span_of(bar))
    return DrawnLine(name, tuple(points), upward=tuple(spans))


def _timeline(row: Row, load: str) -> list[Block]:
    """Return a chart of the first requests of a load over time, [] if the result does not have their times."""
    requests = row["requests"]
    if not requests.get("start_times"):
        return []
    spans = []
    columns = [requests[key] for key in ("start_times", "ttfts", "e2els", "errors")]
    for start, first, end, error in zip(*columns, strict=True):
        if not error:
            spans.append(AxisSpan(start, start + first, start + end))
    if not spans:
        return []
    spans.sort(key=lambda span: span.start)
    return [TimelineChart(f"Requests one by one, {load}", spans[:MOST_SPANS])]


def _ablate(found: Row) -> list[Block]:
    """Return the report of ``ablate``: the ratio of throughput with and without each part."""
    bars = []
    rows = []
    for row in found["rows"]:
        part = row["part"]
        worth = row["worth"]["output_throughput"]
        if worth["ratio"] is not None:
            bars.append(Bar(part, worth["ratio"], worth["low"], worth["high"]))
        sets = ", ".join(row["sets"])
        rows.append((part, row["output_throughput"], ratio_text(worth), worth["says"], sets))
    chart = BarChart("Throughput with the part over that without it", bars, 1.0)
    return [chart, Table(("without", "tokens/s", "worth", "", "by"), rows)]


def _compare(found: Row) -> list[Block]:
    """Return the report of ``compare``: speed, quality and memory of configurations, with their Pareto front."""
    rows = found["rows"]
    front = Front(found)
    out: list[Block] = [_bars("Tokens a second", rows, SPEED)]
    perplexities = [(row["quality"] or {}).get("perplexity") or math.nan for row in rows]
    scored = [i for i, perplexity in enumerate(perplexities) if perplexity == perplexity]
    quality_keys = front.figures(SPEED, *QUALITY)
    if scored:
        axis = "perplexity (lower is better; not from 0)"
        out.append(_scatter("Quality and speed", front, scored, quality_keys, perplexities, axis))
    if len({row["weight_bytes"] for row in rows}) > 1:
        sizes = [row["weight_bytes"] / 2**20 for row in rows]
        axis = "weights, MiB (not from 0)"
        of_memory = (SPEED, "weight_bytes")
        out.append(_scatter("Memory and speed", front, range(len(rows)), of_memory, sizes, axis))
    out += _counters(found)
    heads = ("configuration", "tokens/s", "over the first", "", "TTFT ms", "weights MiB", "perplexity", "KL", "top-1")
    cells = [_compared_row(row) for row in rows]
    if not scored:
        return [*out, Table(heads, cells)]
    keys = [*quality_keys, "weight_bytes"]
    judged = []
    for i, row in enumerate(cells):
        verdict = "not scored"
        if i in scored:
            verdict = front.beaten(i, keys) or "on the front"
        judged.append((*row, verdict))
    out.append(Table((*heads, "Pareto"), judged))
    return [*out, *_quality_tests(rows), front.rule(keys)]


def _bars(title: str, rows: Rows, key: str) -> BarChart:
    """Return a chart with a bar for each configuration."""
    return BarChart(title, [_bar(row["name"], row, key) for row in rows])


def _counters(found: Row) -> list[Block]:
    """Return charts and tables of the counters of engines and plug-ins, and a table of failed configurations."""
    rows = found["rows"]
    counters: list[Metric] = []
    plugins: list[Metric] = []
    runs = list(found["runs_by_name"].values())
    for metric in counted(runs):
        if metric.key.startswith(FIGURE):
            plugins.append(metric)
        else:
            counters.append(metric)
    out: list[Block] = []
    for metric in counters:
        out.append(_bars(metric.name.capitalize(), rows, metric.key))
    failed = found.get("failed")
    if failed:
        out.append(Table(("configuration", "left out"), list(failed.items())))
    if counters:
        cells = []
        for row in rows:
            counts = [row.get(metric.key) for metric in counters]
            cells.append((row["name"], *counts))
        names = [metric.name for metric in counters]
        out.append(Table(("configuration", *names), cells))
    if plugins:
        figures = []
        for row in rows:
            for metric in plugins:
                if row.get(metric.key) is not None:
                    figures.append((row["name"], metric.name, with_bounds(row, metric.key, 3)))
        out.append(Table(("configuration", "figure of a plug-in", "median, ± half the 95 % interval"), figures))
    return out


def _compared_row(row: Row) -> tuple[Any, ...]:
    """Return the table row of a configuration."""
    test = row["against_first"].get(SPEED)
    quality = row["quality"] or {}
    ratio = (ratio_text(test), test["says"]) if test else ("", "")
    scores = [quality.get(key) for key in ("perplexity", "kl", "top1_agreement")]
    mebibytes = row["weight_bytes"] / 2**20
    return (row["name"], row[SPEED], *ratio, row["median_ttft_ms"], mebibytes, *scores)


def _quality_tests(rows: Rows) -> list[Block]:
    """Return a table of the tests of quality against the first configuration, [] if there are none."""
    cells = []
    for row in rows[1:]:
        for key, name in QUALITY.items():
            test = row["against_first"].get(key)
            if test is not None:
                cells.append((row["name"], name, ratio_text(test), test["says"]))
    heads = ("configuration", "figure", f"over {rows[0]['name']}, or minus it", "")
    return [Table(heads, cells)] if cells else []


def _scatter(
    title: str, front: Front, chosen: Sequence[int], keys: Sequence[str], values: Sequence[float], axis: str
) -> LineChart:
    """Return a chart of ``values`` of the chosen rows over tokens per second, with the front of the results ``keys``.

    A lower value is better.
    """
    points = {}
    drawn = []
    for i in chosen:
        row = front.rows[i]
        point = (float(row[SPEED]), float(values[i]))
        points[i] = point
        span = report_traces.span_of(_bar("", row, SPEED))
        drawn.append(DrawnLine(row["name"], (point,), across=(span,)))
    best = [points[i] for i in chosen if not front.beaten(i, keys)]
    title = f"{title} (whiskers: 95 %)"
    return LineChart(title, drawn, "tokens/s", axis, joined=False, front=tuple(sorted(best)))


def _latency(found: Row) -> list[Block]:
    """Return the report of ``bench latency``."""
    rows = found["rows"]
    bars = [_bar(f"{row['input_len']} tokens, batch {row['batch_size']}", row, "latency") for row in rows]
    keys = ("input_len", "batch_size", "latency", "median_ttft_ms", "median_tpot_ms")
    heads = ("prompt", "batch", "latency s", "TTFT ms", "TPOT ms")
    cells = [_values(row, keys) for row in rows]
    return [BarChart("Seconds of a batch", bars), Table(heads, cells)]


def _memory(found: Row) -> list[Block]:
    """Return the report of ``bench memory``."""
    parts = {"weight_bytes": "weights", "kv_peak_bytes": "KV cache, held", "rest_bytes": "activations and the rest"}
    bars = []
    for key, text in parts.items():
        if found.get(key) is not None:
            bars.append(Bar(f"{text}, MiB", found[key] / 2**20))
    return [StackChart("Memory at the peak", bars), *_figures(found)]


def _kernels(found: Row) -> list[Block]:
    """Return the report of ``bench kernels``: a chart for each load, and a table."""
    by_load: dict[tuple[Any, ...], list[Row]] = {}
    for row in found["rows"]:
        load = _values(row, ("batch_size", "tokens", "context"))
        by_load.setdefault(load, []).append(row)
    out: list[Block] = []
    for (rows, tokens, context), own in by_load.items():
        measured = [row for row in own if row["us"] is not None]
        bars = [_in_step(row) for row in measured if row["operation"] != WHOLE_STEP]
        title = "Microseconds in a step, of all layers (bar), and the floor (line)"
        out.append(BarChart(f"{title}: {rows} rows, {tokens} tokens, context {context}", bars))
    keys = {
        "operation": "operation",
        "rows": "batch_size",
        "tokens": "tokens",
        "context": "context",
        "us": "us",
        "floor us": "floor_us",
        "bound by": "bound_by",
        "of floor": "share_of_floor",
        "torch us": "torch_us",
        "torch/own": "torch_over_own",
    }
    cells = [_values(row, list(keys.values())) for row in found["rows"]]
    return [*out, Table(tuple(keys), cells)]


def _in_step(row: Row) -> Bar:
    """Return the bar of an operation's time in a step, over all its calls."""
    bounds = row["intervals"].get("us") or (None, None)
    times = (row["us"], *bounds, row["floor_us"])
    calls = row["calls"]
    value, low, high, floor = (None if time is None else calls * time for time in times)
    return Bar(row["operation"], value or 0.0, low, high, floor)


def _batching(found: Row) -> list[Block]:
    """Return the report of ``bench batching``: lines over the rate for each policy, and a table."""
    by_policy: dict[str, list[Row]] = {}
    for row in found["rows"]:
        by_policy.setdefault(row["policy"], []).append(row)

    def drawn(key: str) -> list[DrawnLine]:
        return [_line(own, "request_rate", key, name) for name, own in by_policy.items()]

    offered = "requests/s offered"
    keys = {
        "policy": "policy",
        offered: "request_rate",
        "latency ms": "mean_e2el_ms",
        "p99": "p99_e2el_ms",
        "TTFT ms": "mean_ttft_ms",
        "TPOT ms": "mean_tpot_ms",
        "requests/s": "request_throughput",
    }
    cells = []
    for row in sorted(found["rows"], key=lambda row: row["request_rate"]):
        test = row.get("against")
        ratio = (ratio_text(test), test["says"]) if test else ("", "")
        cells.append((*_values(row, list(keys.values())), *ratio))
    latency = drawn("mean_e2el_ms")
    answered = drawn("request_throughput")
    first = drawn("mean_ttft_ms")
    return [
        LineChart("Latency against offered rate", latency, offered, "mean ms to the last token", log=True),
        LineChart("Throughput against offered rate", answered, offered, "requests/s answered"),
        LineChart("Time to the first token", first, offered, "mean ms", log=True),
        Table((*keys, "over continuous", ""), cells),
    ]


def _about(name: str, found: Row) -> str:
    """Return the measured quantity, the time and the machine of a result as text."""
    bill = found.get("bill_of_materials")
    if not bill:
        several = found.get("bills_of_materials") or {}
        bill = next(iter(several.values()), None)
    parts = [name, str(found.get("date", ""))]
    if bill:
        machine = bill["machine"]
        parts.append(machine.get("gpu") or machine["cpu"])
        parts.append(f"torch {bill['versions']['torch']}")
        parts.append(f"fingerprint {bill['fingerprint'][:12]}")
    loads = [state.get("cores_of_others") for state in found.get("machine_states") or ()]
    known = [load for load in loads if load is not None]
    if known:
        parts.append(f"others used {max(known):.2f} cores at most")
    if found.get("joules_per_output_token", 0) is None:  # results of a trace do not have this key
        parts.append("energy unknown")
    return "; ".join(filter(None, parts))
