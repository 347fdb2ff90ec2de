"""Loads: a closed loop of so many streams, an open loop of arrivals, and the search for the knee.

A closed loop asks again when an answer has come, so it never overloads and says what a number of users get.  An open
loop sends each request when it is due, whether or not earlier ones have been answered: what the world does.  A request
that is sent late has its delay noted (``TimedAnswer.late``), because a client at its limit measures itself.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from .answers import TimedAnswer
from .workload import BenchAsk

KEPT_UP = 0.9  # of the offered rate: a run that answers less is beyond the knee


class LoadTarget(Protocol):
    """Who is asked: a server, or an engine in this process."""

    async def ask(self, ask: BenchAsk, seed: int) -> TimedAnswer: ...


async def run(
    target: LoadTarget, asks: Sequence[BenchAsk], concurrency: int | None, seed: int
) -> tuple[list[TimedAnswer], float]:
    """All requests: when they are due if they have times, else at once; never more than ``concurrency`` at a time.
    Returns the answers in the order of ``asks``, and seconds to the last one."""
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


def beyond(found: Mapping[str, Any], goodput_share: float) -> bool:
    """Whether a run was more than the target can take: a request failed, answers lagged behind arrivals, or, with
    latency targets, a smaller share of the requests than ``goodput_share`` met them.

    A target that keeps up ends soon after the last arrival: within the time that an answer took at the beginning, and
    a tenth of the run.  One that does not has a queue by then, which grows with the length of the run.
    """
    if found["failed"]:
        return True
    if found["request_goodput"] is not None:
        return found["request_goodput"] * found["duration"] < goodput_share * found["completed"]
    return found["duration"] > found["last_arrival"] / KEPT_UP + found["early_e2el_ms"] / 1e3


async def find_knee(
    measure: Callable[[float], Any], start: float, share: float, rounds: int = 8
) -> tuple[float, float | None, list[dict[str, Any]]]:
    """The highest rate that was kept up with (0.0: none), the lowest that was too much (None: none), and the figures by
    rate.  ``measure(rate)`` is a coroutine that gives the figures of each run at a rate, and those of all together.  A
    rate is too much if no fewer than half of its runs were ``beyond``, or a request of any failed.  Rates double until
    one is too much (or halve until one is not), then the gap is bisected in logarithms, ``rounds`` rates at most."""
    good, bad, rate, rows = 0.0, 0.0, start, []
    for _ in range(rounds):
        runs, found = await measure(rate)
        for run in runs:
            run["beyond"] = beyond(run, share)
        over = any(run["failed"] for run in runs) or 2 * sum(run["beyond"] for run in runs) >= len(runs)
        rows.append({"request_rate": rate, "beyond": over, **found})
        good, bad = (good, rate) if over else (rate, bad)
        if good and bad:
            if bad / good < 1.1:
                break
            rate = (good * bad) ** 0.5
        else:
            rate = 2 * rate if good else rate / 2
    return good, bad or None, sorted(rows, key=lambda row: row["request_rate"])


def knee_text(good: float, bad: float | None) -> str:
    """Between which rates the knee lies."""
    if bad is None:
        return f"above {good:.2f} requests/s: every rate that was tried was kept up with"
    return f"between {good:.2f} and {bad:.2f} requests/s" if good else f"below {bad:.2f} requests/s"
