"""A step in flight: it is submitted, and the engine has not yet processed its result."""

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
    """A step in flight: its plan, and the serial numbers that its rows' slots had when it was planned."""

    plan: StepPlan
    slots: np.ndarray  # i64 [R] slots of the plan
    serial: np.ndarray  # i64 [R] ``Slots.serial`` of each row at the time of the plan
    after: np.ndarray  # i32 [R] tokens with KV after the step
    drawn: np.ndarray  # i64 [N] slots of the rows that sample
    position: np.ndarray  # i32 [N] positions of the new tokens of the rows that draw
    rejected: np.ndarray  # i32 [R] ``Slots.rejected`` of each row at the time of the plan
    kept: list[Compaction] = field(default_factory=list)  # of ``plan.delta.kept``

    @classmethod
    def of(cls, plan: StepPlan, slots: Slots, read: list[Compaction]) -> Flight:
        """Make the flight of a step that was just planned, while the slots still hold its rows.  Its compactions of
        ``plan.delta.kept`` are moved from ``read``."""
        at = plan.slots.astype(np.intp)
        after = plan.computed + plan.q_len
        pick = plan.samples
        drawn, position = (at, after) if len(pick) == len(at) else (at[pick], after[pick])
        kept = read.copy()
        read.clear()
        return cls(plan, at, slots.serial[at], after, drawn, position, slots.rejected[at], kept)

    def settle(self, slots: Slots, live: np.ndarray) -> None:
        """Replace upper bounds of lengths by the lengths that followed from all earlier steps.

        ``live`` bool [R] marks the rows that still hold their slot."""
        if not len(self.plan.slack):
            return
        back = (slots.rejected[self.slots] - self.rejected) * live
        self.plan = replace(self.plan, computed=self.plan.computed - back)
        self.after = self.after - back
        self.position = self.position - back[self.plan.samples]
