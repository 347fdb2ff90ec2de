"""Measure a target under a load, in several runs, for ``minivllm bench serve``."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from minivllm.errors import MinivllmError

from . import Result, serving
from .answers import TimedAnswer, details, figures
from .repeats import joules_a_token, merged
from .workload import BenchAsk, poisson


@dataclass(frozen=True)
class OfferedLoad:
    """A load: ``rate`` requests per second, and at most ``concurrency`` at a time (None means no limit).

    ``rate`` None means that requests are sent at their own times, or all together if they have none.
    """

    rate: float | None = None
    concurrency: int | None = None

    @property
    def named(self) -> Result:
        """Return the load under vLLM's names."""
        return {"request_rate": "inf" if self.rate is None else self.rate, "max_concurrency": self.concurrency}


def row_of(load: OfferedLoad, runs: Sequence[Result], answers: Sequence[TimedAnswer]) -> Result:
    """Return the results of a load: medians over ``runs``, the sum of failed requests, and the last run's requests."""
    row = {**load.named, **merged(runs)}
    row["failed"] = sum(run["failed"] for run in runs)
    row["repeats"] = list(runs)
    row["requests"] = details(answers)
    return row


@dataclass
class Bench:
    """A benchmark of a target.

    ``asks(seed)`` returns the requests of a run.  ``watch`` makes a ``state.MachineWatch``.  ``reset`` is awaited
    before each run.  ``targets`` are latencies in milliseconds for goodput.  Every run has a seed of its own, since a
    server with a prefix cache would find the prompts of an earlier run with the same seed.
    """

    target: serving.LoadTarget
    asks: Callable[[int], Sequence[BenchAsk]]
    watch: Callable[[], Any]
    targets: Mapping[str, float] = field(default_factory=dict)
    burstiness: float = 1.0
    seed: int = 0
    reset: Callable[[], Awaitable[Any]] | None = None
    states: list[Result] = field(default_factory=list)
    runs: int = 0  # number of runs so far

    async def warm(self, count: int, concurrency: int | None) -> None:
        """Warm up the target with ``count`` requests that are not measured.  Raise MinivllmError if the first fails."""
        asks = [replace(ask, at=None) for ask in self.asks(self.seed - 1)[:count]]
        answers, _ = await serving.run(self.target, asks, concurrency, self.seed)
        if answers and answers[0].error:
            raise MinivllmError(f"the first request failed: {answers[0].error}")

    async def once(self, load: OfferedLoad) -> tuple[Result, list[TimedAnswer]]:
        """Measure one run, and return its results and answers."""
        seed = self.seed + self.runs
        self.runs += 1
        if self.reset is not None:
            await self.reset()
        asks = list(self.asks(seed))
        if load.rate is not None:
            asks = poisson(asks, load.rate, seed, self.burstiness)
        with self.watch() as state:
            answers, seconds = await serving.run(self.target, asks, load.concurrency, seed)
        self.states.append(state.found)
        found = figures(answers, seconds, self.targets)
        found["joules_per_output_token"] = joules_a_token([found], [state.found])[0]
        return found, answers

    async def row(self, load: OfferedLoad, repeats: int) -> Result:
        """Measure ``repeats`` runs and return the results of the load (``row_of``)."""
        runs: list[Result] = []
        answers: list[TimedAnswer] = []
        for _ in range(repeats):
            found, answers = await self.once(load)
            runs.append(found)
        return row_of(load, runs, answers)

    async def knee(self, start: float, concurrency: int | None, share: float, repeats: int) -> Result:
        """Search the highest rate that the target can serve, starting at ``start`` requests per second.

        Return ``knee``, the highest rate that it served (0.0 if none), ``knee_below``, the lowest rate that was too
        much (None if none), and ``rows``, the results by rate.  For ``share`` see ``serving.find_knee``.
        """

        async def measure(rate: float) -> tuple[list[Result], Result]:
            row = await self.row(OfferedLoad(rate, concurrency), repeats)
            return row["repeats"], row

        found, over, rows = await serving.find_knee(measure, start, share)
        return {"knee": found, "knee_below": over, "rows": rows}
