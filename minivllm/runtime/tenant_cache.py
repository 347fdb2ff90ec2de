"""What is kept of requests, apart for each salt, as prefixes are in the KV cache: nobody learns from the time that an
answer takes what others asked."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Any, Generic, TypeVar

Salt = tuple[str, str]  # (tenant, cache_salt)
Value = TypeVar("Value")


class TenantCache(Generic[Value]):
    """Values under keys, of at most ``capacity`` bytes together.  One thread at a time.

    Room is made by the tenant that has most bytes, whose least recently used value goes.  So a tenant loses nothing as
    long as it has no more than its even share, ``capacity`` over the number of tenants, whatever others do.  Salts of
    one tenant share its part: a client chooses them.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity, self.bytes = capacity, 0
        self._kept: dict[str, OrderedDict[Hashable, tuple[Value, int]]] = {}  # of each tenant, oldest first
        self._sizes: dict[str, int] = {}

    def __len__(self) -> int:
        return sum(map(len, self._kept.values()))

    def get(self, salt: Salt, key: Hashable) -> Value | None:
        tenant, inner = salt
        kept = self._kept.get(tenant)
        found = None if kept is None else kept.get((inner, key))
        if kept is None or found is None:
            return None
        kept.move_to_end((inner, key))
        return found[0]

    def put(self, salt: Salt, key: Hashable, value: Value, size: int) -> None:
        """Keep a value of ``size`` bytes, with what its key takes; one that is larger than all room is not kept."""
        if size > self.capacity:
            return
        tenant, inner = salt
        kept = self._kept.setdefault(tenant, OrderedDict())
        before: tuple[Any, int] = kept.pop((inner, key), (None, 0))
        kept[inner, key] = value, size
        self._grow(tenant, size - before[1])
        while self.bytes > self.capacity:
            largest = max(self._sizes, key=self._sizes.__getitem__)
            gone = self._kept[largest].popitem(last=False)[1]
            self._grow(largest, -gone[1])

    def _grow(self, tenant: str, size: int) -> None:
        self.bytes += size
        self._sizes[tenant] = self._sizes.get(tenant, 0) + size
        if not self._kept[tenant]:
            del self._kept[tenant], self._sizes[tenant]
