"""Memory of this process: which pages of an array have been taken, and what the C library's heap holds unused.

Why a heap grows on a CPU.  oneDNN keeps a kernel for each size of a step (``hardware.KEPT``).  Kernels live long, the
activations of a step do not, and both lie in one heap.  A kernel that is compiled in the middle of a step splits the
hole that the activations leave, so that larger ones later find no room there and take new pages.  With 256 kernels and
steps of 1 to 2,000 tokens, 155 MiB in use come to lie in 545 MiB.  The pages in the holes can be given back
(``malloc_trim``); to map large arrays one by one instead (``M_MMAP_THRESHOLD``) costs a quarter more CPU time.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Sequence

GROWN = 32 << 20  # bytes
SETTLE = 30.0  # seconds; a trim takes about 1 ms, and what the steps need is taken anew, 2 us a page
LOOK = 1.0  # seconds between looks at what is resident


def resident_bytes(arrays: Sequence[tuple[int, int]]) -> int | None:
    """Of memory given as (address, bytes), what lies in pages that have been taken; None if the system does not tell.
    Memory of calloc takes a page when it is first written."""
    mincore = getattr(ctypes.CDLL(None), "mincore", None)
    if mincore is None:
        return None
    page, found = os.sysconf("SC_PAGE_SIZE"), 0
    for address, size in arrays:
        first, end = address // page, -(-(address + size) // page)
        taken = (ctypes.c_ubyte * (end - first))()
        if mincore(ctypes.c_void_p(first * page), ctypes.c_size_t((end - first) * page), taken):
            return None
        found += page * (end - first - bytes(taken).count(0))
    return found


def find_trim() -> Callable[[], None] | None:
    """A function that gives unused pages of the heap back to the system; None where the C library has none (it is
    glibc's)."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return None if malloc_trim is None else lambda: malloc_trim(0)


def rss_bytes() -> int | None:
    """Of this process, what is resident; None if the system does not tell."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return None


class HeapTrimmer:
    """``look`` trims the heap once the resident memory has grown by ``grown`` bytes above its level.

    The level is what is resident ``SETTLE`` seconds after a trim: by then the steps have taken again what they need.
    To trim on a schedule instead would give that away, and take it again, all the time.
    """

    def __init__(
        self,
        trim: Callable[[], None] | None = None,
        rss: Callable[[], int | None] = rss_bytes,
        clock: Callable[[], float] = time.monotonic,
        grown: int = GROWN,
    ) -> None:
        self._trim, self._rss, self._clock, self._grown = trim or find_trim(), rss, clock, grown
        self._next = clock() + SETTLE
        self._level: int | None = None

    def look(self) -> None:
        """Between two steps."""
        now = self._clock()
        if now < self._next or self._trim is None:
            return
        self._next, resident = now + LOOK, self._rss() or 0
        if self._level is None:
            self._level = resident
        elif resident > self._level + self._grown:
            self._trim()
            self._level, self._next = None, now + SETTLE
