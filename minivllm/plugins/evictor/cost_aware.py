"""What is worth the least goes first: recompute cost x chance of reuse / size, fading with time.

GreedyDual (Young, "The k-server dual and loose competitiveness for paging", Algorithmica 1994) gives an object the
value clock + cost / size and lets the clock rise to the value of what went last; GDSF (Cherkasova, HP Labs 1998)
multiplies the cost by the number of hits.  Here a block's worth is an estimate, and it fades by the factor e whenever
``horizon`` x capacity blocks have been released::

    value = cost x chance / size x exp(-released since / (horizon x capacity))

Values are compared as logarithms, which grow with the stamp of the last release and are otherwise fixed, so a heap
keeps them in order: a block with twice the chance outlives another by ln 2 x horizon x capacity releases.

*Cost* is what is lost with this block alone: a ripe block's parent is still cached, so its own share of the tokens.
*Chance* is learned while it runs: blocks are classed by how often they were hit (never, once, 2 or 3 times, more), and
of each class it is counted how many came to rest and how many of those were used again.  Blocks that come back after
they were given up count too, and get their hits back: ghosts (keys only, as many as ``ghosts`` x capacity) remember
them, without which a class that is given up early could never show that it should not have been.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from minivllm.core.interfaces.evictor import EvictorContext

from .leaves import Ghosts, LeafBlock, Leaves

CLASSES = 4
PRIOR = 20.0  # rests of a class that are worth as much as what all classes together say
LEAST = 1e-3  # a chance: a class that was never used again may yet be


class CostAware(Leaves):
    """O(log n) a key.  ``Block.mark`` is the class in which it came to rest last."""

    def __init__(self, options: Any, ctx: EvictorContext) -> None:
        super().__init__(options, ctx)
        self.fade = options.horizon * ctx.capacity
        self.ghosts = Ghosts(int(options.ghosts * ctx.capacity))  # hits x CLASSES + class
        self.rests, self.reused = [0] * CLASSES, [0] * CLASSES
        self.bonus = [0.0] * CLASSES  # releases that the chance of a class is worth

    def chance(self, group: int) -> float:
        """Return the estimated probability, ``LEAST`` to 1, that a block that becomes free in this class is used
        again."""
        every = (sum(self.reused) + 1) / (sum(self.rests) + 2)
        return min(1.0, max(LEAST, (self.reused[group] + PRIOR * every) / (self.rests[group] + PRIOR)))

    def enqueue(self, block: LeafBlock) -> None:
        entry = block.stamp + self.fade * block.worth + self.bonus[block.mark]
        while entry in self.queue.block_of:  # hardly ever: an entry is one block's
            entry = math.nextafter(entry, math.inf)
        self.queue.push(block, entry)

    def came(self, block: LeafBlock) -> None:
        cost = block.cost - (block.parent.cost if block.parent is not None else 0.0)
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
        """Update the ranks that are assigned in this call from all uses that were counted so far."""
        self.bonus = [self.fade * math.log(self.chance(group)) for group in range(CLASSES)]

    def released(self, block: LeafBlock) -> None:
        block.mark = min(block.hits.bit_length(), CLASSES - 1)
        self.rests[block.mark] += 1

    def gone(self, block: LeafBlock) -> None:
        self.ghosts.put(block.key, block.hits * CLASSES + block.mark)
