"""A request and its life: what a client asks for, and the sequences that the engine makes of it.

Request ──strategy.start──► Sequence (one per branch)

WAITING ──admitted──► RUNNING ──stop, length, abort, error──► FINISHED
   ▲                     │
   └──── preempted ◄─────┘      (blocks freed, tokens kept; it waits until its steps in flight have come back)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from minivllm.core.interfaces.plan import LogProbs

from .scores import Scores, TokenLogprobs
from .stops import StopRule

if TYPE_CHECKING:
    from minivllm.core.interfaces.finish import FinishReason
    from minivllm.core.interfaces.params import SamplingParams
    from minivllm.core.interfaces.taps import Tap

    from .tap_values import RequestTaps, TapValues

WAITING, RUNNING, FINISHED = 0, 1, 2


@dataclass(eq=False, slots=True)
class Seq:
    """One branch of a request as the planner and the engine see it (a sequence, in prose)."""

    id: int
    request: Request
    sample: int
    seed: int
    status: int = WAITING
    slot: int = -1
    serial: int = -1  # stamp of its stay in the slot: results of an older stay are dropped
    # [known] while it has no slot
    tokens: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    known: int = 0  # tokens known to the host while it has no slot
    queued: bool = False  # it is in the planner's queue, by key in its lane
    key: float = 0.0
    lane: int = 0
    hint: int | None = None  # of ``KVCache.hints``: blocks, while that holds
    # while it has no slot: id of the last step that held it, if the result is still to come, else 0
    in_flight: int = 0
    preempted: int = 0
    # the device has put its kept columns aside (see ``plan.Delta.keep``), or is about to
    saved: bool = False
    # hash chain of its full blocks, in the prefix index
    keys: list[int] = field(default_factory=list)
    # sequences that fork from it once the prompt is computed
    branches: list[Seq] = field(default_factory=list)
    guide: Seq | None = None  # its guide, with ``scale`` (see ``guides``)
    scale: float = 1.0
    lead: Seq | None = None  # whose guide it is
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    # of the generated tokens, without pending ones
    logprobs: Sequence[TokenLogprobs] = field(default_factory=Scores)
    cumulative_logprob: float = 0.0
    # of the tokens after those; and rows in them
    pending_logprobs: list[LogProbs] = field(default_factory=list)
    pending_rows: list[int] = field(default_factory=list)
    # a host row: its token, of logits and ids so far
    choose: Callable[[np.ndarray, Sequence[int]], int] | None = None
    # output tokens handed to the text side, as of its last ``sink`` (in a slot: ``Slots.emitted``)
    emitted: int = 0
    score: float | None = None  # that a stepwise strategy gave it
    tap_values: TapValues | None = None  # what it has read at points of the model
    # its grammar's, from the first mask on: it has taken the tokens ``[prompt, matched)``
    matcher: Any = None
    matched: int = 0

    @property
    def pair(self) -> tuple[Seq, ...]:
        """It and its guide, if it has one."""
        return (self,) if self.guide is None else (self, self.guide)

    @property
    def masked(self) -> bool:
        return self.request.grammar is not None or self.request.params.allowed_tokens_fn is not None

    def defer_logprobs(self, lp: LogProbs, row: int) -> None:
        """Its newest token's log-probabilities are row ``row`` of a step's."""
        self.pending_logprobs.append(lp)
        self.pending_rows.append(row)

    def flush_logprobs(self) -> None:
        """Make entries of the log-probabilities that have come: not before somebody asks, a step has no time for it."""
        if self.pending_logprobs and isinstance(self.logprobs, Scores):
            before = len(self.logprobs)
            self.logprobs.add_rows(self.pending_logprobs, self.pending_rows, self.request.logprobs)
            self.cumulative_logprob = sum(self.logprobs.chosen[before:], self.cumulative_logprob)
            self.pending_logprobs.clear()
            self.pending_rows.clear()


@dataclass(eq=False)
class Request:
    """What the client asked for.  Times are seconds of ``time.monotonic``."""

    id: str
    prompt: np.ndarray  # i32 [n]
    params: SamplingParams
    arrival: float
    text: str | None = None
    # whose budget it is, if there are several; owners take turns (see ``core.engine.owners``)
    owner: str = ""
    end: int = 0  # known length at which a sequence of it ends
    rows: tuple[Any, ...] = ()  # per processor: Row or None, the sampler last
    stops: StopRule = field(default_factory=StopRule)
    grammar: Any = None  # interfaces.grammar.Compiled
    sequences: list[Seq] = field(default_factory=list)
    scheduled: float | None = None  # when its first sequence got a slot
    first_token: float | None = None
    finished: float | None = None
    cached_tokens: int = 0
    strategy: Any = None  # the DecodingStrategy that made its sequences
    beams: Any = None  # beams.Beams if its strategy is asked after every step
    logprobs: int = 0  # best log-probabilities that the client is told
    # best log-probabilities of each prompt token; -1: none, or they are all there
    prompt_topk: int = -1
    # (first position, plan.LogProbs) as they came
    prompt_parts: list[tuple[int, Any]] = field(default_factory=list)
    # log-probabilities that the device gives of each token, for client or strategy; -1 none
    topk: int = -1
    # completes(generated ids) -> the stop string that the last completes; for beams
    completes: Any = None
    tenant: int = 0  # number of ``owner``, or of params.tenant
    owner_number: int = 0  # number of ``owner``; 0: it names none
    # (tenant, cache_salt, ...): the prefix cache keeps what differs in it apart
    salt: tuple[str, ...] = ("", "")
    speculates: bool = False  # its steps may bring drafts
    drafted: int = 0  # drafts that were checked
    accepted: int = 0  # and those that were right
    watch: bool = False  # somebody wants each token as it comes (a stream, a stop string)
    # not 0: a token in the middle of its answer goes to ``Publisher.tell``, with this number
    stream: int = 0
    # sink(seq, new token ids, Finish or None) -> the stop string that they complete, or None
    sink: Any = None
    # once it has finished: its sequences, best first
    answer: list[Seq] = field(default_factory=list)
    on_done: Any = None  # on_done(request), once, when its last sequence has ended
    taps: tuple[Tap, ...] = ()  # as its client gave them
    tapped: RequestTaps | None = None  # and as the engine has them; None: there are none
    tap_bytes: int = 0  # of the values that its sequences have read
    # the joules of the request (``runtime.energy.account.RequestJoules``), where a counter is read
    energy: Any = None

    @property
    def expected(self) -> int:
        """Output tokens to reckon with: what the client expects, or the most that there can be."""
        most = self.end - len(self.prompt)
        return (
            most if self.params.expected_tokens is None else min(self.params.expected_tokens, most)
        )

    @property
    def done(self) -> bool:
        return bool(self.sequences) and all(s.status == FINISHED for s in self.sequences)


class FinishSequence(Protocol):
    """``Engine.finish``, as the parts get it that may end a sequence: wherever it is, and its request with its last."""

    def __call__(
        self,
        seq: Seq,
        reason: FinishReason,
        stop_reason: int | str | None = None,
        error: str | None = None,
    ) -> None: ...
