"""The keys of evicted blocks that are computed again, and the rows of ``BlockInfo`` for an evictor plug-in."""

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
# the values of one block in the order of ``COLUMNS``
InfoRow = tuple[int, int, int, float, int, int, int, bool]


def block_info(rows: Sequence[InfoRow]) -> BlockInfo:
    """Return the properties of blocks as columns (``BlockInfo``), from one row of values per block.  There must be at
    least one block."""
    arrays: dict[str, np.ndarray] = {}
    for name, values in zip(COLUMNS, zip(*rows, strict=True), strict=True):
        arrays[name] = np.array(values, COLUMNS[name])
    return BlockInfo(**arrays)


def reads_turns(evictor: Evictor) -> bool:
    """Return whether an evictor plug-in wants to receive the beginning and the end of session requests: whether it
    overrides ``began`` or ``ended``."""
    own: Any = type(evictor)
    return own.began is not Evictor.began or own.ended is not Evictor.ended


class EvictedKeys:
    """The keys of the last ``most`` evicted blocks.  ``needed`` counts the evicted blocks that had to be computed
    again.

    Invariant: ``order`` has the keys of the evictions with the serial numbers from ``first`` on.  ``number`` maps a key
    to its last eviction, unless the key is cached again."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.needed = 0
        self.order: deque[int] = deque()
        self.first = 0
        self.number: dict[int, int] = {}

    def add(self, keys: list[int]) -> None:
        """Add keys that were evicted.  Beyond ``most`` keys the oldest are removed."""
        for key in keys:
            self.number[key] = self.first + len(self.order)
            self.order.append(key)
        while len(self.order) > self.most:
            oldest = self.order.popleft()
            if self.number.get(oldest) == self.first:
                del self.number[oldest]
            self.first += 1

    def take(self, key: int) -> bool:
        """Remove the key of a block that enters the cache, and count it if it was among the last evicted keys.  Return
        True in this case."""
        if self.number.pop(key, None) is None:
            return False
        self.needed += 1
        return True
