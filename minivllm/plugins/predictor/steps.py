"""The time of a step, learned from the steps of the engine.

    milliseconds = c0 + c1 * decode rows + c2 * prompt tokens + c3 * context tokens

The costs are the least squares of relative errors over the recent steps, and are at least 0.
"""

from __future__ import annotations

import numpy as np

from minivllm.core.interfaces.predictor import Predictor, StepWork

FORGET = 0.995  # factor of the weight of all earlier steps when a new step is learned
LEAST_STEPS = 8  # number of steps to learn from before the first time is predicted
RIDGE = 1e-9
TINY = 1e-300  # keeps the equations solvable if a kind of work never occurred


class LearnedSteps(Predictor):
    """A predictor that learns the time of steps.  A subclass predicts the lengths of answers."""

    _sums: np.ndarray | None = None  # f64 [4, 4] weighted sum of x xᵀ
    _products: np.ndarray  # f64 [4] weighted sum of x * milliseconds
    _costs: np.ndarray | None = None
    _steps = 0

    def stepped(self, work: StepWork, ms: float) -> None:
        x = _features(work)
        x /= ms  # errors are relative to the measured time, so that all steps have equal weight
        if self._sums is None:
            self._sums = np.zeros((4, 4))
            self._products = np.zeros(4)
        self._sums = FORGET * self._sums
        self._sums += np.outer(x, x)
        self._products = FORGET * self._products
        self._products += x
        self._steps += 1
        self._costs = None

    def step_ms(self, work: StepWork) -> float | None:
        if self._sums is None:
            return None
        if self._steps < LEAST_STEPS:
            return None
        costs = self._costs
        if costs is None:
            costs = _least_squares(self._sums, self._products)
            self._costs = costs
        found = _features(work) @ costs
        return max(float(found), 1e-6)


def _features(work: StepWork) -> np.ndarray:
    """Return the amounts of work f64 [4] of a step, by which the costs are multiplied: 1, decode rows, prompt tokens,
    context tokens.
    """
    return np.array([1.0, work.decode_rows, work.prompt_tokens, work.context])


def _least_squares(sums: np.ndarray, products: np.ndarray) -> np.ndarray:
    """Return the costs f64 [4] with the least squares of errors.

    Costs that would be negative are set to 0, the most negative one first.
    """
    free = np.arange(len(products))
    costs = np.zeros(len(products))
    while len(free):
        part = sums[free][:, free]
        diagonal = np.diag(part)
        ridge = RIDGE * diagonal
        part = part + np.diag(ridge + TINY)
        found = np.linalg.solve(part, products[free])
        worst = int(found.argmin())
        if found[worst] >= 0:
            costs[free] = found
            break
        free = np.delete(free, worst)
    return costs
