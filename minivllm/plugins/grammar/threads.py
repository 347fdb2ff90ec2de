"""Choose the number of threads of a call by measurement.

Waking a thread and waiting for it takes as long as several masks of a JSON schema.  A mask of a regular expression may
take a thousand times as long, so no fixed number is right.  A call of a given size uses the number of threads with the
least mean time so far.  In increasing intervals a call tries half or twice the number.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

# number of calls between trials of a neighbouring size, at first and after trials without a change
SOON, LATE = 32, 512
# Weight of the newest measurement in the mean. A slow call may have been caused by other work on the machine.
FASTER, SLOWER = 0.5, 0.1
MOST = 3.0  # a longer measurement counts as this multiple of the mean


class Hill:
    """The mean time in seconds of a call by number of threads, and the best number so far."""

    def __init__(self, sizes: int) -> None:
        self.seconds: list[float | None] = [None] * sizes
        self.best = 0
        self._up = True  # direction of the last trial, True for more threads
        self.calls = 0  # number of calls since the last trial
        self.every = SOON

    def pick(self) -> int:
        """Return the index of the number of threads for the next call."""
        neighbours = (self.best - 1, self.best + 1)
        near = [i for i in neighbours if 0 <= i < len(self.seconds)]
        self.calls += 1
        if self.seconds[self.best] is None:
            return self.best
        for i in near:
            if self.seconds[i] is None:
                return i
        if near and self.calls >= self.every:
            self.calls = 0
            self.every = min(2 * self.every, LATE)
            self._up = not self._up
            return near[-1] if self._up else near[0]
        return self.best

    def record(self, at: int, seconds: float) -> None:
        """Add the measured seconds of a call to the mean time of its number of threads, ``sizes[at]``, and find the
        best number.
        """
        mean = self.seconds[at]
        if mean is None:
            self.seconds[at] = seconds
        else:
            weight = FASTER if seconds < mean else SLOWER
            change = min(seconds, MOST * mean) - mean
            self.seconds[at] = mean + weight * change
        measured = [(s, i) for i, s in enumerate(self.seconds) if s is not None]
        _, best = min(measured)
        if best != self.best:
            self.best = best
            self.every = SOON


class Threads:
    """Runs calls with the number of threads that has been fastest for calls of their kind and size.

    There are pools of 1, 2, 4 ... ``most`` threads, each created at its first use by ``make(n)``.  The pool None means
    the caller's own thread.  Only one call may run at a time.
    """

    def __init__(self, most: int, make: Callable[[int], Any]) -> None:
        powers = [1 << i for i in range(most.bit_length())]
        self.sizes = [*(size for size in powers if size < most), max(1, most)]
        self._make = make
        self._pools: dict[int, Any] = {1: None}
        self._hills: dict[tuple[str, int], Hill] = {}

    def run(self, kind: str, n: int, call: Callable[[Any], Any]) -> Any:
        """Return ``call(pool)`` for a pool of the best size; ``kind`` names the work, which concerns n rows."""
        if len(self.sizes) == 1 or n == 1:
            return call(None)
        key = (kind, n.bit_length())
        hill = self._hills.setdefault(key, Hill(len(self.sizes)))
        at = hill.pick()
        size = self.sizes[at]
        if size not in self._pools:
            self._pools[size] = self._make(size)
        start = perf_counter()
        out = call(self._pools[size])
        hill.record(at, (perf_counter() - start) / n)
        return out

    def used(self) -> dict[str, int]:
        """Return the current number of threads of each kind of call, by its kind and its largest number of rows."""
        sizes = {}
        for kind, bits in sorted(self._hills):
            hill = self._hills[kind, bits]
            sizes[f"{kind} {2**bits - 1}"] = self.sizes[hill.best]
        return sizes
