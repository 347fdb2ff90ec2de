"""Sums of hidden states on the device, for embeddings (``StepPlan.pooled``).

A sum is made in float64, so that it does not depend on how a prompt was divided into steps, up to the rounding of
float32."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from minivllm.core.interfaces.plan import StepPlan


def pooled_tokens(plan: StepPlan) -> np.ndarray:
    """Return the indices i64 in the step of the tokens whose hidden states ``plan.pooled`` sums, line after line."""
    rows, first, count = plan.pooled.T.astype(np.int64)
    ends = plan.q_len.cumsum()
    begin = ends[rows] - plan.q_len[rows] + first
    total = count.cumsum()
    shift = begin - (total - count)
    line = np.arange(int(count.sum()))
    return shift.repeat(count) + line


def used_tokens(plan: StepPlan, drawing: np.ndarray) -> np.ndarray:
    """Return the indices i64 of the tokens whose hidden states a step uses, ascending: the tokens ``drawing``, from
    which a token is drawn, and the tokens of ``plan.pooled``."""
    if not len(plan.pooled):
        return drawing
    return np.union1d(drawing, pooled_tokens(plan))


def rows_of(tokens: np.ndarray, used: np.ndarray | None) -> np.ndarray:
    """Return the row of each of ``tokens`` in hidden states of the tokens ``used``; None means all tokens of the
    step."""
    if used is None:
        return tokens
    return np.searchsorted(used, tokens)


def reads_last_tokens(plan: StepPlan) -> bool:
    """Return whether ``plan.pooled`` sums only hidden states of the last token of each row.

    Captured steps return the hidden states of these tokens only."""
    rows, first, count = plan.pooled.T
    last = first + 1 == plan.q_len[rows]
    last |= count == 0
    return bool(last.all())


def pool(plan: StepPlan, hidden: Tensor, used: np.ndarray | None, state: Any) -> Tensor:
    """Return the sums f64 [len(plan.pooled), H] of the hidden states [N, H] of the tokens ``used`` (see ``rows_of``).

    ``state`` is the ``DeviceState`` of ``device/worker/state.py``."""
    rows = rows_of(pooled_tokens(plan), used)
    return _sums(plan, hidden, rows, state)


def pool_captured(plan: StepPlan, hidden: Tensor, state: Any) -> Tensor:
    """Return the sums f64 [len(plan.pooled), H] of a captured step, which returns only the hidden states [R, H] of the
    last token of each of its R rows.  ``reads_last_tokens(plan)`` must be True.

    ``state`` is the ``DeviceState``."""
    rows, _, count = plan.pooled.T
    read = rows[count > 0]
    return _sums(plan, hidden, read.astype(np.int64), state)


def _sums(plan: StepPlan, hidden: Tensor, rows: np.ndarray, state: Any) -> Tensor:
    """Return the sums f64 [len(plan.pooled), H] of rows of ``hidden``.  ``rows`` i64 has the index in ``hidden`` of
    each token of ``pooled_tokens``."""
    counts = plan.pooled[:, 2]
    if (counts == 1).all():
        read = state.to(rows)
        return hidden[read].double()
    begin = counts.cumsum() - counts
    sums = torch.zeros(len(counts), hidden.shape[1], dtype=torch.float64, device=hidden.device)
    single = np.flatnonzero(counts == 1)
    if len(single):
        read_by = np.stack([single, rows[begin[single]]])
        lines, read = state.to(read_by)
        sums[lines] = hidden[read].double()
    # line by line, because a float64 copy of all hidden states may not fit into memory
    for line in np.flatnonzero(counts > 1).tolist():
        first = int(rows[begin[line]])
        adjacent = hidden.narrow(0, first, int(counts[line]))
        sums[line] = adjacent.sum(0, dtype=torch.float64)
    return sums
