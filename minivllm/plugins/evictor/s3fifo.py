"""S3-FIFO (Yang et al., "FIFO Queues are All You Need for Cache Eviction", SOSP 2023).

    new ──► small (10 %) ──hit often──► main (90 %) ──hit──► back to its end, with one count less
              │                           │
              └──► ghosts (keys only)     └──► gone
                     │
                     └── a key that is cached again moves to main at once

Most blocks are used once.  They leave through the small queue and do not evict blocks that are used again.  Counts stop
at 3.  Unlike in the paper, only *ripe* blocks can be evicted: no request holds them, and they have no cached child
(``leaves.py``).  So each queue is a heap by arrival.  Blocks
that are held or have cached children count in the size of their queue, but are skipped.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from minivllm.core.interfaces.evictor import EvictorContext

from .leaves import Ghosts, LeafBlock, Leaves, RankQueue

MOST = 3  # largest count of hits, which two bits can hold
MAIN = 4  # bit of ``LeafBlock.mark`` that is set for blocks in the main queue, above the count of hits


class S3Fifo(Leaves):
    """An evictor with two queues, O(log n) per key.  A block with hits at the head of the main queue is not evicted: it
    loses a hit and goes to the queue's end.

    Invariant: ``small`` is the number of cached blocks, ripe or not, that belong to the small queue.
    """

    def __init__(self, options: Any, ctx: EvictorContext) -> None:
        super().__init__(options, ctx)
        self.main = RankQueue()
        self.small = 0
        self.limit = options.small * ctx.capacity
        # count of blocks that were cached again while their keys were stored as ghosts (evicted keys)
        self.returned = 0
        self.ghosts = Ghosts(ctx.capacity - int(self.limit))

    def came(self, block: LeafBlock) -> None:
        if self.ghosts.pop(block.key) is not None:
            block.mark = MAIN
            self.returned += 1
        else:
            self.small += 1

    def hit(self, keys: np.ndarray) -> None:
        for key in keys.tolist():
            block = self.blocks[key]
            if block.mark % MAIN < MOST:
                block.mark += 1

    def enqueue(self, block: LeafBlock) -> None:
        self._queue_of(block).push(block, block.age)  # ages are unique

    def unqueue(self, block: LeafBlock) -> None:
        self._queue_of(block).discard(block)

    def _queue_of(self, block: LeafBlock) -> RankQueue:
        return self.main if block.mark >= MAIN else self.queue

    def drop(self, keys: np.ndarray) -> None:
        self.small -= sum(self.blocks[key].mark < MAIN for key in keys.tolist())
        super().drop(keys)

    def figures(self) -> Mapping[str, float]:
        """Return ``small`` and ``main``, the cached blocks of each queue, and ``returned``, the blocks since the
        start that were cached again while their key was a ghost."""
        return {"small": self.small, "main": len(self.blocks) - self.small, "returned": self.returned}

    def next(self) -> LeafBlock | None:
        while len(self.queue) or len(self.main):
            if len(self.queue) and (self.small > self.limit or not len(self.main)):
                block = self.queue.pop()
                if block is None or block.mark < self.options.promote_after:
                    return block
                self.small -= 1
                block.mark = MAIN
            else:
                block = self.main.pop()
                if block is None or block.mark == MAIN:
                    return block
                block.mark -= 1
            block.age = self.arrivals  # the block moves to the end of the main queue
            self.arrivals += 1
            self.enqueue(block)
        return None

    def gone(self, block: LeafBlock) -> None:
        if block.mark < MAIN:
            self.small -= 1
            self.ghosts.put(block.key, 0)
