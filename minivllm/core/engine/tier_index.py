"""The index of one tier (storage for KV pages behind the device, such as CPU memory or a disk): which pages it has,
which to evict when it is full, and its counters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from minivllm.errors import EngineDeadError, describe_error

from .evicted import EvictedKeys, block_info, reads_turns

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from minivllm.core.interfaces.evictor import Evictor
    from minivllm.core.interfaces.session import SessionTurn


def evictor_key(key: bytes) -> int:
    """Return the 64-bit key under which the evictor plug-in receives a page."""
    return int.from_bytes(key[8:], "little") or 1


class TierIndex:
    """The pages of one tier by key.

    Invariants: ``used`` is the sum of ``size``.  A page is in ``stored`` once all ranks have it, and in ``size`` from
    the order to store it on.  ``by_number`` and the evictor have the same pages as ``size``.
    """

    def __init__(
        self, name: str, limit: int, queue: int, patience: float, eager: bool, evictor: Evictor
    ) -> None:
        self.name = name
        self.limit = limit
        self.patience = patience
        self.eager = eager
        # bytes of the pages that are being stored, and the limit of these bytes
        self.queued = 0
        self.queue = queue
        self.evictor = evictor
        self.reads_turns = reads_turns(evictor)
        self.evicted_keys = EvictedKeys(max(1, evictor.ctx.capacity))
        self.size: dict[bytes, int] = {}
        self.stored: set[bytes] = set()
        self.by_number: dict[int, bytes] = {}
        self.used = 0
        # page that may not be evicted -> count of names that keep it
        self.pinned: dict[bytes, int] = {}
        # evicted pages, to be removed from the storage with the next delta
        self.dropped: list[bytes] = []
        # ids of running loads whose requests do not wait for them any longer
        self.overdue: set[int] = set()
        self.hits = self.misses = 0  # counts of pages that requests looked for: found, not found
        self.stores = self.loads = self.evictions = 0  # pages
        # count of pages that were not stored, because the queue or the tier was full
        self.skipped = 0
        self.late = 0  # count of loads that ended after their requests had stopped waiting
        self.lost = 0  # count of loads that found no page, or a damaged one
        self.store_bytes = self.load_bytes = 0
        self.load_seconds = 0.0
        self.faults = 0  # count of exceptions and damaged pages in the worker processes

    def has(self, key: bytes) -> bool:
        """Return True if the tier has a page and can load it.  While a load takes longer than requests wait, the tier
        counts as having no page."""
        return key in self.stored and not self.overdue

    def reserve(
        self,
        key: bytes,
        size: int,
        depth: int,
        cost: float,
        tenant: int,
        session: int = 0,
        kind: int = 0,
    ) -> bool:
        """Add a page that is about to be stored, and evict other pages for it.

        Return False if the page has no room.
        """
        number = evictor_key(key)
        if key in self.size or number in self.by_number or size > self.limit:
            return False
        while self.used + size > self.limit:
            if not self._evict(self.used + size - self.limit):
                return False
        parent = 0  # 0 in place of the parent's key, because the tier may not have the page before
        evicted = self.evicted_keys.take(number)
        info = block_info([(parent, depth, size, cost, tenant, session, kind, evicted)])
        self.evictor.add(np.array([number], np.uint64), info)
        self.size[key] = size
        self.by_number[number] = key
        self.used += size
        return True

    def has_place(self, size: int) -> bool:
        """Return True if the queue has room for a page.  An empty queue has room for any page."""
        return not self.queued or self.queued + size <= self.queue

    def arrived(self, key: bytes) -> None:
        """Mark a page as stored, so that it may be loaded and evicted."""
        self.stored.add(key)
        if key not in self.pinned:
            self.evictor.free(np.array([evictor_key(key)], np.uint64))

    def pin(self, keys: Sequence[bytes]) -> None:
        """Keep pages from eviction, and from ``reset``, until ``unpin``."""
        for key in keys:
            if key in self.stored and key not in self.pinned:
                self.evictor.hold(np.array([evictor_key(key)], np.uint64))
            self.pinned[key] = self.pinned.get(key, 0) + 1

    def unpin(self, keys: Sequence[bytes]) -> None:
        """Undo one ``pin`` of each of these pages.  A page without a pin may be evicted again."""
        for key in keys:
            self.pinned[key] -= 1
            if not self.pinned[key]:
                del self.pinned[key]
                if key in self.stored:
                    self.evictor.free(np.array([evictor_key(key)], np.uint64))

    def remove(self, key: bytes) -> None:
        """Remove a page from the index, because the storage has lost it or could not store it."""
        if key in self.size:
            if key in self.pinned and key in self.stored:
                self.evictor.free(np.array([evictor_key(key)], np.uint64))
            self.evictor.drop(np.array([evictor_key(key)], np.uint64))
            self._forget(key)

    def touch(self, keys: Sequence[bytes]) -> None:
        """Report stored pages as used to the evictor."""
        loose = [key for key in keys if key not in self.pinned]
        numbers = np.array([evictor_key(key) for key in loose], np.uint64)
        for call in (self.evictor.hit, self.evictor.hold, self.evictor.free):
            call(numbers)

    def report(self, event: str, pages: Sequence[bytes], turn: SessionTurn) -> None:
        """Call the evictor's method ``event`` ("began" or "ended") for a request of a session, with its pages that the
        tier may evict.  EngineDeadError if the evictor plug-in raises.
        """
        loose = [key for key in pages if key in self.stored and key not in self.pinned]
        keys = np.array([evictor_key(key) for key in loose], np.uint64)
        report = getattr(self.evictor, event)
        try:
            report(keys, turn)
        except Exception as e:
            problem = f"{type(self.evictor).__name__} failed in {event}: {describe_error(e)}"
            raise EngineDeadError(f"evictor {problem}") from e

    def _evict(self, need: int) -> bool:
        """Evict pages of about ``need`` bytes in total. Return False if no page is left that may be evicted."""
        mean = max(1, self.used // max(1, len(self.size)))
        victims = np.asarray(self.evictor.victims(-(-need // mean)), np.uint64).tolist()
        for number in victims:
            key = self.by_number[number]
            self._forget(key)
            self.dropped.append(key)
        self.evicted_keys.add(victims)
        self.evictions += len(victims)
        return bool(victims)

    def _forget(self, key: bytes) -> None:
        self.used -= self.size.pop(key)
        self.stored.discard(key)
        del self.by_number[evictor_key(key)]

    def reset(self) -> None:
        """Remove all stored pages that are not pinned."""
        gone = [key for key in self.stored if key not in self.pinned]
        if gone:
            self.evictor.drop(np.array([evictor_key(key) for key in gone], np.uint64))
        for key in gone:
            self._forget(key)
        self.dropped += gone

    def open(self, found: Sequence[Mapping[str, int]], held: Sequence[str]) -> None:
        """Add the pages that the storage of all ranks had at the start.  ``found`` has a dict from keys (hex) to bytes
        for each rank.

        The pages ``held`` of named prefixes are added first, and not evicted for other pages."""
        sizes: dict[str, int] = {}
        for rank in found:
            for key, size in rank.items():
                sizes[key] = sizes.get(key, 0) + size
        pinned = [bytes.fromhex(key) for key in held]
        self.pin(pinned)
        for key in [*held, *found[0]]:
            page = bytes.fromhex(key)
            everywhere = all(key in rank for rank in found)
            if everywhere and self.reserve(page, sizes[key], 0, 1.0, 0):
                self.arrived(page)
        self.unpin(pinned)

    def figures(self) -> dict[str, Any]:
        """Return the statistics of the tier."""
        names = (
            "limit", "used", "hits", "misses", "stores", "loads", "evictions", "skipped", "late", "lost",
            "store_bytes", "load_bytes", "load_seconds", "faults",
        )  # fmt: skip
        return {
            "name": self.name,
            "pages": len(self.stored),
            **{n: getattr(self, n) for n in names},
        }

    def check(self) -> None:
        """Compare the dicts of the index with each other; AssertionError names the inconsistency."""
        assert self.used == sum(self.size.values()), f"tier {self.name}: the bytes do not add up"
        assert self.stored <= self.size.keys(), f"tier {self.name}: a stored page has no size"
        assert len(self.by_number) == len(self.size), f"tier {self.name}: keys and numbers differ"
