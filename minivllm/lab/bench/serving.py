"""Run loads: a closed loop of some streams, an open loop of arrivals, and the search for the knee.

A closed loop sends the next request when an answer is complete, so it never overloads the target.  It measures the
service that a number of users get.  An open loop sends each request when it is due, whether or not earlier requests
have been answered, as real traffic does.  ``TimedAnswer.late`` stores the delay of a request that is sent late, since a
client at its own limit measures itself.

The knee is the highest rate of requests that the target can serve.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from . import Result, Row
from .answers import TimedAnswer
from .workload import BenchAsk

KEPT_UP = 0.9  # share of the offered rate; a run that serves less is beyond the knee


class LoadTarget(Protocol):
    """The target of a load: a server, or an engine in this process."""

    async def ask(self, ask: BenchAsk, seed: int) -> TimedAnswer:
        """Send a request and return its answer."""


async def run(
    target: LoadTarget, asks: Sequence[BenchAsk], concurrency: int | None, seed: int
) -> tuple[list[TimedAnswer], float]:
    """Send all requests, and return the answers in the same order and the seconds to the last one.

    A request is sent at its time, or at once if it has none.  At most ``concurrency`` requests run at a time; None
    means no limit.
    """
    begun = time.perf_counter()
    gate = asyncio.Semaphore(concurrency or max(1, len(asks)))

    async def one(number: int, ask: BenchAsk) -> TimedAnswer:
        if ask.at is not None:
            await asyncio.sleep(max(0.0, ask.at - (time.perf_counter() - begun)))
        async with gate:
            start = time.perf_counter() - begun
            answer = await target.ask(ask, seed + number)
        answer.start = start
        answer.late = start - ask.at if ask.at is not None else 0.0
        return answer

    answers = await asyncio.gather(*(one(i, ask) for i, ask in enumerate(asks)))
    return list(answers), time.perf_counter() - begun


def beyond(found: Row, goodput_share: float) -> bool:
    """Return whether the load of a run was more than the target can serve.

    This is the case if a request failed.  With latency targets it is the case if a smaller share of the requests than
    ``goodput_share`` met them.  Otherwise it is the case if the run ended late: later after the last arrival than a
    tenth of the run and the time of an early answer.  A queue has then formed, which grows with the length of the run.
    """
    if found["failed"]:
        return True
    if found["request_goodput"] is not None:
        return found["request_goodput"] * found["duration"] < goodput_share * found["completed"]
    return found["duration"] > found["last_arrival"] / KEPT_UP + found["early_e2el_ms"] / 1e3


async def find_knee(
    measure: Callable[[float], Any], start: float, share: float, rounds: int = 8
) -> tuple[float, float | None, list[Result]]:
    """Search the knee, starting at ``start`` requests per second, with at most ``rounds`` rates.

    Return the highest rate that was served (0.0 if none), the lowest rate that was too much (None if none), and the
    results by rate.  ``measure(rate)`` is a coroutine that returns the results of each run, and those of all runs
    together.  A rate is too much if at least half of its runs were ``beyond`` (with ``share`` as the goodput share), or
    a request failed.  Rates double until one is too much, or halve until one is not.  Then the gap is bisected on a
    logarithmic scale.
    """
    good = 0.0
    bad = 0.0
    rate = start
    rows = []
    for _ in range(rounds):
        runs, found = await measure(rate)
        for run in runs:
            run["beyond"] = beyond(run, share)
        failed = any(run["failed"] for run in runs)
        over = failed or 2 * sum(run["beyond"] for run in runs) >= len(runs)
        rows.append({"request_rate": rate, "beyond": over, **found})
        if over:
            bad = rate
        else:
            good = rate
        if good and bad:
            if bad / good < 1.1:
                break
            rate = (good * bad) ** 0.5
        else:
            rate = 2 * rate if good else rate / 2
    return good, bad or None, sorted(rows, key=lambda row: row["request_rate"])


def knee_text(good: float, bad: float | None) -> str:
    """Return the range of the knee as text.  ``good`` and ``bad`` are results of ``find_knee``."""
    if bad is None:
        return f"above {good:.2f} requests/s: every rate that was tried was kept up with"
    return f"between {good:.2f} and {bad:.2f} requests/s" if good else f"below {bad:.2f} requests/s"
