"""A cache that requests share only under the same salt, like prefixes of the KV cache.

So no client can learn from the time of an answer which requests other clients have sent.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

Salt = tuple[str, str]  # (tenant, cache_salt)
Value = TypeVar("Value")


class TenantCache(Generic[Value]):
    """Values by salt and key, of at most ``capacity`` bytes together.  One thread at a time may use it.

    A full cache drops the least recently used value of the tenant with most bytes.  So a tenant loses no value while it
    has at most its even share, ``capacity`` divided by the number of tenants.  All salts of a tenant count together,
    because a client chooses its salts.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.bytes = 0
        self._kept: dict[str, OrderedDict[Hashable, tuple[Value, int]]] = {}  # tenant -> values, the oldest first
        self._sizes: dict[str, int] = {}  # tenant -> number of bytes of its values

    def __len__(self) -> int:
        return sum(map(len, self._kept.values()))

    def get(self, salt: Salt, key: Hashable) -> Value | None:
        """Return a value, or None if the cache does not have it."""
        tenant, inner = salt
        kept = self._kept.get(tenant)
        if kept is None or (inner, key) not in kept:
            return None
        kept.move_to_end((inner, key))
        return kept[inner, key][0]

    def put(self, salt: Salt, key: Hashable, value: Value, size: int) -> None:
        """Store a value.  ``size`` is the bytes of the value and its key; a value above ``capacity`` is not stored."""
        if size > self.capacity:
            return
        tenant, inner = salt
        kept = self._kept.setdefault(tenant, OrderedDict())
        _, old_size = kept.pop((inner, key), (None, 0))
        kept[inner, key] = value, size
        self._grow(tenant, size - old_size)
        while self.bytes > self.capacity:
            largest = max(self._sizes, key=self._sizes.__getitem__)
            _, (_, dropped) = self._kept[largest].popitem(last=False)
            self._grow(largest, -dropped)

    def _grow(self, tenant: str, size: int) -> None:
        """Add ``size``, which may be negative, to the bytes of a tenant, and forget a tenant without values."""
        self.bytes += size
        self._sizes[tenant] = self._sizes.get(tenant, 0) + size
        if not self._kept[tenant]:
            del self._kept[tenant], self._sizes[tenant]
