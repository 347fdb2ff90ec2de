"""Costs of steps from steps that were measured: least squares of the relative error, no cost below nothing.

A step's time is a sum of hat functions (the broken lines) and slopes, so it is linear in what is sought.  Steps that
something else on the machine has stretched count less (Huber, "Robust estimation of a location parameter", 1964).

Only ``limit`` is not linear: the tokens from which steps with prompts cost otherwise.  Each point that could be it is
tried, and the one with the least error taken, if that is clearly less than with costs of one kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from minivllm.plugins.executor.costs import PROMPT_SLOPES, SLOPES, BrokenLine, CostTable, PromptCosts, StepCounts

OFF = 0.5  # relative error from which a step counts less
ROUNDS, FEW_ROUNDS = 8, 2  # of weighing; to compare limits
FEWEST = 20  # steps at a point of a line
SMOOTH = 16.0  # steps that say a point lies between its neighbours: it decides where those that were measured do not
GAIN = 0.95  # of the error with one kind of costs: what a limit must leave at most


@dataclass(frozen=True)
class MeasuredStep:
    counts: StepCounts
    seconds: float
    phase: str  # of the calibration


def fit(steps: Sequence[MeasuredStep], rows_at: Sequence[int], tokens_at: Sequence[int]) -> CostTable:
    """The table without what is said about it.  ``rows_at``, ``tokens_at``: points of the broken lines, of which those
    are used that steps were measured at; those of ``tokens_at`` may be the limit."""
    seen = _Columns(steps)
    design = min(_designs(seen, rows_at, tokens_at), key=lambda one: one.error)
    found = np.split(
        _solve(design.matrix, seen.seconds, ROUNDS, design.bends)[0], np.cumsum([len(one) for one in design.parts])[:-1]
    )
    rows, line, prompts, more, more_prompts, rest = (x.tolist() for x in found)
    large = PromptCosts(BrokenLine(design.parts[1], line), dict(zip(PROMPT_SLOPES, prompts, strict=True)))
    small = large
    if design.limit:
        small = PromptCosts(BrokenLine(design.parts[3], more), dict(zip(PROMPT_SLOPES, more_prompts, strict=True)))
    slopes = dict(zip(SLOPES, rest, strict=True))
    return CostTable(BrokenLine(design.parts[0], rows), small, large, design.limit, slopes)


class _Columns:
    """What was counted, [n] each."""

    def __init__(self, steps: Sequence[MeasuredStep]) -> None:
        counts = [s.counts for s in steps]
        column = lambda name: np.array([getattr(c, name) for c in counts], np.float64)  # noqa: E731
        self.seconds = np.array([s.seconds for s in steps])
        self.rows, self.kv, self.tokens, self.before = (column(x) for x in ("rows", "kv", "tokens", "before"))
        self.prompts = column("prefill") > 0
        self.own = np.stack([self.rows, self.kv, column("pairs"), column("chunks")], 1)  # by PROMPT_SLOPES
        planned, own = column("planned"), column("prefill")
        # of steps that are planned one by one it is what the line of tokens says
        planned = planned if (planned != own).any() else np.zeros(len(steps))
        self.common = [column("joins"), planned, column("ends"), column("fresh")]
        self.wake = column("wake")


@dataclass(frozen=True)
class _Design:
    """What is sought: in ``parts`` points of lines and names of slopes, of which each has a column of ``matrix``."""

    limit: int
    parts: tuple[Sequence[Any], ...]  # decodes | large: line, slopes | small: line, slopes | any
    matrix: np.ndarray
    bends: np.ndarray  # of lines, from ``_bends``
    error: float  # of the best table of this kind


def _designs(seen: _Columns, rows_at: Sequence[int], tokens_at: Sequence[int]) -> list[_Design]:
    """With one kind of steps with prompts, and with each limit that leaves enough steps on both sides.  The error of
    the former is taken as a little less, so that a limit must be worth its costs."""
    one = _design(seen, 0, rows_at, tokens_at)
    found, tokens = [replace(one, error=GAIN * one.error)], seen.tokens[seen.prompts]
    for limit in tokens_at[:-1]:
        if min(np.count_nonzero(tokens <= limit), np.count_nonzero(tokens > limit)) >= 2 * FEWEST:
            found.append(_design(seen, limit, rows_at, tokens_at))
    return found


def _design(seen: _Columns, limit: int, rows_at: Sequence[int], tokens_at: Sequence[int]) -> _Design:
    large = seen.prompts & (seen.tokens > limit)
    small = seen.prompts & ~large
    above = [x for x in tokens_at if x > limit]
    above = [limit + 1, *above] if limit and above[0] > limit + 1 else above
    at_rows, at_large = _reached(rows_at, seen.rows[~seen.prompts]), _reached(above, seen.tokens[large])
    at_small = _reached([x for x in tokens_at if x <= limit], seen.tokens[small]) if limit else []
    cold = (seen.before > limit) & ~large if limit else np.zeros(len(large), bool)
    blocks = [_hats(at_rows, seen.rows) * ~seen.prompts[:, None]]
    for at, which in ((at_large, large), (at_small, small)):
        blocks += [_hats(at, seen.tokens) * which[:, None], seen.own * which[:, None]] if at else []
    rest = np.stack(
        [seen.kv * ~seen.prompts, *seen.common, cold, cold * seen.kv, seen.wake, seen.wake * large * (limit > 0)], 1
    )  # by SLOPES
    matrix = np.concatenate([*blocks, rest], axis=1)
    slopes = PROMPT_SLOPES if limit else ()
    parts = (at_rows, at_large, PROMPT_SLOPES, at_small, slopes, SLOPES)
    bends = _bends(parts, matrix, seen.seconds)
    return _Design(limit, parts, matrix, bends, _solve(matrix, seen.seconds, FEW_ROUNDS, bends)[1])


def _reached(at: Sequence[int], seen: np.ndarray) -> list[int]:
    """The first point, and each up to which there is something to know it by."""
    kept, counted = [at[0]], at[0]
    for high in at[1:]:
        if np.count_nonzero((seen > counted) & (seen <= high)) >= FEWEST:
            kept.append(high)
            counted = high
    return kept


def _hats(at: Sequence[int], x: np.ndarray) -> np.ndarray:
    """[n, len(at)], what each point of a broken line counts for at ``x``; beyond the last as between the last two."""
    out = np.zeros((len(x), len(at)))
    if len(at) == 1:
        out[:, 0] = 1
        return out
    i = np.clip(np.searchsorted(at, x, side="right"), 1, len(at) - 1)
    low, high = np.array(at)[i - 1], np.array(at)[i]
    share = (x - low) / (high - low)
    every = np.arange(len(x))
    out[every, i - 1], out[every, i] = 1 - share, share
    return out


def _bends(parts: tuple[Sequence[Any], ...], matrix: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """[m, columns] rows that give, of what is sought, how far each inner point of a line is from between its
    neighbours, relative to steps there."""
    columns, rows, first = sum(map(len, parts)), [], 0
    for at in parts:
        for i in range(1, len(at) - 1) if at and isinstance(at[0], int) else ():
            share = (at[i] - at[i - 1]) / (at[i + 1] - at[i - 1])
            row = np.zeros(columns)
            row[first + i - 1 : first + i + 2] = share - 1, 1, -share
            there = matrix[:, first + i]
            rows.append(row * there.sum() / (there @ seconds))
        first += len(at)
    return np.array(rows).reshape(-1, columns)


def _solve(matrix: np.ndarray, seconds: np.ndarray, rounds: int, bends: np.ndarray) -> tuple[np.ndarray, float]:
    """(costs, the mean error that is left).  Errors relative to what is said, from round to round: relative to what was
    measured, steps that happened to be short would weigh most, and the sum would come out too small."""
    weight, straight = 1 / seconds, np.sqrt(SMOOTH) * bends
    for _ in range(rounds):
        rows = np.concatenate([matrix * weight[:, None], straight])
        found = _not_negative(rows, np.concatenate([seconds * weight, np.zeros(len(straight))]))
        said = np.maximum(matrix @ found, seconds.min())
        off = np.abs(seconds / said - 1)
        weight = np.sqrt(np.minimum(1, OFF / np.maximum(off, 1e-9))) / said
    return found, float(np.minimum(off, OFF).mean())


def _not_negative(matrix: np.ndarray, target: np.ndarray) -> np.ndarray:
    """x >= 0 with the least |matrix x - target|: what would help most is let free, one after the other, and what falls
    below 0 is held at it (Lawson and Hanson, "Solving Least Squares Problems", 1974, chapter 23)."""
    size = np.sqrt((matrix**2).sum(axis=0))
    size[size == 0] = 1
    scaled = matrix / size
    n = matrix.shape[1]
    gram, wanted = scaled.T @ scaled + 1e-9 * np.eye(n), scaled.T @ target
    x, free = np.zeros(n), np.zeros(n, bool)
    for _ in range(3 * n):
        slope = np.where(free, 0.0, wanted - gram @ x)
        if slope.max() <= 1e-9 * np.abs(wanted).max():
            break
        free[slope.argmax()] = True
        x = _best_within(gram, wanted, x, free)
    return x / size


def _best_within(gram: np.ndarray, wanted: np.ndarray, x: np.ndarray, free: np.ndarray) -> np.ndarray:
    """The best x >= 0 of those that are ``free``; the others are 0.  What is held at 0 is no longer free."""
    while True:
        best = np.zeros(len(x))
        at = np.flatnonzero(free)
        best[at] = np.linalg.solve(gram[np.ix_(at, at)], wanted[at])
        below = free & (best <= 0)
        if not below.any():
            return best
        x = x + (x[below] / (x[below] - best[below])).min() * (best - x)
        free &= x > 1e-12
        x[~free] = 0


def errors(table: CostTable, steps: Sequence[MeasuredStep]) -> dict[str, Any]:
    """How far the table is from steps, of each phase and of all: relative errors of single steps, and of their sum."""
    said = np.array([table.seconds(s.counts) for s in steps])
    took = np.array([s.seconds for s in steps])
    phases = np.array([s.phase for s in steps])

    def about(which: np.ndarray) -> dict[str, float]:
        off = np.abs(said[which] / took[which] - 1)
        p50, p90 = np.percentile(off, [50, 90])
        return {
            "steps": int(which.sum()),
            "median_error": round(float(p50), 4),
            "p90_error": round(float(p90), 4),
            "sum_error": round(float(said[which].sum() / took[which].sum() - 1), 4),
        }

    found: dict[str, Any] = {name: about(phases == name) for name in dict.fromkeys(phases.tolist())}
    return {"all": about(np.ones(len(steps), bool)), **found}
