"""The evictor seam: the order in which unused cached blocks are evicted.

The same class serves every tier of the cache: device, CPU memory and disk.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

API = (1, 1)  # 1.1: Evictor.figures


@dataclass(frozen=True)
class BlockInfo:
    """Properties of cached blocks, one array element for each key of ``Evictor.add``."""

    # u64 key of the preceding block.  0 means that the block is the first of its sequence, or (depth > 0)
    # that it belongs to a sliding-window group.  Blocks of such a group depend on the blocks of another
    # group, not on each other.
    parent: np.ndarray
    depth: np.ndarray  # i32 number of preceding blocks
    bytes: np.ndarray  # i64 size of the block
    cost: np.ndarray  # f64 number of tokens to recompute if the block is lost
    tenant: np.ndarray  # i32 number of the tenant whose request computed the block


@dataclass(frozen=True)
class EvictorContext:
    """The arguments with which the engine constructs an evictor."""

    capacity: int  # blocks in the tier
    block: int  # tokens per block
    tier: str  # device | cpu | disk


class Evictor(ABC):
    """Chooses the cached blocks that are evicted when their tier is full.

    Keys are u64 hashes of block contents.  A key that was evicted or dropped may be added again, as a new block.  In
    every call, parents come before their children.  After ``hit``, the engine calls ``hold`` for the found keys that no
    sequence holds yet.

    A key is *held* from ``add`` until ``free``, and again from ``hold`` until ``free``.  ``victims(n)`` returns exactly
    ``min(n, number of free keys)`` distinct keys.  None of them is held, and children come before their parents.  The
    evictor must forget these keys.  A call may take O(number of its keys) time, or O(log n) time for each key.
    """

    def __init__(self, options: Any, ctx: EvictorContext) -> None:
        self.options, self.ctx = options, ctx

    @abstractmethod
    def add(self, keys: np.ndarray, info: BlockInfo) -> None:
        """Add new cached blocks.  They are held until ``free``."""

    def hit(self, keys: np.ndarray) -> None:  # noqa: B027  (optional)
        """Record that a prefix lookup found these keys, held or not."""

    @abstractmethod
    def hold(self, keys: np.ndarray) -> None:
        """Mark these keys as used by a sequence.  They must not be evicted until ``free``."""

    @abstractmethod
    def free(self, keys: np.ndarray) -> None:
        """Mark these keys as evictable, because no sequence uses them any longer."""

    @abstractmethod
    def drop(self, keys: np.ndarray) -> None:
        """Forget these keys.  The engine removed their blocks for another reason, such as a reset of the cache."""

    @abstractmethod
    def victims(self, n: int) -> np.ndarray:
        """Choose at most ``n`` keys to evict, forget them and return them as u64."""

    def figures(self) -> Mapping[str, float]:
        """Return the evictor's own counters, with the same rules as ``SchedulerPolicy.figures``."""
        return {}
