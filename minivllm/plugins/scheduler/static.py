"""Run static batches: a batch is filled and runs until its last sequence has ended, then the next batch starts.

This is the baseline of continuous batching (Yu et al., "Orca", OSDI 2022, figures 3 and 4).  Rows that end early stay
empty, and new requests wait for the longest answer of the running batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from minivllm.core.interfaces.scheduler import Load, QueueView, SchedulerContext, SchedulerPolicy, StepShape

from .options import StaticOptions

if TYPE_CHECKING:
    from typing import Any


class Static(SchedulerPolicy):
    """A policy that admits a whole batch in one step.  Its prompts are computed first, then all rows decode together.

    A batch is smaller than ``batch`` if fewer requests wait after ``max_hold`` seconds, or if the cache is too small.
    No request starves, since the order is by arrival and each batch ends.
    """

    options: StaticOptions

    def __init__(self, options: Any, ctx: SchedulerContext) -> None:
        super().__init__(options or StaticOptions(), ctx)
        self.batch = min(self.options.batch or ctx.max_num_seqs, ctx.max_num_seqs)

    def shape(self, load: Load, now: float) -> StepShape:
        most = self.options.max_hold
        if load.running or load.waiting >= self.batch or load.oldest_wait >= most:
            return StepShape("static")
        return StepShape("static", hold_until=now + most - load.oldest_wait)

    def order(self, head: QueueView, running: QueueView, now: float) -> np.ndarray:
        free = max(self.batch - len(running), 0)
        return np.lexsort((head.id, head.arrival))[:free]
