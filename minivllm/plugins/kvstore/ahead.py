"""Reads of pages that are requested soon, several at a time, because a disk needs several to reach its speed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

READERS = 6  # threads that read
DEPTH = 12  # largest number of pages that are read ahead or wait to be requested


class ReadAhead:
    """Pages that other threads read before they are requested, by key.  Only one thread calls the methods."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._expected: deque[bytes] = deque()
        # key -> (number of the file, the read page); the page is None if it is damaged
        self._reading: dict[bytes, tuple[int, Future[np.ndarray | None]]] = {}

    def expect(self, keys: Iterable[bytes]) -> None:
        """Set the pages that are requested next, in this order.  Reads that were not requested are forgotten."""
        for key in list(self._reading):
            self.forget(key)
        self._expected = deque(keys)

    def start(self, begin: Callable[[bytes], tuple[int, Callable[[], np.ndarray | None]] | None]) -> None:
        """Start reads while fewer than ``DEPTH`` pages are under way.

        ``begin`` returns the number of the file of a page and the function that reads it; None if it is not read
        ahead."""
        while self._expected and len(self._reading) < DEPTH:
            key = self._expected.popleft()
            found = None if key in self._reading else begin(key)
            if found is None:
                continue
            if self._pool is None:
                self._pool = ThreadPoolExecutor(READERS, thread_name_prefix="minivllm-reader")
            self._reading[key] = found[0], self._pool.submit(found[1])

    def take(self, key: bytes) -> Future[np.ndarray | None] | None:
        """Return the read of a page, which is forgotten; None if it was not read ahead."""
        if key in self._expected:  # the page was also listed as expected
            self._expected.remove(key)
        _, read = self._reading.pop(key, (0, None))
        return read

    def forget(self, key: bytes) -> None:
        """Forget the read of a page, after its end."""
        read = self.take(key)
        if read is not None:
            read.exception()

    def release(self, number: int) -> None:
        """Wait for the reads of a file, which is about to be closed.  Their pages stay."""
        for file, read in list(self._reading.values()):
            if file == number:
                read.exception()

    def close(self) -> None:
        """Forget all reads, and end the threads."""
        self._expected.clear()
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
        self._pool = None
        self._reading.clear()
