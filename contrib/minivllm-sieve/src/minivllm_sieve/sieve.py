"""SIEVE (Zhang et al., "SIEVE is Simpler than LRU: an Efficient Turn-Key Eviction Algorithm for Web Caches", NSDI
2024).

Objects stand in the order in which they came.  A hand moves from the oldest to the newest and then starts again; an
object that was hit since the hand last passed is spared and loses its mark, the first one without a mark goes::

    oldest                       newest
      a*   b    c*   d    e              * = hit since the hand was here
           ^hand                         victims: b goes, then c is spared, then d goes

A hit moves nothing, so a scan of new blocks cannot push out what was hit: it stands ahead of the hand and goes first
when the hand comes.  Two things are added for a prefix cache.  Blocks that a sequence holds, and blocks with a cached
child, are passed over: they are not *ripe*.  And the hand does not walk over them, which would cost O(n): ripe blocks
wait in two heaps, those ahead of the hand and those behind it, by age.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Any

import numpy as np

from minivllm.plugin import BlockInfo, Evictor, EvictorContext


@dataclass(slots=True)
class Block:
    age: int  # number of blocks that were added before this one
    parent: int
    held: bool = True
    hit: bool = False
    children: int = 0
    queued: bool = False  # whether one of the heaps has an entry for the block

    @property
    def ripe(self) -> bool:
        return not self.held and not self.children


class Sieve(Evictor):
    """Evict blocks by SIEVE, in O(log n) per call and key.

    An eviction may pass over blocks with a mark, each of which was paid for by a hit.
    A ripe block has one entry: in ``ahead`` if it is younger than ``hand``, else in ``behind``.  Entries of blocks
    that are evicted, or not ripe any more, are dropped when they are popped.
    """

    def __init__(self, options: Any, ctx: EvictorContext) -> None:
        super().__init__(options, ctx)
        self.blocks: dict[int, Block] = {}
        self.ahead: list[tuple[int, int]] = []  # heap of (age, key)
        self.behind: list[tuple[int, int]] = []
        self.hand = -1  # age of the block that the hand looked at last
        self.clock = 0

    def add(self, keys: np.ndarray, info: BlockInfo) -> None:
        for key, parent in zip(keys.tolist(), info.parent.tolist(), strict=True):
            self.blocks[key] = Block(self.clock, parent)
            self.clock += 1
            if parent in self.blocks:
                self.blocks[parent].children += 1

    def hit(self, keys: np.ndarray) -> None:
        for key in keys.tolist():
            self.blocks[key].hit = True

    def hold(self, keys: np.ndarray) -> None:
        for key in keys.tolist():
            self.blocks[key].held = True

    def free(self, keys: np.ndarray) -> None:
        for key in keys.tolist():
            self.blocks[key].held = False
            self._queue(key)

    def drop(self, keys: np.ndarray) -> None:
        for key in keys.tolist():
            self._forget(key)
        # most entries belong to blocks that are evicted, so the heaps are built again
        if len(self.ahead) + len(self.behind) > 2 * len(self.blocks) + 64:
            for name in ("ahead", "behind"):
                heap = [(age, key) for age, key in getattr(self, name) if self._is(key, age)]
                heapq.heapify(heap)
                setattr(self, name, heap)

    def victims(self, n: int) -> np.ndarray:
        found: list[int] = []
        while len(found) < n and (self.ahead or self.behind):
            if not self.ahead:  # the hand starts again at the oldest
                self.ahead, self.behind, self.hand = self.behind, self.ahead, -1
            age, key = heapq.heappop(self.ahead)
            if not self._is(key, age):
                continue
            block = self.blocks[key]
            block.queued = False
            if not block.ripe:
                continue
            self.hand = age
            if block.hit:
                block.hit = False
                self._queue(key)
            else:
                self._forget(key)
                found.append(key)
        return np.array(found, np.uint64)

    def _is(self, key: int, age: int) -> bool:
        """Return whether an entry of a heap belongs to a cached block; a key may have returned as a new block."""
        return key in self.blocks and self.blocks[key].age == age

    def _queue(self, key: int) -> None:
        block = self.blocks[key]
        if block.ripe and not block.queued:
            block.queued = True
            heapq.heappush(self.ahead if block.age > self.hand else self.behind, (block.age, key))

    def _forget(self, key: int) -> None:
        parent = self.blocks.pop(key).parent
        if parent in self.blocks:
            self.blocks[parent].children -= 1
            self._queue(parent)
