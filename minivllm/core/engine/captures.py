"""CUDA graph captures that the executor makes while the engine has nothing to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from minivllm.errors import EngineDeadError

VERB = "captures"
# Seconds without work before the first capture.  Without this wait, a client that sends one request
# after another would wait for a capture each time.
QUIET = 0.05
COMPILING = 0.02  # seconds until the next call of an executor that is still compiling kernels


class IdleCaptures:
    """Lets the executor capture one step after another while the engine is idle, until all are captured."""

    def __init__(self) -> None:
        self.left = 0  # number of steps that remain to be captured
        # seconds to wait before the next capture, or None if none remains
        self.pause: float | None = None
        self._implemented = True
        self._tokens = 0

    def turn(self, call: Callable[[str], Any], tokens: int) -> None:
        """Make one capture through the executor.

        ``tokens`` is the number of tokens that the engine has generated so far.  If it has grown since the last call,
        the engine was busy until now, and the next capture waits for ``QUIET`` seconds.  ``call(verb)`` is a method of
        the executor."""
        if not self._implemented:
            return
        if tokens != self._tokens:
            self._tokens = tokens
            self.pause = QUIET
            return
        try:
            answer = call(VERB)
            self.left = int(answer["left"])
            worked = bool(answer["worked"])
        except EngineDeadError:
            raise
        except Exception:  # this executor has no captures, or makes them all at the start
            self._implemented = False
            self.pause = None
            return
        self.pause = None if not self.left else 0.0 if worked else COMPILING
