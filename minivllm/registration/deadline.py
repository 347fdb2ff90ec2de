"""A deadline for external code, such as the import of a plug-in module, which may sleep or wait for a network."""

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
    """Return the time limit for importing one plug-in, in seconds; 0 means no limit.

    It is the environment variable MINIVLLM_PLUGIN_TIMEOUT, by default 30.  PluginError if that is not a number."""
    text = os.environ.get(ENV, "")
    try:
        limit = float(text) if text else SECONDS
    except ValueError:
        limit = -1.0
    if not 0 <= limit < 1e9:
        raise PluginError(f"{ENV}={shown(text)}: expected a number of seconds, 0 for no limit")
    return limit


class TooSlow(BaseException):
    """Raised inside code that exceeds its deadline.

    It is a BaseException, so that ``except Exception`` does not catch it.
    """


@contextlib.contextmanager
def deadline(limit: float) -> Iterator[None]:
    """Raise TooSlow after ``limit`` seconds in the body of the ``with`` statement.

    It uses SIGALRM, which also interrupts a sleep.  There is therefore no deadline outside of the main thread, on a
    system without that signal, inside another deadline, and in applications that use the signal.
    """
    possible = threading.current_thread() is threading.main_thread() and hasattr(signal, "setitimer")
    if not possible or not limit or signal.getsignal(signal.SIGALRM) is not signal.SIG_DFL:
        yield
        return

    def ring(number: int, frame: Any) -> None:
        """Raise TooSlow in the interrupted code."""
        raise TooSlow(f"the code had not ended after {limit:g} s; {ENV} sets the limit in seconds")

    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, limit)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
