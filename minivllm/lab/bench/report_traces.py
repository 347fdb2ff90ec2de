"""What a report draws of traces: what a replay found in the cache, and latencies of a simulation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from minivllm.runtime.hooks.figures import FIGURE

from .charts import COLOURS, Bar, BarChart, Block, DrawnLine, LineChart, Row, Table, number, short

PARTS = ("config", "scheduler", "evictor")
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
    """Bars of the cache, a bar for each run."""
    runs, alone = found["runs"], found["step_ms"] is None
    out = _cache(_bar_names(runs, PARTS), runs, "hit_rate", "blocks" if alone else "prompt tokens")
    how = "the cache alone" if alone else f"a step counts for {number(found['step_ms'])} ms"
    out.append(f"{_sizes(found)}; {how}.")
    heads = (*PARTS, "blocks", "hits", "of optimum", "evicted")
    counted = () if alone else ("preemptions", "steps")
    waited = () if alone else ("p50", "p99", "max")
    told = []
    for run in runs:
        best, sizes = run.get("of_optimum"), f"{run['blocks']} x {run['block_size']}"
        shares = (f"{100 * run['hit_rate']:.2f} %", None if best is None else f"{100 * best:.1f} %")
        own = (*(run[key] for key in ("evictions", *counted)), *(run["queue_steps"].get(q) for q in waited))
        told.append((*(run[key] for key in PARTS), sizes, *shares, *own))
    more = () if alone else ("preempted", "steps", "steps queued p50", "p99", "most")
    return [*out, Table((*heads, *more), told), *_plugins(runs)]


def _plugins(runs: Sequence[Row]) -> list[Block]:
    """Return a table of what plug-ins count (``figures()``), a row for each run that has some."""
    told = [
        (run["config"], run["scheduler"], run["evictor"], key.removeprefix(FIGURE), value)
        for run in runs
        for key, value in run.items()
        if key.startswith(FIGURE)
    ]
    return [Table((*PARTS, "figure of a plug-in", ""), told)] if told else []


def simulate(found: Row) -> list[Block]:
    """Percentiles of latencies, a bar for each run; throughput and goodput over the rate where there are several."""
    runs = [one for run in found["runs"] for one in _beside_real(run)]
    names = _bar_names(runs, (*PARTS, "rate"))
    out: list[Block] = []
    if warning := (found.get("uncertainty") or {}).get("warning"):
        out.append(f"Rough: {warning}")
    for key, title in LATENCIES.items():
        drawn = [bar for name, run in zip(names, runs, strict=True) for bar in _percentiles(name, run, key)]
        if drawn:
            out.append(BarChart(f"{title}, ms: p50, p90 and p99{_whiskers(runs)}", drawn))
    out += _served(names, runs)
    out += _cache(names, runs, "prefix_hit_rate", "prompt tokens")
    if joules := _bars(names, runs, "joules_per_output_token"):
        out.append(BarChart("Joules for each output token", joules))
    goals = [f"{name} of at most {number(most)} ms" for name, most in found["goodput"].items()]
    out.append(f"{_sizes(found)}; costs of steps from {found['costs']}{_measured(found['costs_about'])}.")
    if goals:
        out.append(f"Good are requests with {' and '.join(goals)}.")
    shown = {head: key for head, key in COLUMNS.items() if any(run.get(key) is not None for run in runs)}
    if not any(run.get("failed") for run in runs):
        shown.pop("failed", None)
    told = [
        (*(run[key] for key in ("config", "rate", *PARTS[1:])), *(_cell(run, k) for k in shown.values()))
        for run in runs
    ]
    return [
        *out,
        Table(("config", "rate", *PARTS[1:], *shown), told),
        *_bands(found, shown),
        *_errors(found["runs"]),
        *_plugins(runs),
    ]


def _bands(found: Row, shown: dict[str, str]) -> list[Block]:
    """Return between which values each simulated figure lies by the error of the costs, and what that error is."""
    runs = [run for run in found["runs"] if run.get("band")]
    if not runs:
        return []
    own = {head: key for head, key in shown.items() if any(key in run["band"] for run in runs)}
    told = []
    for run in runs:
        cells = (_between(run["band"].get(key), key) for key in own.values())
        told.append((run["config"], f"x{float(run['rate']):g}", run["scheduler"], run["evictor"], *cells))
    error = found["uncertainty"]
    checked = f"{error['steps']} steps of the {error['phase']} of the costs"
    off = f"{100 * error['median_error']:.1f} % in the median, {100 * error['sum_error']:+.1f} % in sum"
    said = f"Bands: all steps may be {100 * error['error']:.0f} % off, as {checked} were ({off}):"
    return [said, Table(("config", "rate", *PARTS[1:], *own), told)]


def _between(bounds: Sequence[float] | None, key: str) -> str | None:
    if bounds is None:
        return None
    low, high = (f"{100 * one:.1f} %" if key == "prefix_hit_rate" else number(one) for one in bounds)
    return low if low == high else f"{low} to {high}"


def _whiskers(runs: Sequence[Row]) -> str:
    """Return what whiskers are, for the title of a chart."""
    simulated = any(run.get("band") for run in runs)
    real = any(run.get("intervals") for run in runs)
    words = ["bands by the error of the costs"] * simulated + ["95 % of real runs"] * real
    return f" (whiskers: {', '.join(words)})" if words else ""


def _errors(runs: Sequence[Row]) -> list[Block]:
    """How far the simulation was off, of runs that the real engine made too."""
    real = [run for run in runs if "off" in run]
    shown = {head: key for head, key in OFF.items() if any(key in run["off"] for run in real)}
    if not shown:
        return []
    told = []
    for run in real:
        errors = (_error(run, key) for key in shown.values())
        told.append((run["config"], f"x{float(run['rate']):g}", run["scheduler"], run["evictor"], *errors))
    table = Table(("config", "rate", *PARTS[1:], *shown), told)
    return ["How far the simulation is off what the real engine did:", table]


def _error(run: Row, key: str) -> str | None:
    if key not in run["off"]:
        return None
    bounds = (run.get("off_intervals") or {}).get(key)
    more = f" [{100 * bounds[0]:+.1f}, {100 * bounds[1]:+.1f}]" if bounds else ""
    return f"{100 * run['off'][key]:+.1f} %{more}"


def _names(runs: Sequence[Row], keys: Sequence[str]) -> list[str]:
    """What tells the runs apart."""
    apart = [key for key in keys if len({run[key] for run in runs}) > 1] or ["evictor"]
    return [" ".join(run[key] for key in apart) for run in runs]


def _bar_names(runs: Sequence[Row], keys: Sequence[str]) -> list[str]:
    """With the table's row before each, where names that are too long for a chart would be the same there."""
    names = _names(runs, keys)
    if len(set(map(short, names))) == len(set(names)):
        return names
    return [f"row {i}: {name}" for i, name in enumerate(names, 1)]


def _sizes(found: Row) -> str:
    tokens = f"{found['prompt_tokens']} prompt and {found['output_tokens']} output tokens"
    return f"{found['requests']} requests in {found['seconds']:.0f} s, {tokens}"


def _bars(names: Sequence[str], runs: Sequence[Row], key: str, scale: float = 1.0) -> list[Bar]:
    """Return a bar for each run that has the figure."""
    return [bar_of(name, run, key, scale) for name, run in zip(names, runs, strict=True) if run.get(key) is not None]


def bar_of(name: str, run: Row, key: str, scale: float = 1.0) -> Bar:
    """Return the bar of a figure with its band, or with the interval of real runs around their median."""
    value = scale * float(run[key])
    if band := (run.get("band") or {}).get(key):
        return Bar(name, value, scale * band[0], scale * band[1])
    if bounds := (run.get("intervals") or {}).get(key):
        half = scale * (bounds[1] - bounds[0]) / 2
        return Bar(name, value, value - half, value + half)
    return Bar(name, value)


def _cache(names: Sequence[str], runs: Sequence[Row], hit_rate: str, what: str) -> list[Block]:
    out: list[Block] = [BarChart(f"Found in the cache, % of {what}", _bars(names, runs, hit_rate, 100.0))]
    for key, title in (("evictions", "Evictions"), ("preemptions", "Preemptions")):
        if any(run.get(key) for run in runs):
            out.append(BarChart(title, _bars(names, runs, key)))
    return out


def _beside_real(run: Row) -> list[Row]:
    """A run, and behind it what the real engine did where it served the trace too.  Rates as they are shown."""
    own = {**run, "rate": f"x{float(run['rate']):g}"}
    if "real" not in run:
        return [own]
    head = {key: own[key] for key in (*PARTS, "rate")}
    return [own, {**run["real"], **head, "scheduler": f"{run['scheduler']}, really"}]


def _percentiles(name: str, run: Row, key: str) -> list[Bar]:
    """Return a bar for each percentile of a latency, none if the run has none of it."""
    own = [(q, f"{q}_{key}_ms") for q in ("p50", "p90", "p99")]
    return [bar_of(f"{q} {name}", run, figure) for q, figure in own if run.get(figure) is not None]


def _served(names: Sequence[str], runs: Sequence[Row]) -> list[Block]:
    """Over the rate where there are several, else a bar for each run.  All at once is no rate."""
    figures = [("Throughput", "output_throughput", "tokens/s"), ("Goodput", "request_goodput", "good requests/s")]
    figures = [one for one in figures if any(run.get(one[1]) is not None for run in runs)]
    rates = {rate for run in runs if math.isfinite(rate := _rate(run))}
    if len(rates) < 2:
        return [BarChart(f"{title}, {unit}", _bars(names, runs, key)) for title, key, unit in figures]
    out: list[Block] = []
    for title, key, unit in figures:
        drawn = _over_rate(runs, key)
        for i in range(0, len(drawn), len(COLOURS)):  # as many lines as can be told apart
            own = drawn[i : i + len(COLOURS)]
            out.append(LineChart(f"{title} against the rate", own, "arrivals, times as fast", unit))
    if any(math.isinf(_rate(run)) for run in runs):
        out.append("Runs with all requests at once (xinf) are no points of these lines; the table has them.")
    return out


def _over_rate(runs: Sequence[Row], key: str) -> list[DrawnLine]:
    bars: dict[str, list[tuple[float, Bar]]] = {}
    for name, run in zip(_names(runs, PARTS), runs, strict=True):
        if math.isfinite(_rate(run)) and run.get(key) is not None:
            bars.setdefault(name, []).append((_rate(run), bar_of(name, run, key)))
    out = []
    for name, own in bars.items():
        own.sort(key=lambda one: one[0])
        spans = tuple(None if bar.low is None or bar.high is None else (bar.low, bar.high) for _, bar in own)
        out.append(DrawnLine(name, tuple((rate, bar.value) for rate, bar in own), spans if any(spans) else ()))
    return out


def _rate(run: Row) -> float:
    return float(run["rate"].removeprefix("x"))


def _measured(about: Row) -> str:
    """Of which model and machine a table of costs is, where it says so."""
    machine = about.get("machine") or {}
    what = [about.get("model"), about.get("dtype"), machine.get("gpu") or machine.get("cpu")]
    return f" ({', '.join(map(str, filter(None, what)))})" if any(what) else ""


def _cell(run: Row, key: str) -> Any:
    share = run.get(key) if key == "prefix_hit_rate" else None
    return run.get(key) if share is None else f"{100 * share:.1f} %"
