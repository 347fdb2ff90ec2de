"""Belady's optimum (Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems Journal
1966): evict the block whose next use is latest.  It needs the future, so it serves as a bound for other evictors.

Prefixes need no extra rule.  A request that uses a block uses its parent too, so a parent's next use is never later
than its child's.  Blocks with equal next use are evicted deepest first, so children always leave before their parents.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence

from minivllm.core.interfaces.evictor import EvictorContext
from minivllm.plugins.evictor.leaves import LeafBlock, Leaves, exact

NEVER = 1 << 40


class Optimum(Leaves):
    """An evictor that evicts the block whose next use is latest.

    ``uses`` maps a key to the numbers of the requests that use it, in ascending order.  ``now()`` returns the number of
    the next request.  The evictor is optimal if requests are served one after another in this order.  If several run
    at once, the held blocks depend on the run, and the result is no proven bound.
    """

    def __init__(self, ctx: EvictorContext, uses: Mapping[int, Sequence[int]], now: Callable[[], int]) -> None:
        super().__init__(None, ctx)
        self.uses, self.now = uses, now

    def rank(self, block: LeafBlock) -> int:
        """Return the negative number of the next request that uses a block; the lowest rank is evicted."""
        uses = self.uses.get(block.key, ())
        i = bisect_left(uses, self.now())
        return -(uses[i] if i < len(uses) else NEVER)

    def next(self) -> LeafBlock | None:
        """Remove and return the block to evict, None if there is none."""
        while (block := self.queue.pop()) is not None:
            if self.rank(block) == block.mark:
                return block
            self.enqueue(block)  # the next use of the block has passed without a hit, so its rank changed
        return None

    def enqueue(self, block: LeafBlock) -> None:
        """Add a block to the queue by its current rank."""
        block.mark = self.rank(block)
        self.queue.push(block, exact(block.mark, block))


def uses_of(chains: Sequence[Sequence[int]]) -> dict[int, list[int]]:
    """Return for each key the indices of the chains that contain it."""
    uses: dict[int, list[int]] = {}
    for i, chain in enumerate(chains):
        for key in chain:
            uses.setdefault(key, []).append(i)
    return uses
