"""Priority with static ageing: smaller goes first, and each level is worth some seconds of waiting.

The ageing priority of operating systems (Silberschatz et al., "Operating System Concepts", chapter 5), in the form
that needs no clock: all waiting requests age alike, so arrival + ageing x priority keeps its order for ever and is a
sort key.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from minivllm.core.interfaces.scheduler import QueueView, SchedulerContext, SchedulerPolicy

from .options import PriorityOptions

if TYPE_CHECKING:
    from typing import Any


class Priority(SchedulerPolicy):
    """Who is served first is also preempted last; a request that waits takes nobody's row.

    No starvation: a request of level p is overtaken only by those of level q < p that come less than ageing x (p - q)
    seconds after it, so for 2 x ageing x levels seconds at most.
    """

    options: PriorityOptions

    def __init__(self, options: Any, ctx: SchedulerContext) -> None:
        super().__init__(options or PriorityOptions(), ctx)

    def key(self, new: QueueView) -> np.ndarray:
        levels = self.options.levels
        return new.arrival + self.options.ageing * np.clip(new.priority, -levels, levels)

    def victim(self, candidates: QueueView, need: int) -> int:
        return int(np.lexsort((candidates.id, self.key(candidates)))[-1])
