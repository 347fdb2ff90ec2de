"""Remove rows from the plan of a step before it runs, and later convert its result to one of the original plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from minivllm.core.interfaces.plan import StepPlan, StepResult, group_rows


def without(plan: StepPlan, keep: np.ndarray) -> tuple[StepPlan, np.ndarray]:
    """Return the plan of the rows in ``keep`` bool [R], and the index in ``plan.samples`` of each of them that draws.

    Rows that still have drafts come after the other rows with one token, as ``StepPlan`` requires.
    """
    first, _ = group_rows(plan.draft)
    alone = np.bincount(first[keep], minlength=len(first))[first] == 1
    rows = np.flatnonzero(keep)
    rows = rows[np.argsort(2 * (plan.q_len[rows] > 1) + ~alone[rows], kind="stable")]
    at = np.full(len(keep), -1)
    at[plan.samples] = np.arange(len(plan.samples))
    samples = np.flatnonzero(at[rows] >= 0)
    back = at[rows][samples]
    new = np.zeros(len(plan.samples), np.int32)
    row = np.zeros(len(keep), np.int32)
    new[back] = np.arange(len(back))
    row[rows] = np.arange(len(rows))
    prompt = plan.prompt.copy()
    taps = plan.taps[keep[plan.taps[:, 1]]]
    pooled = plan.pooled.copy()
    prompt[:, 0] = row[prompt[:, 0]]
    taps[:, 1] = row[taps[:, 1]]
    pooled[:, 0] = row[pooled[:, 0]]
    given, routes = _given_of(plan, keep)
    given[:, 0] = row[given[:, 0]]
    return replace(
        plan,
        slots=plan.slots[rows],
        q_len=plan.q_len[rows],
        computed=plan.computed[rows],
        draft=plan.draft[rows],
        slack=plan.slack[rows] if len(plan.slack) else plan.slack,
        samples=samples.astype(np.int32),
        late=new[plan.late],
        host=new[plan.host],
        held=new[plan.held],
        guided=new[plan.guided],
        prompt=prompt,
        taps=taps,
        pooled=pooled,
        given=given,
        routes=routes,
    ), back


def _given_of(plan: StepPlan, keep: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return copies of ``plan.given`` and ``plan.routes`` for the rows in ``keep`` bool [R]."""
    if not len(plan.given):
        return plan.given.copy(), plan.routes
    rows, counts = plan.given.T
    tokens = plan.routes.reshape(int(counts.sum()), -1)
    return plan.given[keep[rows]], tokens[np.repeat(keep[rows], counts)].ravel()


def spread(result: StepResult, back: np.ndarray, plan: StepPlan, widths: Sequence[int]) -> StepResult:
    """Extend the result of the remaining rows to all rows of ``plan``.  ``back`` comes from ``without``.

    Removed rows have zeros.  ``widths`` has the width of each point of the model.
    """

    def full(part: np.ndarray) -> np.ndarray:
        out = np.zeros((len(plan.samples), *part.shape[1:]), part.dtype)
        out[back] = part
        return out

    lp = result.logprobs
    if lp is not None:
        lp = replace(
            lp,
            chosen=full(lp.chosen),
            rank=full(lp.rank),
            top_ids=full(lp.top_ids),
            top=full(lp.top),
        )
    errors = tuple(replace(e, rows=tuple(back[list(e.rows)].tolist())) if e.rows else e for e in result.errors)
    return replace(
        result,
        slots=plan.slots[plan.samples],
        tokens=full(result.tokens),
        count=full(result.count),
        flags=full(result.flags),
        logprobs=lp,
        errors=errors,
        taps=result.taps if result.failure else _spread_taps(result.taps, back, plan, widths),
    )


def _spread_taps(values: np.ndarray, back: np.ndarray, plan: StepPlan, widths: Sequence[int]) -> np.ndarray:
    """Extend the tap values f32 of the remaining rows with zeros for removed rows."""
    if not len(plan.taps):
        return values
    removed = np.zeros(len(plan.slots), bool)
    removed[np.delete(plan.samples, back)] = True  # each removed row would have drawn a token
    point, row, first = plan.taps.T
    sizes = np.asarray(widths)[point] * (plan.q_len[row] - first)
    there = np.repeat(~removed[row], sizes)
    out = np.zeros(len(there), np.float32)
    out[there] = values
    return out
