"""Serve the request with the longest cached prefix first, with a bounded wait.

SGLang's RadixAttention has this order (Zheng et al., "SGLang: Efficient Execution of Structured Language Model
Programs", NeurIPS 2024, arXiv:2312.07104, section 3).  Requests that share a prefix run one after another, before the
prefix is evicted.  In the paper's order other requests may starve; ``max_wait`` bounds their wait.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from minivllm.core.interfaces.scheduler import QueueView, SchedulerContext, SchedulerPolicy

from .options import PrefixAwareOptions

if TYPE_CHECKING:
    from typing import Any


class PrefixAware(SchedulerPolicy):
    """A policy that compares the cached prefixes of the ``window`` oldest requests, since keys are times of arrival.

    No request starves: requests that have waited ``max_wait`` seconds precede all others, by arrival.
    """

    options: PrefixAwareOptions

    def __init__(self, options: Any, ctx: SchedulerContext) -> None:
        super().__init__(options or PrefixAwareOptions(), ctx)

    def order(self, head: QueueView, running: QueueView, now: float) -> np.ndarray:
        waits = now - head.arrival <= self.options.max_wait  # False sorts first
        cached = np.where(waits, -head.cached, 0)
        return np.lexsort((head.id, head.arrival, cached, waits))
