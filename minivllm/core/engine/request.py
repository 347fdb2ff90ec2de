"""A request of a client, the sequences that the engine creates for it, and their states.

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
    from minivllm.core.interfaces.adapters import LoRARequest
    from minivllm.core.interfaces.finish import FinishReason
    from minivllm.core.interfaces.images import PlacedImage
    from minivllm.core.interfaces.params import SamplingParams
    from minivllm.core.interfaces.predictor import RequestFacts
    from minivllm.core.interfaces.session import SessionTurn
    from minivllm.core.interfaces.taps import Tap

    from .adapter_set import Adapter
    from .image_content import Content
    from .tap_values import RequestTaps, TapValues
    from .tier_loads import PageLoad

WAITING, RUNNING, FINISHED = 0, 1, 2


@dataclass(eq=False, slots=True)
class Seq:
    """One branch of a request, as the planner and the engine handle it (a "sequence" in the texts)."""

    id: int
    request: Request
    sample: int
    seed: int
    status: int = WAITING
    slot: int = -1
    serial: int = -1  # number of its stay in the slot; results of an older stay are dropped
    # token ids i32 [known] while the sequence has no slot
    tokens: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    known: int = 0  # number of tokens known to the host while the sequence has no slot
    queued: bool = False  # it is in the planner's queue, sorted by ``key`` in lane ``lane``
    key: float = 0.0
    lane: int = 0
    # number of cached blocks that ``KVCache.hints`` found; None means unknown
    hint: int | None = None
    hinted: int = 0  # ``Checkpoints.changes`` when ``hint`` was found
    # id of the last step that contains a sequence without a slot, until the engine processes the step's result; else 0
    in_flight: int = 0
    preempted: int = 0
    # whether the device has stored the sequence's kept columns (see ``plan.Delta.keep``), or will with the next delta
    saved: bool = False
    # computed tokens -> tokens that stayed, of each compression of its row; repeated after a preemption
    compressions: dict[int, int] = field(default_factory=dict)
    # computed tokens -> layer -> stored tokens i32 [kv_heads, kept] that stayed, if the request reads them
    kept: dict[int, dict[int, np.ndarray]] = field(default_factory=dict)
    # (version of the weights, number of the first output token that they drew), the oldest first
    weights: list[tuple[int, int]] = field(default_factory=list)
    # keys of the sequence's first full blocks (see ``BlockPool.keys_of``)
    keys: list[int] = field(default_factory=list)
    # digests of the sequence's first full blocks (see ``Tiers.keys_of``), and the pages that it waits for or may use
    page_keys: list[bytes] = field(default_factory=list)
    load: PageLoad | None = None
    # sequences that fork from this one once the prompt is computed
    branches: list[Seq] = field(default_factory=list)
    guide: Seq | None = None  # the guide of this sequence, with ``scale`` (see ``guides``)
    scale: float = 1.0
    lead: Seq | None = None  # the sequence that this guide steers, or None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    # log-probabilities of the generated tokens, without the pending ones
    logprobs: Sequence[TokenLogprobs] = field(default_factory=Scores)
    cumulative_logprob: float = 0.0
    # step results that hold the log-probabilities of the later tokens, and the row in each
    pending_logprobs: list[LogProbs] = field(default_factory=list)
    pending_rows: list[int] = field(default_factory=list)
    # chooses the token on the host: choose(logits, ids so far); None: the device samples
    choose: Callable[[np.ndarray, Sequence[int]], int] | None = None
    # output tokens sent to the sink so far (in a slot: ``Slots.emitted``)
    emitted: int = 0
    score: float | None = None  # score from a strategy with the mode "stepwise", else None
    tap_values: TapValues | None = None  # values that the sequence has read at its taps
    # grammar matcher, from the first mask on; it has received the tokens ``[prompt, matched)``
    matcher: Any = None
    matched: int = 0

    @property
    def pair(self) -> tuple[Seq, ...]:
        """Return the sequence and its guide, or only the sequence if it has no guide."""
        return (self,) if self.guide is None else (self, self.guide)

    @property
    def masked(self) -> bool:
        return self.request.grammar is not None or self.request.params.allowed_tokens_fn is not None

    def defer_logprobs(self, lp: LogProbs, row: int) -> None:
        """Store the log-probabilities of the newest token for later: row ``row`` of a step's ``lp``."""
        self.pending_logprobs.append(lp)
        self.pending_rows.append(row)

    def flush_logprobs(self) -> None:
        """Convert the stored log-probabilities to entries of ``logprobs``.

        This is done for many tokens in one call, because it takes too long in every step.
        """
        if self.pending_logprobs and isinstance(self.logprobs, Scores):
            before = len(self.logprobs)
            self.logprobs.add_rows(self.pending_logprobs, self.pending_rows, self.request.logprobs)
            self.cumulative_logprob = sum(self.logprobs.chosen[before:], self.cumulative_logprob)
            self.pending_logprobs.clear()
            self.pending_rows.clear()


@dataclass(eq=False)
class Request:
    """Request of a client, with its state in the engine.  Times are in seconds of ``time.monotonic``."""

    id: str
    prompt: np.ndarray  # i32 [n]
    params: SamplingParams
    arrival: float
    text: str | None = None
    # owner for fair shares (see ``core.engine.owners``); "" means none
    owner: str = ""
    end: int = 0  # length in tokens at which the sequences of the request end
    rows: tuple[Any, ...] = ()  # per processor: Row or None, the sampler last
    stops: StopRule = field(default_factory=StopRule)
    grammar: Any = None  # interfaces.grammar.Compiled
    sequences: list[Seq] = field(default_factory=list)
    scheduled: float | None = None  # time at which the first sequence of the request got a slot
    first_token: float | None = None
    finished: float | None = None
    cached_tokens: int = 0
    lora: LoRARequest | None = None  # the adapter that the client named
    adapter: Adapter | None = None  # the engine's entry of the same adapter
    # the images of the prompt, in the order of their positions
    images: tuple[PlacedImage, ...] = ()
    contents: tuple[Content, ...] = ()  # the engine's entry of each image
    strategy: Any = None  # the DecodingStrategy that made the sequences of the request
    beams: Any = None  # beams.Beams if the strategy is called after every step
    logprobs: int = 0  # best log-probabilities per token in the client's answer
    # best log-probabilities of each prompt token; -1 = none, or all are collected
    prompt_topk: int = -1
    # (first position, plan.LogProbs) of each chunk, in the order of computation
    prompt_parts: list[tuple[int, Any]] = field(default_factory=list)
    # best log-probabilities per token that the device returns, for client or strategy; -1 = none
    topk: int = -1
    # completes(generated ids) -> the stop string completed by the last id, or None; for beams
    completes: Any = None
    turn: SessionTurn | None = None  # ``SamplingParams.session``; None if the client has sent none
    kinds: np.ndarray | None = None  # the kinds of the prompt's blocks (see ``sessions.kinds_of``)
    tenant: int = 0  # number of ``owner``, or of params.tenant
    owner_number: int = 0  # number of ``owner``; 0 = no owner
    # (tenant, cache_salt, ...): only requests with an equal salt share prefixes
    salt: tuple[str, ...] = ("", "")
    speculates: bool = False  # whether steps of the request may have drafts
    drafted: int = 0  # draft tokens that were verified
    accepted: int = 0  # draft tokens that were accepted
    # whether tokens are sent to the sink in every step (streaming, stop strings)
    watch: bool = False
    # number of its stream in the event ``tokens_streamed``; 0 = no stream
    stream: int = 0
    # sink(seq, new token ids, Finish or None) -> the stop string that the ids complete, or None
    sink: Any = None
    # the sequences of the answer of a finished request, best first
    answer: list[Seq] = field(default_factory=list)
    on_done: Any = None  # callback on_done(request) at the end of the last sequence
    taps: tuple[Tap, ...] = ()  # taps of the client
    tapped: RequestTaps | None = None  # taps in the form that the engine uses; None means no taps
    # pools the prompt's hidden states (``pooling.Pooling``); the request then draws no token.  None for other requests
    pooling: Any = None
    reads_kept: bool = False  # whether the request reads the tokens that compressions keep (tap ``compression.kept``)
    tap_bytes: int = 0  # bytes of the values that the sequences of the request have read
    # number of tokens that a compression keeps in the KV cache; 0 means no compression (see ``compression``)
    keep: int = 0
    # tokens that stay under memory pressure, below 1 a share of the computed ones; 0 = not compressed then
    pressure: float = 0
    first_compression: int = 0  # number of computed tokens at the first compression
    # largest number of tokens that the KV cache holds for a compressed row of the request
    held: int = 0
    # number of last prompt tokens whose queries the compressor reads; the whole prompt if it reads attention sums
    observed: int = 0
    facts: RequestFacts | None = None  # the request as a predictor received it
    predicted: int | None = None  # output tokens that a predictor expects, None = unknown
    truth: int | None = None  # true length of the answer, which only a trace has
    # limit of the answer that policies and predictors receive; None = the real one.  A trace hides the length with it.
    shown_out: int | None = None
    # joules of the request (``runtime.energy.account.RequestJoules``); None without an energy counter
    energy: Any = None

    def ids(self, tokens: np.ndarray) -> list[int]:
        """Return the model's token ids for the tokens i32 [n] of a sequence of this request.

        In ``tokens``, numbers of contents replace the placeholders of images.
        """
        if not self.images:
            return tokens.tolist()
        return [*self.prompt.tolist(), *tokens[len(self.prompt) :].tolist()]

    def kind_of(self, block: int) -> int:
        """Return the kind of a block of the request's prompt, 0 for none (see ``BlockInfo.kind``)."""
        kinds = self.kinds
        if kinds is None or block >= len(kinds):
            return 0
        return int(kinds[block])

    @property
    def stored(self) -> int:
        """Return the most tokens of one of its sequences that the KV cache holds."""
        if self.pooling is not None:
            return len(self.prompt)
        return self.held if self.keep else self.end

    @property
    def expected(self) -> int:
        """Return the number of output tokens to plan with, limited by ``most_out``: the prediction, else the client's
        ``expected_tokens``, else ``most_out``."""
        if self.predicted is not None:
            return self.predicted
        expected = self.params.expected_tokens
        return self.most_out if expected is None else min(expected, self.most_out)

    @property
    def most_out(self) -> int:
        """Return the number of output tokens that policies and predictors receive as the maximum."""
        return self.end - len(self.prompt) if self.shown_out is None else self.shown_out

    @property
    def weights_version(self) -> int:
        """Return the newest version of the weights that may have drawn its tokens."""
        versions = (seq.weights[-1][0] for seq in self.sequences if seq.weights)
        return max(versions, default=0)

    @property
    def done(self) -> bool:
        return bool(self.sequences) and all(s.status == FINISHED for s in self.sequences)


class FinishSequence(Protocol):
    """Type of ``Engine.finish``, which the parts of the engine call to end a sequence.  The request ends with its last
    sequence."""

    def __call__(
        self,
        seq: Seq,
        reason: FinishReason,
        stop_reason: int | str | None = None,
        error: str | None = None,
    ) -> None: ...
