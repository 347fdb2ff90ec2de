"""Evict the block that was freed longest ago, and within a sequence the deepest block first."""

from __future__ import annotations

from typing import Any

import numpy as np

from minivllm.core.interfaces.evictor import BlockInfo, Evictor, EvictorContext


class Lru(Evictor):
    """An evictor whose queue is a dict in order of release, O(1) per key.

    The keys of one call of ``free`` have parents first and are queued in reverse.  A child is held only while its
    parent is held, so cached children always precede their parent in the queue.
    """

    def __init__(self, options: Any, ctx: EvictorContext) -> None:
        super().__init__(options, ctx)
        self.queue: dict[int, None] = {}  # keys of evictable blocks, the one released longest ago first

    def add(self, keys: np.ndarray, info: BlockInfo) -> None:
        """Do nothing, because added keys are held and therefore not in the queue."""

    def hold(self, keys: np.ndarray) -> None:
        for key in keys.tolist():
            self.queue.pop(key, None)

    def free(self, keys: np.ndarray) -> None:
        for key in reversed(keys.tolist()):
            self.queue[key] = None

    def drop(self, keys: np.ndarray) -> None:
        self.hold(keys)

    def victims(self, n: int) -> np.ndarray:
        n = min(n, len(self.queue))
        out: list[int] = []
        for key in self.queue:
            if len(out) == n:
                break
            out.append(key)
        for key in out:
            del self.queue[key]
        return np.array(out, np.uint64)
