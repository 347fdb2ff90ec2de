"""Schedule the least work first.  To overtake, a request must be ``ageing`` tokens smaller for each second that it
arrived later."""

from __future__ import annotations

import numpy as np

from minivllm.plugin import QueueView, SchedulerContext, SchedulerPolicy

from .options import Options


class MyPlugin(SchedulerPolicy):
    """A policy without starvation: only requests that arrive within work / ageing seconds can overtake a request.

    ``order`` and ``shape`` can be overridden too.  They take time in each step, and are called only if overridden.
    """

    options: Options

    def __init__(self, options: Options | None, ctx: SchedulerContext) -> None:
        super().__init__(options or Options(), ctx)

    def key(self, new: QueueView) -> np.ndarray:
        """Return the keys of sequences that have arrived or were preempted; the smallest key runs first."""
        work = new.prompt + new.max_out
        return work / self.options.ageing + new.arrival

    def victim(self, candidates: QueueView, need: int) -> int:
        """Return the index of the last sequence by its key, so that an old request is not preempted repeatedly."""
        order = np.lexsort((candidates.id, self.key(candidates)))
        return int(order[-1])
