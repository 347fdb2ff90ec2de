"""Longest cached prefix first, with a bounded wait.

The cache-aware order of SGLang's RadixAttention (Zheng et al., "SGLang: Efficient Execution of Structured Language
Model Programs", NeurIPS 2024, arXiv:2312.07104, section 3): requests that share a prefix run one after the other,
before the prefix is evicted.  The paper's order lets others starve; ``max_wait`` bounds it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from minivllm.core.interfaces.scheduler import QueueView, SchedulerContext, SchedulerPolicy

from .options import PrefixAwareOptions

if TYPE_CHECKING:
    from typing import Any


class PrefixAware(SchedulerPolicy):
    """Keys are times of arrival, so the ``window`` oldest are compared by what the cache holds of them.

    No starvation: who has waited ``max_wait`` seconds goes before all that have waited less, by arrival.
    """

    options: PrefixAwareOptions

    def __init__(self, options: Any, ctx: SchedulerContext) -> None:
        super().__init__(options or PrefixAwareOptions(), ctx)

    def order(self, head: QueueView, running: QueueView, now: float) -> np.ndarray:
        waits = now - head.arrival <= self.options.max_wait  # False sorts first
        cached = np.where(waits, -head.cached, 0)
        return np.lexsort((head.id, head.arrival, cached, waits))
