"""Prediction of the end of a wait, so that a waiting process polls at that time and sleeps otherwise.

    begin ──── sleeps ────┬─ polls ───────────────┬─ sleeps ────
                          usual - EARLY           usual + LATE

Waking up takes 50 to 100 us, most of the cost of a message between two processes.  Polling all the time would keep a
core busy, even in an idle process.  Only a main thread polls, because polling holds the interpreter's lock and would
delay the other threads.  ``AsyncLLM`` runs its engine in another thread, which therefore sleeps.
"""

from __future__ import annotations

import os
import threading
import time

from minivllm.limits import usable_cores

# Polling begins this many seconds before the expected end of a wait, because a sleep ends about 100 us late.
EARLY = 200e-6
LATE = 150e-6  # polling ends this many seconds after the expected end of a wait
LONG = 10e-3  # a process does not poll for waits of more seconds, for which the cost of waking up is negligible
GAIN = 0.25  # weight of the latest wait in the mean


let_others = getattr(os, "sched_yield", lambda: None)  # lets other processes of this core run


class Rhythm:
    """The mean of recent waits.  A single wait counts as at most about twice the mean."""

    def __init__(self) -> None:
        self.usual = 0.0  # seconds
        self._since = float("-inf")
        # polling needs a second core, because on a single one it would keep the other process from running
        self._looks = usable_cores() > 1

    def begin(self) -> None:
        """Start to measure a wait."""
        self._since = time.perf_counter()

    def came(self) -> None:
        """Add the wait that ends now to the mean, and start to measure the next."""
        now = time.perf_counter()
        self.usual += GAIN * (min(now - self._since, 2 * self.usual + LATE) - self.usual)
        self._since = now

    def window(self) -> tuple[float, float]:
        """Return the begin and the end of the time to poll (``time.perf_counter``); (0.0, 0.0) means never."""
        if not self._looks or self.usual > LONG or threading.current_thread() is not threading.main_thread():
            return 0.0, 0.0
        at = self._since + self.usual
        return at - EARLY, at + LATE
