"""The device of a simulation: the trace's tokens, after the time that the table of costs says."""

from __future__ import annotations

import numpy as np

from minivllm.plugins.executor.clocks import ModelClock
from minivllm.plugins.executor.costs import CostTable
from minivllm.replay.serve import Counting, ServeSizes, Steps
from minivllm.traces.trace import Trace

UNSAID = 2**31 - 2  # the content of an answer that no later prompt repeats


class Simulated(Counting):
    """``answers``: what they hold is what the trace says, so the next turn of a conversation finds it in the cache;
    else no prompt has it, as where a model writes answers of its own."""

    def __init__(self, trace: Trace, sizes: ServeSizes, costs: CostTable, clock: ModelClock, answers: bool) -> None:
        super().__init__(trace, sizes, Steps(0.0))
        self.costs, self.clock, self.answers = costs, clock, answers
        self.busy = 0.0  # seconds

    def _work(self, ms: float) -> None:
        self.busy += ms / 1e3
        super()._work(ms)

    def _next(self, slots: np.ndarray) -> np.ndarray:
        return super()._next(slots) if self.answers else np.full(len(slots), UNSAID, np.int64)
