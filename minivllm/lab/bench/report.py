"""Results of ``bench``, ``ablate``, ``compare``, ``replay`` and ``simulate`` as one HTML file, whole in itself.

No script, no font, no picture from elsewhere; light and dark by the reader's setting, from the width of a phone on.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from html import escape
from typing import Any

from minivllm.runtime.hooks.figures import FIGURE

from . import report_traces
from .charts import (
    Bar,
    BarChart,
    Block,
    Chart,
    DrawnLine,
    LineChart,
    Row,
    Span,
    StackChart,
    Table,
    TimelineChart,
    number,
)
from .comparing import QUALITY
from .pareto import SPEED, Front
from .repeats import with_bounds
from .serving import knee_text
from .trials import counted, ratio_text

MOST_STEPS = 200  # of a distribution that is drawn
MOST_LINES = 4  # of one chart
MOST_SPANS = 40  # requests that are drawn one by one
WHOLE_STEP = "step: all layers"  # of kernels: not one operation beside the others
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
    """``results`` with their names."""
    body = "".join(section(name, found) for name, found in results)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>minivllm measurements</title><style>{STYLE}</style></head>\n"
        f"<body><h1>Measurements</h1>{body}</body></html>\n"
    )


def blocks(found: Row) -> list[Block]:
    """Charts, tables and sentences of a result, by its kind."""
    kinds: dict[str, Callable[[Row], list[Block]]] = {
        "serve": _serve,
        "ablate": _ablate,
        "compare": _compare,
        "latency": _latency,
        "memory": _memory,
        "kernels": _kernels,
        "batching": _batching,
        "replay": report_traces.replay,
        "simulate": report_traces.simulate,
    }
    return kinds.get(found["kind"], _figures)(found)


def section(name: str, found: Row) -> str:
    """One result: charts of its kind, a table, what it was measured on."""
    inside = "".join(map(_html, blocks(found)))
    return f"<h2>{escape(title_of(name, found))}</h2>{inside}<p class=s>{escape(_about(name, found))}</p>"


def title_of(name: str, found: Row) -> str:
    return f"{found['kind']}: {found.get('model_id') or found.get('trace') or name}"


def charts_of(name: str, found: Row) -> list[tuple[str, Chart]]:
    """The charts of a result with what it is called."""
    own = [one for one in blocks(found) if not isinstance(one, (str, Table))]
    return [(title_of(name, found), one) for one in own]


def _html(block: Block) -> str:
    if isinstance(block, str):
        return f"<p class=s>{escape(block)}</p>"
    if isinstance(block, Table):
        return table(block.heads, block.rows)
    return f'<figure><figcaption>{escape(block.title)}</figcaption><div class="t">{block.svg()}</div></figure>'


def table(heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    cells = [f"<th>{escape(one)}</th>" for one in heads]
    body = ["".join(f"<td>{escape(_cell(one))}</td>" for one in row) for row in rows]
    inside = "".join(f"<tr>{row}</tr>" for row in ("".join(cells), *body))
    return f'<div class="t"><table>{inside}</table></div>'


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return number(value) if isinstance(value, float) else str(value)


def _bar(name: str, row: Row, key: str) -> Bar:
    """A median, and as far around it as tables say."""
    value, bounds = math.nan if row.get(key) is None else float(row[key]), (row.get("intervals") or {}).get(key)
    half = (bounds[1] - bounds[0]) / 2 if bounds else None
    return Bar(name, value, *((None, None) if half is None else (value - half, value + half)))


def _figures(found: Row) -> list[Block]:
    intervals = found.get("intervals", {})
    own = [(key, value) for key, value in found.items() if type(value) in (int, float) and key != "format_version"]
    rows = [(key, value, *(intervals.get(key) or (None, None))) for key, value in own]
    return [Table(("figure", "median", "95 % from", "to"), rows)]


def _distribution(name: str, values: Sequence[float]) -> DrawnLine:
    """The share of requests that took at most so many milliseconds."""
    ordered = sorted(1e3 * value for value in values)
    steps = sorted({round(i * (len(ordered) - 1) / MOST_STEPS) for i in range(MOST_STEPS + 1)}) if ordered else []
    return DrawnLine(name, tuple((ordered[i], (i + 1) / len(ordered)) for i in steps))


def _answered(row: Row, word: str) -> list[float]:
    """Times of the requests of a load that did not fail."""
    asked = row["requests"]
    return [seconds for seconds, error in zip(asked[word], asked["errors"], strict=True) if not error]


def _serve(found: Row) -> list[Block]:
    rows = found["rows"]
    rated = all(not isinstance(row["request_rate"], str) for row in rows)
    key, name = ("request_rate", "requests/s offered") if rated else ("max_concurrency", "streams")
    label = lambda row: f"{number(float(row[key]))} {'a second' if rated else 'streams'}" if row[key] else "all"  # noqa: E731
    out: list[Block] = []
    if len(rows) > 1:
        of = functools.partial(_line, rows, key)
        against = "offered rate" if rated else "concurrency"
        out.append(LineChart(f"Throughput against {against}", [of("output_throughput", "")], name, "tokens/s"))
        times = [of(f"{q}_{word}_ms", f"{word} {q}") for word in ("ttft", "tpot") for q in ("median", "p99")]
        out.append(LineChart(f"Latency against {against}", times, name, "milliseconds"))
    for word, text in (("ttfts", "to the first token"), ("e2els", "to the last")):
        drawn = [_distribution(label(row), took) for row in rows[:MOST_LINES] if (took := _answered(row, word))]
        out.append(LineChart(f"Share of requests, time {text}", drawn, "milliseconds", "share"))
    if len(rows) > MOST_LINES:
        out.append(f"Distributions are those of the first {MOST_LINES} of {len(rows)} loads.")
    out += _timeline(rows[-1], label(rows[-1]))
    if "knee" in found:
        out.append(f"Knee: {knee_text(found['knee'], found['knee_below'])}")
    heads = (name, "requests/s", "tokens/s", "TTFT p50 ms", "p99", "TPOT p50 ms", "p99", "failed")
    keys = ("request_throughput", "output_throughput", "median_ttft_ms", "p99_ttft_ms", "median_tpot_ms", "p99_tpot_ms")
    return [*out, Table(heads, [(label(row), *(row[k] for k in keys), row["failed"]) for row in rows])]


def _line(rows: Sequence[Row], x: str, y: str, name: str) -> DrawnLine:
    """Draw a figure of each row over another, with its interval."""
    own = [row for row in rows if row.get(y) is not None]
    bars = [_bar("", row, y) for row in own]
    spans = tuple(None if bar.low is None or bar.high is None else (bar.low, bar.high) for bar in bars)
    return DrawnLine(name, tuple((float(row[x]), bar.value) for row, bar in zip(own, bars, strict=True)), upward=spans)


def _timeline(row: Row, load: str) -> list[Block]:
    """The first requests of a load one by one, where the result has their times."""
    asked = row["requests"]
    if not asked.get("start_times"):
        return []
    times = zip(asked["start_times"], asked["ttfts"], asked["e2els"], asked["errors"], strict=True)
    spans = [Span(start, start + first, start + whole) for start, first, whole, error in times if not error]
    spans = sorted(spans, key=lambda span: span.start)[:MOST_SPANS]
    return [TimelineChart(f"Requests one by one, {load}", spans)] if spans else []


def _ablate(found: Row) -> list[Block]:
    worth = [(row["part"], row["worth"]["output_throughput"]) for row in found["rows"]]
    drawn = [Bar(name, one["ratio"], one["low"], one["high"]) for name, one in worth if one["ratio"] is not None]
    rows = [
        (
            row["part"],
            row["output_throughput"],
            ratio_text(row["worth"]["output_throughput"]),
            row["worth"]["output_throughput"]["says"],
            ", ".join(row["sets"]),
        )
        for row in found["rows"]
    ]
    chart = BarChart("Throughput with the part over that without it", drawn, 1.0)
    return [chart, Table(("without", "tokens/s", "worth", "", "by"), rows)]


def _compare(found: Row) -> list[Block]:
    rows, front = found["rows"], Front(found)
    out: list[Block] = [BarChart("Tokens a second", [_bar(row["name"], row, SPEED) for row in rows])]
    scored = [i for i, row in enumerate(rows) if (row["quality"] or {}).get("perplexity")]
    quality_keys = front.figures(SPEED, *QUALITY)
    if scored:
        quality = "perplexity (lower is better; not from 0)"
        y = lambda row: row["quality"]["perplexity"]  # noqa: E731
        out.append(_scatter("Quality and speed", front, scored, quality_keys, y, quality))
    if len({row["weight_bytes"] for row in rows}) > 1:
        memory = "weights, MiB (not from 0)"
        every, y = range(len(rows)), lambda row: row["weight_bytes"] / 2**20
        out.append(_scatter("Memory and speed", front, every, (SPEED, "weight_bytes"), y, memory))
    counts = counted(list(found["runs_by_name"].values()))
    plugins = [one for one in counts if one.key.startswith(FIGURE)]
    counts = tuple(one for one in counts if one not in plugins)
    out += [BarChart(one.name.capitalize(), [_bar(row["name"], row, one.key) for row in rows]) for one in counts]
    if failed := found.get("failed"):
        out.append(Table(("configuration", "left out"), list(failed.items())))
    if counts:
        own = [(row["name"], *(row.get(one.key) for one in counts)) for row in rows]
        out.append(Table(("configuration", *(one.name for one in counts)), own))
    if plugins:
        told = [
            (row["name"], one.name, with_bounds(row, one.key, 3))
            for row in rows
            for one in plugins
            if row.get(one.key) is not None
        ]
        out.append(Table(("configuration", "figure of a plug-in", "median, ± half the 95 % interval"), told))
    heads = ("configuration", "tokens/s", "over the first", "", "TTFT ms", "weights MiB", "perplexity", "KL", "top-1")
    table = [_compared_row(row) for row in rows]
    if not scored:
        return [*out, Table(heads, table)]
    keys = [*quality_keys, "weight_bytes"]
    pareto = [front.beaten(i, keys) or "on the front" if i in scored else "not scored" for i in range(len(rows))]
    judged = Table((*heads, "Pareto"), [(*row, said) for row, said in zip(table, pareto, strict=True)])
    return [*out, judged, *_tests(rows), front.rule(keys)]


def _compared_row(row: Row) -> tuple[Any, ...]:
    one, own = row["against_first"].get(SPEED), row["quality"] or {}
    over = (ratio_text(one), one["says"]) if one else ("", "")
    scores = map(own.get, ("perplexity", "kl", "top1_agreement"))
    return (row["name"], row[SPEED], *over, row["median_ttft_ms"], row["weight_bytes"] / 2**20, *scores)


def _tests(rows: Sequence[Row]) -> list[Block]:
    """Return the verdicts of quality against the first configuration."""
    told = [
        (row["name"], name, ratio_text(one), one["says"])
        for row in rows[1:]
        for key, name in QUALITY.items()
        if (one := row["against_first"].get(key)) is not None
    ]
    heads = ("configuration", "figure", f"over {rows[0]['name']}, or minus it", "")
    return [Table(heads, told)] if told else []


def _scatter(
    title: str, front: Front, own: Sequence[int], keys: Sequence[str], y: Callable[[Row], float], name: str
) -> LineChart:
    """Draw tokens a second, with its interval, against a figure that shall be small, with the front of ``keys``."""
    points, spans = {}, {}
    for i in own:
        row = front.rows[i]
        points[i] = (float(row[SPEED]), float(y(row)))
        bar = _bar("", row, SPEED)
        spans[i] = None if bar.low is None or bar.high is None else (bar.low, bar.high)
    best = tuple(sorted(points[i] for i in own if not front.beaten(i, keys)))
    drawn = [DrawnLine(front.rows[i]["name"], (points[i],), across=(spans[i],)) for i in own]
    return LineChart(f"{title} (whiskers: 95 %)", drawn, "tokens/s", name, joined=False, front=best)


def _latency(found: Row) -> list[Block]:
    rows = found["rows"]
    drawn = [_bar(f"{row['input_len']} tokens, batch {row['batch_size']}", row, "latency") for row in rows]
    keys = ("input_len", "batch_size", "latency", "median_ttft_ms", "median_tpot_ms")
    heads = ("prompt", "batch", "latency s", "TTFT ms", "TPOT ms")
    return [BarChart("Seconds of a batch", drawn), Table(heads, [[r[k] for k in keys] for r in rows])]


def _memory(found: Row) -> list[Block]:
    names = (
        ("weight_bytes", "weights"),
        ("kv_peak_bytes", "KV cache, held"),
        ("rest_bytes", "activations and the rest"),
    )
    drawn = [Bar(f"{text}, MiB", found[key] / 2**20) for key, text in names if found.get(key) is not None]
    return [StackChart("Memory at the peak", drawn), *_figures(found)]


def _kernels(found: Row) -> list[Block]:
    out: list[Block] = []
    for load in dict.fromkeys((row["batch_size"], row["tokens"], row["context"]) for row in found["rows"]):
        own = [row for row in found["rows"] if (row["batch_size"], row["tokens"], row["context"]) == load]
        drawn = [_in_step(row) for row in own if row["us"] is not None and row["operation"] != WHOLE_STEP]
        rows, tokens, context = load
        title = "Microseconds in a step, of all layers (bar), and the floor (line)"
        out.append(BarChart(f"{title}: {rows} rows, {tokens} tokens, context {context}", drawn))
    heads = (
        "operation",
        "rows",
        "tokens",
        "context",
        "us",
        "floor us",
        "bound by",
        "of floor",
        "torch us",
        "torch/own",
    )
    keys = ("operation", "batch_size", "tokens", "context", "us", "floor_us", "bound_by", "share_of_floor", "torch_us")
    return [*out, Table(heads, [(*(row[k] for k in keys), row["torch_over_own"]) for row in found["rows"]])]


def _in_step(row: Row) -> Bar:
    """An operation with all its calls."""
    low, high = row["intervals"].get("us") or (None, None)
    own = [None if value is None else row["calls"] * value for value in (row["us"], low, high, row["floor_us"])]
    return Bar(row["operation"], own[0] or 0.0, *own[1:])


def _batching(found: Row) -> list[Block]:
    rows = found["rows"]
    names = list(dict.fromkeys(row["policy"] for row in rows))

    def drawn(key: str) -> list[DrawnLine]:
        own = {name: [row for row in rows if row["policy"] == name] for name in names}
        return [_line(own[name], "request_rate", key, name) for name in names]

    offered = "requests/s offered"
    heads = ("policy", offered, "latency ms", "p99", "TTFT ms", "TPOT ms", "requests/s", "over continuous", "")
    keys = (
        "policy",
        "request_rate",
        "mean_e2el_ms",
        "p99_e2el_ms",
        "mean_ttft_ms",
        "mean_tpot_ms",
        "request_throughput",
    )
    told = []
    for row in sorted(rows, key=lambda row: row["request_rate"]):
        one = row.get("against")
        told.append((*(row[k] for k in keys), *((ratio_text(one), one["says"]) if one else ("", ""))))
    return [
        LineChart(
            "Latency against offered rate", drawn("mean_e2el_ms"), offered, "mean ms to the last token", log=True
        ),
        LineChart("Throughput against offered rate", drawn("request_throughput"), offered, "requests/s answered"),
        LineChart("Time to the first token", drawn("mean_ttft_ms"), offered, "mean ms", log=True),
        Table(heads, told),
    ]


def _about(name: str, found: Row) -> str:
    """What was measured, where and when."""
    bill = found.get("bill_of_materials") or next(iter((found.get("bills_of_materials") or {}).values()), None)
    parts = [name, str(found.get("date", ""))]
    if bill:
        own = bill["machine"]
        parts += [
            own.get("gpu") or own["cpu"],
            f"torch {bill['versions']['torch']}",
            f"fingerprint {bill['fingerprint'][:12]}",
        ]
    states = found.get("machine_states") or [{}]
    if others := [state["cores_of_others"] for state in states if state.get("cores_of_others") is not None]:
        parts.append(f"others used {max(others):.2f} cores at most")
    if found.get("joules_per_output_token", 0) is None:  # a trace's result has none of its own
        parts.append("energy unknown")
    return "; ".join(filter(None, parts))
