"""Evict the deepest block, and among equal depths the block released longest ago.

The beginning of a prompt can serve all sequences that start with it, its end only continuations of the whole prompt.
Depths are compared in bands of ``band`` blocks.  A band of 1 compares only depths, a large band is close to LRU.
RadixAttention (Zheng et al., "SGLang: Efficient Execution of Structured Language Model Programs", NeurIPS 2024) evicts
leaves by recency instead.
"""

from __future__ import annotations

from .leaves import LeafBlock, Leaves


class PrefixDepth(Leaves):
    """An evictor that evicts the deepest block of a prompt first, O(log n) per key."""

    def rank(self, block: LeafBlock) -> int:
        return -(block.depth // self.options.band)
