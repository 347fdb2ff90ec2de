"""Keep beginnings: the deepest block goes first, of equal depth the one released longest ago.

A beginning can serve every sequence that starts with it, an end only its own continuation.  Depths are compared in
bands of ``band`` blocks: 1 is pure depth, a large band comes near to LRU.  RadixAttention (Zheng et al., "SGLang:
Efficient Execution of Structured Language Model Programs", NeurIPS 2024) gives leaves up first by recency; this takes
the other order.
"""

from __future__ import annotations

from .leaves import LeafBlock, Leaves


class PrefixDepth(Leaves):
    """O(log n) a key."""

    def rank(self, block: LeafBlock) -> int:
        return -(block.depth // self.options.band)
