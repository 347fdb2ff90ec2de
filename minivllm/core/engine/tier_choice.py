"""The choice whether a request loads pages from a tier or computes them, by measured speeds."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping

NEW = 0.3  # weight of a new measurement in the mean
PROMPT = 4  # tokens of a row from which on a step counts as one of prompts
RECENT = 24  # number of recent steps from which the speed of computing is measured
WAITS = 9  # number of recent requests whose waits beyond the loads are measured
APART = 0.25  # least difference between two steps for a slope, as a share of the largest step
# A slow tier counts as faster by this factor after each request that did not load from it, so that it is measured
# again.
HOPE = 0.97


def mean(before: float | None, new: float) -> float:
    """Return a running mean in which later measurements count more."""
    return new if before is None else before + NEW * (new - before)


class Slope:
    """The growth of one quantity with another: the median of the slopes between recent pairs.

    Single pairs that took long, because other programs used the machine, do not change it."""

    def __init__(self) -> None:
        self.pairs: deque[tuple[float, float]] = deque(maxlen=RECENT)
        self._value: float | None = None

    def add(self, x: float, y: float) -> None:
        self.pairs.append((x, y))
        self._value = None

    @property
    def value(self) -> float | None:
        """Return the slope; the median of y / x while all x are alike, and None without pairs."""
        if self._value is None and self.pairs:
            x, y = np.array(self.pairs).T
            run = x[:, None] - x
            rise = y[:, None] - y
            far = run > APART * x.max()
            slopes = rise[far] / run[far]
            slope = float(np.median(slopes)) if len(slopes) else 0.0
            self._value = slope if slope > 0 else float(np.median(y / x))
        return self._value


class LoadChoice:
    """Measured speeds, and counts of the choices.

    A speed that was not measured counts as infinite for loads, so that they are tried, and as zero for computing.
    """

    def __init__(self, always: list[bool]) -> None:
        """Begin without measurements.  ``always`` marks the tiers from which pages are loaded in any case."""
        self.always = always
        # seconds by tokens, which gives the time that a token adds to a step that runs anyway
        self.steps = Slope()
        # Seconds that recent requests waited beyond the expected time of their loads, and their median. This is time in
        # queues and between polls.
        self.longer: deque[float] = deque(maxlen=WAITS)
        self.wait_seconds = 0.0
        self.byte_seconds: list[float | None] = [None] * len(
            always
        )  # seconds to load a byte from each tier
        self.write_seconds = 0.0  # seconds to write a byte to the device
        # bytes and seconds of all writes so far, by the number of a rank
        self.writes: dict[int, tuple[int, float]] = {}
        self.busy_seconds = 0.0  # time of all steps so far
        self.loaded = self.computed = 0  # requests
        # number of requests whose loads have ended, and the sums of the following times
        self.waited = 0
        self.predicted_seconds = self.measured_seconds = self.error_seconds = 0.0

    def step_ended(self, q_len: np.ndarray, milliseconds: float) -> None:
        """Note the time of a step whose rows have ``q_len`` i32 [R] tokens."""
        tokens = int(q_len.sum())
        self.busy_seconds += max(milliseconds, 0.0) / 1e3
        if milliseconds > 0 and tokens >= PROMPT * len(q_len):
            self.steps.add(tokens, milliseconds / 1e3)

    @property
    def token_seconds(self) -> float | None:
        """Return the seconds to compute a token of a prompt; None if no step was measured."""
        return self.steps.value

    def page_loaded(self, tier: int, size: int, seconds: float) -> None:
        """Note the time of a load of ``size`` bytes."""
        self.byte_seconds[tier] = mean(self.byte_seconds[tier], seconds / max(size, 1))

    def written(self, rank: int, size: int, seconds: float) -> None:
        """Note the bytes of all ranks' writes of host memory to device memory, as one rank has counted them so far,
        and its seconds."""
        bytes_before, seconds_before = self.writes.get(rank, (0, 0.0))
        if size > bytes_before:
            new = (seconds - seconds_before) / (size - bytes_before)
            self.write_seconds = mean(self.write_seconds or None, new)
            self.writes[rank] = size, seconds

    def seconds_to_load(self, sizes: Mapping[int, int]) -> float:
        """Return the expected seconds until pages are in host memory.

        ``sizes`` has the bytes from each tier; bytes that other requests have ordered before are included.
        """
        each = [size * (self.byte_seconds[tier] or 0.0) for tier, size in sizes.items()]
        return max(each, default=0.0) + self.wait_seconds

    def loads(self, own: Mapping[int, int], sizes: Mapping[int, int], tokens: int) -> bool:
        """Return True if loading pages is expected to be faster than computing their ``tokens``.

        ``own`` has the bytes of the request from each tier, and ``sizes`` those and the bytes ordered before."""
        writing = sum(own.values()) * self.write_seconds
        load = self.seconds_to_load(sizes) + writing
        forced = any(self.always[tier] for tier in own)
        if forced or self.token_seconds is None or load <= tokens * self.token_seconds:
            self.loaded += 1
            return True
        self.computed += 1
        self.wait_seconds *= HOPE
        self.write_seconds *= HOPE
        for tier in own:
            seconds = self.byte_seconds[tier]
            if seconds is not None:
                self.byte_seconds[tier] = seconds * HOPE
        return False

    def ended(self, predicted: float, measured: float, busy: float = 0.0) -> None:
        """Note the expected and the real seconds that a request waited for its pages.

        ``busy`` is the time of the steps that ended meanwhile.  A request that computes its blocks waits for these
        steps too, so the part of ``busy`` beyond the expected time of the loads does not count.
        """
        load = predicted - self.wait_seconds
        measured -= max(0.0, min(busy, measured) - load)
        self.waited += 1
        self.predicted_seconds += predicted
        self.measured_seconds += measured
        self.error_seconds += abs(predicted - measured)
        self.longer.append(measured - load)
        self.wait_seconds = max(0.0, float(np.median(self.longer)))

    def figures(self) -> dict[str, Any]:
        """Return the speeds in bytes and tokens per second (None if they were not measured), and the counters."""

        def speed(seconds: float | None) -> float | None:
            return 1 / seconds if seconds else None

        names = (
            "loaded",
            "computed",
            "waited",
            "predicted_seconds",
            "measured_seconds",
            "error_seconds",
        )
        return {
            "tokens_per_second": speed(self.token_seconds),
            "load_bytes_per_second": [speed(seconds) for seconds in self.byte_seconds],
            "write_bytes_per_second": speed(self.write_seconds),
            **{name: getattr(self, name) for name in names},
        }
