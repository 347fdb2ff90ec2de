"""Run prefill before decode: no row decodes while a prompt can be computed.

vLLM 0.1 has this order (Kwon et al., "PagedAttention", SOSP 2023, arXiv:2309.06180).  Requests reach their first token
soonest, and decoding rows wait for them ("generation stalls", arXiv:2403.02310).  The new requests of a step have
prompts of similar length (as in Zheng et al., arXiv:2305.13144), so short prompts do not wait for a long prompt in the
same step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from minivllm.core.interfaces.scheduler import Load, QueueView, SchedulerContext, SchedulerPolicy, StepShape

from .options import PrefillFirstOptions

if TYPE_CHECKING:
    from typing import Any


class PrefillFirst(SchedulerPolicy):
    """A policy whose step admits the oldest request and requests with prompts of similar length, among ``window``.

    No request starves: the oldest is in every group, and waits at most ``max_hold`` seconds.
    """

    options: PrefillFirstOptions

    def __init__(self, options: Any, ctx: SchedulerContext) -> None:
        super().__init__(options or PrefillFirstOptions(), ctx)
        self.length = 0  # number of tokens of the oldest prompt among those of the step; 0 before the first step

    def shape(self, load: Load, now: float) -> StepShape:
        """Return the shape of a step, with a time until which a small batch of waiting requests is held back.

        The engine calls it once in each step, before ``order``.
        """
        self.length = 0
        o = self.options
        hold = 0.0
        batch = min(o.batch, self.ctx.max_num_seqs - load.running)
        if load.waiting < batch and load.oldest_wait < o.max_hold:
            hold = now + o.max_hold - load.oldest_wait
        return StepShape("prefill_first", o.prefill_cap, hold)

    def order(self, head: QueueView, running: QueueView, now: float) -> np.ndarray:
        length = np.maximum(head.known - head.cached, 1)  # tokens to compute
        index = np.lexsort((head.id, head.arrival))
        ratio = self.options.ratio
        if not self.length:
            self.length = int(length[index[0]])
        alike = (length < self.length * ratio) & (self.length < length * ratio)
        return index[alike[index]]
