"""First in, first out: the block that was cached longest ago goes first, whatever was hit since.  The baseline that
any policy which looks at hits has to beat."""

from __future__ import annotations

from .leaves import LeafBlock, Leaves


class Fifo(Leaves):
    """O(log n) a key: a queue would not do, because a block waits for its children and becomes ripe out of turn."""

    def rank(self, block: LeafBlock) -> int:
        return block.age
