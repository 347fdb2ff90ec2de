"""Where the time of each step goes, always on: a fixed ring of floats, one row a step.

plan      policy, budget, blocks                     (host)
submit    hand the plan to the executor              (host; on CPU this is the forward pass too)
wait      until a step in flight has come back       (host idle)
publish   results to sequences, text, streams        (host)
device    time on the device as the executor reports it

Beside these parts, the time that each plug-in takes on the host (``SeamTimes``), wherever in a turn it is called.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from minivllm import files

from .external_calls import contained

PARTS = ("plan", "submit", "wait", "publish")
PLAN, SUBMIT, WAIT, PUBLISH = range(4)  # columns of StepClock.part


class SeamTimes(dict[str, float]):
    """Host seconds by seam, ``seam:plug-in`` where a seam holds several.  A call within another seam's call counts for
    its own seam only, so the times add up.  One thread."""

    def __init__(self) -> None:
        super().__init__()
        self._inner = 0.0  # seconds of the calls within the one that runs

    def run(self, seam: str, call: Callable[..., Any], *args: Any) -> Any:
        """``call(*args)``, its time counted under ``seam``.  What it raises is an ``Exception`` (see ``foreign``)."""
        outer, self._inner = self._inner, 0.0
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
        for seam, seconds in more.items():
            self[seam] = self.get(seam, 0.0) + seconds

    def take(self) -> dict[str, float]:
        """What was counted since the last time."""
        out = dict(self)
        self.clear()
        return out


def processor_seams(names: Sequence[str]) -> list[str]:
    """What the times of processors are counted under; the sampler is the last."""
    return [*(f"processor:{name}" for name in names[:-1]), "sampler"]


class StepClock:
    """The last ``size`` steps: start, seconds of each part and seam, device milliseconds, rows, tokens."""

    def __init__(self, size: int = 8192) -> None:
        self.size, self.count = size, 0
        self.start = np.zeros(size)
        self.part = np.zeros((size, len(PARTS)))
        self.device_ms = np.zeros(size)
        self.rows, self.tokens = np.zeros(size, np.int32), np.zeros(size, np.int32)
        # since the end of the last step: what is added between two counts for the next
        self.seams = SeamTimes()
        self.seam: dict[str, np.ndarray] = {}  # seam -> seconds [size]
        # of the step that runs
        self._begun = self._mark = self._device_ms = 0.0
        self._spent = [0.0] * len(PARTS)

    def begin(self) -> None:
        self._begun = self._mark = perf_counter()
        self._spent = [0.0] * len(PARTS)
        self._device_ms = 0.0

    def lap(self, part: int) -> None:
        """The time since the last mark belongs to this part."""
        now = perf_counter()
        self._spent[part] += now - self._mark
        self._mark = now

    def collected(self, device_ms: float, seams: Mapping[str, float]) -> None:
        """A step has come back: what it took on the device, and the worker's seams."""
        self._device_ms += device_ms
        self.seams.add(seams)

    def end(self, rows: int, tokens: int) -> None:
        row = self.count % self.size
        self.start[row], self.part[row] = self._begun, self._spent
        self.device_ms[row], self.rows[row], self.tokens[row] = self._device_ms, rows, tokens
        for name, seconds in self.seams.items():
            if name not in self.seam:
                self.seam[name] = np.zeros(self.size)
            self.seam[name][row] = seconds
            # the key stays, so that a row of the ring is always written anew
            self.seams[name] = 0.0
        self.count += 1

    def _order(self) -> np.ndarray:
        n = min(self.count, self.size)
        return (np.arange(self.count - n, self.count)) % self.size

    def summary(self) -> dict[str, Any]:
        """Over the steps kept: median milliseconds of each part, and mean milliseconds of each seam (``seam_ms``; most
        plug-ins are called in some steps only, and means add up); the number of steps."""
        rows = self._order()
        out: dict[str, Any] = {"steps": self.count}
        for i, name in enumerate(PARTS):
            out[f"{name}_ms"] = (
                round(float(np.median(self.part[rows, i])) * 1e3, 4) if len(rows) else 0.0
            )
        out["device_ms"] = round(float(np.median(self.device_ms[rows])), 4) if len(rows) else 0.0
        out["seam_ms"] = {
            name: round(float(self.seam[name][rows].mean()) * 1e3, 4) for name in sorted(self.seam)
        }
        return out

    def chrome_trace(self, path: str | Path) -> None:
        """Write the steps kept as a Chrome trace (chrome://tracing, Perfetto): one bar a part."""
        files.check_output(path)
        events = []
        for row in self._order().tolist():
            at = self.start[row]
            for i, name in enumerate(PARTS):
                span = self.part[row, i]
                args = {"rows": int(self.rows[row]), "tokens": int(self.tokens[row])}
                event = {
                    "name": name,
                    "ph": "X",
                    "ts": at * 1e6,
                    "dur": span * 1e6,
                    "pid": 0,
                    "tid": i,
                    "args": args,
                }
                events.append(event)
                at += span
        Path(path).write_text(json.dumps({"traceEvents": events}))
