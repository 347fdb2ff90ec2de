"""The feedback about evicted blocks, and the test whether an evictor reads facts of sessions."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

from minivllm.core.interfaces.evictor import BlockInfo, Evictor

if TYPE_CHECKING:
    from collections.abc import Sequence

# the columns of ``BlockInfo`` in order, and their types
COLUMNS = {
    "parent": np.uint64,
    "depth": np.int32,
    "bytes": np.int64,
    "cost": np.float64,
    "tenant": np.int32,
    "session": np.int64,
    "kind": np.int8,
    "evicted": np.bool_,
}
# the values of one block, in the order of ``COLUMNS``
InfoRow = tuple[int, int, int, float, int, int, int, bool]


def block_info(rows: Sequence[InfoRow]) -> BlockInfo:
    """Return the columns of ``BlockInfo`` for at least one block."""
    arrays: dict[str, np.ndarray] = {}
    for name, values in zip(COLUMNS, zip(*rows, strict=True), strict=True):
        arrays[name] = np.array(values, COLUMNS[name])
    return BlockInfo(**arrays)


def reads_turns(evictor: Evictor) -> bool:
    """Return whether an evictor overrides ``began`` or ``ended``."""
    own: Any = type(evictor)
    return own.began is not Evictor.began or own.ended is not Evictor.ended


class EvictedKeys:
    """The keys of the last ``most`` evictions.  ``needed`` counts the evicted keys that were computed again.

    Invariant: ``order`` has the keys of the evictions from number ``first`` on.  ``number`` has the last eviction of
    each key that was not taken.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.needed = 0
        self.order: deque[int] = deque()
        self.first = 0
        self.number: dict[int, int] = {}

    def add(self, keys: list[int]) -> None:
        """Add keys that were evicted."""
        for key in keys:
            self.number[key] = self.first + len(self.order)
            self.order.append(key)
        while len(self.order) > self.most:
            oldest = self.order.popleft()
            if self.number.get(oldest) == self.first:
                del self.number[oldest]
            self.first += 1

    def take(self, key: int) -> bool:
        """Remove a key that is cached again.  Return True if it was among the last evicted keys."""
        if self.number.pop(key, None) is None:
            return False
        self.needed += 1
        return True
