"""A reference model for evictors: the tree of cached blocks that the engine's pools keep.

A sequence is a path from a root of the tree.  Sequences with a common prefix share its blocks.  A key, a hash of a
block's content, is *held* while a sequence that uses it runs.  A key is *ripe* if it is not held and has no cached
child: an evictor may evict only ripe keys.  An evicted block has the same key when the engine computes it again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from minivllm.core.interfaces.evictor import BlockInfo

Numbers = Sequence[int] | np.ndarray


def keys(values: Numbers) -> np.ndarray:
    """Return keys as a uint64 array, the form in which an evictor receives them."""
    return np.array(values, np.uint64)


def key_of(parent: int, branch: int) -> int:
    """Return the key of a block, from the key of the block before it and a number for its content.

    Keys are large, like hashes, so that an evictor cannot use them as indices.
    """
    x = (parent + (branch + 1) * 0x9E3779B97F4A7C15) % (1 << 64)
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % (1 << 64)
    return x ^ x >> 27


def block_info(parent: Numbers, depth: Numbers, tenant: Numbers) -> BlockInfo:
    """Return the information about some blocks of 4,096 bytes that an evictor receives.

    The cost of a block grows with its depth.
    """
    depths = np.array(depth, np.int32)
    sizes = np.full(len(depths), 4096, np.int64)
    cost = (depths + 1) * 16.0
    tenants = np.array(tenant, np.int32)
    return BlockInfo(keys(parent), depths, sizes, cost, tenants)


class Tree:
    """The cached keys, with the facts about each key that decide whether and when it may be evicted."""

    def __init__(self) -> None:
        self.parent: dict[int, int] = {}  # key -> its parent, 0 for none
        self.depth: dict[int, int] = {}
        self.refs: dict[int, int] = {}  # key -> number of running sequences that use it
        self.children: dict[int, int] = {}  # key -> number of its cached children
        self.added: dict[int, int] = {}  # time
        # key -> (time at which it was freed, order within the call); keys of greater depth come first
        self.freed: dict[int, tuple[int, int]] = {}
        self.hits: dict[int, int] = {}
        self.clock = 0
        self.gone: set[int] = set()  # keys that were cached at some time and are not any more

    @property
    def free(self) -> list[int]:
        """Return the keys that no running sequence uses."""
        return [key for key, refs in self.refs.items() if not refs]

    def path(self, key: int) -> list[int]:
        """Return the ancestors of a key and the key itself, parents first."""
        path = [key]
        while parent := self.parent[path[-1]]:
            path.append(parent)
        return path[::-1]

    def add(self, key: int, parent: int, depth: int = 0) -> BlockInfo:
        """Add a held key and return its information for the evictor.

        ``depth`` is used only for a key without a parent.
        """
        self.clock += 1
        if parent:
            depth = self.depth[parent] + 1
            self.children[parent] += 1
        self.parent[key] = parent
        self.depth[key] = depth
        self.refs[key] = 1
        self.children[key] = 0
        self.added[key] = self.clock
        self.hits[key] = 1
        return block_info([parent], [depth], [depth % 3])

    def take(self, path: Sequence[int]) -> list[int]:
        """Add a running sequence to the users of each key, and return the keys that had no user before."""
        woken = [key for key in path if not self.refs[key]]
        for key in path:
            self.refs[key] += 1
        return woken

    def give(self, path: Sequence[int]) -> list[int]:
        """Remove a running sequence from the users of each key, and return the keys that have no user left."""
        self.clock += 1
        for key in path:
            self.refs[key] -= 1
        freed = [key for key in path if not self.refs[key]]
        for i, key in enumerate(freed):
            self.freed[key] = (self.clock, -i)
        return freed

    def remove(self, key: int) -> None:
        """Remove a key that was evicted or dropped."""
        self.gone.add(key)
        parent = self.parent[key]
        if parent:
            self.children[parent] -= 1
        for column in (self.parent, self.depth, self.refs, self.children, self.added, self.hits):
            del column[key]

    ORDERS: dict[str, Callable[[Tree, int], Any]] = {
        "lru": lambda self, key: self.freed[key],
        "fifo": lambda self, key: self.added[key],
        "lfu": lambda self, key: (self.hits[key], self.freed[key]),
    }

    def expected(self, order: str, n: int) -> list[int]:
        """Return the n keys that the reference ``order`` evicts, one after another.

        Each is the first key of that order which is not held and has no cached child.
        """
        rank = self.ORDERS[order]
        victims: list[int] = []
        children = dict(self.children)
        free = set(self.free)
        while len(victims) < n:
            ripe = (key for key in free if not children[key])
            key = min(ripe, key=lambda key: rank(self, key))
            free.remove(key)
            parent = self.parent[key]
            if parent:
                children[parent] -= 1
            victims.append(key)
        return victims
