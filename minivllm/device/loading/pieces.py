"""Threads that read, scale and check the pieces of adapters.  They serve all loads of a process."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

from minivllm.limits import usable_cores

PIECE = 8 << 20  # largest number of bytes that a call of ``in_threads`` reads, scales or checks
THREADS = min(8, usable_cores())  # threads of ``in_threads``
T = TypeVar("T")


def in_threads(calls: Sequence[Callable[[], T]]) -> list[T]:
    """Return the results of calls that run on several threads.

    The first error of a call is raised when all calls have ended.
    """
    if len(calls) == 1:
        return [calls[0]()]
    futures = [_threads().submit(call) for call in calls]
    wait(futures)
    return [future.result() for future in futures]


@functools.cache
def _threads() -> ThreadPoolExecutor:
    """Return the threads of ``in_threads``."""
    return ThreadPoolExecutor(THREADS, "minivllm-read")
