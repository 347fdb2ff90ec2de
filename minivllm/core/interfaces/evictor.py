"""The evictor seam (plug-in interface): the order in which unused cached blocks are evicted.

The same class serves every tier of the cache: device, CPU memory and disk.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .session import SessionTurn

# added in 1.1: Evictor.figures; in 1.2: facts of sessions, ``evicted``, EvictorContext.now
API = (1, 2)


@dataclass(frozen=True)
class BlockInfo:
    """Properties of cached blocks, one array element for each key of ``Evictor.add``."""

    # u64 key of the preceding block.  0 means that the block is the first of its sequence, or (depth > 0)
    # that it belongs to a sliding-window group.  Blocks of such a group depend on the blocks of another
    # group, not on each other.
    parent: np.ndarray
    depth: np.ndarray  # i32 number of blocks before the block in its sequence
    bytes: np.ndarray  # i64 size of the block in bytes
    cost: np.ndarray  # f64 number of tokens that must be computed again if the block is lost
    tenant: np.ndarray  # i32 number that stands for the tenant whose request computed the block
    # i64 number of the session (see ``SessionTurn``) whose request computed the block, 0 for none
    session: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    # i8 kind of the block's first token: the index in ``SPAN_KINDS`` + 1, 0 for none
    kind: np.ndarray = field(default_factory=lambda: np.empty(0, np.int8))
    # bool; True means that the block was evicted lately, and a request needed it again
    evicted: np.ndarray = field(default_factory=lambda: np.empty(0, np.bool_))

    def __post_init__(self) -> None:
        for name in ("session", "kind", "evicted"):
            column = getattr(self, name)
            if not len(column):
                object.__setattr__(self, name, np.zeros(len(self.parent), column.dtype))


@dataclass(frozen=True)
class EvictorContext:
    """The arguments with which the engine constructs an evictor."""

    capacity: int  # largest number of blocks in the tier
    block: int  # tokens per block
    tier: str  # which memory the blocks are in: "device", "cpu" or "disk"
    # the engine's clock in seconds, which may be a virtual one
    now: Callable[[], float] = time.monotonic


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

    def began(self, keys: np.ndarray, turn: SessionTurn) -> None:  # noqa: B027  (optional)
        """Receive a request of a session that was admitted.  ``keys`` are the blocks of its prefix hit.

        The engine calls it after ``hold``, only if it is overridden and the client has sent facts of the session, and
        in tiers behind the device too, where ``keys`` is empty."""

    def ended(self, keys: np.ndarray, turn: SessionTurn) -> None:  # noqa: B027  (optional)
        """Receive a request of a session that ends.  ``keys`` are its blocks in this tier, which other requests may
        share.  On the device they are freed after this call.

        The engine calls it under the conditions of ``began``.  A request that ends while it waits has no keys."""

    @abstractmethod
    def victims(self, n: int) -> np.ndarray:
        """Choose at most ``n`` keys to evict, forget them and return them as u64."""

    def figures(self) -> Mapping[str, float]:
        """Return the evictor's own counters, with the same rules as ``SchedulerPolicy.figures``."""
        return {}
