"""The progress of the start of an engine: bytes of weights that are loaded, and captures that are made.

The code that works reports it, and one listener of the process shows it or sends it on.  Without a listener reporting
costs nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

WEIGHTS, CAPTURES = "weights", "captures"  # stages of a start; the progress of weights is in bytes
INTERVAL = 0.1  # ``thinned`` passes on at most one report in this many seconds

Listener = Callable[[str, int, int], None]  # callback (stage, amount done, total amount)
T = TypeVar("T")
_listeners: list[Listener] = []


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Pass the reports of this process to ``listener`` until the context ends."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def report(stage: str, done: int, total: int) -> None:
    """Call the newest listener with the progress of a stage: ``done`` of ``total``."""
    if _listeners:
        _listeners[-1](stage, done, total)


def counted(stage: str, items: Sequence[T]) -> Iterator[T]:
    """Yield items, and report each one as done when the next one is requested."""
    for done, item in enumerate(items):
        report(stage, done, len(items))
        yield item
    report(stage, len(items), len(items))


def thinned(listener: Listener) -> Listener:
    """Return a listener that passes on the first and the last report of a stage, and few of those between."""
    passed: dict[str, float] = {}  # stage -> time of its last report

    def listen(stage: str, done: int, total: int) -> None:
        now = time.monotonic()
        if done >= total or now - passed.get(stage, -INTERVAL) >= INTERVAL:
            passed[stage] = now
            listener(stage, done, total)

    return listen
