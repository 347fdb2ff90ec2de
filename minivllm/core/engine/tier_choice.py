"""The choice whether a request loads KV pages from a tier (CPU memory or disk) or computes them again, by measured
speeds."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping

PROMPT = 4  # a step counts as one with prompts if a row has this many tokens
RECENT = 24  # a speed is measured from this many of the newest steps or copies
LEAST = 1e-12  # seconds to copy a byte, at least; shorter times are errors of a clock
WAITS = 9  # count of newest requests from which the waiting time besides the loads is measured
APART = 0.25  # two steps show a slope only if they differ by this share of the larger one
# After each request that does not load from a slow tier, the tier counts as faster by this factor,
# so that its speed is measured again.
HOPE = 0.97


class CopyPace:
    """The measured time to copy a byte: the median of recent copies."""

    def __init__(self, start: float | None = None) -> None:
        """Start with ``start`` seconds per byte until the first measurement; None means unknown."""
        self._start = start
        self._recent: deque[float] = deque(maxlen=RECENT)

    def add(self, size: int, seconds: float) -> None:
        """Note the time of a copy of ``size`` bytes."""
        if size > 0:
            self._recent.append(max(seconds / size, LEAST))

    @property
    def value(self) -> float | None:
        """Return the seconds for a byte: the median of recent copies, or before the first one the initial value, which
        is None if unknown."""
        return float(np.median(self._recent)) if self._recent else self._start

    def lower(self) -> None:
        """Multiply the time per byte by the factor HOPE, so that a slow copy is tried again."""
        for i, seconds in enumerate(self._recent):
            self._recent[i] = seconds * HOPE


class Slope:
    """How much one quantity grows with another: the median of the slopes between recent pairs of measurements.

    So a few measurements that took long because of other programs on the machine do not change it."""

    def __init__(self) -> None:
        self.pairs: deque[tuple[float, float]] = deque(maxlen=RECENT)
        self._value: float | None = None

    def add(self, x: float, y: float) -> None:
        self.pairs.append((x, y))
        self._value = None

    @property
    def value(self) -> float | None:
        """Return the slope.  While all x are about equal, return the median of y / x; None without measurements."""
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
    """Chooses between loading and computing by measured speeds, and counts the choices.

    A speed that was not measured yet counts as infinite for loads, so that they are tried, and as zero for computing.
    """

    def __init__(self, always: list[bool], copy_seconds: float | None = None) -> None:
        """Begin without measurements.

        ``always`` marks the tiers from which pages are loaded in any case.  ``copy_seconds`` is the time to copy a byte
        from host memory to the device, if the worker has measured it at its start.
        """
        self.always = always
        # (tokens of a step, seconds): the slope is the time that each token adds to a step
        self.steps = Slope()
        # For recent requests whose loads ended while no row ran: seconds that they waited beyond the
        # expected time of their loads, for example in queues and between polls; and the median.
        self.longer: deque[float] = deque(maxlen=WAITS)
        self.wait_seconds = 0.0
        # measured time per byte of loads from each tier, and of writes to the device within steps
        self.loading = [CopyPace(copy_seconds) for _ in always]
        self.writing = CopyPace()
        # rank (number of a worker process) -> bytes and seconds of all its writes so far
        self.writes: dict[int, tuple[int, float]] = {}
        self.busy_seconds = 0.0  # seconds of all steps so far
        self.loaded = self.computed = 0  # requests
        # count of requests whose loads have ended, and sums of their expected seconds, of their
        # measured seconds and of the errors
        self.waited = 0
        self.predicted_seconds = self.measured_seconds = self.error_seconds = 0.0

    def step_ended(self, q_len: np.ndarray, milliseconds: float) -> None:
        """Add a step to the measurements.  ``q_len`` i32 [R] has the number of tokens of each of its rows."""
        tokens = int(q_len.sum())
        self.busy_seconds += max(milliseconds, 0.0) / 1e3
        if milliseconds > 0 and tokens >= PROMPT * len(q_len):
            self.steps.add(tokens, milliseconds / 1e3)

    @property
    def token_seconds(self) -> float | None:
        """Return the seconds to compute a token of a prompt; None if no step was measured."""
        return self.steps.value

    def page_loaded(self, tier: int, size: int, seconds: float) -> None:
        """Add a load of ``size`` bytes from a tier to the measurements."""
        self.loading[tier].add(size, seconds)

    def written(self, rank: int, size: int, seconds: float) -> None:
        """Record the bytes and seconds of writes from host to device memory.

        ``size`` is the total of all ranks' writes so far, as rank ``rank`` has counted them, and ``seconds`` the total
        time of this rank.
        """
        bytes_before, seconds_before = self.writes.get(rank, (0, 0.0))
        if size > bytes_before:
            self.writing.add(size - bytes_before, seconds - seconds_before)
            self.writes[rank] = size, seconds

    def seconds_to_load(self, sizes: Mapping[int, int]) -> float:
        """Return the expected seconds until pages are in host memory.

        ``sizes`` has the bytes from each tier; bytes that other requests have ordered before are included.
        """
        each = [size * (self.loading[tier].value or 0.0) for tier, size in sizes.items()]
        return max(each, default=0.0) + self.wait_seconds

    def loads(
        self, own: Mapping[int, int], sizes: Mapping[int, int], tokens: int, others: int = 0
    ) -> bool:
        """Return True if loading pages costs all requests together less time than computing their ``tokens``.

        ``own`` has the bytes of the request from each tier, and ``sizes`` those and the bytes ordered before.  A load
        delays only its own request.  A step that computes the tokens delays the ``others`` that run or wait as well."""
        writing = sum(own.values()) * (self.writing.value or 0.0) * (1 + others)
        load = self.seconds_to_load(sizes) + writing
        forced = any(self.always[tier] for tier in own)
        compute = None if self.token_seconds is None else tokens * self.token_seconds * (1 + others)
        if forced or compute is None or load <= compute:
            self.loaded += 1
            return True
        self.computed += 1
        self.wait_seconds *= HOPE
        for pace in (self.writing, *(self.loading[tier] for tier in own)):
            pace.lower()
        return False

    def ended(
        self, predicted: float, measured: float, busy: float = 0.0, alone: bool = True
    ) -> None:
        """Add the expected and the real seconds that a request waited for its pages to the measurements.

        ``busy`` is the time of the steps that ended meanwhile.  A request that computes its blocks waits for these
        steps too, so the part of ``busy`` beyond the expected time of the loads does not count.  Waits beyond the loads
        are only measured if no row ran (``alone``), because the end of a load is noticed between steps."""
        load = predicted - self.wait_seconds
        measured -= max(0.0, min(busy, measured) - load)
        self.waited += 1
        self.predicted_seconds += predicted
        self.measured_seconds += measured
        self.error_seconds += abs(predicted - measured)
        if alone and busy <= 0:
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
            "load_bytes_per_second": [speed(pace.value) for pace in self.loading],
            "write_bytes_per_second": speed(self.writing.value),
            **{name: getattr(self, name) for name in names},
        }
