"""Plan a step with drafts from the step before, if both have the same sequences and numbers of drafts.

This takes a few operations.  ``steady`` does the same for steps without drafts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from minivllm.core.interfaces.plan import NO_CHANGE, Delta, StepPlan, group_rows

from .steady import ONE, SteadyPlanner

if TYPE_CHECKING:
    from .images import Images


class SteadyDrafts(NamedTuple):
    """The last step, in which every running row had ``k`` drafts."""

    plan: StepPlan
    slots: np.ndarray  # i64 [S] slot of each sequence
    sequence: np.ndarray  # i64 [R] index of the sequence of each row
    k: int
    # value of ``Slots.changes`` after the step; the rows are the same as long as it does not change
    changes: int


class DraftPlanner(SteadyPlanner, Protocol):
    """The attributes of a planner that are needed to repeat a step with drafts."""

    drafted: SteadyDrafts | None
    images: Images | None


def steady_drafts_of(planner: DraftPlanner, plan: StepPlan, at: np.ndarray) -> SteadyDrafts | None:
    """Return the step ``plan`` if the next step may repeat it; None if the next step must be planned in full.  ``at``
    i64 are the slots of the rows of ``plan``.

    A step must be planned in full if its sequences have different numbers of drafts, or if a request needs further
    columns of the plan, for example for taps or guides."""
    p = planner
    s = planner.slots
    if not len(plan.draft) or len(plan.slack):
        return None
    if p.asks_shape or s.asking or s.special or s.paired or s.tapping or s.pooling:
        return None
    if p.images is not None or p.cache.compacts or p.cache.slides or p.cache.margin:
        return None
    k = int(plan.draft.max())
    repeated = s.running.repeat(1 + k)
    if len(at) != len(plan.samples) or at.tobytes() != repeated.tobytes():
        return None
    sequence = np.arange(len(s.running)).repeat(1 + k)
    return SteadyDrafts(plan, s.running, sequence, k, s.changes)


def next_drafted(planner: DraftPlanner) -> StepPlan | None:
    """Return the next step if it repeats the last one, with as many drafts behind the tokens known now, else None.

    If None is returned, nothing changes.
    """
    p = planner
    s = planner.slots
    cache = planner.cache
    last = planner.drafted
    spec = planner.speculation
    if last is None or spec is None or last.changes != s.changes:
        return None
    if p.n_waiting and (s.free or s.cooling or p.shared or p.policy.preemptive):
        return None  # a waiting sequence may enter a slot in this step
    at = last.slots
    if spec.most_drafts(len(at)) != last.k:
        return None
    computed = s.computed[at]
    known = computed + ONE
    after = known + last.k
    fits = s.ready[at] & (s.known[at] == known) & (s.end[at] > after) & (s.collected[at] == known)
    if np.count_nonzero(fits) < len(at) or np.count_nonzero(s.slack[at]):
        return None
    missing = cache.missing(at, after)
    if np.count_nonzero(missing):
        if not cache.can_take(missing):
            return None
        # blocks are taken for the newest tokens first, as in a step planned in full
        newest = cache.missing(at, known)
        cache.grow(at, newest)
        cache.grow(at, missing - newest)
    rows = computed[last.sequence] + last.plan.draft
    s.computed[at] = after
    s.known[at] = s.schedulable[at] = after + ONE
    s.slack[at] = last.k
    if not spec.ahead:
        s.ready[at] = False
    p.step_id += 1
    s.step[at] = p.step_id
    delta = Delta(**cache.changes()) if cache.table or cache.trims else NO_CHANGE
    plan = last.plan.further(p.step_id, rows, delta)
    p.drafted = last._replace(plan=plan)
    return plan


class DraftedRows(NamedTuple):
    """The rows of a plan, grouped by sequence.  The head of a sequence is the row with its newest token."""

    draft: np.ndarray  # i32 [R] ``StepPlan.draft``
    first: np.ndarray  # i64 [R] index of the head of each row's sequence
    heads: np.ndarray  # i64 [H] indices of the heads of sequences with drafts
    drafts: np.ndarray  # i32 [H] number of drafts of each of these sequences
    rows: np.ndarray  # i64 indices of the rows of these sequences, one sequence after another

    def of_heads(self, some: np.ndarray) -> DraftedRows:
        """Return only the sequences for which ``some`` bool [H] is true."""
        rows = self.rows[some.repeat(1 + self.drafts)]
        return self._replace(heads=self.heads[some], drafts=self.drafts[some], rows=rows)


def drafted_rows(draft: np.ndarray, last: DraftedRows | None) -> DraftedRows:
    """Return the rows of a plan, grouped by sequence.  ``draft`` is ``StepPlan.draft``.

    Return ``last`` if it was made from the same array, as in a step that repeats the step before."""
    if last is not None and last.draft is draft:
        return last
    first, heads = group_rows(draft)
    sizes = np.bincount(first, minlength=len(draft))
    drafts = (sizes[heads] - 1).astype(np.int32)
    rows = np.flatnonzero(sizes[first] > 1)
    return DraftedRows(draft, first, heads, drafts, rows)
