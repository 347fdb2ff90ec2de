"""Where the time of each step goes, always on: a fixed ring of floats, one row a step.

plan      policy, budget, blocks                     (host)
submit    hand the plan to the executor              (host; on CPU this is the forward pass too)
wait      until a step in flight has come back       (host idle)
publish   results to sequences, text, streams        (host)
device    time on the device as the executor reports it
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np

PARTS = ("plan", "submit", "wait", "publish")


class StepClock:
    """The last ``size`` steps: start, seconds of each part, device milliseconds, rows, tokens."""

    def __init__(self, size: int = 8192) -> None:
        self.size, self.count = size, 0
        self.start = np.zeros(size)
        self.part = np.zeros((size, len(PARTS)))
        self.device_ms = np.zeros(size)
        self.rows, self.tokens = np.zeros(size, np.int32), np.zeros(size, np.int32)
        self._at = self._mark = 0.0

    def begin(self) -> None:
        self._row = self.count % self.size
        self._mark = time.perf_counter()
        self.start[self._row] = self._mark
        self.part[self._row] = 0
        self.device_ms[self._row] = self.rows[self._row] = self.tokens[self._row] = 0

    def lap(self, part: int) -> None:
        """The time since the last mark belongs to this part."""
        now = time.perf_counter()
        self.part[self._row, part] += now - self._mark
        self._mark = now

    def end(self, rows: int, tokens: int) -> None:
        self.rows[self._row], self.tokens[self._row] = rows, tokens
        self.count += 1

    def _order(self) -> np.ndarray:
        n = min(self.count, self.size)
        return (np.arange(self.count - n, self.count)) % self.size

    def summary(self) -> dict[str, float]:
        """Median milliseconds of each part over the steps kept, and the number of steps."""
        rows = self._order()
        out: dict[str, float] = {"steps": self.count}
        for i, name in enumerate(PARTS):
            out[f"{name}_ms"] = round(float(np.median(self.part[rows, i])) * 1e3, 4) if len(rows) else 0.0
        out["device_ms"] = round(float(np.median(self.device_ms[rows])), 4) if len(rows) else 0.0
        return out

    def chrome_trace(self, path: str | Path) -> None:
        """Write the steps kept as a Chrome trace (chrome://tracing, Perfetto): one bar a part."""
        events = []
        for row in self._order().tolist():
            at = self.start[row]
            for i, name in enumerate(PARTS):
                span = self.part[row, i]
                args = {"rows": int(self.rows[row]), "tokens": int(self.tokens[row])}
                event = {"name": name, "ph": "X", "ts": at * 1e6, "dur": span * 1e6, "pid": 0, "tid": i, "args": args}
                events.append(event)
                at += span
        Path(path).write_text(json.dumps({"traceEvents": events}))
