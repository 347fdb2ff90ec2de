"""Pinned host memory for pages, in slabs, because a single allocation takes as long as the copy of several pages."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor

SLAB = 16 << 20  # bytes of a slab; larger ones delay the launches of other threads for longer
ALIGNED = 4096  # bytes to which the address of each piece is aligned, as reads from a disk need


class Piece:
    """A piece of a slab, which is given back when no array refers to it any longer."""

    def __init__(self, at: int, size: int, slab: Tensor, free: list[tuple[Tensor, int]]) -> None:
        self.slab, self.at, self._free = slab, at, free  # the slab lives as long as its pieces
        self.__array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (at, False), "version": 3}

    def __del__(self) -> None:
        self._free.append((self.slab, self.at))


class PinnedSlabs:
    """Slabs of equal pieces for each size of a page.  They are freed with the last reference to their pieces."""

    def __init__(self, allocate: Callable[[int], Tensor]) -> None:
        """Begin without a slab.  ``allocate`` returns pinned memory u8 [n]."""
        self._allocate = allocate
        self._free: dict[int, list[tuple[Tensor, int]]] = {}  # by size of a piece: (slab, address)
        self._lock = threading.Lock()

    def empty(self, size: int) -> np.ndarray:
        """Return pinned memory u8 [size] of any content."""
        step = -(-max(size, 1) // ALIGNED) * ALIGNED
        with self._lock:
            free = self._free.setdefault(step, [])
            if not free:
                slab = self._allocate(max(SLAB, step) // step * step + ALIGNED)
                begin = -(-slab.data_ptr() // ALIGNED) * ALIGNED
                pieces = (slab.nbytes - ALIGNED) // step
                free += [(slab, begin + i * step) for i in reversed(range(pieces))]
            slab, at = free.pop()
        piece: Any = Piece(at, size, slab, free)
        return np.asarray(piece)
