"""Least frequently used: the block with the fewest hits since it was cached goes first, of equal ones the one released
longest ago.  Counts are never forgotten, so blocks that were popular once stay: the classic weakness, which
``cost-aware`` avoids."""

from __future__ import annotations

from .leaves import LeafBlock, Leaves


class Lfu(Leaves):
    """O(log n) a key."""

    def rank(self, block: LeafBlock) -> int:
        return block.hits
