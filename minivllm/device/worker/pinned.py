"""Pinned host memory for pages, in slabs, because a single allocation takes as long as the copy of several pages.

CUDA's own allocation of pinned memory clears small pages of the system one by one, and blocks the launches of other
threads meanwhile.  So slabs are ordinary memory in huge pages, which is touched first and then registered.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

SLAB = 32 << 20  # bytes of a slab
HUGE = 2 << 20  # bytes of a huge page
ALIGNED = 4096  # bytes to which the address of each piece is aligned, as reads from a disk need


class HostSlab:
    """Memory that is registered for a GPU until no piece refers to it."""

    def __init__(self, size: int) -> None:
        """Allocate and register ``size`` bytes.  RuntimeError if CUDA refuses."""
        self._registered = False
        self._memory = mmap.mmap(-1, size + HUGE)
        whole = np.frombuffer(self._memory, np.uint8)
        first = -whole.__array_interface__["data"][0] % HUGE
        self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._bytes = whole[first : first + size]
        self._bytes[::ALIGNED] = 0
        self.address: int = self._bytes.__array_interface__["data"][0]
        error = torch.cuda.cudart().cudaHostRegister(self.address, size, 0)
        if int(error):
            raise RuntimeError(f"cudaHostRegister: error {int(error)} for {size} bytes")
        self._registered = True

    def __del__(self) -> None:
        if self._registered:
            torch.cuda.cudart().cudaHostUnregister(self.address)


class TorchSlab:
    """Pinned memory that torch allocates, where memory cannot be registered."""

    def __init__(self, size: int) -> None:
        self._memory = torch.empty(size + ALIGNED, dtype=torch.uint8, pin_memory=True)
        self.address = -(-self._memory.data_ptr() // ALIGNED) * ALIGNED


class Piece:
    """A piece of a slab, which is given back when no array refers to it any longer."""

    def __init__(self, at: int, size: int, slab: Any, free: list[tuple[Any, int]]) -> None:
        self.slab, self.at, self._free = slab, at, free  # the slab lives as long as its pieces
        self.__array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (at, False), "version": 3}

    def __del__(self) -> None:
        self._free.append((self.slab, self.at))


def allocate(size: int) -> Any:
    """Return a slab of ``size`` bytes."""
    try:
        return HostSlab(size)
    except (RuntimeError, OSError):
        _forget_error()
        return TorchSlab(size)


def _forget_error() -> None:
    """Clear the last error of CUDA with a launch that reports it; it would else end the next launch of this thread."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda")


class PinnedSlabs:
    """Slabs of equal pieces for each size of a page.  They are freed with the last reference to their pieces."""

    def __init__(self, allocate: Callable[[int], Any]) -> None:
        """Begin without a slab.  ``allocate`` returns an object that keeps memory of n bytes at its ``address``."""
        self._allocate = allocate
        self._free: dict[int, list[tuple[Any, int]]] = {}  # by size of a piece: (slab, address)
        self._lock = threading.Lock()

    def empty(self, size: int) -> np.ndarray:
        """Return pinned memory u8 [size] of any content."""
        step = -(-max(size, 1) // ALIGNED) * ALIGNED
        free = self._free.setdefault(step, [])
        while True:
            try:
                slab, at = free.pop()
            except IndexError:
                self._grow(step, free)
                continue
            piece: Any = Piece(at, size, slab, free)
            return np.asarray(piece)

    def _grow(self, step: int, free: list[tuple[Any, int]]) -> None:
        """Allocate a slab of pieces of ``step`` bytes, unless another thread has just done so."""
        with self._lock:
            if free:
                return
            pieces = max(SLAB, step) // step
            slab = self._allocate(-(-pieces * step // HUGE) * HUGE)
            free += [(slab, slab.address + i * step) for i in reversed(range(pieces))]
