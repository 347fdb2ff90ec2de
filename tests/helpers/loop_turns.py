"""The longest turn of a server's event loop, and the turn that allocates most."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def longest_turn(server: Any) -> Iterator[list[float]]:
    """Measure the CPU seconds of the longest turn of the loop of ``server``, as a list of one.

    The time of equal turns varies with the machine: new memory takes 2 to 10 microseconds for each page of 4 KiB that
    is written first, and a process whose heap has free memory needs none.  So a turn that copies 8 MiB three times took
    3 to 70 ms.  ``largest_allocation`` does not vary.  The objects of earlier tests are left out of garbage
    collections, because a full collection of them takes longer than any turn."""
    run, longest, thread = asyncio.events.Handle._run, [0.0], server._thread.ident

    def timed(self: Any) -> None:
        if threading.get_ident() != thread:
            return run(self)
        start = time.thread_time()
        run(self)
        longest[0] = max(longest[0], time.thread_time() - start)
        return None

    asyncio.events.Handle._run = timed  # type: ignore[method-assign]
    gc.freeze()
    try:
        yield longest
    finally:
        gc.unfreeze()
        asyncio.events.Handle._run = run  # type: ignore[method-assign]


@contextmanager
def largest_allocation() -> Iterator[list[int]]:
    """Measure the bytes that the turn which allocates most adds to the memory of Python objects, as a list of one.

    All turns of the loops of this thread count."""
    run, most, before, thread = asyncio.events.Handle._run, [0], [0], threading.get_ident()

    def count() -> None:
        most[0] = max(most[0], tracemalloc.get_traced_memory()[1] - before[0])

    def traced(self: Any) -> None:
        if threading.get_ident() != thread:
            return run(self)
        tracemalloc.reset_peak()
        before[0] = tracemalloc.get_traced_memory()[0]
        run(self)
        count()
        return None

    asyncio.events.Handle._run = traced  # type: ignore[method-assign]
    tracemalloc.start()
    try:
        yield most
    finally:
        count()  # the context may end in a turn
        tracemalloc.stop()
        asyncio.events.Handle._run = run  # type: ignore[method-assign]
