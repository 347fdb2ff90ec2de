"""A deadline for code that is not ours, as the import of somebody's module: it may sleep, or wait for a network."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

from minivllm.errors import PluginError, shown

ENV = "MINIVLLM_PLUGIN_TIMEOUT"
SECONDS = 30.0


def seconds() -> float:
    """That the import of one plug-in may take; 0: no matter how long.  PluginError for what is no number."""
    text = os.environ.get(ENV, "")
    try:
        found = float(text) if text else SECONDS
    except ValueError:
        found = -1.0
    if not 0 <= found < 1e9:
        raise PluginError(f"{ENV}={shown(text)}: want a number of seconds, 0 for no limit")
    return found


class TooSlow(BaseException):
    """Raised into what takes too long; no ``except Exception`` in it holds it up."""


@contextlib.contextmanager
def deadline(limit: float) -> Iterator[None]:
    """TooSlow after ``limit`` seconds.  By SIGALRM, which ends a sleep too; so there is no deadline outside of the main
    thread, on a system without that signal, inside of another deadline, or where the application uses the signal."""
    ours = threading.current_thread() is threading.main_thread() and hasattr(signal, "setitimer")
    if not ours or not limit or signal.getsignal(signal.SIGALRM) is not signal.SIG_DFL:
        yield
        return

    def ring(number: int, frame: Any) -> None:
        raise TooSlow(f"it had not ended after {limit:g} s ({ENV} sets the limit)")

    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, limit)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
