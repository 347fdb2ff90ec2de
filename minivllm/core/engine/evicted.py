"""The feedback about evicted blocks, and the test whether an evictor reads facts of sessions."""

from __future__ import annotations

from collections import deque
from typing import Any

from minivllm.core.interfaces.evictor import Evictor


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
        self.most, self.needed = most, 0
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
