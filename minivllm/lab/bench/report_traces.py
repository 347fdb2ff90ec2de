"""Reports of ``replay`` and ``simulate``: hits in the cache, latencies and throughput."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from minivllm.runtime.hooks.figures import FIGURE

from . import Row
from .charts import COLOURS, Bar, BarChart, Block, DrawnLine, LineChart, Table, number, short

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
    return [*out, Table(heads, [_replay_row(run, alone) for run in runs]), *_plugins(runs)]


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


def _plugins(runs: Sequence[Row]) -> list[Block]:
    """Return a table of the counters of plug-ins (``figures()``), [] if there are none."""
    rows = []
    for run in runs:
        for key, value in run.items():
            if key.startswith(FIGURE):
                rows.append((*(run[part] for part in PARTS), key.removeprefix(FIGURE), value))
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
        bars = [bar for name, run in zip(names, runs, strict=True) for bar in _percentiles(name, run, key)]
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
    shown = {head: key for head, key in COLUMNS.items() if any(run.get(key) is not None for run in runs)}
    if not any(run.get("failed") for run in runs):
        shown.pop("failed", None)
    rows = [(*_labels(run, run["rate"]), *(_cell(run, key) for key in shown.values())) for run in runs]
    out.append(Table((*LABELS, *shown), rows))
    return [*out, *_bands(found, shown), *_errors(found["runs"]), *_plugins(runs)]


def _labels(run: Row, rate: str) -> tuple[str, str, str, str]:
    """Return the cells that name a simulated run, under the heads ``LABELS``."""
    return run["config"], rate, run["scheduler"], run["evictor"]


def _rate_text(run: Row) -> str:
    return f"x{float(run['rate']):g}"


def _bands(found: Row, shown: dict[str, str]) -> list[Block]:
    """Return a table of the bands of all runs, and a sentence about the error of the costs; [] without bands.

    ``shown`` maps the heads of the main table to the keys of results.
    """
    runs = [run for run in found["runs"] if run.get("band")]
    if not runs:
        return []
    columns = {head: key for head, key in shown.items() if any(key in run["band"] for run in runs)}
    rows = []
    for run in runs:
        cells = [_range_text(run["band"].get(key), key) for key in columns.values()]
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
    low, high = (f"{100 * value:.1f} %" if key == "prefix_hit_rate" else number(value) for value in bounds)
    return low if low == high else f"{low} to {high}"


def _whiskers(runs: Sequence[Row]) -> str:
    """Return the end of a chart's title that explains its intervals, "" if it has none."""
    parts = []
    if any(run.get("band") for run in runs):
        parts.append("bands by the error of the costs")
    if any(run.get("intervals") for run in runs):
        parts.append("95 % of real runs")
    return f" (whiskers: {', '.join(parts)})" if parts else ""


def _errors(runs: Sequence[Row]) -> list[Block]:
    """Return a table of the errors of simulated runs against real runs, [] if there are no real runs."""
    compared = [run for run in runs if "off" in run]
    columns = {head: key for head, key in OFF.items() if any(key in run["off"] for run in compared)}
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


def _names(runs: Sequence[Row], keys: Sequence[str]) -> list[str]:
    """Return a name for each run from the fields in which the runs differ, or its evictor if they do not."""
    differing = [key for key in keys if len({run[key] for run in runs}) > 1] or ["evictor"]
    return [" ".join(run[key] for key in differing) for run in runs]


def _bar_names(runs: Sequence[Row], keys: Sequence[str]) -> list[str]:
    """Return the names of runs for a chart, with table rows as prefixes if the shortened names would be equal."""
    names = _names(runs, keys)
    if len(set(map(short, names))) == len(set(names)):
        return names
    return [f"row {i}: {name}" for i, name in enumerate(names, 1)]


def _sizes(found: Row) -> str:
    """Return the size of a trace as text."""
    tokens = f"{found['prompt_tokens']} prompt and {found['output_tokens']} output tokens"
    return f"{found['requests']} requests in {found['seconds']:.0f} s, {tokens}"


def _bars(names: Sequence[str], runs: Sequence[Row], key: str, scale: float = 1.0) -> list[Bar]:
    """Return a bar for each run that has the result."""
    return [bar_of(name, run, key, scale) for name, run in zip(names, runs, strict=True) if run.get(key) is not None]


def bar_of(name: str, run: Row, key: str, scale: float = 1.0) -> Bar:
    """Return the bar of a result with its band, or with the interval of real runs around their median."""
    value = scale * float(run[key])
    band = (run.get("band") or {}).get(key)
    if band:
        return Bar(name, value, scale * band[0], scale * band[1])
    bounds = (run.get("intervals") or {}).get(key)
    if bounds:
        half = scale * (bounds[1] - bounds[0]) / 2
        return Bar(name, value, value - half, value + half)
    return Bar(name, value)


def _cache(names: Sequence[str], runs: Sequence[Row], hit_rate: str, unit: str) -> list[Block]:
    """Return charts of the hit rate (in % of ``unit``), of evictions and of preemptions."""
    out: list[Block] = [BarChart(f"Found in the cache, % of {unit}", _bars(names, runs, hit_rate, 100.0))]
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
    return [simulated, {**run["real"], **labels, "scheduler": f"{run['scheduler']}, really"}]


def _percentiles(name: str, run: Row, key: str) -> list[Bar]:
    """Return a bar for each percentile of a latency that the run has."""
    keys = [(q, f"{q}_{key}_ms") for q in ("p50", "p90", "p99")]
    return [bar_of(f"{q} {name}", run, figure) for q, figure in keys if run.get(figure) is not None]


def _throughput(names: Sequence[str], runs: Sequence[Row]) -> list[Block]:
    """Return charts of throughput and goodput: lines over the rate if there are several rates, else bars."""
    figures = []
    for figure in (("Throughput", "output_throughput", "tokens/s"), ("Goodput", "request_goodput", "good requests/s")):
        if any(run.get(figure[1]) is not None for run in runs):
            figures.append(figure)
    rates = {_rate(run) for run in runs}
    finite = {rate for rate in rates if math.isfinite(rate)}
    if len(finite) < 2:
        return [BarChart(f"{title}, {unit}", _bars(names, runs, key)) for title, key, unit in figures]
    out: list[Block] = []
    for title, key, unit in figures:
        lines = _over_rate(runs, key)
        for i in range(0, len(lines), len(COLOURS)):  # each line of a chart has a colour of its own
            some = lines[i : i + len(COLOURS)]
            out.append(LineChart(f"{title} against the rate", some, "arrivals, times as fast", unit))
    if finite != rates:
        out.append("Runs with all requests at once (xinf) have no finite rate and are in the table only.")
    return out


def _over_rate(runs: Sequence[Row], key: str) -> list[DrawnLine]:
    """Return a line over the rate for each configuration, scheduler and evictor."""
    bars: dict[str, list[tuple[float, Bar]]] = {}
    for name, run in zip(_names(runs, PARTS), runs, strict=True):
        rate = _rate(run)
        if math.isfinite(rate) and run.get(key) is not None:
            bars.setdefault(name, []).append((rate, bar_of(name, run, key)))
    out = []
    for name, points in bars.items():
        points.sort(key=lambda point: point[0])
        spans = tuple(None if bar.low is None or bar.high is None else (bar.low, bar.high) for _, bar in points)
        line = tuple((rate, bar.value) for rate, bar in points)
        out.append(DrawnLine(name, line, spans if any(spans) else ()))
    return out


def _rate(run: Row) -> float:
    """Return the rate of a run from its text, "x2"."""
    return float(run["rate"].removeprefix("x"))


def _measured(about: Row) -> str:
    """Return the model and machine of a table of costs in parentheses, "" if they are unknown."""
    machine = about.get("machine") or {}
    parts = [about.get("model"), about.get("dtype"), machine.get("gpu") or machine.get("cpu")]
    known = [str(part) for part in parts if part]
    return f" ({', '.join(known)})" if known else ""


def _cell(run: Row, key: str) -> Any:
    """Return the table cell of a result."""
    value = run.get(key)
    return f"{100 * value:.1f} %" if key == "prefix_hit_rate" and value is not None else value
