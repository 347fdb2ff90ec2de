"""The textbook's comparison of ways to form batches, on the engine itself.

    static            a batch of n starts when n have come, and ends with its longest answer
    size-or-timeout   likewise, or when its oldest has waited long enough      (Clipper, NSDI 2017; Triton's server)
    continuous        who comes enters in the next step, who ends leaves       (Orca, OSDI 2022)
    adaptive          continuous, with a learned wait before newcomers enter

All are scheduling policies over the same requests and arrivals, run by run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from . import trials

PATIENT = 10  # seconds that a static batch waits for its last request: nobody leaves a service idle for ever
REFERENCE = "continuous"
LATENCY = trials.Metric("mean_e2el_ms", "latency", False)


@dataclass(frozen=True)
class BatchingWay:
    """``sets``: the settings that make a configuration form its batches so."""

    name: str
    sets: tuple[str, ...]


def ways(batch: int, timeout_ms: float, others: Sequence[str]) -> list[BatchingWay]:
    """The four, and other policies by their names."""
    static = ("scheduler.name=static", f"scheduler.options.batch={batch}")
    own = [
        BatchingWay("static", (*static, f"scheduler.options.max_hold={PATIENT}")),
        BatchingWay("size-or-timeout", (*static, f"scheduler.options.max_hold={timeout_ms / 1e3:g}")),
        BatchingWay(REFERENCE, ("scheduler.name=fcfs",)),
        BatchingWay("adaptive", ("scheduler.name=adaptive",)),
    ]
    return own + [BatchingWay(name, (f"scheduler.name={name}",)) for name in dict.fromkeys(others)]


def compared(rows: Sequence[dict[str, Any]]) -> None:
    """Give each row, under ``against``, its mean latency over that of ``REFERENCE`` at the same rate, paired by run."""
    first = {row["request_rate"]: row for row in rows if row["policy"] == REFERENCE}
    others = [row for row in rows if row["policy"] != REFERENCE]
    found = trials.judged([trials.against(_runs(first[row["request_rate"]]), _runs(row), [LATENCY]) for row in others])
    for row, verdict in zip(others, found, strict=True):
        row["against"] = verdict[LATENCY.key]


def _runs(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"figures": run} for run in row["repeats"]]
