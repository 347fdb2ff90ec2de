"""Fit costs to measured steps: least squares of the relative error, with no negative cost.

A step's time is a sum of broken lines and slopes, and therefore linear in the costs.  A step with a large error has a
smaller weight, since other processes may have delayed it (Huber, "Robust estimation of a location parameter", 1964).

Only ``limit`` is not linear: the number of tokens beyond which steps with prompts have other costs.  All candidates are
tried.  The one with the least error is used if it is clearly better than no limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from minivllm.plugins.executor.costs import PROMPT_SLOPES, SLOPES, BrokenLine, CostTable, PromptCosts, StepCounts

OFF = 0.5  # relative error above which a step has a smaller weight
ROUNDS = 8  # of computing weights
FEW_ROUNDS = 2  # rounds of computing weights while limits are compared
FEWEST = 20  # fewest measured steps near a point of a broken line, if the point is to be used
# weight of the interpolation between a point's neighbours, in steps; it matters where few steps were measured
SMOOTH = 16.0
GAIN = 0.95  # a limit is used if it reduces the error to at most this share

Array = np.ndarray


@dataclass(frozen=True)
class MeasuredStep:
    """A step of an engine, with its counts and its time."""

    counts: StepCounts
    seconds: float
    phase: str  # of the calibration


def fit(steps: Sequence[MeasuredStep], rows_at: Sequence[int], tokens_at: Sequence[int]) -> CostTable:
    """Fit a table of costs, without its descriptions.

    ``rows_at`` and ``tokens_at`` are candidate points of the broken lines, ascending; a point is used if enough steps
    were measured near it.  Points of ``tokens_at`` are also candidates for the limit.
    """
    columns = _Columns(steps)
    design = min(_designs(columns, rows_at, tokens_at), key=lambda one: one.error)
    costs, _ = _solve(design.matrix, columns.seconds, ROUNDS, design.bends)
    ends = np.cumsum([len(part) for part in design.parts])
    parts = [part.tolist() for part in np.split(costs, ends[:-1])]
    rows, line, prompts, small_line, small_prompts, rest = parts
    large = _prompt_costs(design.parts[1], line, prompts)
    small = large
    if design.limit:
        small = _prompt_costs(design.parts[3], small_line, small_prompts)
    slopes = dict(zip(SLOPES, rest, strict=True))
    return CostTable(BrokenLine(design.parts[0], rows), small, large, design.limit, slopes)


def _prompt_costs(points: Sequence[Any], seconds: list[float], slopes: list[float]) -> PromptCosts:
    by_name = dict(zip(PROMPT_SLOPES, slopes, strict=True))
    return PromptCosts(BrokenLine(points, seconds), by_name)


class _Columns:
    """The counts and the measured seconds of all n steps, as arrays [n], or [n, k] for k counts."""

    def __init__(self, steps: Sequence[MeasuredStep]) -> None:
        counts = [s.counts for s in steps]

        def column(name: str) -> Array:
            return np.array([getattr(c, name) for c in counts], np.float64)

        self.seconds = np.array([s.seconds for s in steps])
        prefill = column("prefill")
        self.rows = column("rows")
        self.kv = column("kv")
        self.tokens = column("tokens")
        self.before = column("before")
        self.prompts = prefill > 0
        own = [self.rows, self.kv, column("pairs"), column("chunks")]  # the columns in the order of PROMPT_SLOPES
        self.own = np.stack(own, 1)
        planned = column("planned")
        if np.array_equal(planned, prefill):
            # each step plans its own prompts, so their cost is part of the line of tokens
            planned = np.zeros(len(steps))
        self.common = [column("joins"), planned, column("ends"), column("fresh")]
        self.wake = column("wake")


@dataclass(frozen=True)
class _Design:
    """A linear least-squares problem, in which each unknown cost of a step has a column of ``matrix``.

    ``parts`` lists the costs: points of the line of decode rows; points of the line of tokens beyond the limit, and
    slopes there; points and slopes within the limit; slopes of all steps.
    """

    limit: int
    parts: tuple[Sequence[Any], ...]
    matrix: Array
    bends: Array  # from ``_bends``: its rows times the costs are the changes of slope of the broken lines
    error: float  # the error of the best costs


def _designs(columns: _Columns, rows_at: Sequence[int], tokens_at: Sequence[int]) -> list[_Design]:
    """Return the design without a limit, and one design for each limit that leaves enough steps on both sides.

    The error of the design without a limit is lowered a little, so that a limit is chosen only if it is clearly better.
    """
    without = _design(columns, 0, rows_at, tokens_at)
    found = [replace(without, error=GAIN * without.error)]
    tokens = columns.tokens[columns.prompts]
    for limit in tokens_at[:-1]:
        within = np.count_nonzero(tokens <= limit)
        beyond = np.count_nonzero(tokens > limit)
        if min(within, beyond) >= 2 * FEWEST:
            found.append(_design(columns, limit, rows_at, tokens_at))
    return found


def _design(columns: _Columns, limit: int, rows_at: Sequence[int], tokens_at: Sequence[int]) -> _Design:
    """Return the least-squares problem for the costs of a step, with separate costs up to ``limit`` tokens; 0 means no
    limit.
    """
    large = columns.prompts & (columns.tokens > limit)
    small = columns.prompts & ~large
    decodes = ~columns.prompts
    above = [x for x in tokens_at if x > limit]
    if limit and above[0] > limit + 1:
        above = [limit + 1, *above]
    at_rows = _reached(rows_at, columns.rows[decodes])
    at_large = _reached(above, columns.tokens[large])
    at_small: list[int] = []
    cold = np.zeros(len(large), bool)  # steps within the limit that directly follow a step beyond it
    if limit:
        at_small = _reached([x for x in tokens_at if x <= limit], columns.tokens[small])
        cold = (columns.before > limit) & ~large
    blocks = [_hats(at_rows, columns.rows) * decodes[:, None]]
    for points, steps in ((at_large, large), (at_small, small)):
        if points:
            chosen = steps[:, None]
            blocks.append(_hats(points, columns.tokens) * chosen)
            blocks.append(columns.own * chosen)
    wake_large = columns.wake * large * (limit > 0)
    rest = [columns.kv * decodes, *columns.common, cold, cold * columns.kv, columns.wake, wake_large]  # as SLOPES
    blocks.append(np.stack(rest, 1))
    matrix = np.concatenate(blocks, axis=1)
    small_slopes = PROMPT_SLOPES if limit else ()
    parts = (at_rows, at_large, PROMPT_SLOPES, at_small, small_slopes, SLOPES)
    bends = _bends(parts, matrix, columns.seconds)
    _, error = _solve(matrix, columns.seconds, FEW_ROUNDS, bends)
    return _Design(limit, parts, matrix, bends, error)


def _reached(points: Sequence[int], values: Array) -> list[int]:
    """Return the first point, and each point with enough values between it and the last one returned."""
    kept = [points[0]]
    for high in points[1:]:
        between = (values > kept[-1]) & (values <= high)
        if np.count_nonzero(between) >= FEWEST:
            kept.append(high)
    return kept


def _hats(points: Sequence[int], x: Array) -> Array:
    """Return the weight of each point of a broken line at ``x``, [n, points].

    Beyond the last point the line continues as between the last two.
    """
    weights = np.zeros((len(x), len(points)))
    if len(points) == 1:
        weights[:, 0] = 1
        return weights
    right = np.searchsorted(points, x, side="right")
    i = np.clip(right, 1, len(points) - 1)
    low = np.array(points)[i - 1]
    high = np.array(points)[i]
    share = (x - low) / (high - low)
    every = np.arange(len(x))
    weights[every, i - 1] = 1 - share
    weights[every, i] = share
    return weights


def _bends(parts: tuple[Sequence[Any], ...], matrix: Array, seconds: Array) -> Array:
    """Return a row [columns] for each inner point of a line.

    A row times the costs is the distance of the point from the straight line between its neighbours, relative to the
    time of steps there.
    """
    columns = sum(map(len, parts))
    rows = []
    first = 0
    for points in parts:
        is_line = len(points) > 0 and isinstance(points[0], int)
        for i in range(1, len(points) - 1) if is_line else ():
            below, point, above = points[i - 1 : i + 2]
            share = (point - below) / (above - below)
            at = first + i
            row = np.zeros(columns)
            row[at - 1 : at + 2] = share - 1, 1, -share
            weights = matrix[:, at]
            rows.append(row * weights.sum() / (weights @ seconds))
        first += len(points)
    return np.array(rows).reshape(-1, columns)


def _solve(matrix: Array, seconds: Array, rounds: int, bends: Array) -> tuple[Array, float]:
    """Return the costs with the least relative error, and this error as a mean.

    Each round takes errors relative to the predictions of the round before.  Relative to the measured times, steps that
    happened to be short would have the largest weight, and the sum of all predictions would be too small.
    """
    weight = 1 / seconds
    straight = np.sqrt(SMOOTH) * bends
    for _ in range(rounds):
        rows = np.concatenate([matrix * weight[:, None], straight])
        target = np.concatenate([seconds * weight, np.zeros(len(straight))])
        costs = _solve_nonnegative(rows, target)
        predicted = np.maximum(matrix @ costs, seconds.min())
        off = np.abs(seconds / predicted - 1)
        trust = np.minimum(1, OFF / np.maximum(off, 1e-9))
        weight = np.sqrt(trust) / predicted
    return costs, float(np.minimum(off, OFF).mean())


def _solve_nonnegative(matrix: Array, target: Array) -> Array:
    """Return the x >= 0 with the least |matrix x - target|.

    All elements start at 0.  In each round the element that helps most becomes free, and elements that would fall below
    0 are fixed at 0 again (Lawson and Hanson, "Solving Least Squares Problems", 1974, chapter 23).
    """
    size = np.sqrt((matrix**2).sum(axis=0))
    size[size == 0] = 1
    scaled = matrix / size
    n = matrix.shape[1]
    gram = scaled.T @ scaled + 1e-9 * np.eye(n)
    wanted = scaled.T @ target
    x = np.zeros(n)
    free = np.zeros(n, bool)
    for _ in range(3 * n):
        slope = np.where(free, 0.0, wanted - gram @ x)
        if slope.max() <= 1e-9 * np.abs(wanted).max():
            break
        free[slope.argmax()] = True
        x = _best_free(gram, wanted, x, free)
    return x / size


def _best_free(gram: Array, wanted: Array, x: Array, free: Array) -> Array:
    """Return the best x >= 0 whose elements outside ``free`` are 0; elements that reach 0 are removed from ``free``."""
    while True:
        best = np.zeros(len(x))
        at = np.flatnonzero(free)
        free_gram = gram[np.ix_(at, at)]
        best[at] = np.linalg.solve(free_gram, wanted[at])
        below = free & (best <= 0)
        if not below.any():
            return best
        steps_to_zero = x[below] / (x[below] - best[below])
        x = x + steps_to_zero.min() * (best - x)
        free &= x > 1e-12
        x[~free] = 0


def errors(table: CostTable, steps: Sequence[MeasuredStep]) -> dict[str, Any]:
    """Return the table's relative errors for single steps and for their sum, by phase and for all steps."""
    predicted = np.array([table.seconds(s.counts) for s in steps])
    took = np.array([s.seconds for s in steps])
    phases = np.array([s.phase for s in steps])

    def errors_of(chosen: Array) -> dict[str, float]:
        simulated = predicted[chosen]
        real = took[chosen]
        p50, p90 = np.percentile(np.abs(simulated / real - 1), [50, 90])
        total = simulated.sum() / real.sum() - 1
        found: dict[str, float] = {"steps": len(real)}
        found["median_error"] = round(float(p50), 4)
        found["p90_error"] = round(float(p90), 4)
        found["sum_error"] = round(float(total), 4)
        return found

    found = {"all": errors_of(np.ones(len(steps), bool))}
    for name in dict.fromkeys(phases.tolist()):
        found[name] = errors_of(phases == name)
    return found
