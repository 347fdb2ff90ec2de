"""Captures that the executor makes while the engine has nothing to do (the verb "captures")."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from minivllm.errors import EngineDeadError

VERB = "captures"
# Seconds without work before the first capture.  A client that sends one request after another would wait for each.
QUIET = 0.05
COMPILING = 0.02  # seconds until the next call of an executor that still compiles


class IdleCaptures:
    """Calls the executor in idle turns until no capture is left."""

    def __init__(self) -> None:
        self.left = 0  # number of captures that are left
        # seconds until the next idle turn, or None if no capture is left
        self.pause: float | None = None
        self._implemented = True
        self._tokens = 0

    def turn(self, call: Callable[[str], Any], tokens: int) -> None:
        """Make one capture, which takes 20 to 80 ms on a GPU.

        ``tokens`` is the number of tokens that the engine has generated.  If it has grown, the engine was busy until
        now, and the next capture is made after ``QUIET`` seconds.  ``call`` calls the executor."""
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
        except Exception:  # an executor without this verb captures at the start
            self._implemented = False
            self.pause = None
            return
        self.pause = None if not self.left else 0.0 if worked else COMPILING
