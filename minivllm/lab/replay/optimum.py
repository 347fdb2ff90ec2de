"""Belady's optimum (Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems Journal
1966): give up what is used again last.  It has to know the future, so it is a bound to measure others by.

For prefixes the rule needs no change.  Whoever uses a block uses its parent, so a parent's next use is never later than
its child's: the order by next use, of equal ones the deeper first, gives children up before their parents by itself.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence

from minivllm.core.interfaces.evictor import EvictorContext
from minivllm.plugins.evictor.leaves import LeafBlock, Leaves, exact

NEVER = 1 << 40


class Optimum(Leaves):
    """``uses``: key -> requests that use it, in ascending order.  ``now()``: the number of the next request to be
    served.  With requests served in that order, one after the other, it is the optimum; if several run at once, what
    they hold differs from run to run, and it is the same rule with the same knowledge, but no proven bound."""

    def __init__(self, ctx: EvictorContext, uses: Mapping[int, Sequence[int]], now: Callable[[], int]) -> None:
        super().__init__(None, ctx)
        self.uses, self.now = uses, now

    def rank(self, block: LeafBlock) -> int:
        uses = self.uses.get(block.key, ())
        at = bisect_left(uses, self.now())
        return -(uses[at] if at < len(uses) else NEVER)

    def next(self) -> LeafBlock | None:
        while (block := self.queue.pop()) is not None:
            if self.rank(block) == block.mark:
                return block
            self.enqueue(block)  # the use that it waited for has passed without it
        return None

    def enqueue(self, block: LeafBlock) -> None:
        block.mark = self.rank(block)
        self.queue.push(block, exact(block.mark, block))


def uses_of(chains: Sequence[Sequence[int]]) -> dict[int, list[int]]:
    """key -> numbers of the chains that hold it."""
    uses: dict[int, list[int]] = {}
    for i, chain in enumerate(chains):
        for key in chain:
            uses.setdefault(key, []).append(i)
    return uses
