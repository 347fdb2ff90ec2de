"""Two phases: while a prompt can be computed nothing decodes; newcomers of one step have prompts of like length.

The order of Orca's successors before chunked prefill: vLLM 0.1 (Kwon et al., "PagedAttention", SOSP 2023,
arXiv:2309.06180).  Prompts come to their first token soonest, and those that decode wait for them ("generation stalls",
arXiv:2403.02310).  Grouping by length (as in Zheng et al., arXiv:2305.13144) keeps short prompts out of a step that one
long prompt makes slow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from minivllm.core.interfaces.scheduler import Load, QueueView, SchedulerContext, SchedulerPolicy, StepShape

from .options import PrefillFirstOptions

if TYPE_CHECKING:
    from typing import Any


class PrefillFirst(SchedulerPolicy):
    """A step admits the oldest newcomer and those whose prompts are about as long; ``window`` of them are looked at.

    No starvation: the oldest is in every group, and is held back for ``max_hold`` seconds at most.
    """

    options: PrefillFirstOptions

    def __init__(self, options: Any, ctx: SchedulerContext) -> None:
        super().__init__(options or PrefillFirstOptions(), ctx)
        self.length = 0  # tokens of the prompt that this step's group is built round; 0 = none yet

    def shape(self, load: Load, now: float) -> StepShape:
        """Return the shape of a step, with a time until which a small batch of waiting requests is held back.  The
        engine calls it once in each step, before ``order``."""
        self.length = 0
        o, hold = self.options, 0.0
        if load.waiting < min(o.batch, self.ctx.max_num_seqs - load.running) and load.oldest_wait < o.max_hold:
            hold = now + o.max_hold - load.oldest_wait
        return StepShape("prefill_first", o.prefill_cap, hold)

    def order(self, head: QueueView, running: QueueView, now: float) -> np.ndarray:
        length = np.maximum(head.known - head.cached, 1)  # what is there to compute
        index = np.lexsort((head.id, head.arrival))
        if not self.length:
            self.length = int(length[index[0]])
        alike = (length < self.length * self.options.ratio) & (self.length < length * self.options.ratio)
        return index[alike[index]]
