"""Compute the results of a trace.  Their names are those of vLLM's benchmark, so that its readers can read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from minivllm.errors import ConfigError, shown
from minivllm.runtime.hooks.figures import FIGURE

from .drive import TraceOutcome

GOALS = ("ttft", "tpot", "e2el")  # milliseconds
PERCENTILES = (50, 90, 99)

Bounds = dict[str, list[float]]  # name of a result -> lower and upper bound of its relative error


def parse_goals(texts: Sequence[str]) -> dict[str, float]:
    """Parse goals such as ``ttft:500`` (milliseconds).  Raise ConfigError."""
    goals = {}
    for text in texts:
        name, _, value = text.partition(":")
        try:
            limit = float(value)
        except ValueError:
            limit = -1.0
        if name not in GOALS or not limit > 0:
            names = ", ".join(GOALS)
            raise ConfigError(f"--goodput {shown(text)}: expected NAME:MILLISECONDS, where NAME is one of {names}")
        goals[name] = limit
    return goals


def figures(run: TraceOutcome, goals: Mapping[str, float], watts: Mapping[str, float]) -> dict[str, Any]:
    """Return the results of a run in milliseconds, seconds and tokens.

    ``duration`` is from the first arrival to the last token.  ``goals`` are the limits of a request that counts as
    goodput, as ``parse_goals`` returns them.  ``watts`` is the power of a busy and an idle device; {} omits the energy.
    """
    ok = run.served
    served = int(ok.sum())
    times = columns(run)
    duration = float(run.finished[ok].max()) if ok.any() else 0.0

    def per_second(total: Any) -> float:
        return float(total) / duration if duration else 0.0

    good = np.ones(served, bool)
    for name, limit in goals.items():
        good &= ~(times[name] > limit)  # an answer of one token has no time per output token, so it meets the limit
    prompt = int(run.prompt[ok].sum())
    output = int(run.output[ok].sum())
    found: dict[str, Any] = {"completed": served, "failed": len(ok) - served}
    found["duration"] = duration
    found["total_input_tokens"] = prompt
    found["total_output_tokens"] = output
    found["request_throughput"] = per_second(served)
    found["output_throughput"] = per_second(output)
    found["total_token_throughput"] = per_second(prompt + output)
    if goals:
        found["request_goodput"] = per_second(good.sum())
    for name, values in times.items():
        finite = values[np.isfinite(values)]
        if len(finite):
            found[f"mean_{name}_ms"] = float(finite.mean())
            for p, value in zip(PERCENTILES, np.percentile(finite, PERCENTILES), strict=True):
                found[f"p{p}_{name}_ms"] = float(value)
    cached = run.cached[ok].sum()
    found["prefix_hit_rate"] = float(cached / max(1, prompt))
    found["preemptions"] = run.preemptions
    found["evictions"] = run.evictions
    found["steps"] = run.steps
    if {"busy", "idle"} <= set(watts):
        idle = max(0.0, duration - run.busy)
        joules = watts["busy"] * run.busy + watts["idle"] * idle
        found["joules"] = joules
        found["joules_per_output_token"] = joules / max(1, output)
    found["run_seconds"] = run.took
    found["run_cpu_seconds"] = run.cpu
    for name, value in run.figures.items():
        found[FIGURE + name] = value
    return found


def columns(run: TraceOutcome) -> dict[str, np.ndarray]:
    """Return the times of each served request in milliseconds, by the names of ``GOALS``.

    The time per output token is nan for an answer of one token.
    """
    ok = run.served
    first = run.first[ok]
    finished = run.finished[ok]
    arrival = run.arrival[ok]
    later = run.output[ok] - 1
    per_token = 1e3 * (finished - first) / np.maximum(later, 1)
    tpot = np.where(later > 0, per_token, np.nan)
    return {"ttft": 1e3 * (first - arrival), "tpot": tpot, "e2el": 1e3 * (finished - arrival)}


COMPARED = (
    "output_throughput",
    *(f"{p}_{name}_ms" for name in GOALS for p in ("mean", "p50", "p99")),
    "prefix_hit_rate",
    "steps",
)


def off(simulated: Mapping[str, Any], real: Mapping[str, Any]) -> tuple[dict[str, float], Bounds]:
    """Return the relative errors of a simulation, and their 95 % confidence intervals.

    ``real`` has ``intervals`` of its figures (``repeats.merged``).  The error of a figure has no interval if the
    interval of the figure begins at 0 or below.
    """
    errors: dict[str, float] = {}
    bounds: Bounds = {}
    intervals = real.get("intervals", {})
    for key in COMPARED:
        if key not in simulated or not real.get(key):
            continue
        value = simulated[key]
        errors[key] = value / real[key] - 1
        low, high = intervals.get(key) or (0.0, 0.0)
        if low > 0:
            bounds[key] = [value / high - 1, value / low - 1]
    return errors, bounds
