"""Log how long steps took on the device: the median and the 99th percentile."""

from __future__ import annotations

import logging
from collections import deque
from typing import Any

import numpy as np

from minivllm.plugin import EngineView, FinishedStep, Hooks, hookimpl

from .options import Options

LOG = logging.getLogger(__name__)


class MyPlugin(Hooks):
    """A method with @hookimpl receives the arguments of the hook that it names.  It runs during a step, so it must be
    fast.  A plug-in that raises three errors is disabled."""

    options: Options

    def __init__(self, options: Options | None = None) -> None:
        super().__init__(options or Options())
        self.ms: deque[float] = deque(maxlen=self.options.last)

    @hookimpl
    def minivllm_engine_started(self, engine: EngineView) -> None:
        """Reset the durations.  Open files and start threads here, not in ``__init__``."""
        self.ms.clear()

    @hookimpl
    def minivllm_step_finished(self, step: FinishedStep) -> None:
        self.ms.append(step.device_ms)

    @hookimpl
    def minivllm_engine_stopped(self) -> None:
        LOG.warning("%s", self.summary())

    def summary(self) -> dict[str, Any]:
        """Return the number of steps and their percentiles in milliseconds."""
        if not self.ms:
            return {"steps": 0}
        p50, p99 = np.percentile(self.ms, (50, 99))
        return {"steps": len(self.ms), "p50_ms": round(float(p50), 3), "p99_ms": round(float(p99), 3)}
