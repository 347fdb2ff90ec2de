"""The kvstore seam (plug-in interface): a tier that keeps pages of the KV cache outside of the device, such as a disk.

A *page* is the bytes of a block of one KV group in all its layers, or a copy of recurrent states.  Its key is a digest
of the model, the KV format, the layout, the salt, and all tokens up to the end of the block.  So equal keys mean equal
pages, in every process.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

API = (1, 1)
KEY_BYTES = 16


def _empty(size: int) -> np.ndarray:
    return np.empty(size, np.uint8)


@dataclass(frozen=True)
class StoreContext:
    """The arguments with which a worker constructs a store."""

    # digest (hex) of all that determines a page besides its tokens: weights, KV format, layout, block size, ranks
    identity: str
    rank: int = 0  # number of the process among those that share the model; each stores its own part of a page
    ranks: int = 1
    label: str = ""  # name of the model, for people who look at the store
    # empty(n) returns memory u8 [n] of any content, from which the device copies without waiting
    # (pinned memory for a GPU).
    empty: Callable[[int], np.ndarray] = _empty


class KVStore(ABC):
    """Keeps pages by key.

    The engine has the index: it decides which pages are stored and removed, and asks for a page only after it was
    stored.  The thread that makes a store also calls ``keys`` and ``names``; then another thread makes all calls,
    ``close`` too.  Two calls never run at the same time.  They may take long, because no step waits for them.  An
    exception of ``put`` or ``get`` is counted as a fault of this page and has no other effect.
    """

    # True stores a page soon after it was computed; False stores it when the device evicts it.
    eager = False
    # True loads pages even if computing them is expected to be faster
    always = False
    # True if the store keeps names of prefixes (``mark`` and ``names``) for later processes
    keeps_names = False
    # True if ``put`` keeps the array that it gets, so that the page is not copied again.  Nobody changes it afterwards,
    # and no other page uses its memory.  (1.1)
    keeps_pages = False
    # Seconds that a request waits at most for its pages. It computes them afterwards.
    patience = 5.0

    def __init__(self, options: Any, ctx: StoreContext) -> None:
        self.options, self.ctx = options, ctx

    @property
    @abstractmethod
    def limit(self) -> int:
        """Return the bytes of pages that all ranks together may store."""

    @abstractmethod
    def keys(self) -> Mapping[bytes, int]:
        """Return the keys of all stored pages, each with the size of the page in bytes, the oldest page first."""

    @abstractmethod
    def put(self, key: bytes, page: np.ndarray) -> bool:
        """Store a page u8 [n], and return True; False if the store has no room.  The caller reuses ``page``
        afterwards, unless ``keeps_pages`` is True."""

    @abstractmethod
    def get(self, key: bytes) -> np.ndarray | None:
        """Return a page u8 [n] exactly as it was stored, or None if it is lost or damaged.  Later calls must not change
        the returned array."""

    def expect(self, keys: Sequence[bytes]) -> None:  # noqa: B027  (optional)
        """Prepare for calls of ``get`` for these keys, which follow in this order unless the engine stops.

        A call replaces the keys of earlier calls.  (1.1)"""

    @abstractmethod
    def drop(self, keys: Iterable[bytes]) -> None:
        """Remove pages.  Unknown keys are ignored.  A page that another open store has put stays there for that store;
        this store forgets it."""

    def look(self) -> Mapping[bytes, int]:
        """Return the keys and sizes of pages that other processes have added since the last call, or since the start.
        It is called when the store has had nothing to do for a second."""
        return {}

    def names(self) -> Mapping[str, Sequence[bytes]]:
        """Return the names that ``mark`` has stored, each with the keys of the pages of its prefix."""
        return {}

    def mark(self, name: str, keys: Sequence[bytes] | None) -> bool:
        """Store a name for a prefix, with the keys of its pages, and return True.  Earlier pages of the name are
        replaced.  ``keys`` None removes the name.  False means that the store keeps no names."""
        return False

    def close(self) -> None:  # noqa: B027  (optional)
        """Write data that is not written yet, and free all resources."""
