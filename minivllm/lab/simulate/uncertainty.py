"""Estimate the error of a simulation's results from the error of the table of costs.

``minivllm calibrate`` checks its table against steps of other requests.  The simulation runs twice more, with steps
that are faster and slower by the error of this check.  The band of a result is the range of the three runs, so it
includes the effect of queues on the error.  It does not include other errors, such as another load of the machine.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from minivllm.plugins.executor.costs import CostTable

LARGE = 0.2  # error of the check above which results are rough
FEW = 20  # number of steps of the check below which its error is uncertain
MOST = 0.9  # largest error that is used, for steps ten times as slow
OWN_TIME = ("run_seconds", "run_cpu_seconds")  # results about the simulator's own time, whose error is not estimated


@dataclass(frozen=True)
class CostError:
    """The relative error of a table of costs.

    ``error`` is the larger of the median error of a step and the error of the sum over all steps, None if the file has
    neither.  ``phase`` is "check", or "all" if the error was measured on the steps of the fit.
    """

    error: float | None
    phase: str = ""
    steps: int = 0
    median: float = 0.0
    sum: float = 0.0

    def scales(self) -> tuple[float, float]:
        """Return the factors on the time of all steps for a fast and a slow simulation.

        The error is relative to the measured time, so a table that predicts half the time is scaled by two.
        """
        error = self.error or 0.0
        return 1 / (1 + error), 1 / (1 - min(MOST, error))

    def warning(self, path: str) -> str:
        """Return a warning that results of the table at ``path`` are rough, "" if they are not."""
        advice = "calibrate again for longer (--seconds) while nothing else runs"
        if self.error is None:
            return f"{path}: its error is unknown, so figures have no band; {advice}"
        if self.error >= LARGE:
            off = f"{100 * self.median:.0f} % off in the median and {100 * self.sum:+.0f} % in sum"
            problem = f"the table of costs is {off} on steps of its {self.phase}, so figures are rough"
            return f"{path}: {problem}: read them with their bands; {advice}"
        if self.phase != "check" or self.steps < FEW:
            return f"{path}: only {self.steps} steps checked the table, so the bands are rough; {advice}"
        return ""

    def line(self) -> str:
        """Return a line that explains the bands."""
        if self.error is None:
            return "bands: unknown"
        fast, slow = self.scales()
        return (
            f"bands (from, to): all steps {fast:.2f} to {slow:.2f} times as long, by {self.steps} steps of the "
            f"{self.phase} of the costs: {100 * self.median:.1f} % off in the median, {100 * self.sum:+.1f} % in sum"
        )

    def as_json(self, path: str) -> dict[str, Any]:
        """Return the error as part of a JSON result."""
        found = {"error": self.error, "phase": self.phase, "steps": self.steps}
        return {**found, "median_error": self.median, "sum_error": self.sum, "warning": self.warning(path)}


def error_of(costs: CostTable) -> CostError:
    """Return the error of a table in its check, or in all steps if it has no check."""
    for phase in ("check", "all"):
        own = costs.fit.get(phase)
        own = own if isinstance(own, Mapping) else {}
        values = [_number(own.get(name)) for name in ("steps", "median_error", "sum_error")]
        if not any(map(math.isnan, values)) and values[0] > 0:
            steps, median, total = values
            return CostError(max(abs(median), abs(total)), phase, int(steps), median, total)
    return CostError(None)


def _number(value: Any) -> float:
    """Return a value as a float if it is a finite number, else NaN."""
    return float(value) if type(value) in (int, float) and math.isfinite(value) else math.nan


def bands(found: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Return the smallest and the largest value of each figure over the simulation and the ``others``."""
    out = {}
    for key, value in found.items():
        values = [one[key] for one in (found, *others) if type(one.get(key)) in (int, float)]
        if type(value) in (int, float) and key not in OWN_TIME:
            out[key] = [min(values), max(values)]
    return out
