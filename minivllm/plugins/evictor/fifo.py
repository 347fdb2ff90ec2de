"""First in, first out, which evicts the block that was cached longest ago and ignores hits.

It is the baseline for policies that use hits.
"""

from __future__ import annotations

from .leaves import LeafBlock, Leaves


class Fifo(Leaves):
    """An evictor that evicts blocks in the order of their arrival, O(log n) per key.

    A simple queue is not enough, because a block must wait for its children, and becomes evictable (ripe) out of order.
    """

    def rank(self, block: LeafBlock) -> int:
        return block.age
