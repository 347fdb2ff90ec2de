"""S3-FIFO (Yang et al., "FIFO Queues are All You Need for Cache Eviction", SOSP 2023).

    new ──► small (10 %) ──hit often──► main (90 %) ──hit──► back to its end, with one count less
              │                           │
              └──► ghosts (keys only)     └──► gone
                     │
                     └── a key that comes back from here goes to main at once

Most blocks are used once; the small queue lets them pass without pushing out what is used again.  Counts stop at 3.
What differs from the paper: only ripe blocks can leave (see ``leaves``), so each queue is a heap by arrival, and blocks
that are held or have cached children count in the size of their queue but are passed over.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from minivllm.core.interfaces.evictor import EvictorContext

from .leaves import Ghosts, LeafBlock, Leaves, RankQueue

MOST = 3  # a count takes two bits
SMALL, MAIN = 0, 4  # added to the count in ``Block.mark``


class S3Fifo(Leaves):
    """O(log n) a key; a block that is spared has paid for it with a hit.

    Invariant: ``small`` is the number of cached blocks, ripe or not, that belong to the small queue.
    """

    def __init__(self, options: Any, ctx: EvictorContext) -> None:
        super().__init__(options, ctx)
        self.main = RankQueue()
        self.small = 0
        self.limit = options.small * ctx.capacity
        self.returned = 0  # blocks that came back while their key was a ghost
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
        (self.main if block.mark >= MAIN else self.queue).push(block, block.age)  # an age is one block's

    def unqueue(self, block: LeafBlock) -> None:
        (self.main if block.mark >= MAIN else self.queue).discard(block)

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
            block.age = self.arrivals  # to the end of the main queue
            self.arrivals += 1
            self.enqueue(block)
        return None

    def gone(self, block: LeafBlock) -> None:
        if block.mark < MAIN:
            self.small -= 1
            self.ghosts.put(block.key, 0)
