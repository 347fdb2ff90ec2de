"""Clocks of the executor sim: who waits, and what time it is meanwhile."""

from __future__ import annotations

import time


class RealClock:
    """Seconds; waits are slept."""

    def now(self) -> float:
        return time.monotonic()

    def until(self, when: float) -> None:
        if (left := when - self.now()) > 0:
            time.sleep(left)


class VirtualClock(RealClock):
    """Seconds in which waits are skipped: only what this process computes takes anybody's time."""

    skipped = 0.0

    def now(self) -> float:
        return time.monotonic() + self.skipped

    def until(self, when: float) -> None:
        self.skipped += max(0.0, when - self.now())


class ModelClock(RealClock):
    """Seconds that pass only where somebody waits: what this process computes takes no time, so a run is the same
    whatever machine it is on.  Whoever has nothing to do must skip to when there will be."""

    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time

    def until(self, when: float) -> None:
        self.time = max(self.time, when)


CLOCKS: dict[str, type[RealClock]] = {"real": RealClock, "virtual": VirtualClock}
