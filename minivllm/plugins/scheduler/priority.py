"""Serve by priority with static ageing: smaller first, and a level is worth some seconds of waiting.

This is the ageing priority of operating systems (Silberschatz et al., "Operating System Concepts", chapter 5) in a form
without a clock.  All waiting requests age equally, so the order of arrival + ageing x priority never changes, and it is
a sort key.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from minivllm.core.interfaces.scheduler import QueueView, SchedulerContext, SchedulerPolicy

from .options import PriorityOptions

if TYPE_CHECKING:
    from typing import Any


class Priority(SchedulerPolicy):
    """A policy whose order of service is also the reverse order of preemption.

    A waiting request preempts no row, unless the option ``preempt`` is set.  A row that was preempted for a request
    never precedes it, so the two cannot preempt each other in turn.

    No request starves: a request of level p is overtaken only by requests of level q < p that arrive less than
    ageing x (p - q) seconds after it, so for at most 2 x ageing x levels seconds.
    """

    options: PriorityOptions

    def __init__(self, options: Any, ctx: SchedulerContext) -> None:
        super().__init__(options or PriorityOptions(), ctx)
        self.preemptive = self.options.preempt is not None

    def key(self, new: QueueView) -> np.ndarray:
        levels = self.options.levels
        return new.arrival + self.options.ageing * np.clip(new.priority, -levels, levels)

    def displaced(self, head: QueueView, running: QueueView, now: float) -> int:
        levels = self.options.preempt
        if levels is None:
            return -1
        keys = self.key(running)
        last = int(np.argmax(keys))
        ahead = keys[last] - self.key(head)[0]
        if ahead < levels * self.options.ageing:
            return -1
        return last

    def victim(self, candidates: QueueView, need: int) -> int:
        order = np.lexsort((candidates.id, self.key(candidates)))
        return int(order[-1])
