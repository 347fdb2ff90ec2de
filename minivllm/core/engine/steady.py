"""Steps with the same rows as the step before, each one token further.  Most steps are of this kind.  They are derived
from the step before in a few operations, because planning would dominate the time of a small model."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from minivllm.core.interfaces.plan import NO_CHANGE, Delta, StepPlan

from .taps import reads_all

if TYPE_CHECKING:
    from minivllm.core.interfaces.scheduler import SchedulerPolicy

    from .cache import KVCache
    from .slots import Slots
    from .speculation import Speculation

ONE = np.ones(1, np.int32)  # numpy adds an array in half the time that it needs for a Python number


class Steady(NamedTuple):
    """The last step, in which every running row drew its next token, and how many further steps may repeat it."""

    plan: StepPlan
    slots: np.ndarray  # i64 [R] slot of each row
    # value of ``Slots.changes`` after the step; the rows are the same as long as it does not change
    changes: int
    steps: int  # count of further steps before a row reaches its last token
    room: int  # count of further steps before a row needs a new block


class SteadyPlanner(Protocol):
    """The attributes of a planner that are needed to repeat a step."""

    slots: Slots
    cache: KVCache
    speculation: Speculation | None
    steady: Steady | None
    step_id: int
    asks_shape: bool
    shared: bool
    policy: SchedulerPolicy

    @property
    def n_waiting(self) -> int: ...


def steady_of(planner: SteadyPlanner, plan: StepPlan, at: np.ndarray) -> Steady | None:
    """Return the step ``plan`` if the next step may repeat it with one more token per row; None if the next step must
    be planned in full.  ``at`` i64 are the slots of its rows.

    A step must be planned in full if a policy is called in each step, if rows have drafts or may have some in the next
    step, or if a row waits for the host, computes its prompt, reads only some of its taps, or has given routes."""
    p = planner
    s = planner.slots
    same = len(plan.samples) == len(at) and at.tobytes() == s.running.tobytes()
    if not same or p.asks_shape or s.asking or len(plan.slack) or drafts_next(p, len(at)):
        return None
    if len(plan.host) or len(plan.held) or len(plan.sums) or plan.q_len[-1] > 1:
        return None
    if s.tapping and (len(plan.given) or not reads_all(s, at, plan.taps)):
        return None
    steps = (s.end[at] - s.known[at]).min()
    if p.cache.compacts:
        # the step before a compression is planned in full, because its queries may be read
        steps = min(steps, (s.compress_at[at] - s.computed[at]).min() - 1)
    if p.cache.margin and p.cache.available < p.cache.margin * len(at):
        return None
    return Steady(plan, at, s.changes, max(0, int(steps)), 0)


def drafts_next(planner: SteadyPlanner, rows: int) -> bool:
    """Return whether the next step of ``rows`` decoding rows has drafts."""
    spec = planner.speculation
    return spec is not None and spec.most_drafts(rows) > 0


def next_steady(planner: SteadyPlanner) -> StepPlan | None:
    """Return the next step if it repeats the last one with one more token in each row, else None.

    If None is returned, nothing changes except for blocks that a sliding window has released.
    """
    p = planner
    s = planner.slots
    cache = planner.cache
    last = planner.steady
    if (
        last is None
        or last.changes != s.changes
        or not last.steps
        or drafts_next(p, len(last.slots))
    ):
        return None
    if p.n_waiting and (s.free or s.cooling or p.shared or p.policy.preemptive):
        return None  # a waiting sequence may enter a slot in this step
    at = last.slots
    computed = last.plan.computed + ONE
    room = last.room
    after = computed + ONE
    if cache.slides:
        cache.trim(at)
    if not room:
        missing = cache.missing(at, after)
        if np.count_nonzero(missing):
            if not cache.can_take(missing):
                return None
            cache.grow(at, missing)
        stored = after - s.dropped[:, at]
        room = 1 + int((s.blocks[:, at] * s.block - stored).min())
    s.computed[at] = after
    s.known[at] = s.schedulable[at] = after + ONE
    p.step_id += 1
    s.step[at] = p.step_id
    delta = Delta(**cache.changes()) if cache.table or cache.trims else NO_CHANGE
    plan = last.plan.further(p.step_id, computed, delta)
    steps = last.steps - 1
    if cache.margin and cache.available < cache.margin * len(at):
        steps = 0  # the next step is planned in full, because a row may lack a block then
    p.steady = Steady(plan, at, last.changes, steps, room - 1)
    return plan
