"""Pinned host memory for pages, in slabs, because a single allocation takes as long as the copy of several pages.

CUDA's own allocation of pinned memory clears small pages of the system one by one, and blocks the launches of other
threads meanwhile.  So slabs are ordinary memory in huge pages, which is touched first and then registered.  Threads do
this ahead, because pages leave a GPU faster than a thread can allocate memory for them.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch

log = logging.getLogger("minivllm")

SLAB = 32 << 20  # bytes of a slab
HUGE = 2 << 20  # bytes of a huge page
THREADS = 4  # threads that allocate slabs ahead
AHEAD = 2 << 30  # bytes of free pieces that the threads keep in reserve
PAUSE = 2e-3  # seconds that a thread pauses between two slabs, so that other threads can launch kernels
JOIN = 2.0  # most seconds to wait for the end of a thread
LOOK = 0.05  # seconds between two checks whether more slabs are needed
ALIGNED = 4096  # bytes to which the address of each piece is aligned, as reads from a disk need


class HostSlab:
    """Host memory that is registered with CUDA as pinned until no piece of it is in use."""

    def __init__(self, size: int) -> None:
        """Allocate ``size`` bytes, and write to each page of the operating system, so that it exists."""
        self._registered = False
        self._size = size
        # a private mapping, because a system may lack huge pages of shared memory
        self._memory = mmap.mmap(-1, size + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        whole = np.frombuffer(self._memory, np.uint8)
        first = -whole.__array_interface__["data"][0] % HUGE
        self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._memory.madvise(mmap.MADV_DONTFORK)  # after a fork the GPU and this process could use different pages
        self._bytes = whole[first : first + size]
        self._bytes[::ALIGNED] = 0
        self.address: int = self._bytes.__array_interface__["data"][0]

    def register(self) -> None:
        """Register the memory with CUDA as pinned memory.  RuntimeError if CUDA refuses it."""
        error = torch.cuda.cudart().cudaHostRegister(self.address, self._size, 0)
        if int(error):
            raise RuntimeError(f"cudaHostRegister: error {int(error)} for {self._size} bytes")
        self._registered = True

    def __del__(self) -> None:
        if self._registered:
            torch.cuda.cudart().cudaHostUnregister(self.address)


class TorchSlab:
    """Pinned memory that torch allocates, where memory cannot be registered."""

    def __init__(self, size: int) -> None:
        self._memory = torch.empty(size + ALIGNED, dtype=torch.uint8, pin_memory=True)
        self.address = -(-self._memory.data_ptr() // ALIGNED) * ALIGNED


class SlabPiece:
    """A piece of a slab as an array.  The piece becomes free again when no array refers to it any longer."""

    def __init__(self, at: int, size: int, slab: Any, free: list[tuple[Any, int]]) -> None:
        # each piece refers to its slab, so a slab is freed after its last piece
        self.slab = slab
        self.at = at
        self._free = free
        self.__array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (at, False), "version": 3}

    def __del__(self) -> None:
        self._free.append((self.slab, self.at))


def allocate(size: int, alone: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext) -> Any:
    """Return a slab of ``size`` bytes of pinned memory.  ``alone()`` is the context in which CUDA may be called."""
    try:
        slab = HostSlab(size)
        with alone():
            slab.register()
        return slab
    except (RuntimeError, OSError):
        with alone():
            _forget_error()
            return TorchSlab(size)


def _forget_error() -> None:
    """Clear the pending CUDA error of this thread by a launch that reports it, so that the next launch succeeds."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda")


class PinnedSlabs:
    """An allocator of pinned memory: for each size it divides slabs into equal pieces.  A slab is freed when none of
    its pieces is in use."""

    def __init__(self, allocate: Callable[[int], Any]) -> None:
        """Create an allocator that has no slab yet.

        ``allocate(n)`` returns an object that owns n bytes of memory at its ``address``.
        """
        self._allocate = allocate
        self._free: dict[int, list[tuple[Any, int]]] = {}  # size of a piece -> (slab, address) of its free pieces
        self._made: dict[int, int] = {}  # size of a piece -> bytes of its slabs, including slabs being allocated
        self._lock = threading.Lock()
        self._growing = threading.Lock()
        self._closing = threading.Event()
        self._threads: list[threading.Thread] = []

    def empty(self, size: int) -> np.ndarray:
        """Return pinned memory u8 [size] of any content."""
        while (piece := self.at_hand(size)) is None:
            with self._growing:
                if not self._free[_step(size)]:  # another thread may have added a slab in the meantime
                    self._claim(size, lambda made: True)
                    self._add(size)
        return piece

    def at_hand(self, size: int) -> np.ndarray | None:
        """Return a free piece of ``size`` bytes without an allocation, or None if no piece is free."""
        free = self._free.setdefault(_step(size), [])
        try:
            slab, at = free.pop()
        except IndexError:
            return None
        piece: Any = SlabPiece(at, size, slab, free)
        return np.asarray(piece)

    def _claim(self, size: int, wants: Callable[[int], bool]) -> bool:
        """Reserve the allocation of another slab of pieces of ``size`` bytes if ``wants(bytes of existing slabs)`` is
        true.

        Return whether it was reserved.
        """
        with self._lock:
            made = self._made.get(size, 0)
            wanted = wants(made)
            if wanted:
                self._made[size] = made + _slab_bytes(size)
        return wanted

    def _add(self, size: int) -> None:
        """Allocate a slab of pieces of ``size`` bytes.  ``_claim`` has counted it; after an exception it is
        uncounted."""
        try:
            slab = self._allocate(_slab_bytes(size))
            step = _step(size)
        except BaseException:
            with self._lock:
                self._made[size] -= _slab_bytes(size)
            raise
        places = range(max(SLAB, step) // step)
        free = self._free.setdefault(step, [])
        free += [(slab, slab.address + i * step) for i in reversed(places)]

    def prepare(self, shares: Mapping[int, int], most: int) -> None:
        """Allocate slabs in threads, so that ``at_hand`` finds free pieces.

        ``shares`` maps a size of pieces to the bytes to allocate.  Afterwards the threads keep ``AHEAD`` bytes free,
        but allocate at most ``most`` bytes for each size.  The first slab of each size exists when this returns."""
        for size in shares:
            self.empty(size)
        for _ in range(THREADS):
            work = threading.Thread(target=self._prepare, args=(shares, most), daemon=True)
            work.name = "minivllm-pinned"
            work.start()
            self._threads.append(work)

    def _prepare(self, shares: Mapping[int, int], most: int) -> None:
        """Allocate slabs as they are needed, until ``close`` (the loop of a thread).

        A failed allocation ends all threads with a warning.  Pages then use the slabs that exist.
        """
        while not self._closing.is_set():
            added = False
            for size, share in shares.items():
                if not self._claim(size, partial(self._lacks, size, share, most)):
                    continue
                try:
                    self._add(size)
                except (RuntimeError, OSError, MemoryError) as e:
                    self._closing.set()
                    log.warning("no more pinned memory is allocated for pages that leave the GPU: %s", e)
                    return
                added = True
            self._closing.wait(PAUSE if added else LOOK)

    def _lacks(self, size: int, share: int, most: int, made: int) -> bool:
        """Return whether another slab of pieces of ``size`` bytes is needed, when ``made`` bytes of slabs exist."""
        free = len(self._free.get(_step(size), ())) * size
        return made + _slab_bytes(size) <= (most if free < AHEAD else share)

    def close(self) -> None:
        """End the threads that allocate slabs, and wait until their last allocations are finished."""
        self._closing.set()
        for thread in self._threads:
            thread.join(JOIN)


def _step(size: int) -> int:
    """Return the distance in bytes between the starts of two neighbouring pieces of ``size`` bytes."""
    return -(-max(size, 1) // ALIGNED) * ALIGNED


def _slab_bytes(size: int) -> int:
    """Return the bytes of a slab of pieces of ``size`` bytes."""
    step = _step(size)
    return -(-max(SLAB, step) // step * step // HUGE) * HUGE
