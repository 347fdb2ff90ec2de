"""The scheduler seam: an order and a victim.  Budgets, blocks, overlap and placeholders stay in the engine.

A policy sees read-only columns (numpy arrays of equal length, one entry a sequence) and returns indices into them, so
it can be slow or unfair but never wrong.  What is no index, no number or no ``StepShape`` costs the turn, as if the
policy had raised; three such turns in a row end the engine, with the policy's name.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

API = (1, 2)  # 1.1: SchedulerPolicy.figures; 1.2: QueueView.aborted


@dataclass(frozen=True)
class QueueView:
    """Columns over some sequences.  Times are seconds on the engine's monotonic clock; lengths are tokens.  The engine
    makes a column when it is first read, so read in the call what you need: a view is of no use after it."""

    id: np.ndarray  # i64 engine-wide number of the sequence
    arrival: np.ndarray  # f64
    prompt: np.ndarray  # i32 prompt length
    known: np.ndarray  # i32 prompt + generated (or promised) tokens
    computed: np.ndarray  # i32 tokens whose keys and values are in the cache (or on their way)
    # i32 tokens that a hit of whole blocks would give; known only in what ``order`` is shown
    cached: np.ndarray
    # i32 output tokens expected (the request's expected_tokens, or max_out)
    predicted_out: np.ndarray
    max_out: np.ndarray  # i32
    priority: np.ndarray  # i32, smaller is more urgent (as in vLLM)
    tenant: np.ndarray  # i32 number of the tenant's name
    ttft_due: np.ndarray  # f64 when the first token is due, inf = no target
    tpot_due: np.ndarray  # f64 when the next token is due, inf = no target
    preempted: np.ndarray  # i32 how often
    blocks: np.ndarray  # i32 blocks held over all KV groups
    # i32 1 for a sequence that its client aborted; known only in what ``ended`` is given
    aborted: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))

    def __post_init__(self) -> None:
        if not len(self.aborted):
            object.__setattr__(self, "aborted", np.zeros(len(self.id), np.int32))

    def __len__(self) -> int:
        return len(self.id)

    def take(self, index: np.ndarray) -> QueueView:
        return QueueView(**{f.name: getattr(self, f.name)[index] for f in fields(self)})


@dataclass(frozen=True)
class Load:
    """The engine's state in a few numbers, for ``shape``."""

    waiting: int
    running: int
    prefilling: int  # running rows that still have prompt to compute
    free_blocks: int  # of the scarcest KV group, evictable ones included
    total_blocks: int
    token_budget: int
    oldest_wait: float  # seconds the oldest waiting request has waited
    # seconds until the first running row with a target is due to have its next token
    tpot_slack: float = np.inf


@dataclass(frozen=True)
class StepShape:
    """What kind of step is wanted.  ``mix``: decodes first, the rest of the budget to prefill.  ``prefill_first``:
    while anything can prefill, a step holds prefill only.  ``static``: so too, and nothing is admitted until all
    running rows ended; then as many as there is room for enter in one step.  ``prefill_cap`` limits prefill tokens of
    the step; before ``hold_until`` (clock) nothing new is admitted."""

    kind: str = "mix"
    prefill_cap: int | None = None
    hold_until: float = 0.0


@dataclass(frozen=True)
class SchedulerContext:
    """What a policy is told when it is made."""

    max_num_seqs: int
    max_num_batched_tokens: int
    block: int


class SchedulerPolicy(ABC):  # noqa: B024  (every method has a default that is first come, first served)
    """Order and victim.  ``window`` waiting sequences at most are shown to ``order``."""

    window: int = 256

    def __init__(self, options: Any, ctx: SchedulerContext) -> None:
        self.options, self.ctx = options, ctx

    def key(self, new: QueueView) -> np.ndarray:
        """Sort key f64 [n] given once, on arrival or requeue; smaller goes first.  Ageing is static in it.  Keys of
        all calls are compared, so none depends on who comes with it."""
        return new.arrival

    def lane(self, new: QueueView) -> np.ndarray:
        """Numbers i64 [n], given with ``key``.  ``order`` is shown the first of each lane, as many of each, so that no
        lane hides another; beyond ``window`` lanes, those that were served longest ago."""
        return np.zeros(len(new), np.int64)

    def order(self, head: QueueView, running: QueueView, now: float) -> np.ndarray:
        """Indices i32 into ``head`` in the order wanted; what is left out waits.  Not called unless overridden."""
        return np.arange(len(head), dtype=np.int32)

    def shape(self, load: Load, now: float) -> StepShape:
        return StepShape()

    def ended(self, gone: QueueView) -> None:  # noqa: B027  (most policies do not want to know)
        """Told, before a step is planned, of those that ended since the last one: finished, aborted or failed, running
        or not.  ``known`` is what they came to, ``aborted`` says whose length means nothing.  Not called unless
        overridden."""

    def victim(self, candidates: QueueView, need: int) -> int:
        """Index of the running sequence to preempt for ``need`` blocks.  Protected ones are not among them."""
        return int(np.lexsort((candidates.id, candidates.arrival))[-1])

    def figures(self) -> Mapping[str, float]:
        """What it counts, for ``stats()["figures"]``, records and metrics: at most 64 names ``[a-z][a-z0-9_]*`` with
        finite numbers.  Asked between steps, on the engine's thread; asking changes nothing."""
        return {}
