"""A plain model of what an evictor must know: a tree of cached blocks, as the engine's pools make it.

Sequences are paths from a root; the blocks of a common prefix are the same keys.  A key is held while a sequence that
uses it runs.  Of the keys that nobody holds, those without a cached child are *ripe*: only they may be given up.
Keys are hashes of content: what was given up comes back under the same key when it is computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from minivllm.core.interfaces.evictor import BlockInfo


def keys(values: Sequence[int]) -> np.ndarray:
    return np.array(values, np.uint64)


def key_of(parent: int, branch: int) -> int:
    """The key of a block, from that of the block before it and a number for its content.  Keys are large on purpose:
    they are hashes, not indices."""
    x = (parent + (branch + 1) * 0x9E3779B97F4A7C15) % (1 << 64)
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % (1 << 64)
    return x ^ x >> 27


class Tree:
    """What an evictor must know, written down plainly."""

    def __init__(self) -> None:
        self.parent: dict[int, int] = {}
        self.depth: dict[int, int] = {}
        self.refs: dict[int, int] = {}
        self.children: dict[int, int] = {}
        self.added: dict[int, int] = {}
        self.freed: dict[int, tuple[int, int]] = {}  # when, and deeper first within a call
        self.hits: dict[int, int] = {}
        self.clock = 0
        self.gone: set[int] = set()  # keys that were cached once

    @property
    def free(self) -> list[int]:
        return [k for k, n in self.refs.items() if not n]

    def path(self, key: int) -> list[int]:
        """The key's ancestors and itself, parents first."""
        out = [key]
        while self.parent[out[-1]]:
            out.append(self.parent[out[-1]])
        return out[::-1]

    def add(self, key: int, parent: int, depth: int = 0) -> BlockInfo:
        """``depth`` counts only without a parent."""
        self.clock += 1
        depth = self.depth[parent] + 1 if parent else depth
        self.parent[key], self.depth[key], self.refs[key], self.children[key] = parent, depth, 1, 0
        self.added[key], self.hits[key] = self.clock, 1
        if parent:
            self.children[parent] += 1
        column = lambda x, t: np.array([x], t)  # noqa: E731
        return BlockInfo(
            column(parent, np.uint64),
            column(depth, np.int32),
            column(4096, np.int64),
            column((depth + 1) * 16.0, np.float64),
            column(depth % 3, np.int32),
        )

    def take(self, path: Sequence[int]) -> list[int]:
        """One more user of each; returns those that nobody held."""
        woken = [k for k in path if not self.refs[k]]
        for k in path:
            self.refs[k] += 1
        return woken

    def give(self, path: Sequence[int]) -> list[int]:
        """One user less; returns those that nobody holds now."""
        self.clock += 1
        for k in path:
            self.refs[k] -= 1
        gone = [k for k in path if not self.refs[k]]
        self.freed.update({k: (self.clock, -i) for i, k in enumerate(gone)})
        return gone

    def remove(self, key: int) -> None:
        self.gone.add(key)
        if self.parent[key]:
            self.children[self.parent[key]] -= 1
        for column in (self.parent, self.depth, self.refs, self.children, self.added, self.hits):
            del column[key]

    ORDERS: dict[str, Callable[[Tree, int], Any]] = {
        "lru": lambda self, k: self.freed[k],
        "fifo": lambda self, k: self.added[k],
        "lfu": lambda self, k: (self.hits[k], self.freed[k]),
    }

    def expected(self, order: str, n: int) -> list[int]:
        """The n victims of a reference order: again and again the least of the ripe keys."""
        out: list[int] = []
        left = dict(self.children)
        free = set(self.free)
        while len(out) < n:
            key = min((k for k in free if not left[k]), key=lambda k: self.ORDERS[order](self, k))
            free.remove(key)
            if self.parent[key]:
                left[self.parent[key]] -= 1
            out.append(key)
        return out
