"""The common code of evictors that compute a rank for each block and evict the ripe block with the smallest one.

A block is *ripe* if no request holds it and it has no cached child.  Only ripe blocks may be evicted, so a parent
becomes ripe when its last child is evicted.

    held ──free──► idle ──last child gone──► ripe ──victims──► gone
     ▲               │                         │
     └─────hold──────┴─────────────────────────┘
"""

from __future__ import annotations

import heapq
from collections import deque
from typing import Any

import numpy as np

from minivllm.core.interfaces.evictor import BlockInfo, Evictor, EvictorContext

# A queue entry is a number. This many of its lowest bits are a release number, enough for the life of an engine.
STAMP_BITS = 40


class LeafBlock:
    """A cached block.  It is a plain class, since up to a million blocks exist and a dataclass is built more slowly."""

    __slots__ = (
        "age",
        "children",
        "cost",
        "depth",
        "entry",
        "held",
        "hits",
        "key",
        "mark",
        "parent",
        "size",
        "stamp",
        "worth",
    )  # fmt: skip

    def __init__(self, key: int, parent: LeafBlock | None, depth: int, size: int, cost: float, age: int) -> None:
        self.key, self.parent, self.depth = key, parent, depth
        self.size = size  # bytes
        self.cost = cost  # number of tokens to compute again if this block and all blocks before it are lost
        self.age = age  # serial number of the block's arrival
        self.hits = 0  # number of lookups that found the block
        self.children = 0  # cached children
        self.held = True
        # unique number of the last release, growing; of the blocks of one call, deeper ones have smaller numbers
        self.stamp = 0
        self.entry: float | None = None  # number by which a queue is sorted, while the block is in one, else None
        self.mark = 0  # a number that a subclass sets, and from which it computes ``worth``
        self.worth = 0.0


class RankQueue:
    """Ripe blocks in ascending order of a number.  Push and pop are O(log n), discard is O(1).

    The heap holds plain numbers, which compare faster than tuples; each belongs to one block.  The numbers of discarded
    blocks stay in the heap until they are popped or are more than half of it.  Invariant: ``block_of[b.entry] is b``
    for all blocks in the queue.
    """

    def __init__(self) -> None:
        self.heap: list[float] = []
        self.block_of: dict[float, LeafBlock] = {}

    def __len__(self) -> int:
        return len(self.block_of)

    def push(self, block: LeafBlock, entry: float) -> None:
        """Add a block under an ``entry`` that no other block has.  Entries of ``exact`` are unique, because no two
        blocks have the same stamp."""
        block.entry = entry
        self.block_of[entry] = block
        heapq.heappush(self.heap, entry)

    def discard(self, block: LeafBlock) -> None:
        if block.entry is None:
            return
        del self.block_of[block.entry]
        block.entry = None
        if len(self.heap) > 2 * len(self.block_of) + 64:
            self.heap = list(self.block_of)
            heapq.heapify(self.heap)

    def pop(self) -> LeafBlock | None:
        while self.heap:
            block = self.block_of.pop(heapq.heappop(self.heap), None)
            if block is not None:
                block.entry = None
                return block
        return None


def exact(rank: int, block: LeafBlock) -> int:
    """Return the queue entry of a whole-numbered rank.  Among equal ranks, the block that was released longest ago
    comes first."""
    return rank << STAMP_BITS | block.stamp


class Ghosts:
    """The last ``most`` evicted keys, each with a number.  A key that was evicted twice is dropped with its first
    eviction."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.number: dict[int, int] = {}
        self.line: deque[int] = deque()  # a deque, because finding the oldest key of a dict is slow after deletions

    def put(self, key: int, number: int) -> None:
        self.line.append(key)
        self.number[key] = number
        if len(self.line) > self.most:
            self.number.pop(self.line.popleft(), None)

    def pop(self, key: int) -> int | None:
        """Remove a key and return its number, or None if the key is not stored."""
        return self.number.pop(key, None)


class Leaves(Evictor):
    """Base class of evictors, with the tree of cached blocks.

    A subclass defines the ``rank`` of a ripe block (one that may be evicted).  Among equal ranks the block that was
    released longest ago is evicted first.  A rank is computed when a block becomes ripe, and stays until the block is
    held again."""

    def __init__(self, options: Any, ctx: EvictorContext) -> None:
        super().__init__(options, ctx)
        self.blocks: dict[int, LeafBlock] = {}
        self.queue = RankQueue()
        self.arrivals = self.releases = 0

    def rank(self, block: LeafBlock) -> int:
        """Return the rank of a ripe block; the block with the smallest rank is evicted first."""
        raise NotImplementedError

    def came(self, block: LeafBlock) -> None:
        """Update the data of a subclass after a new block was added, which a request holds.  This class has none."""

    def gone(self, block: LeafBlock) -> None:
        """Update the data of a subclass after a block was evicted.  This class has none."""

    # ---- the contract --------------------------------------------------------------------------------------------

    def add(self, keys: np.ndarray, info: BlockInfo) -> None:
        columns = (keys, info.parent, info.depth, info.bytes, info.cost)
        for key, up, depth, size, cost in zip(*(c.tolist() for c in columns), strict=True):
            parent = self.blocks.get(up) if up else None
            block = self.blocks[key] = LeafBlock(key, parent, depth, size, cost, self.arrivals)
            self.arrivals += 1
            if parent is not None:
                parent.children += 1
                self.unqueue(parent)
            self.came(block)

    def hit(self, keys: np.ndarray) -> None:
        for key in keys.tolist():
            self.blocks[key].hits += 1

    def hold(self, keys: np.ndarray) -> None:
        for key in keys.tolist():
            block = self.blocks[key]
            block.held = True
            self.unqueue(block)

    def free(self, keys: np.ndarray) -> None:
        for key in reversed(keys.tolist()):
            block = self.blocks[key]
            block.held = False
            self.releases += 1
            block.stamp = self.releases
            self.released(block)
            if not block.children:
                self.enqueue(block)

    def drop(self, keys: np.ndarray) -> None:
        for key in keys.tolist():
            block = self.blocks[key]
            block.held = True  # so that the block does not become ripe when its children are removed after it
            self.unqueue(block)
            self._cut(block)

    def victims(self, n: int) -> np.ndarray:
        out: list[int] = []
        while len(out) < n:
            block = self.next()
            if block is None:
                break
            self.gone(block)
            self._cut(block)
            out.append(block.key)
        return np.array(out, np.uint64)

    # ---- for subclasses with more than one queue -----------------------------------------------------------------

    def released(self, block: LeafBlock) -> None:
        """Update the data of a subclass after the last request released a block, before ``rank`` is called.  This class
        has none.
        """

    def enqueue(self, block: LeafBlock) -> None:
        """Add a block that became ripe to the queue."""
        self.queue.push(block, exact(self.rank(block), block))

    def unqueue(self, block: LeafBlock) -> None:
        """Remove a block from the queue if it was ripe."""
        self.queue.discard(block)

    def next(self) -> LeafBlock | None:
        """Remove and return the ripe block with the smallest rank; None if no block is ripe."""
        return self.queue.pop()

    def _cut(self, block: LeafBlock) -> None:
        del self.blocks[block.key]
        parent = block.parent
        if parent is not None:
            block.parent = None
            parent.children -= 1
            if not parent.held and not parent.children:
                self.enqueue(parent)
