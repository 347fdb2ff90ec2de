"""Evict the block of the least value: cost of recomputation x chance of reuse / size, decreasing with time.

GreedyDual (Young, "The k-server dual and loose competitiveness for paging", Algorithmica 1994) gives an object the
value clock + cost / size, and sets the clock to the value of the last evicted object.  GDSF (Cherkasova, HP Labs 1998)
multiplies the cost by the number of hits.  Here the value of a block is an estimate, which falls by the factor e
whenever ``horizon`` x capacity blocks have been released::

    value = cost x chance / size x exp(-releases since its own / (horizon x capacity))

Values are compared as logarithms.  They grow with the stamp of the last release and are otherwise fixed, so a heap
keeps them in order.  A block with twice the chance stays ln 2 x horizon x capacity releases longer than another.

*Cost* is the number of tokens of this block only, since the parent of an evicted block is still cached.  *Chance* is
learned at run time.  Blocks are classed by the number of their hits: none, one, 2 or 3, more.  The chance of a class is
the share of its released blocks that were used again.  An evicted block that is cached again counts as used and gets
its hits back.  For this purpose the keys of the last ``ghosts`` x capacity evicted blocks are stored.  Without them the
statistics of a class that is evicted early could never improve.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from minivllm.core.interfaces.evictor import EvictorContext

from .leaves import Ghosts, LeafBlock, Leaves

CLASSES = 4
# The estimated chance of another use of a block is averaged over its class and all classes; the latter has the weight
# of this many releases.
PRIOR = 20.0
LEAST = 1e-3  # least estimated chance, because blocks of a class that were never used again may be used later


class CostAware(Leaves):
    """An evictor that evicts the block of the least value, O(log n) per key.  ``LeafBlock.mark`` is the class (by
    number of hits) at the last release."""

    def __init__(self, options: Any, ctx: EvictorContext) -> None:
        super().__init__(options, ctx)
        self.fade = options.horizon * ctx.capacity
        self.ghosts = Ghosts(int(options.ghosts * ctx.capacity))  # evicted keys, each with hits x CLASSES + class
        self.rests = [0] * CLASSES
        self.reused = [0] * CLASSES
        # logarithm of each class's chance of another use, expressed as a number of releases
        self.bonus = [0.0] * CLASSES

    def chance(self, group: int) -> float:
        """Return the estimated probability, from ``LEAST`` to 1, that a block which is released with this class is used
        again."""
        every = (sum(self.reused) + 1) / (sum(self.rests) + 2)
        chance = (self.reused[group] + PRIOR * every) / (self.rests[group] + PRIOR)
        return min(1.0, max(LEAST, chance))

    def enqueue(self, block: LeafBlock) -> None:
        entry = block.stamp + self.fade * block.worth + self.bonus[block.mark]
        # entries of the queue must be unique, and another block may rarely have the same value
        while entry in self.queue.block_of:
            entry = math.nextafter(entry, math.inf)
        self.queue.push(block, entry)

    def came(self, block: LeafBlock) -> None:
        cost = block.cost
        if block.parent is not None:
            cost -= block.parent.cost
        block.worth = math.log(max(cost, 1e-6) / max(block.size, 1))
        ghost = self.ghosts.pop(block.key)
        if ghost is not None:
            hits, group = divmod(ghost, CLASSES)
            self.reused[group] += 1
            block.hits = hits + 1

    def hit(self, keys: np.ndarray) -> None:
        for key in keys.tolist():
            block = self.blocks[key]
            block.hits += 1
            if not block.held:
                self.reused[block.mark] += 1

    def free(self, keys: np.ndarray) -> None:
        self._learn()
        super().free(keys)

    def victims(self, n: int) -> np.ndarray:
        self._learn()
        return super().victims(n)

    def _learn(self) -> None:
        """Update the chances of the classes from all uses counted so far."""
        self.bonus = [self.fade * math.log(self.chance(group)) for group in range(CLASSES)]

    def released(self, block: LeafBlock) -> None:
        block.mark = min(block.hits.bit_length(), CLASSES - 1)
        self.rests[block.mark] += 1

    def gone(self, block: LeafBlock) -> None:
        self.ghosts.put(block.key, block.hits * CLASSES + block.mark)
