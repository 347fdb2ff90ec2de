"""When a wait is likely to end: so that who waits looks without a rest then, and sleeps otherwise.

    begin ──── sleeps ────┬─ looks ───────────────┬─ sleeps ────
                          usual - EARLY           usual + LATE

To be woken takes 50 to 100 us, most of what a message between two processes costs.  To look all the time would keep a
core busy, in an idle process for ever.  Only a process's main thread looks: it holds the interpreter's lock meanwhile,
so that a thread which serves others (``AsyncLLM`` has its engine in one) would keep them waiting.
"""

from __future__ import annotations

import os
import threading
import time

EARLY = 200e-6  # seconds: a sleep ends some 100 us later than it should
LATE = 150e-6
LONG = 10e-3  # seconds; in longer waits a wake-up does not count
GAIN = 0.25  # of a wait in what is usual


def cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


let_others = getattr(os, "sched_yield", lambda: None)  # whoever waits for this core has it first


class Rhythm:
    """What is usual: the mean of recent waits, in which one counts as no more than about twice what was usual."""

    def __init__(self) -> None:
        self.usual = 0.0  # seconds
        self._since = float("-inf")
        self._looks = cores() > 1  # with one core nothing happens while this process looks

    def begin(self) -> None:
        """A wait begins."""
        self._since = time.perf_counter()

    def came(self) -> None:
        """It has ended; another one begins."""
        now = time.perf_counter()
        self.usual += GAIN * (min(now - self._since, 2 * self.usual + LATE) - self.usual)
        self._since = now

    def window(self) -> tuple[float, float]:
        """From when and until when it is worth while to look, by ``time.perf_counter``; until 0.0: never."""
        if not self._looks or self.usual > LONG or threading.current_thread() is not threading.main_thread():
            return 0.0, 0.0
        at = self._since + self.usual
        return at - EARLY, at + LATE
