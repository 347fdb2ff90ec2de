"""The textbook comparison of ways to form batches, on the engine itself.

    static            a batch starts when n requests have arrived, and ends with its longest answer
    size-or-timeout   the same, or when its oldest request has waited long enough      (Clipper, NSDI 2017; Triton)
    continuous        a request joins the batch in the next step, and leaves at its end       (Orca, OSDI 2022)
    adaptive          continuous, with a learned wait before new requests join

All are scheduler plug-ins.  In each run they serve the same requests at the same arrival times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from . import Result, Row, trials

PATIENT = 10  # seconds that a static batch waits for requests at most, so that the last batch starts too
REFERENCE = "continuous"
LATENCY = trials.Metric("mean_e2el_ms", "latency", False)


@dataclass(frozen=True)
class BatchingWay:
    """A way to form batches; ``sets`` are its settings."""

    name: str
    sets: tuple[str, ...]


def ways(batch: int, timeout_ms: float, others: Sequence[str]) -> list[BatchingWay]:
    """Return the four built-in ways of batching, and one for each other scheduler.

    ``batch`` is the size of static batches.
    """
    static = ("scheduler.name=static", f"scheduler.options.batch={batch}")
    own = [
        BatchingWay("static", (*static, f"scheduler.options.max_hold={PATIENT}")),
        BatchingWay("size-or-timeout", (*static, f"scheduler.options.max_hold={timeout_ms / 1e3:g}")),
        BatchingWay(REFERENCE, ("scheduler.name=fcfs",)),
        BatchingWay("adaptive", ("scheduler.name=adaptive",)),
    ]
    return own + [BatchingWay(name, (f"scheduler.name={name}",)) for name in dict.fromkeys(others)]


def compared(rows: Sequence[Result]) -> None:
    """Compare the mean latency of each row with that of the policy ``REFERENCE`` at the same request rate.

    The result of a paired test, with a pair of values for each run, is stored in the row under the key ``against``.
    """
    references = {row["request_rate"]: row for row in rows if row["policy"] == REFERENCE}
    others = [row for row in rows if row["policy"] != REFERENCE]
    tests = []
    for row in others:
        reference = references[row["request_rate"]]
        tests.append(trials.against(_runs(reference), _runs(row), [LATENCY]))
    for row, verdict in zip(others, trials.judged(tests), strict=True):
        row["against"] = verdict[LATENCY.key]


def _runs(row: Row) -> list[Result]:
    """Return the results of the runs of a row, each as the value of a key "figures", as ``trials.against`` expects."""
    return [{"figures": run} for run in row["repeats"]]
