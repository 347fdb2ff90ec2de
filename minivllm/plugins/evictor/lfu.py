"""Evict the block with the fewest hits since it was cached, and among equal counts the block released longest ago.

Counts never decrease, so blocks that were popular once stay in the cache.  The evictor ``cost-aware`` avoids this.
"""

from __future__ import annotations

from .leaves import LeafBlock, Leaves


class Lfu(Leaves):
    """An evictor that evicts the block with the fewest hits, O(log n) per key."""

    def rank(self, block: LeafBlock) -> int:
        return block.hits
