"""The scheduler seam (plug-in interface): the order in which sequences are admitted, and the sequence to preempt.

Token budgets, blocks and run-ahead (steps in flight) remain in the engine.

A policy receives read-only columns (numpy arrays of equal length, one entry for each sequence) and returns indices into
them.  A bad policy can therefore be slow or unfair, but never produce wrong tokens.  If it returns an invalid index,
number or ``StepShape``, the engine treats this as if the policy had raised: the planning turn is lost.  Three such
turns in a row end the engine with an error that names the policy.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from .predictor import StepWork

# Additions by version: 1.1: SchedulerPolicy.figures; 1.2: QueueView.aborted; 1.3: facts of
# sessions; 1.4: preemptive 1.5: SchedulerContext.step_ms
API = (1, 5)

# Columns of ``QueueView`` with facts about sessions -> the value for a request without such facts.
ABSENT = {"session": 0, "turn": 0, "parent": 0, "next_s": np.inf, "deadline": np.inf, "budget": -1}


@dataclass(frozen=True)
class QueueView:
    """Columns of numbers about some sequences, one element for each.  Times are seconds on the engine's monotonic
    clock; lengths are numbers of tokens.

    The engine computes a column when it is first read.  Read the columns during the call; a view is invalid afterwards.
    """

    id: np.ndarray  # i64 number of the sequence, unique in the engine
    arrival: np.ndarray  # f64
    prompt: np.ndarray  # i32 prompt length
    # i32 number of prompt tokens and generated tokens, including those of steps in flight
    known: np.ndarray
    computed: (
        np.ndarray
    )  # i32 number of tokens whose keys and values are computed, including those of steps in flight
    # i32 Number of tokens of the cached prefix, in whole blocks; computed only for the views of
    # ``order``.
    cached: np.ndarray
    # i32 Expected number of output tokens: the predictor's, else the request's expected_tokens,
    # else max_out.
    predicted_out: np.ndarray
    max_out: np.ndarray  # i32 largest number of output tokens
    priority: np.ndarray  # i32, smaller is more urgent (as in vLLM)
    tenant: np.ndarray  # i32 number that stands for the tenant
    ttft_due: np.ndarray  # f64 time at which the first token is due, inf means no target
    tpot_due: np.ndarray  # f64 time at which the next token is due, inf means no target
    preempted: np.ndarray  # i32 how often the sequence was preempted
    blocks: np.ndarray  # i32 number of blocks that the sequence holds in all KV groups
    # i32 1 if the client aborted the sequence, else 0; set for the view of ``ended`` only
    aborted: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    # The fields of ``SessionTurn`` as columns, of the types i64, i64, i64, f64, f64, i32.
    session: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    turn: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    parent: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    next_s: np.ndarray = field(default_factory=lambda: np.empty(0))
    deadline: np.ndarray = field(default_factory=lambda: np.empty(0))
    budget: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))

    def __post_init__(self) -> None:
        for name, absent in (("aborted", 0), *ABSENT.items()):
            column = getattr(self, name)
            if not len(column):
                object.__setattr__(self, name, np.full(len(self.id), absent, column.dtype))

    def __len__(self) -> int:
        return len(self.id)

    def take(self, index: np.ndarray) -> QueueView:
        """Return the view of the sequences at ``index``."""
        return QueueView(**{f.name: getattr(self, f.name)[index] for f in fields(self)})


@dataclass(frozen=True)
class Load:
    """The state of the engine in a few numbers, for ``SchedulerPolicy.shape``."""

    waiting: int  # waiting sequences
    running: int  # running sequences
    prefilling: int  # count of running sequences whose prompt is not computed yet
    free_blocks: int  # count of free and evictable blocks, in the KV group with the fewest
    total_blocks: int
    token_budget: int  # largest number of tokens that a step may compute
    oldest_wait: float  # seconds since the arrival of the oldest waiting request
    # Seconds until the next token of a running sequence with a time target is due; the least of
    # all.
    tpot_slack: float = np.inf
    # Count of blocks, since the start and in all KV groups, that were evicted and soon computed
    # again.
    evicted_needed: int = 0


@dataclass(frozen=True)
class StepShape:
    """How the next step combines decoding rows and prompt chunks (prefill), as the policy chooses.

    ``mix``: decoding rows come first, and prefill gets the remaining token budget.  ``prefill_first``: as long as any
    sequence can prefill, a step contains prefill only.  ``static``: as ``prefill_first``, but nothing is admitted until
    all running sequences have ended; then as many sequences as fit are admitted in one step.

    ``prefill_cap`` limits the prefill tokens of the step; None means no limit.  Nothing new is admitted before the time
    ``hold_until``.
    """

    kind: str = "mix"
    prefill_cap: int | None = None
    hold_until: float = 0.0


@dataclass(frozen=True)
class SchedulerContext:
    """The arguments with which the engine constructs a policy."""

    max_num_seqs: int
    max_num_batched_tokens: int
    block: int  # tokens per block
    # step_ms(work) returns the milliseconds that the predictor expects for a step, None if they are
    # unknown.
    step_ms: Callable[[StepWork], float | None] = lambda work: None


class SchedulerPolicy(ABC):  # noqa: B024  (every method has a default that is first come, first served)
    """Chooses the order of admission and the sequence to preempt.  ``order`` receives at most ``window`` waiting
    sequences."""

    window: int = 256
    preemptive: bool = False  # True means that ``displaced`` is called

    def __init__(self, options: Any, ctx: SchedulerContext) -> None:
        self.options, self.ctx = options, ctx

    def key(self, new: QueueView) -> np.ndarray:
        """Return a sort key f64 [n] for new sequences; smaller keys are admitted first.

        The engine calls it once per sequence on arrival, and again if the sequence returns to the queue.  A key does
        not change while the sequence waits.  Keys of different calls are compared, so a key must not depend on the
        other sequences of the call.
        """
        return new.arrival

    def lane(self, new: QueueView) -> np.ndarray:
        """Return the number of the queue (lane) i64 [n] of each new sequence, such as one lane for each tenant.

        ``order`` receives the first sequences of each lane, equally many from each, so that no lane blocks another.  If
        there are more than ``window`` lanes, it receives those that were served longest ago.
        """
        return np.zeros(len(new), np.int64)

    def order(self, head: QueueView, running: QueueView, now: float) -> np.ndarray:
        """Return indices i32 into ``head`` in the order of admission.  Omitted sequences keep waiting.  The engine
        calls it only if it is overridden."""
        return np.arange(len(head), dtype=np.int32)

    def shape(self, load: Load, now: float) -> StepShape:
        """Return how the next step combines decoding rows and prompt chunks.

        ``load`` is the state of the engine at the time ``now`` in seconds.  This default mixes both."""
        return StepShape()

    def ended(self, gone: QueueView) -> None:  # noqa: B027  (optional)
        """Receive the sequences that finished, failed or were aborted since the last step was planned, running or
        waiting.

        ``known`` is their final length.  If ``aborted`` is 1, it differs from the length that the output would have
        had.  The engine calls this method only if it is overridden.
        """

    def victim(self, candidates: QueueView, need: int) -> int:
        """Return the index of the running sequence to preempt, because ``need`` blocks are missing.  Sequences that
        must not be preempted are not among the candidates."""
        return int(np.lexsort((candidates.id, candidates.arrival))[-1])

    def displaced(self, head: QueueView, running: QueueView, now: float) -> int:
        """Return the index of the running sequence to preempt for the waiting sequence ``head``, or -1 for none.

        The engine calls it once for each step in which a slot or blocks are missing for the next waiting sequence, if
        ``preemptive`` is True.  ``head`` is the view of that sequence.  Sequences that must not be preempted are not in
        ``running``: the oldest one, beams, and those that were preempted often."""
        return -1

    def figures(self) -> Mapping[str, float]:
        """Return the policy's own counters, for ``stats()["figures"]``, records and metrics.

        At most 64 finite numbers, with names that match ``[a-z][a-z0-9_]*``.  The engine calls it between steps, on its
        own thread.  It must not change any state.
        """
        return {}
