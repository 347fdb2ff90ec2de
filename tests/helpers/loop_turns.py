"""The longest turn of a server's event loop."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def longest_turn(server: Any) -> Iterator[list[float]]:
    """Measure the CPU seconds of the longest turn of the loop of ``server``, as a list of one.

    The objects of earlier tests are left out of garbage collections, because a full collection of them takes longer
    than any turn."""
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
