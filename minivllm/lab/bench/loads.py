"""Measures a target under a load, several times: what ``minivllm bench serve`` does."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from minivllm.errors import MinivllmError

from . import serving
from .answers import TimedAnswer, details, figures
from .repeats import joules_a_token, merged
from .workload import BenchAsk, poisson


@dataclass(frozen=True)
class OfferedLoad:
    """``rate`` requests a second (None: as the requests say, or all at once), at most ``concurrency`` at a time."""

    rate: float | None = None
    concurrency: int | None = None

    @property
    def named(self) -> dict[str, Any]:
        return {"request_rate": "inf" if self.rate is None else self.rate, "max_concurrency": self.concurrency}


def row_of(load: OfferedLoad, runs: Sequence[dict[str, Any]], answers: Sequence[TimedAnswer]) -> dict[str, Any]:
    """Medians over ``runs`` (``failed``: the sum), and each request of the last one."""
    failed = {"failed": sum(run["failed"] for run in runs)}
    return {**load.named, **merged(runs), **failed, "repeats": list(runs), "requests": details(answers)}


@dataclass
class Bench:
    """``asks(seed)`` are the requests of a run; ``watch`` makes a ``state.MachineWatch``; ``reset`` is awaited before
    each run.  ``targets`` are latencies in milliseconds for goodput.  No two runs share a seed, of whatever rate they
    are: a server that keeps prefixes would find the prompts of the earlier one."""

    target: serving.LoadTarget
    asks: Callable[[int], Sequence[BenchAsk]]
    watch: Callable[[], Any]
    targets: Mapping[str, float] = field(default_factory=dict)
    burstiness: float = 1.0
    seed: int = 0
    reset: Callable[[], Awaitable[Any]] | None = None
    states: list[dict[str, Any]] = field(default_factory=list)
    runs: int = 0  # so far

    async def warm(self, count: int, concurrency: int | None) -> None:
        """Requests that are not counted: what a batch of that size needs once.  MinivllmError if the first fails."""
        asks = [replace(ask, at=None) for ask in self.asks(self.seed - 1)[:count]]
        answers, _ = await serving.run(self.target, asks, concurrency, self.seed)
        if answers and answers[0].error:
            raise MinivllmError(f"the first request failed: {answers[0].error}")

    async def once(self, load: OfferedLoad) -> tuple[dict[str, Any], list[TimedAnswer]]:
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

    async def row(self, load: OfferedLoad, repeats: int) -> dict[str, Any]:
        """As ``row_of``, over ``repeats`` runs with seeds of their own."""
        runs: list[dict[str, Any]] = []
        answers: list[TimedAnswer] = []
        for _ in range(repeats):
            found, answers = await self.once(load)
            runs.append(found)
        return row_of(load, runs, answers)

    async def knee(self, start: float, concurrency: int | None, share: float, repeats: int) -> dict[str, Any]:
        """``knee``: the highest rate that the target keeps up with (0.0: none of those that were tried);
        ``knee_below``: the lowest that was too much (None: none); ``rows``: the figures by rate."""

        async def measure(rate: float) -> tuple[list[dict[str, Any]], dict[str, Any]]:
            row = await self.row(OfferedLoad(rate, concurrency), repeats)
            return row["repeats"], row

        found, over, rows = await serving.find_knee(measure, start, share)
        return {"knee": found, "knee_below": over, "rows": rows}
