"""Memory of this process: the resident pages of arrays, and unused pages of the C library's heap.

Why the heap grows on a CPU: oneDNN keeps a kernel for each size of a step (``hardware.KEPT``).  Kernels live long and
the activations of a step do not, and both are in one heap.  A kernel that is compiled in the middle of a step splits
the free block that the activations leave, so larger activations later do not fit and take new pages.  With 256 kernels
and steps of 1 to 2,000 tokens, 155 MiB in use are spread over 545 MiB.  ``malloc_trim`` returns the free pages to the
system.  Mapping large arrays separately (``M_MMAP_THRESHOLD``) would take a quarter more CPU time.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Sequence

GROWN = 32 << 20  # growth of the resident memory in bytes after which the heap is trimmed
SETTLE = 30.0  # seconds between trims; a trim takes about 1 ms, and steps need 2 us to get each page back
LOOK = 1.0  # seconds between looks at the resident memory


def resident_bytes(arrays: Sequence[tuple[int, int]]) -> int | None:
    """Return the bytes of the resident pages of arrays, each given as (address, bytes).

    None means that the system does not report them.  Memory of ``calloc`` becomes resident at the first write."""
    mincore = getattr(ctypes.CDLL(None), "mincore", None)
    if mincore is None:
        return None
    page = os.sysconf("SC_PAGE_SIZE")
    found = 0
    for address, size in arrays:
        first, end = address // page, -(-(address + size) // page)
        taken = (ctypes.c_ubyte * (end - first))()
        if mincore(ctypes.c_void_p(first * page), ctypes.c_size_t((end - first) * page), taken):
            return None
        found += page * (end - first - bytes(taken).count(0))
    return found


def find_trim() -> Callable[[], None] | None:
    """Return a function that returns unused pages of the heap to the system.

    None means that the C library has no such function; glibc has one."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return None if malloc_trim is None else lambda: malloc_trim(0)


def rss_bytes() -> int | None:
    """Return the resident bytes of this process.  None means that the system does not report them."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return None


class HeapTrimmer:
    """Trims the heap when the resident memory has grown by ``grown`` bytes above its level.

    The level is the resident memory ``SETTLE`` seconds after a trim, when the steps have allocated their memory again.
    Regular trims would return and allocate that memory again and again.
    """

    def __init__(
        self,
        trim: Callable[[], None] | None = None,
        rss: Callable[[], int | None] = rss_bytes,
        clock: Callable[[], float] = time.monotonic,
        grown: int = GROWN,
    ) -> None:
        self._trim = trim or find_trim()
        self._rss, self._clock, self._grown = rss, clock, grown
        self._next = clock() + SETTLE
        self._level: int | None = None

    def look(self) -> None:
        """Trim the heap if the resident memory has grown enough, at most every ``LOOK`` seconds.  Call it between two
        steps."""
        now = self._clock()
        if now < self._next or self._trim is None:
            return
        self._next = now + LOOK
        resident = self._rss() or 0
        if self._level is None:
            self._level = resident
        elif resident > self._level + self._grown:
            self._trim()
            self._level = None
            self._next = now + SETTLE
