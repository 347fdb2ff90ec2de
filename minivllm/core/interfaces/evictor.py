"""The evictor seam: in which order cached blocks that nobody uses are given up.  The same class serves every tier."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

API = (1, 1)  # 1.1: Evictor.figures


@dataclass(frozen=True)
class BlockInfo:
    """Columns beside the keys of ``add``."""

    # u64 key of the block before it; 0: the first of a sequence, or (depth > 0) one of a sliding
    # window's group, whose blocks hang on those of another group and not on each other
    parent: np.ndarray
    depth: np.ndarray  # i32 blocks before it
    bytes: np.ndarray  # i64
    cost: np.ndarray  # f64 tokens to recompute if it is lost
    tenant: np.ndarray  # i32


@dataclass(frozen=True)
class EvictorContext:
    """What an evictor is told when it is made."""

    capacity: int  # blocks in the tier
    block: int  # tokens per block
    tier: str  # device | cpu | disk


class Evictor(ABC):
    """Keys are u64 hashes of content: a key that was evicted or dropped may be added again, as a new block.  In every
    call parents come before children.  A ``hit`` is followed by a ``hold`` of those of its keys that nobody holds.

    A key is *held* from ``add`` until ``free``, and again from ``hold`` until ``free``.  ``victims(n)`` returns exactly
    ``min(n, free keys)`` distinct keys, none of them held, children before parents; they are gone from the evictor
    afterwards.  A call costs O(keys in it) or O(log n) each.
    """

    def __init__(self, options: Any, ctx: EvictorContext) -> None:
        self.options, self.ctx = options, ctx

    @abstractmethod
    def add(self, keys: np.ndarray, info: BlockInfo) -> None:
        """New cached blocks, held."""

    def hit(self, keys: np.ndarray) -> None:  # noqa: B027  (optional)
        """A lookup found these keys (held or not)."""

    @abstractmethod
    def hold(self, keys: np.ndarray) -> None:
        """A sequence refers to these keys: not evictable until ``free``."""

    @abstractmethod
    def free(self, keys: np.ndarray) -> None:
        """Nobody refers to these keys any longer."""

    @abstractmethod
    def drop(self, keys: np.ndarray) -> None:
        """Gone for another reason (a reset): forget them."""

    @abstractmethod
    def victims(self, n: int) -> np.ndarray:
        """u64 keys to give up, at most n."""

    def figures(self) -> Mapping[str, float]:
        """What it counts, as ``SchedulerPolicy.figures``."""
        return {}
