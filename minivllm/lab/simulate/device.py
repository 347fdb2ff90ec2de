"""The device of a simulation: the trace's tokens, after the time that the table of costs says."""

from __future__ import annotations

from typing import Any

import numpy as np

from minivllm.core.interfaces.plan import LENGTH, NO_CHANGE, OVERSHOOT, StepPlan, StepResult
from minivllm.lab.replay.serve import Counting, ServeSizes, Steps
from minivllm.lab.traces.trace import Trace
from minivllm.plugins.executor.clocks import ModelClock
from minivllm.plugins.executor.costs import CostTable
from minivllm.plugins.executor.sim import SimStep

UNSAID = 2**31 - 2  # the content of an answer that no later prompt repeats
ENDS = np.array(LENGTH, np.uint8)
NO_COLUMN = np.empty(0, np.int32)
NOTHING = StepResult(0, NO_COLUMN, NO_COLUMN, NO_COLUMN, NO_COLUMN.astype(np.uint8))


class Simulated(Counting):
    """``answers``: what they hold is what the trace says, so the next turn of a conversation finds it in the cache;
    else no prompt has it, as where a model writes answers of its own.

    Most steps are of the rows of the one before, each a token further, and none of them ends.  What such a step answers
    is known from the last one, so ``_again`` makes it in a few operations; lengths of rows wait in ``_ahead`` until
    another step reads them.
    """

    def __init__(self, trace: Trace, sizes: ServeSizes, costs: CostTable, clock: ModelClock, answers: bool) -> None:
        super().__init__(trace, sizes, Steps(0.0))
        self.costs, self.clock, self.answers = costs, clock, answers
        self.busy = 0.0  # seconds
        self._rows: np.ndarray | None = None  # ``plan.slots`` of the last step, if it can be made again
        self._at = np.empty(0, np.intp)  # the same
        self._left = 0  # steps until one of the rows ends
        self._ahead = 0  # steps that ``known`` does not have
        self._kv = 0  # tokens that the last one read
        self.tokens = np.empty(0, np.int32)  # that the rows of the last step draw, in each step alike
        self._unsaid = np.full(sizes.max_num_seqs, UNSAID, np.int32)

    @property
    def again(self) -> int:
        """So many more steps like the last one end no row."""
        return self._left - 1 if self._rows is not None else 0

    def goes_on(self, plan: StepPlan) -> bool:
        """Whether this is the last step, and can be made again."""
        return plan.slots is self._rows

    def go_on(self, plan: StepPlan, at: np.ndarray) -> None:
        """The next steps are of the rows of this plan, ``at``, each a token further."""
        self._settle()
        self._rows, self._at = None, at
        self._left = int((self.end[at] - self.known[at]).min())
        self._kv = int(plan.computed.sum()) + len(at)
        self.tokens = self._drawn(at)

    def pass_one(self, clock: ModelClock, plan: StepPlan) -> np.ndarray:
        """One of these steps, which may cost more than the next ones, or end rows; the clock shows its end.  Which of
        its rows it ends, i64."""
        assert self.costs is not None
        self._count()
        self._work(1e3 * self.costs.seconds(self._counter.decodes(plan, self._kv, wake=self.wakes())))
        self._rows = plan.slots if self._left and self._is_warm() else None
        ends = self.known[self._at] + self._ahead >= self.end[self._at]
        if not self._left:
            self._settle()
            self.stopped[self._at] = ends
            self._end(int(np.count_nonzero(ends)))
        clock.until(self._free_at)
        return ends.nonzero()[0]

    def pass_steps(self, clock: ModelClock, most: int, until: float | None) -> int:
        """Steps like the last one that end no row, as many as begin before ``until``, at most so many; the clock shows
        the end of the last.  What ``_work`` and ``_count`` do for one each, without calls."""
        assert self.costs is not None
        rows, kv, free_at, time, taken = len(self._at), self._kv, self._free_at, clock.time, 0
        alone, each = self.costs.rows(rows), self.costs.slopes["kv"]
        most = min(most, self.again)
        while taken < most and (until is None or time < until):
            kv += rows
            seconds = 1e3 * (alone + each * kv) / 1e3  # as milliseconds of a plan become seconds, to the last bit
            self.busy += seconds
            free_at = max(time, free_at) + seconds
            time = max(time, free_at)
            taken += 1
        self._kv, self._free_at, clock.time = kv, free_at, time
        self._left -= taken
        self._ahead += taken
        if self._counter.last is not None:
            self._counter.skip(self._counter.last)
        return taken

    def _count(self) -> None:
        self._kv += len(self._at)
        self._left -= 1
        self._ahead += 1

    def _settle(self) -> None:
        """Lengths of rows, of those steps that they lack."""
        if self._ahead:
            self.known[self._at] += self._ahead
            self._ahead = 0

    def _end(self, rows: int) -> None:
        """What it takes that so many end."""
        if rows and self.costs is not None and self.costs.slopes["end"]:
            self._work(1e3 * self.costs.slopes["end"] * rows)

    def submit(self, plan: StepPlan) -> None:
        if plan.slots is self._rows and self._left > 1 and not self._behind and not self.wakes() and _is_still(plan):
            assert self.costs is not None
            ms = 1e3 * self.costs.decode(len(self._at), self._kv + len(self._at))
            self._count()
            self._work(ms)
            self._counter.skip(plan)
            count, flags = np.ones(len(self._at), np.int32), np.zeros(len(self._at), np.uint8)
            result = _result(id=plan.id, slots=plan.slots, tokens=self.tokens, count=count, flags=flags, device_ms=ms)
            self._running.append(SimStep(plan, ms, result, self._free_at))
            return
        self._settle()
        self._rows = None
        plain = not (len(plan.host) or len(plan.late) or len(plan.draft) or len(plan.prompt) or len(plan.taps))
        if plain and plan.topk < 0 and not self._behind and not len(plan.delta.fork) and not len(plan.delta.token):
            self._begin(plan)
        else:
            super().submit(plan)

    def _begin(self, plan: StepPlan) -> None:
        """A step of requests that ask for nothing but tokens: what ``Sim`` does, in a third of the operations."""
        delta, n = plan.delta, len(plan.slots)
        if len(delta.leave):
            self.stopped[delta.leave] = True
        if (join := delta.join) is not None:
            at = join.slot
            self.known[at], self.end[at], self.stopped[at] = join.known, join.end, False
            self.token[at], self.request[at] = self.trace.answer[join.seed], join.seed
        ms = self._cost(plan)
        self._work(ms)
        rows = slots = plan.slots.astype(np.intp)
        if len(plan.samples) < n:
            slots = rows[plan.samples]
        goes = ~self.stopped[slots]
        known = self.known[slots] + goes
        ends = known >= self.end[slots]
        self.known[slots], self.stopped[slots] = known, ends
        ends &= goes
        flags = ends.view(np.uint8) * ENDS
        if np.count_nonzero(goes) < len(goes):
            flags[~goes] = OVERSHOOT
        self.tokens = self._drawn(slots)
        result = _result(
            id=plan.id,
            slots=plan.slots if slots is rows else plan.slots[plan.samples],
            tokens=self.tokens,
            count=goes.astype(np.int32),
            flags=flags,
            device_ms=ms,
        )
        self._end(int(np.count_nonzero(ends)))
        self._running.append(SimStep(plan, ms, result, self._free_at))
        if slots is rows and plan.q_len[-1] == 1 and not np.count_nonzero(flags) and self._is_warm():
            self._rows, self._at = plan.slots, rows
            self._left = int((self.end[rows] - known).min())
            self._kv = int(plan.computed.sum()) + n

    def _is_warm(self) -> bool:
        """Whether the step after the last one costs no more for those before it."""
        return self.costs is None or not 0 < self.costs.limit < max(self._counter.before)

    def _work(self, ms: float) -> None:
        self.busy += ms / 1e3
        super()._work(ms)

    def _drawn(self, slots: np.ndarray) -> np.ndarray:
        return self._next(slots).astype(np.int32, copy=False)

    def _next(self, slots: np.ndarray) -> np.ndarray:
        return super()._next(slots) if self.answers else self._unsaid[: len(slots)]


def _result(**columns: Any) -> StepResult:
    """In a fraction of the time that the class takes for one."""
    made: StepResult = object.__new__(StepResult)
    made.__dict__.update(NOTHING.__dict__, **columns)
    return made


def _is_still(plan: StepPlan) -> bool:
    """Whether nobody enters, leaves or forks; blocks may be added."""
    d = plan.delta
    return d is NO_CHANGE or not (len(d.leave) or d.join is not None or len(d.fork) or len(d.token))
