"""Reports of ``replay`` and ``simulate``: hits in the cache, latencies and throughput."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from minivllm.runtime.hooks.figures import FIGURE

from . import Row, Rows
from .charts import COLOURS, Bar, BarChart, Block, DrawnLine, LineChart, Point, Table, number, short

PARTS = ("config", "scheduler", "evictor")
LABELS = ("config", "rate", "scheduler", "evictor")
LATENCIES = {
    "ttft": "Time to the first token",
    "tpot": "Time for each later token",
    "e2el": "Time to the last token",
}
COLUMNS = {
    "tokens/s": "output_throughput",
    "requests/s": "request_throughput",
    "good/s": "request_goodput",
    "TTFT p50 ms": "p50_ttft_ms",
    "TTFT p90": "p90_ttft_ms",
    "TTFT p99": "p99_ttft_ms",
    "TPOT p50 ms": "p50_tpot_ms",
    "TPOT p90": "p90_tpot_ms",
    "TPOT p99": "p99_tpot_ms",
    "E2E p50 ms": "p50_e2el_ms",
    "E2E p90": "p90_e2el_ms",
    "E2E p99": "p99_e2el_ms",
    "hits": "prefix_hit_rate",
    "evicted": "evictions",
    "preempted": "preemptions",
    "J/token": "joules_per_output_token",
    "failed": "failed",
}
OFF = {
    "tokens/s": "output_throughput",
    **{f"{name} {q}": f"{q}_{key}_ms" for name, key in (("TTFT", "ttft"), ("TPOT", "tpot"), ("E2E", "e2el"))
       for q in ("mean", "p50", "p99")},
    "hits": "prefix_hit_rate",
    "steps": "steps",
}  # fmt: skip


def replay(found: Row) -> list[Block]:
    """Return the report of a replay: charts of the cache, with a bar for each run, and a table."""
    runs = found["runs"]
    alone = found["step_ms"] is None
    out = _cache(_bar_names(runs, PARTS), runs, "hit_rate", "blocks" if alone else "prompt tokens")
    time = "the cache alone" if alone else f"a step counts for {number(found['step_ms'])} ms"
    out.append(f"{_sizes(found)}; {time}.")
    heads = [*PARTS, "blocks", "hits", "of optimum", "evicted"]
    if not alone:
        heads += ["preempted", "steps", "steps queued p50", "p99", "most"]
    rows = [_replay_row(run, alone) for run in runs]
    return [*out, Table(heads, rows), *_plugins(runs)]


def _replay_row(run: Row, alone: bool) -> tuple[Any, ...]:
    """Return the table row of a replay; ``alone`` means the cache without an engine."""
    optimum = run.get("of_optimum")
    cells = [run[key] for key in PARTS]
    cells.append(f"{run['blocks']} x {run['block_size']}")
    cells.append(f"{100 * run['hit_rate']:.2f} %")
    cells.append(None if optimum is None else f"{100 * optimum:.1f} %")
    cells.append(run["evictions"])
    if not alone:
        cells += [run["preemptions"], run["steps"]]
        cells += [run["queue_steps"].get(q) for q in ("p50", "p99", "max")]
    return tuple(cells)


def _plugins(runs: Rows) -> list[Block]:
    """Return a table of the counters of plug-ins (``figures()``), [] if there are none."""
    rows = []
    for run in runs:
        parts = [run[part] for part in PARTS]
        for key, value in run.items():
            if key.startswith(FIGURE):
                rows.append((*parts, key.removeprefix(FIGURE), value))
    return [Table((*PARTS, "figure of a plug-in", ""), rows)] if rows else []


def simulate(found: Row) -> list[Block]:
    """Return the report of a simulation: latencies, throughput, goodput and the cache, as charts and a table."""
    runs = [one for run in found["runs"] for one in _with_real(run)]
    names = _bar_names(runs, (*PARTS, "rate"))
    out: list[Block] = []
    warning = (found.get("uncertainty") or {}).get("warning")
    if warning:
        out.append(f"Rough: {warning}")
    for key, title in LATENCIES.items():
        bars = []
        for name, run in zip(names, runs, strict=True):
            bars += _percentiles(name, run, key)
        if bars:
            out.append(BarChart(f"{title}, ms: p50, p90 and p99{_whiskers(runs)}", bars))
    out += _throughput(names, runs)
    out += _cache(names, runs, "prefix_hit_rate", "prompt tokens")
    joules = _bars(names, runs, "joules_per_output_token")
    if joules:
        out.append(BarChart("Joules for each output token", joules))
    out.append(f"{_sizes(found)}; costs of steps from {found['costs']}{_measured(found['costs_about'])}.")
    goals = [f"{name} of at most {number(limit)} ms" for name, limit in found["goodput"].items()]
    if goals:
        out.append(f"Good are requests with {' and '.join(goals)}.")
    shown = _present(COLUMNS, runs)
    if not any(run.get("failed") for run in runs):
        shown.pop("failed", None)
    rows = []
    for run in runs:
        cells = [_cell(run, key) for key in shown.values()]
        rows.append((*_labels(run, run["rate"]), *cells))
    out.append(Table((*LABELS, *shown), rows))
    return [*out, *_bands(found, shown), *_errors(found["runs"]), *_plugins(runs)]


def _present(columns: Mapping[str, str], runs: Iterable[Row]) -> dict[str, str]:
    """Return the columns (head -> key) in which at least one run has a value."""
    runs = list(runs)
    return {head: key for head, key in columns.items() if any(run.get(key) is not None for run in runs)}


def _labels(run: Row, rate: str) -> tuple[str, str, str, str]:
    """Return the cells that name a simulated run, under the heads ``LABELS``."""
    return run["config"], rate, run["scheduler"], run["evictor"]


def _rate_text(run: Row) -> str:
    return f"x{float(run['rate']):g}"


def _bands(found: Row, shown: dict[str, str]) -> list[Block]:
    """Return a table of the bands of all runs, and a sentence about the error of the costs; [] without bands.

    A band is the range of a result that the error of the table of costs allows.

    ``shown`` maps the heads of the main table to the keys of results.
    """
    runs = [run for run in found["runs"] if run.get("band")]
    if not runs:
        return []
    columns = _present(shown, (run["band"] for run in runs))
    rows = []
    for run in runs:
        band = run["band"]
        cells = [_range_text(band.get(key), key) for key in columns.values()]
        rows.append((*_labels(run, _rate_text(run)), *cells))
    error = found["uncertainty"]
    checked = f"{error['steps']} steps of the {error['phase']} of the costs"
    off = f"{100 * error['median_error']:.1f} % in the median, {100 * error['sum_error']:+.1f} % in sum"
    title = f"Bands: all steps may be {100 * error['error']:.0f} % off, as {checked} were ({off}):"
    return [title, Table((*LABELS, *columns), rows)]


def _range_text(bounds: Sequence[float] | None, key: str) -> str | None:
    """Return a range of a result as text, None if there is none."""
    if bounds is None:
        return None
    texts = [f"{100 * value:.1f} %" if key == "prefix_hit_rate" else number(value) for value in bounds]
    low, high = texts
    return low if low == high else f"{low} to {high}"


def _whiskers(runs: Rows) -> str:
    """Return the end of a chart's title that explains its intervals, "" if it has none."""
    parts = []
    if any(run.get("band") for run in runs):
        parts.append("bands by the error of the costs")
    if any(run.get("intervals") for run in runs):
        parts.append("95 % of real runs")
    return f" (whiskers: {', '.join(parts)})" if parts else ""


def _errors(runs: Rows) -> list[Block]:
    """Return a table of the errors of simulated runs against real runs, [] if there are no real runs."""
    compared = [run for run in runs if "off" in run]
    columns = _present(OFF, (run["off"] for run in compared))
    if not columns:
        return []
    rows = []
    for run in compared:
        errors = [_error_text(run, key) for key in columns.values()]
        rows.append((*_labels(run, _rate_text(run)), *errors))
    return ["Errors of the simulation against the real engine:", Table((*LABELS, *columns), rows)]


def _error_text(run: Row, key: str) -> str | None:
    """Return the relative error of a result with its interval, None if the run has none."""
    if key not in run["off"]:
        return None
    text = f"{100 * run['off'][key]:+.1f} %"
    bounds = (run.get("off_intervals") or {}).get(key)
    if not bounds:
        return text
    low, high = bounds
    return f"{text} [{100 * low:+.1f}, {100 * high:+.1f}]"


def _names(runs: Rows, keys: Sequence[str]) -> list[str]:
    """Return a name for each run, from the fields in which the runs differ, or else its evictor."""
    differing = []
    for key in keys:
        values = {run[key] for run in runs}
        if len(values) > 1:
            differing.append(key)
    return [" ".join(run[key] for key in differing or ["evictor"]) for run in runs]


def _bar_names(runs: Rows, keys: Sequence[str]) -> list[str]:
    """Return the names of runs for a chart, with table rows as prefixes if the shortened names would be equal."""
    names = _names(runs, keys)
    if len(set(map(short, names))) == len(set(names)):
        return names
    return [f"row {i}: {name}" for i, name in enumerate(names, 1)]


def _sizes(found: Row) -> str:
    """Return the size of a trace as text."""
    tokens = f"{found['prompt_tokens']} prompt and {found['output_tokens']} output tokens"
    return f"{found['requests']} requests in {found['seconds']:.0f} s, {tokens}"


def _bars(names: Sequence[str], runs: Rows, key: str, scale: float = 1.0) -> list[Bar]:
    """Return a bar for each run that has the result ``key``, with its value times ``scale``."""
    bars = []
    for name, run in zip(names, runs, strict=True):
        if run.get(key) is not None:
            bars.append(bar_of(name, run, key, scale))
    return bars


def bar_of(name: str, run: Row, key: str, scale: float = 1.0) -> Bar:
    """Return the bar of a result with its band, or with the interval of real runs around their median."""
    value = scale * float(run[key])
    bands = run.get("band") or {}
    intervals = run.get("intervals") or {}
    if bands.get(key):
        low, high = bands[key]
        return Bar(name, value, scale * low, scale * high)
    if intervals.get(key):
        low, high = intervals[key]
        half = scale * (high - low) / 2
        return Bar(name, value, value - half, value + half)
    return Bar(name, value)


def _cache(names: Sequence[str], runs: Rows, hit_rate: str, unit: str) -> list[Block]:
    """Return charts of the hit rate (in % of ``unit``), of evictions and of preemptions."""
    hits = _bars(names, runs, hit_rate, 100.0)
    out: list[Block] = [BarChart(f"Found in the cache, % of {unit}", hits)]
    for key, title in (("evictions", "Evictions"), ("preemptions", "Preemptions")):
        if any(run.get(key) for run in runs):
            out.append(BarChart(title, _bars(names, runs, key)))
    return out


def _with_real(run: Row) -> list[Row]:
    """Return a simulated run, followed by its run on the real engine if there is one, with rates as shown."""
    simulated = {**run, "rate": _rate_text(run)}
    if "real" not in run:
        return [simulated]
    labels = {key: simulated[key] for key in (*PARTS, "rate")}
    labels["scheduler"] += ", really"
    return [simulated, run["real"] | labels]


def _percentiles(name: str, run: Row, key: str) -> list[Bar]:
    """Return a bar for each percentile of a latency that the run has."""
    bars = []
    for q in ("p50", "p90", "p99"):
        figure = f"{q}_{key}_ms"
        if run.get(figure) is not None:
            bars.append(bar_of(f"{q} {name}", run, figure))
    return bars


def _throughput(names: Sequence[str], runs: Rows) -> list[Block]:
    """Return charts of throughput and goodput: lines over the rate if there are several rates, else bars."""
    figures = []
    throughput = ("Throughput", "output_throughput", "tokens/s")
    goodput = ("Goodput", "request_goodput", "good requests/s")
    for title, key, unit in (throughput, goodput):
        if any(run.get(key) is not None for run in runs):
            figures.append((title, key, unit))
    rates = {_rate(run) for run in runs}
    finite = {rate for rate in rates if math.isfinite(rate)}
    if len(finite) < 2:
        charts: list[Block] = []
        for title, key, unit in figures:
            charts.append(BarChart(f"{title}, {unit}", _bars(names, runs, key)))
        return charts
    out: list[Block] = []
    for title, key, unit in figures:
        lines = _over_rate(runs, key)
        # a chart has at most as many lines as there are colours, so that all lines differ
        for i in range(0, len(lines), len(COLOURS)):
            some = lines[i : i + len(COLOURS)]
            out.append(LineChart(f"{title} against the rate", some, "arrivals, times as fast", unit))
    if finite != rates:
        out.append("Runs with all requests at once (xinf) have no finite rate and are in the table only.")
    return out


def _over_rate(runs: Rows, key: str) -> list[DrawnLine]:
    """Return a line over the rate for each configuration, scheduler and evictor."""
    bars: dict[str, list[tuple[float, Bar]]] = {}
    for name, run in zip(_names(runs, PARTS), runs, strict=True):
        rate = _rate(run)
        if math.isfinite(rate) and run.get(key) is not None:
            bar = bar_of(name, run, key)
            bars.setdefault(name, []).append((rate, bar))
    out = []
    for name, points in bars.items():
        points.sort(key=lambda point: point[0])
        spans = tuple(span_of(bar) for _, bar in points)
        line = tuple((rate, bar.value) for rate, bar in points)
        out.append(DrawnLine(name, line, spans if any(spans) else ()))
    return out


def span_of(bar: Bar) -> Point | None:
    """Return the interval of a bar, None without one."""
    if bar.low is None or bar.high is None:
        return None
    return bar.low, bar.high


def _rate(run: Row) -> float:
    """Return the rate of a run from its text, "x2"."""
    return float(run["rate"].removeprefix("x"))


def _measured(about: Row) -> str:
    """Return the model and machine of a table of costs in parentheses, "" if they are unknown."""
    machine = about.get("machine") or {}
    processor = machine.get("gpu") or machine.get("cpu")
    parts = [about.get("model"), about.get("dtype"), processor]
    known = [str(part) for part in parts if part]
    return f" ({', '.join(known)})" if known else ""


def _cell(run: Row, key: str) -> Any:
    """Return the table cell of a result."""
    value = run.get(key)
    return f"{100 * value:.1f} %" if key == "prefix_hit_rate" and value is not None else value
