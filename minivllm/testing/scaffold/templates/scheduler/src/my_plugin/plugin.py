"""Least work first.  A request that came a second later must be ``ageing`` tokens smaller to overtake."""

from __future__ import annotations

import numpy as np

from minivllm.plugin import QueueView, SchedulerContext, SchedulerPolicy

from .options import Options


class MyPlugin(SchedulerPolicy):
    """Nobody starves: a request is overtaken only by those that come within work / ageing seconds after it.

    ``order`` and ``shape`` can be overridden too; they cost something each step, and are not called unless they are.
    """

    options: Options

    def __init__(self, options: Options | None, ctx: SchedulerContext) -> None:
        super().__init__(options or Options(), ctx)

    def key(self, new: QueueView) -> np.ndarray:
        """Asked once, on arrival or when a sequence was preempted; smaller goes first."""
        return (new.prompt + new.max_out) / self.options.ageing + new.arrival

    def victim(self, candidates: QueueView, need: int) -> int:
        """The last one by the same order: an old request is not thrown out again and again."""
        return int(np.lexsort((candidates.id, self.key(candidates)))[-1])
