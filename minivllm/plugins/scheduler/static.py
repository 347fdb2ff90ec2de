"""Static batching: a batch is filled, runs until its last sequence has ended, and then comes the next one.

The baseline that continuous batching is measured against (Yu et al., "Orca", OSDI 2022, figures 3 and 4): rows that end
early stay empty, and newcomers wait for the longest answer of a batch that they are not in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from minivllm.core.interfaces.scheduler import Load, QueueView, SchedulerContext, SchedulerPolicy, StepShape

from .options import StaticOptions

if TYPE_CHECKING:
    from typing import Any


class Static(SchedulerPolicy):
    """All of a batch are admitted in one step; their prompts are computed first, then all decode together.

    A batch is smaller than asked for if fewer wait after ``max_hold`` seconds, or if the cache has no room for more.
    No starvation: by arrival, and each batch ends.
    """

    options: StaticOptions

    def __init__(self, options: Any, ctx: SchedulerContext) -> None:
        super().__init__(options or StaticOptions(), ctx)
        self.batch = min(self.options.batch or ctx.max_num_seqs, ctx.max_num_seqs)

    def shape(self, load: Load, now: float) -> StepShape:
        fill = not load.running and load.waiting < self.batch and load.oldest_wait < self.options.max_hold
        return StepShape("static", None, now + self.options.max_hold - load.oldest_wait if fill else 0.0)

    def order(self, head: QueueView, running: QueueView, now: float) -> np.ndarray:
        return np.lexsort((head.id, head.arrival))[: max(self.batch - len(running), 0)]
