"""Evict blocks by a score.  Change ``score`` and the fields of a block to make another policy.

Any score is valid.  Blocks form a tree of prefixes.  A block is *ripe*, and can be evicted, if no request holds it
and none of its children is cached.  Ripe blocks are in a heap, the smallest score first.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Any

import numpy as np

from minivllm.plugin import BlockInfo, Evictor, EvictorContext


@dataclass
class Block:
    """A cached block."""

    parent: int
    depth: int  # blocks before it
    hits: int = 0
    freed: int = 0  # number of the call of ``free``
    held: bool = True
    children: int = 0
    entry: tuple[Any, int] | None = None  # the valid entry in the heap; others are out of date


class MyPlugin(Evictor):
    """An evictor whose calls take O(log n) for each key."""

    def __init__(self, options: Any, ctx: EvictorContext) -> None:
        super().__init__(options, ctx)
        self.blocks: dict[int, Block] = {}
        self.ripe: list[tuple[Any, int]] = []  # heap of (score, key)
        self.clock = 0

    def score(self, block: Block) -> Any:
        """Return the score of a block, computed once when it becomes ripe.  The smallest score is evicted first."""
        return (block.hits, block.freed)

    def add(self, keys: np.ndarray, info: BlockInfo) -> None:
        for key, parent, depth in zip(keys.tolist(), info.parent.tolist(), info.depth.tolist(), strict=True):
            self.blocks[key] = Block(parent, depth)
            if parent in self.blocks:
                self.blocks[parent].children += 1

    def hit(self, keys: np.ndarray) -> None:
        for key in keys.tolist():
            self.blocks[key].hits += 1

    def hold(self, keys: np.ndarray) -> None:
        for key in keys.tolist():
            block = self.blocks[key]
            block.held = True
            block.entry = None

    def free(self, keys: np.ndarray) -> None:
        self.clock += 1
        for key in keys.tolist():
            block = self.blocks[key]
            block.held = False
            block.freed = self.clock
            self._queue(key)
        if len(self.ripe) > 2 * len(self.blocks) + 64:  # most entries are out of date
            self.ripe = [entry for entry in self.ripe if self._valid(entry)]
            heapq.heapify(self.ripe)

    def drop(self, keys: np.ndarray) -> None:
        for key in keys.tolist():
            self._forget(key)

    def victims(self, n: int) -> np.ndarray:
        found: list[int] = []
        while self.ripe and len(found) < n:
            entry = heapq.heappop(self.ripe)
            if self._valid(entry):
                found.append(entry[1])
                self._forget(entry[1])
        return np.array(found, np.uint64)

    def _valid(self, entry: tuple[Any, int]) -> bool:
        block = self.blocks.get(entry[1])
        return block is not None and block.entry is entry

    def _queue(self, key: int) -> None:
        block = self.blocks[key]
        if not block.held and not block.children:
            block.entry = (self.score(block), key)
            heapq.heappush(self.ripe, block.entry)

    def _forget(self, key: int) -> None:
        parent = self.blocks.pop(key).parent
        if parent in self.blocks:
            self.blocks[parent].children -= 1
            self._queue(parent)
