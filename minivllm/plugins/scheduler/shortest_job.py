"""Serve the shortest job first, by prompt and expected output, with a bound on the delay of long jobs.

Shortest job first has the least mean waiting time of all orders (Smith, "Various optimizers for single-stage
production", 1956).  For language models the length of the answer decides, which has to be predicted (Zheng et al.,
"Response Length Perception and Sequence Scheduling", NeurIPS 2023, arXiv:2305.13144; Fu et al., "Efficient LLM
Scheduling by Learning to Rank", arXiv:2408.15792).  Here the option ``predictor`` predicts it, or the client sends it
as ``expected_tokens``; the default is ``max_tokens``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from minivllm.core.interfaces.predictor import StepWork
from minivllm.core.interfaces.scheduler import QueueView, SchedulerContext, SchedulerPolicy

from .options import ShortestJobOptions

if TYPE_CHECKING:
    from typing import Any


class ShortestJob(SchedulerPolicy):
    """A policy whose key is the time of arrival plus some seconds for each remaining token of work.

    No request starves: it is overtaken only by requests that arrive less than ``max_wait`` seconds after it.
    """

    options: ShortestJobOptions

    def __init__(self, options: Any, ctx: SchedulerContext) -> None:
        super().__init__(options or ShortestJobOptions(), ctx)

    def key(self, new: QueueView) -> np.ndarray:
        delay = self.seconds_per_token() * self.work(new)
        return new.arrival + np.minimum(delay, self.options.max_wait)

    def seconds_per_token(self) -> float:
        """Return the seconds by which a request is delayed for each output token.

        With the option ``ageing`` this is ``ageing`` times the predicted time of a step of a full batch, because such a
        step draws one token of each row.
        """
        ageing = self.options.ageing
        if ageing is not None:
            ms = self.ctx.step_ms(StepWork(self.ctx.max_num_seqs, 0))
            if ms is not None:
                return ageing * ms / 1e3
        return self.options.seconds_per_token

    def work(self, view: QueueView) -> np.ndarray:
        """Return the estimated remaining work f64 [n] in output tokens.

        A sequence that is longer than predicted is expected to generate as many tokens again.
        """
        made = (view.known - view.prompt).astype(np.float64)
        beyond = np.minimum(made, view.max_out - made)
        left = np.where(made < view.predicted_out, view.predicted_out - made, beyond)
        prefill = np.maximum(view.known - view.computed, 0)
        return np.maximum(left, 1) + self.options.prefill_cost * prefill

    def victim(self, candidates: QueueView, need: int) -> int:
        order = np.lexsort((candidates.id, candidates.arrival, self.work(candidates)))
        return int(order[-1])
