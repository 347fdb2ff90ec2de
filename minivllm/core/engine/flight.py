"""A step in flight: it was submitted to the executor, and the engine has not processed its result yet."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from minivllm.core.interfaces.plan import StepPlan

    from .compaction import Compaction
    from .slots import Slots


@dataclass
class Flight:
    """A step in flight: its plan, and copies of some columns of its rows' slots, made when the step was planned."""

    plan: StepPlan
    slots: np.ndarray  # i64 [R] slot of each row of the plan
    # i64 [R] serial number of each row's stay in its slot (``Slots.serial``); another number later
    # means that the row has left
    serial: np.ndarray
    after: np.ndarray  # i32 [R] number of computed tokens of each row after the step
    drawn: np.ndarray  # i64 [N] slots of the rows that draw a token
    # i32 [N] position in its sequence of the token that each of these rows draws
    position: np.ndarray
    # i32 [R] number of drafts of each row that were rejected up to the time of the plan
    rejected: np.ndarray
    kept: list[Compaction] = field(default_factory=list)  # of ``plan.delta.kept``

    @classmethod
    def of(cls, plan: StepPlan, slots: Slots, read: list[Compaction]) -> Flight:
        """Return the flight of a step that was just planned, while the slots still hold its rows.  The compressions in
        ``read``, whose kept tokens the step returns, are moved to the flight."""
        at = plan.slots.astype(np.intp)
        after = plan.computed + plan.q_len
        pick = plan.samples
        drawn, position = (at, after) if len(pick) == len(at) else (at[pick], after[pick])
        kept = read.copy()
        read.clear()
        return cls(plan, at, slots.serial[at], after, drawn, position, slots.rejected[at], kept)

    def settle(self, slots: Slots, live: np.ndarray) -> None:
        """Set the exact numbers of tokens of the plan's rows.  They were upper bounds, because drafts of earlier steps
        may have been rejected since.

        ``live`` bool [R] marks the rows that still hold their slot."""
        if not len(self.plan.slack):
            return
        back = (slots.rejected[self.slots] - self.rejected) * live
        self.plan = replace(self.plan, computed=self.plan.computed - back)
        self.after = self.after - back
        self.position = self.position - back[self.plan.samples]
