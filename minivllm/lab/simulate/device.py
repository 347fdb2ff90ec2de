"""The device of a simulation: it returns the trace's tokens and advances the clock by the costs of steps."""

from __future__ import annotations

from typing import Any

import numpy as np

from minivllm.core.interfaces.plan import LENGTH, NO_CHANGE, OVERSHOOT, StepPlan, StepResult
from minivllm.lab.replay.serve import Counting, ServeSizes, Steps
from minivllm.lab.traces.trace import Trace
from minivllm.plugins.executor.clocks import ModelClock
from minivllm.plugins.executor.costs import CostTable
from minivllm.plugins.executor.sim import SimStep

UNSAID = 2**31 - 2  # the content number of an answer that no later prompt repeats
ENDS = np.array(LENGTH, np.uint8)
NO_COLUMN = np.empty(0, np.int32)
NOTHING = StepResult(0, NO_COLUMN, NO_COLUMN, NO_COLUMN, NO_COLUMN.astype(np.uint8))


class Simulated(Counting):
    """A device without a computation, whose steps take the time of the table of costs.

    With ``answers`` the tokens of answers are those of the trace, so the next turn of a conversation finds them in the
    cache.  Otherwise no prompt contains an answer, as with a real model.

    Most steps repeat the rows of the previous step with one more token each, and end no row.  The result of such a step
    follows from the previous one, so ``submit`` builds it in a few operations.  The lengths of its rows are counted in
    ``_ahead`` and not updated in ``known`` until another kind of step reads them.
    """

    def __init__(self, trace: Trace, sizes: ServeSizes, costs: CostTable, clock: ModelClock, answers: bool) -> None:
        super().__init__(trace, sizes, Steps(0.0))
        self.costs = costs
        self.clock = clock
        self.answers = answers
        self.busy = 0.0  # seconds
        self._rows: np.ndarray | None = None  # ``plan.slots`` of the last step, if the next step may repeat it
        self._at = np.empty(0, np.intp)  # the slots in ``_rows`` as an index array of numpy's index type
        self._left = 0  # steps until a row ends
        self._ahead = 0  # number of repeated steps that ``known`` does not include
        self._kv = 0  # number of tokens whose KV the last step read
        self.tokens = np.empty(0, np.int32)  # the token that each row of the last step generates, in all steps the same
        self._unsaid = np.full(sizes.max_num_seqs, UNSAID, np.int32)

    @property
    def again(self) -> int:
        """Return how many times the last step can be repeated before a row ends."""
        return self._left - 1 if self._rows is not None else 0

    def goes_on(self, plan: StepPlan) -> bool:
        """Return whether a plan is that of the last step, and the step can be repeated."""
        return plan.slots is self._rows

    def go_on(self, plan: StepPlan, at: np.ndarray) -> None:
        """Prepare for steps that repeat a plan, each row a token further; ``at`` are the plan's slots."""
        self._settle()
        self._rows = None
        self._at = at
        self._left = int((self.end[at] - self.known[at]).min())
        self._kv = int(plan.computed.sum()) + len(at)
        self.tokens = self._drawn(at)

    def pass_one(self, clock: ModelClock, plan: StepPlan) -> np.ndarray:
        """Run one repeated step, advance the clock to its end, and return the indices of the rows that end, i64.

        This step may cost more than the later ones, because caches can be cold.
        """
        assert self.costs is not None
        self._count()
        counts = self._counter.decodes(plan, self._kv, wake=self.wakes())
        self._work(1e3 * self.costs.seconds(counts))
        self._rows = plan.slots if self._left and self._is_warm() else None
        ends = self.known[self._at] + self._ahead >= self.end[self._at]
        if not self._left:
            self._settle()
            self.stopped[self._at] = ends
            self._end(int(np.count_nonzero(ends)))
        clock.until(self._free_at)
        return ends.nonzero()[0]

    def pass_steps(self, clock: ModelClock, most: int, until: float | None) -> int:
        """Run at most ``most`` repeated steps that end no row and begin before ``until`` (None means no limit).

        Return the number of steps, and advance the clock to the end of the last one.  The loop does the work of
        ``_work`` and ``_count`` without calls.
        """
        assert self.costs is not None
        rows = len(self._at)
        kv = self._kv
        free_at = self._free_at
        time = clock.time
        taken = 0
        base = self.costs.rows(rows)
        per_token = self.costs.slopes["kv"]
        most = min(most, self.again)
        while taken < most and (until is None or time < until):
            kv += rows
            seconds = 1e3 * (base + per_token * kv) / 1e3  # rounded like the milliseconds of other steps
            self.busy += seconds
            free_at = max(time, free_at) + seconds
            time = max(time, free_at)
            taken += 1
        self._kv = kv
        self._free_at = free_at
        clock.time = time
        self._left -= taken
        self._ahead += taken
        if self._counter.last is not None:
            self._counter.skip(self._counter.last)
        return taken

    def _count(self) -> None:
        """Count a step that repeats the last one with a token more in each row."""
        self._kv += len(self._at)
        self._left -= 1
        self._ahead += 1

    def _settle(self) -> None:
        """Add the repeated steps to the lengths of their rows."""
        if self._ahead:
            self.known[self._at] += self._ahead
            self._ahead = 0

    def _end(self, rows: int) -> None:
        """Advance the clock by the host's cost of ending ``rows`` rows."""
        if rows and self.costs is not None and self.costs.slopes["end"]:
            self._work(1e3 * self.costs.slopes["end"] * rows)

    def submit(self, plan: StepPlan) -> None:
        """Compute a step.  A step that repeats the last one takes only a few operations."""
        repeats = plan.slots is self._rows and self._left > 1
        if repeats and not self._behind and not self.wakes() and _keeps_rows(plan):
            assert self.costs is not None
            ms = 1e3 * self.costs.decode(len(self._at), self._kv + len(self._at))
            self._count()
            self._work(ms)
            self._counter.skip(plan)
            count = np.ones(len(self._at), np.int32)
            flags = np.zeros(len(self._at), np.uint8)
            result = _result(id=plan.id, slots=plan.slots, tokens=self.tokens, count=count, flags=flags, device_ms=ms)
            self._running.append(SimStep(plan, ms, result, self._free_at))
            return
        self._settle()
        self._rows = None
        special = (
            plan.host,
            plan.late,
            plan.draft,
            plan.prompt,
            plan.taps,
            plan.pooled,
            plan.delta.fork,
            plan.delta.token,
        )
        if plan.topk < 0 and not self._behind and not any(map(len, special)):
            self._begin(plan)
        else:
            super().submit(plan)

    def _begin(self, plan: StepPlan) -> None:
        """Compute a step whose rows need only tokens.

        It takes a third of the operations of the executor ``Sim``, which also serves masks, drafts, taps and so on.
        """
        delta = plan.delta
        n = len(plan.slots)
        if len(delta.leave):
            self.stopped[delta.leave] = True
        join = delta.join
        if join is not None:
            at = join.slot
            self.known[at] = join.known
            self.end[at] = join.end
            self.stopped[at] = False
            self.token[at] = self.trace.answer[join.seed]
            self.request[at] = join.seed
        ms = self._cost(plan)
        self._work(ms)
        rows = slots = plan.slots.astype(np.intp)
        if len(plan.samples) < n:
            slots = rows[plan.samples]
        active = ~self.stopped[slots]
        known = self.known[slots] + active
        ends = known >= self.end[slots]
        self.known[slots] = known
        self.stopped[slots] = ends
        ends &= active
        flags = ends.view(np.uint8) * ENDS
        if np.count_nonzero(active) < len(active):
            flags[~active] = OVERSHOOT
        self.tokens = self._drawn(slots)
        count = active.astype(np.int32)
        sampled = plan.slots if slots is rows else plan.slots[plan.samples]
        result = _result(id=plan.id, slots=sampled, tokens=self.tokens, count=count, flags=flags, device_ms=ms)
        self._end(int(np.count_nonzero(ends)))
        self._running.append(SimStep(plan, ms, result, self._free_at))
        if slots is rows and plan.q_len[-1] == 1 and not np.count_nonzero(flags) and self._is_warm():
            self._rows = plan.slots
            self._at = rows
            self._left = int((self.end[rows] - known).min())
            self._kv = int(plan.computed.sum()) + n

    def _is_warm(self) -> bool:
        """Return whether the next step pays no extra cost for a large step before it."""
        if self.costs is None:
            return True
        return not 0 < self.costs.limit < max(self._counter.before)

    def _work(self, ms: float) -> None:
        """Keep the simulated device busy for ``ms`` milliseconds."""
        self.busy += ms / 1e3
        super()._work(ms)

    def _drawn(self, slots: np.ndarray) -> np.ndarray:
        """Return the tokens that rows generate, i32."""
        return self._next(slots).astype(np.int32, copy=False)

    def _next(self, slots: np.ndarray) -> np.ndarray:
        if self.answers:
            return super()._next(slots)
        return self._unsaid[: len(slots)]


def _result(**columns: Any) -> StepResult:
    """Build a StepResult without its constructor, which takes several times as long."""
    result: StepResult = object.__new__(StepResult)
    result.__dict__.update(NOTHING.__dict__, **columns)
    return result


def _keeps_rows(plan: StepPlan) -> bool:
    """Return whether no row joins, leaves or forks; blocks may be added."""
    d = plan.delta
    if d is NO_CHANGE:
        return True
    return d.join is None and not (len(d.leave) or len(d.fork) or len(d.token))
