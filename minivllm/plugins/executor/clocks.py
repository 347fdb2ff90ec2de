"""Clocks of the executor sim, which define how waits pass and which time they return."""

from __future__ import annotations

import time


class RealClock:
    """A clock in real seconds, whose waits sleep."""

    def now(self) -> float:
        return time.monotonic()

    def until(self, when: float) -> None:
        if (left := when - self.now()) > 0:
            time.sleep(left)


class VirtualClock(RealClock):
    """A clock in seconds whose waits are skipped, so that only the computation of this process takes time."""

    skipped = 0.0

    def now(self) -> float:
        return time.monotonic() + self.skipped

    def until(self, when: float) -> None:
        self.skipped += max(0.0, when - self.now())


class ModelClock(RealClock):
    """A clock in seconds that advances only in waits.

    The computation of this process takes no time, so a run is the same on every machine.  An idle caller must advance
    the clock to the time of its next work.
    """

    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time

    def until(self, when: float) -> None:
        self.time = max(self.time, when)


CLOCKS: dict[str, type[RealClock]] = {"real": RealClock, "virtual": VirtualClock}
