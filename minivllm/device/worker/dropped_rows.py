"""Remove rows from the plan of a step before the step runs, and extend its result to all rows of the plan
afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from minivllm.core.interfaces.plan import LogProbs, StepError, StepPlan, StepResult, group_rows

# fields of ``StepPlan`` with one number for each row, and fields with indices into ``StepPlan.samples``
OF_ROWS = ("slots", "q_len", "computed", "draft")
OF_SAMPLES = ("late", "host", "held", "guided")


def without(plan: StepPlan, keep: np.ndarray) -> tuple[StepPlan, np.ndarray]:
    """Return the plan of the rows in ``keep`` bool [R] only; also return the index in ``plan.samples`` of each of these
    rows that draws a token.

    Rows that still have drafts come after the other rows with one token, as ``StepPlan`` requires.
    """
    first, _ = group_rows(plan.draft)
    remaining = np.bincount(first[keep], minlength=len(first))  # number of a sequence's kept rows, at its first row
    alone = remaining[first] == 1
    rows = np.flatnonzero(keep)
    several = plan.q_len[rows] > 1
    kind = 2 * several + ~alone[rows]
    order = np.argsort(kind, kind="stable")
    rows = rows[order]
    draws = len(plan.samples)
    at = np.full(len(keep), -1)
    at[plan.samples] = np.arange(draws)
    samples = np.flatnonzero(at[rows] >= 0)
    back = at[rows][samples]
    new = np.zeros(draws, np.int32)
    row = np.zeros(len(keep), np.int32)
    new[back] = np.arange(len(back))
    row[rows] = np.arange(len(rows))
    prompt = plan.prompt.copy()
    prompt[:, 0] = row[prompt[:, 0]]
    stays = keep[plan.taps[:, 1]]
    taps = plan.taps[stays]
    taps[:, 1] = row[taps[:, 1]]
    pooled = plan.pooled.copy()
    pooled[:, 0] = row[pooled[:, 0]]
    given, routes = _given_of(plan, keep)
    given[:, 0] = row[given[:, 0]]
    of_rows = {name: getattr(plan, name)[rows] for name in OF_ROWS}
    of_samples = {name: new[getattr(plan, name)] for name in OF_SAMPLES}
    slack = plan.slack
    if len(slack):
        slack = slack[rows]
    samples = samples.astype(np.int32)
    plan = replace(plan, **of_rows, **of_samples, slack=slack, samples=samples)
    plan = replace(plan, prompt=prompt, taps=taps, pooled=pooled, given=given, routes=routes)
    return plan, back


def _given_of(plan: StepPlan, keep: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return copies of ``plan.given`` and ``plan.routes`` (experts that requests set) for the rows in ``keep`` bool
    [R]."""
    if not len(plan.given):
        return plan.given.copy(), plan.routes
    rows, counts = plan.given.T
    total = int(counts.sum())
    experts = plan.routes.reshape(total, -1)
    stays = keep[rows]
    kept = experts[np.repeat(stays, counts)]
    return plan.given[stays], kept.ravel()


def spread(result: StepResult, back: np.ndarray, plan: StepPlan, widths: Sequence[int]) -> StepResult:
    """Extend the result of a step to all rows of ``plan``, of which ``without`` had removed some.

    ``back`` is the second result of ``without``.  Removed rows get zeros.  ``widths`` has the number of elements of a
    token's value at each tap point (named value) of the model.
    """

    def full(part: np.ndarray) -> np.ndarray:
        shape = (len(plan.samples), *part.shape[1:])
        out = np.zeros(shape, part.dtype)
        out[back] = part
        return out

    def moved(error: StepError) -> StepError:
        if not error.rows:
            return error
        rows = back[list(error.rows)]
        return replace(error, rows=tuple(rows.tolist()))

    lp = result.logprobs
    if lp is not None:
        chosen = full(lp.chosen)
        rank = full(lp.rank)
        top_ids = full(lp.top_ids)
        lp = LogProbs(chosen, rank, top_ids, full(lp.top))
    errors = tuple(moved(error) for error in result.errors)
    taps = result.taps
    if not result.failure:
        taps = _spread_taps(taps, back, plan, widths)
    slots = plan.slots[plan.samples]
    tokens = full(result.tokens)
    count = full(result.count)
    flags = full(result.flags)
    return replace(result, slots=slots, tokens=tokens, count=count, flags=flags, logprobs=lp, errors=errors, taps=taps)


def _spread_taps(values: np.ndarray, back: np.ndarray, plan: StepPlan, widths: Sequence[int]) -> np.ndarray:
    """Insert zeros for removed rows into the f32 values that the other rows read at tap points."""
    if not len(plan.taps):
        return values
    removed = np.zeros(len(plan.slots), bool)
    removed[np.delete(plan.samples, back)] = True  # only rows that draw a token are removed
    point, row, first = plan.taps.T
    tokens = plan.q_len[row] - first
    sizes = np.asarray(widths)[point] * tokens
    there = np.repeat(~removed[row], sizes)
    out = np.zeros(len(there), np.float32)
    out[there] = values
    return out
