"""The time of each part of a step, always measured: a ring buffer of floats with a row for each step.

    plan      choose rows, tokens and blocks                (host)
    submit    pass the plan to the executor                 (host; on a CPU this includes the forward pass)
    wait      wait until a step in flight has finished      (host idle)
    publish   write results to sequences, text and streams  (host)
    device    compute on the device, as the executor reports it

The host time of each plug-in (``SeamTimes``) is measured in addition, whichever part calls it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from minivllm import files

from .external_calls import contained
from .interfaces.plan import NO_FORM, StepForm

PARTS = ("plan", "submit", "wait", "publish")
PLAN, SUBMIT, WAIT, PUBLISH = range(4)  # columns of StepClock.part
MOST_FORMS = (
    4096  # a clock counts at most this many forms of steps; there are usually a few hundred
)


class StartTimes:
    """Measures how many seconds each part of an engine's start takes.  Time in an inner part counts for this
    part only."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._inner = 0.0  # seconds of the parts that were measured inside the present part

    @contextmanager
    def of(self, part: str) -> Iterator[None]:
        """Add the seconds that the context lasts to ``part``."""
        outer, self._inner, begun = self._inner, 0.0, perf_counter()
        try:
            yield
        finally:
            spent = perf_counter() - begun
            self._add(part, spent - self._inner)
            self._inner = outer + spent

    def include(self, parts: Mapping[str, float]) -> None:
        """Add the parts of another measurement, made in the current context of ``of``, and deduct them from the part
        of this context."""
        for part, seconds in parts.items():
            self._add(part, seconds)
            self._inner += seconds

    def _add(self, part: str, seconds: float) -> None:
        """Add seconds to the measured time of a part of the start."""
        self.seconds[part] = self.seconds.get(part, 0.0) + seconds


class SeamTimes(dict[str, float]):
    """Measures the host time of plug-ins: seconds by seam (kind of plug-in), or by ``seam:plug-in`` for a seam with
    several plug-ins.

    The time of a nested call counts for the inner seam only, so the times add up.  All calls must be on one thread."""

    def __init__(self) -> None:
        super().__init__()
        self._inner = 0.0  # seconds of calls that were made inside the present call

    def run(self, seam: str, call: Callable[..., Any], *args: Any) -> Any:
        """Call ``call(*args)`` and count its time under ``seam``.  Anything that it raises becomes an ``Exception``
        (see ``call_foreign``)."""
        outer = self._inner
        self._inner = 0.0
        start = perf_counter()
        try:
            return call(*args)
        except Exception:
            raise
        except BaseException as e:
            raise contained(e) from e
        finally:
            span = perf_counter() - start
            self[seam] = self.get(seam, 0.0) + span - self._inner
            self._inner = outer + span

    def add(self, more: Mapping[str, float]) -> None:
        """Add seconds by seam."""
        for seam, seconds in more.items():
            self[seam] = self.get(seam, 0.0) + seconds

    def take(self) -> dict[str, float]:
        """Return the times since the last call, and start again at zero."""
        times = dict(self)
        self.clear()
        return times


def processor_seams(names: Sequence[str]) -> list[str]:
    """Return the names under which the times of processors are counted.  The last of ``names`` is the sampler."""
    return [*(f"processor:{name}" for name in names[:-1]), "sampler"]


def form_name(form: StepForm) -> str:
    """Return a form as text: "native", "separate", "decode 8", or "mixed 8x512" (rows and tokens of the capture)."""
    if form.kind == "mixed":
        return f"mixed {form.rows}x{form.tokens}"
    return f"{form.kind} {form.rows}" if form.rows else form.kind


class StepClock:
    """Stores the times of the last ``size`` steps: start, seconds of each part and seam (kind of plug-in), device
    milliseconds, rows, tokens and form."""

    def __init__(self, size: int = 8192) -> None:
        self.size, self.count = size, 0
        self.start = np.zeros(size)
        self.part = np.zeros((size, len(PARTS)))
        self.device_ms = np.zeros(size)
        self.rows, self.tokens = np.zeros(size, np.int32), np.zeros(size, np.int32)
        # form (how the layers of a step ran) -> number that stands for it in the array ``form``
        self.forms = {NO_FORM: 0}
        self.form = np.zeros(size, np.int32)
        # Seconds of plug-ins since the end of the last step. Time between two steps belongs to the
        # later step.
        self.seams = SeamTimes()
        # seam (kind of plug-in) -> seconds in each of the stored steps
        self.seam: dict[str, np.ndarray] = {}
        # the current step
        self._begun = self._mark = self._device_ms = 0.0
        self._spent = [0.0] * len(PARTS)
        self._form = 0

    def begin(self) -> None:
        """Start the clock for a step."""
        self._begun = self._mark = perf_counter()
        self._spent = [0.0] * len(PARTS)
        self._device_ms = 0.0
        self._form = 0

    def lap(self, part: int) -> None:
        """Add the time since the last call to the part with this number."""
        now = perf_counter()
        self._spent[part] += now - self._mark
        self._mark = now

    def collected(self, device_ms: float, seams: Mapping[str, float], form: StepForm) -> None:
        """Add the device time and the worker's plug-in times of a finished step, and note its form."""
        self._device_ms += device_ms
        self.seams.add(seams)
        if len(self.forms) < MOST_FORMS or form in self.forms:
            self._form = self.forms.setdefault(form, len(self.forms))

    def end(self, rows: int, tokens: int) -> None:
        """Store the times of the step in the ring buffer."""
        row = self.count % self.size
        self.start[row], self.part[row] = self._begun, self._spent
        self.device_ms[row], self.rows[row], self.tokens[row] = self._device_ms, rows, tokens
        self.form[row] = self._form
        for name, seconds in self.seams.items():
            if name not in self.seam:
                self.seam[name] = np.zeros(self.size)
            self.seam[name][row] = seconds
            # Keep the key, so that the next step overwrites the old value in the ring.
            self.seams[name] = 0.0
        self.count += 1

    def _order(self) -> np.ndarray:
        """Return the rows of the ring buffer, the oldest step first."""
        n = min(self.count, self.size)
        return (np.arange(self.count - n, self.count)) % self.size

    def form_counts(self, rows: np.ndarray) -> list[tuple[StepForm, int]]:
        """Return each form of the steps in ``rows`` of the ring buffer with their number, the most frequent first.

        Turns that collected no step, and steps whose form the executor does not report, are left out."""
        counts = np.bincount(self.form[rows], minlength=len(self.forms)).tolist()
        found = [
            (form, counts[number])
            for form, number in self.forms.items()
            if number and counts[number]
        ]
        return sorted(found, key=lambda one: -one[1])

    def summary(self) -> dict[str, Any]:
        """Return the number of steps, times over the stored steps, and the number of steps by form (``forms``).

        These are the median milliseconds of each part, and the mean milliseconds of each seam (``seam_ms``).  The
        latter is a mean, because many plug-ins run in some steps only, and means add up.
        """
        rows = self._order()
        summary: dict[str, Any] = {"steps": self.count}
        columns = [*zip(PARTS, 1e3 * self.part.T, strict=True), ("device", self.device_ms)]
        for name, values in columns:
            median = float(np.median(values[rows])) if len(rows) else 0.0
            summary[f"{name}_ms"] = round(median, 4)
        summary["seam_ms"] = {
            name: round(float(self.seam[name][rows].mean()) * 1e3, 4) for name in sorted(self.seam)
        }
        summary["forms"] = {form_name(form): count for form, count in self.form_counts(rows)}
        return summary

    def chrome_trace(self, path: str | Path) -> None:
        """Write the stored steps as a Chrome trace (chrome://tracing, Perfetto), with a bar for each part."""
        files.check_output(path)
        events = []
        for row in self._order().tolist():
            at = self.start[row]
            for i, name in enumerate(PARTS):
                span = self.part[row, i]
                args = {"rows": int(self.rows[row]), "tokens": int(self.tokens[row])}
                events.append(
                    {
                        "name": name,
                        "ph": "X",
                        "ts": at * 1e6,
                        "dur": span * 1e6,
                        "pid": 0,
                        "tid": i,
                        "args": args,
                    }
                )
                at += span
        Path(path).write_text(json.dumps({"traceEvents": events}))
