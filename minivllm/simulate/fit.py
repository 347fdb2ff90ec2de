"""Costs of steps from steps that were measured: least squares of the relative error, no cost below nothing.

A step's time is a sum of hat functions (the broken lines) and slopes, so it is linear in what is sought.  Steps that
something else on the machine has stretched count less (Huber, "Robust estimation of a location parameter", 1964).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from minivllm.plugins.executor.costs import SLOPES, BrokenLine, CostTable, StepCounts

OFF = 0.5  # relative error from which a step counts less
ROUNDS, SWEEPS = 8, 3000
FEWEST = 20  # steps at a point of a line


@dataclass(frozen=True)
class MeasuredStep:
    counts: StepCounts
    seconds: float
    phase: str  # of the calibration


def fit(steps: Sequence[MeasuredStep], rows_at: Sequence[int], prefill_at: Sequence[int]) -> CostTable:
    """The table without what is said about it.  ``rows_at``, ``prefill_at``: points of the broken lines, of which those
    are used that steps were measured at."""
    counts = [s.counts for s in steps]
    seconds = np.array([s.seconds for s in steps])
    rows = np.array([c.rows for c in counts], np.float64)
    prefill = np.array([c.prefill for c in counts], np.float64)
    at = [_reached(rows_at, rows), _reached(prefill_at, prefill[prefill > 0])]
    hats = [_hats(at[0], rows), _hats(at[1], prefill) * (prefill > 0)[:, None]]
    slopes = np.array([[c.kv, c.pairs, c.chunks, c.joins, c.ends, c.fresh] for c in counts], np.float64)
    matrix = np.concatenate([*hats, slopes], axis=1)
    found = _solve(matrix, seconds)
    cut = np.cumsum([len(at[0]), len(at[1])])
    line, chunk, rest = np.split(found, cut)
    return CostTable(
        BrokenLine(at[0], line.tolist()),
        BrokenLine(at[1], chunk.tolist()),
        dict(zip(SLOPES, rest.tolist(), strict=True)),
    )


def _reached(at: Sequence[int], seen: np.ndarray) -> list[int]:
    """The first point, and each up to which there is something to know it by."""
    if not len(seen):
        return [at[0]]
    kept = [at[0]]
    for low, high in itertools.pairwise(at):
        if np.count_nonzero((seen > low) & (seen <= high)) >= FEWEST:
            kept.append(high)
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


def _solve(matrix: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Errors relative to what is said, from round to round: relative to what was measured, steps that happened to be
    short would weigh most, and the sum would come out too small."""
    weight = 1 / seconds
    for _ in range(ROUNDS):
        found = _not_negative(matrix * weight[:, None], seconds * weight)
        said = np.maximum(matrix @ found, seconds.min())
        off = np.abs(seconds / said - 1)
        weight = np.sqrt(np.minimum(1, OFF / np.maximum(off, 1e-9))) / said
    return found


def _not_negative(matrix: np.ndarray, target: np.ndarray) -> np.ndarray:
    """x >= 0 with the least |matrix x - target|, coordinate after coordinate (Franc et al., "Sequential coordinate-wise
    algorithm for the non-negative least squares problem", CAIP 2005)."""
    size = np.sqrt((matrix**2).sum(axis=0))
    size[size == 0] = 1
    scaled = matrix / size
    gram = scaled.T @ scaled + 1e-9 * np.eye(matrix.shape[1])
    x = np.zeros(matrix.shape[1])
    slope = -(scaled.T @ target)
    for _ in range(SWEEPS):
        moved = 0.0
        for k in range(len(x)):
            new = max(0.0, x[k] - slope[k] / gram[k, k])
            if new != x[k]:
                slope += (new - x[k]) * gram[:, k]
                moved = max(moved, abs(new - x[k]))
                x[k] = new
        if moved < 1e-10:
            break
    return x / size


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
