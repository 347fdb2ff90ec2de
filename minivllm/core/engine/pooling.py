"""Requests for embeddings: they compute only the prompt, and pool its hidden states into one vector.

    step              1             2           3 (preempted)   4
    computed          p p p p       p p p       .               p p p p p p p p
    mean reads        0 1 2 3       4 5 6                       . . . . . . . 7
    last reads                                                                7

Such a sequence draws no token.  It ends with the result of the step that computes its last token.  ``Request.pooling``
decides which tokens are read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import numpy as np

from minivllm.errors import RequestError

if TYPE_CHECKING:
    from minivllm.core.interfaces.plan import StepPlan

    from .request import Request, Seq
    from .slots import Slots

NOT_FINITE = "the model gave values that are not finite numbers, so there is no embedding"


class Pooling(Protocol):
    """The pooled hidden states of one request, which become its embedding.  ``frontend.pooling.PromptPooling``
    implements it."""

    def most_cached(self, most: int) -> int:
        """Return how many of the first ``most`` tokens may come from the prefix cache, although a cached token has no
        hidden state."""

    def read(self, at: int, n: int, ends: bool) -> tuple[int, int]:
        """Return (first, count): which hidden states to read in a step that computes the positions [at, at + n) of the
        prompt.

        ``ends`` means that the step computes the last token of the prompt.  A position may be computed again after a
        preemption."""

    def add(self, values: np.ndarray) -> None:
        """Add the sum f64 [hidden] of the hidden states of a step."""

    def restart(self) -> None:
        """Clear the sum, because the prompt is computed again with other weights."""

    def end(self, tokens: int) -> bool:
        """Compute the embedding of a prompt of ``tokens`` tokens.  Return whether all values are finite numbers."""


def check_pooling(request: Request, hidden: int, executor: object) -> None:
    """Check a request for an embedding.

    RequestError if the request also has taps, or if the executor returns no hidden states (``hidden`` is 0).
    """
    if request.pooling is None:
        return
    if not hidden:
        name = type(executor).__name__
        raise RequestError(f"embeddings: the executor {name} returns no hidden states", "pooling")
    if request.taps:
        raise RequestError("taps: expected none in a request for an embedding", "taps")
    if request.params.routes is not None:
        raise RequestError("routes: expected none in a request for an embedding", "routes")
    request.speculates = False


def pooled_rows(
    s: Slots, slots: np.ndarray, computed: np.ndarray, q_len: np.ndarray
) -> dict[str, np.ndarray]:
    """Return the column ``pooled`` of plan.StepPlan: which hidden states of the step are read for embeddings.

    A row that computes the last token of its prompt always has an entry, perhaps for no tokens."""
    lines = []
    for row in np.flatnonzero(s.pooled[slots]).tolist():
        slot = int(slots[row])
        at = int(computed[row])
        n = int(q_len[row])
        ends = at + n == s.prompt[slot]
        first, count = s.at(slot).request.pooling.read(at, n, ends)
        if count or ends:
            lines.append((row, first, count))
    return {"pooled": np.array(lines, np.int32).reshape(-1, 3)}


def keep_pooled(
    plan: StepPlan, sequence: Callable[[int], Seq | None], sums: np.ndarray
) -> list[Seq]:
    """Add the sums f64 [n, hidden] of a step's hidden states to their requests, and return the sequences that can end.

    A sequence can end if all its hidden states have been added, or if a sum is not finite.  ``sequence(row)`` returns
    the sequence of a plan row, or None if it has ended."""
    complete = []
    finite = np.isfinite(sums).all(axis=1)
    for (row, _, count), values, usable in zip(plan.pooled.tolist(), sums, finite, strict=True):
        seq = sequence(row)
        if seq is None:
            continue
        if count:
            seq.request.pooling.add(values)
        if not usable or plan.computed[row] + plan.q_len[row] == len(seq.request.prompt):
            complete.append(seq)
    return complete
