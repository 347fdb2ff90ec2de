"""What became of a trace, in numbers.  Names are those of vLLM's benchmark, so what reads its results reads these."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from minivllm.errors import ConfigError, shown
from minivllm.runtime.hooks.figures import FIGURE

from .drive import TraceOutcome

GOALS = ("ttft", "tpot", "e2el")  # milliseconds
PERCENTILES = (50, 90, 99)


def parse_goals(texts: Sequence[str]) -> dict[str, float]:
    """``ttft:500`` and so on; ConfigError."""
    found = {}
    for text in texts:
        name, _, value = text.partition(":")
        try:
            most = float(value)
        except ValueError:
            most = -1.0
        if name not in GOALS or not most > 0:
            raise ConfigError(f"--goodput {shown(text)}: want NAME:MILLISECONDS with a name of {', '.join(GOALS)}")
        found[name] = most
    return found


def figures(run: TraceOutcome, goals: Mapping[str, float], watts: Mapping[str, float]) -> dict[str, Any]:
    """Milliseconds, seconds, tokens.  ``duration`` is from the first arrival to the last token."""
    ok = run.served
    times = columns(run)
    duration = float(run.finished[ok].max()) if ok.any() else 0.0
    per = lambda x: float(x) / duration if duration else 0.0  # noqa: E731
    good = np.ones(int(ok.sum()), bool)
    for name, most in goals.items():
        good &= ~(times[name] > most)  # one token has no time between tokens
    prompt, output = int(run.prompt[ok].sum()), int(run.output[ok].sum())
    found: dict[str, Any] = {
        "completed": int(ok.sum()),
        "failed": int((~ok).sum()),
        "duration": duration,
        "total_input_tokens": prompt,
        "total_output_tokens": output,
        "request_throughput": per(ok.sum()),
        "output_throughput": per(output),
        "total_token_throughput": per(prompt + output),
    }
    if goals:
        found["request_goodput"] = per(good.sum())
    for name, x in times.items():
        x = x[np.isfinite(x)]
        if len(x):
            found[f"mean_{name}_ms"] = float(x.mean())
            found |= {
                f"p{p}_{name}_ms": float(v) for p, v in zip(PERCENTILES, np.percentile(x, PERCENTILES), strict=True)
            }
    found |= {
        "prefix_hit_rate": float(run.cached[ok].sum() / max(1, prompt)),
        "preemptions": run.preemptions,
        "evictions": run.evictions,
        "steps": run.steps,
    }
    if {"busy", "idle"} <= set(watts):
        joules = watts["busy"] * run.busy + watts["idle"] * max(0.0, duration - run.busy)
        found |= {"joules": joules, "joules_per_output_token": joules / max(1, output)}
    own = {f"{FIGURE}{name}": value for name, value in run.figures.items()}
    return {**found, "run_seconds": run.took, "run_cpu_seconds": run.cpu, **own}


def columns(run: TraceOutcome) -> dict[str, np.ndarray]:
    """Milliseconds of each request that was served; nan between the tokens of one that has a single one."""
    ok = run.served
    first, finished, arrival = run.first[ok], run.finished[ok], run.arrival[ok]
    later = run.output[ok] - 1
    tpot = np.where(later > 0, 1e3 * (finished - first) / np.maximum(later, 1), np.nan)
    return {"ttft": 1e3 * (first - arrival), "tpot": tpot, "e2el": 1e3 * (finished - arrival)}


COMPARED = (
    "output_throughput",
    *(f"{p}_{name}_ms" for name in GOALS for p in ("mean", "p50", "p99")),
    "prefix_hit_rate",
    "steps",
)


def off(said: Mapping[str, Any], real: Mapping[str, Any]) -> tuple[dict[str, float], dict[str, list[float]]]:
    """Return relative errors of a simulation, and between which values they lie with confidence 95 %.

    ``real`` has ``intervals`` of its figures (``repeats.merged``).  An end of an interval that is not above 0 gives no
    bound, so such a figure has no interval of its error.
    """
    errors = {k: said[k] / real[k] - 1 for k in COMPARED if real.get(k) and k in said}
    bounds = {}
    for key in errors:
        low, high = real.get("intervals", {}).get(key) or (0.0, 0.0)
        if low > 0:
            bounds[key] = [said[key] / high - 1, said[key] / low - 1]
    return errors, bounds
