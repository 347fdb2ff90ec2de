"""Shortest job first, by prompt and expected output, with a bound on how long a long job is overtaken.

Shortest job first has the least mean waiting time of all orders (Smith, "Various optimizers for single-stage
production", 1956).  For language models the length of the answer is what decides, and has to be predicted (Zheng et
al., "Response Length Perception and Sequence Scheduling", NeurIPS 2023, arXiv:2305.13144; Fu et al., "Efficient LLM
Scheduling by Learning to Rank", arXiv:2408.15792).  Here the client says it, with ``expected_tokens``; without, it is
``max_tokens``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from minivllm.core.interfaces.scheduler import QueueView, SchedulerContext, SchedulerPolicy

from .options import ShortestJobOptions

if TYPE_CHECKING:
    from typing import Any


class ShortestJob(SchedulerPolicy):
    """The key is the time of arrival, put back by some seconds for each token of work that is left.

    No starvation: a request is overtaken only by those that come less than ``max_wait`` seconds after it.
    """

    options: ShortestJobOptions

    def __init__(self, options: Any, ctx: SchedulerContext) -> None:
        super().__init__(options or ShortestJobOptions(), ctx)

    def key(self, new: QueueView) -> np.ndarray:
        return new.arrival + np.minimum(self.options.seconds_per_token * self.work(new), self.options.max_wait)

    def work(self, view: QueueView) -> np.ndarray:
        """Return the estimated remaining work f64 [n] in output tokens.  A sequence that is longer than predicted
        is expected to generate as many tokens again."""
        made = (view.known - view.prompt).astype(np.float64)
        left = np.where(made < view.predicted_out, view.predicted_out - made, np.minimum(made, view.max_out - made))
        return np.maximum(left, 1) + self.options.prefill_cost * np.maximum(view.known - view.computed, 0)

    def victim(self, candidates: QueueView, need: int) -> int:
        return int(np.lexsort((candidates.id, candidates.arrival, self.work(candidates)))[-1])
