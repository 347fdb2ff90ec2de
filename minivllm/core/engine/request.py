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

from minivllm.core import declared_params
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
    """One answer of a request that is being generated (a "sequence" in other texts)."""

    id: int
    request: Request
    sample: int
    seed: int
    status: int = WAITING
    slot: int = -1
    # serial number of the present stay in a slot; results for an earlier stay are dropped
    serial: int = -1
    # token ids i32 [known] while the sequence has no slot
    tokens: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    known: int = 0  # count of known tokens while the sequence has no slot
    # whether it is in the queue of waiting sequences, in lane ``lane``, sorted by ``key``
    queued: bool = False
    key: float = 0.0
    lane: int = 0
    # number of cached blocks at the beginning of its prompt, as ``KVCache.hints`` found; None if
    # not known
    hint: int | None = None
    hinted: int = 0  # value of the counter ``Checkpoints.changes`` when ``hint`` was computed
    # For a sequence without a slot: id of the last step in flight that contains it, 0 if there is
    # none.
    in_flight: int = 0
    preempted: int = 0
    # whether the device keeps the columns of the preempted sequence, or will with the next delta
    # (``plan.Delta.keep``)
    saved: bool = False
    # compressions of its KV cache so far: number of computed tokens -> number of kept tokens; they
    # are repeated after a preemption
    compressions: dict[int, int] = field(default_factory=dict)
    # If the request reads which tokens compressions keep: number of computed tokens -> layer ->
    # indices of kept tokens i32 [kv_heads, kept].
    kept: dict[int, dict[int, np.ndarray]] = field(default_factory=dict)
    # (version of the model's weights, index of the first output token that they drew), the oldest
    # first
    weights: list[tuple[int, int]] = field(default_factory=list)
    # keys of the sequence's first full blocks (see ``BlockPool.keys_of``)
    keys: list[int] = field(default_factory=list)
    # keys under which tiers (CPU memory or disk) store its first full blocks (see
    # ``Tiers.keys_of``), and the pages that it loads from them
    page_keys: list[bytes] = field(default_factory=list)
    load: PageLoad | None = None
    # other sequences of the request, which fork from this one once the prompt is computed
    branches: list[Seq] = field(default_factory=list)
    # second sequence that steers the sampling of this one (see ``guides``), with the weight
    # ``scale``
    guide: Seq | None = None
    scale: float = 1.0
    lead: Seq | None = None  # for a guide: the sequence that it steers
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    # log-probabilities of the generated tokens, except for the pending ones below
    logprobs: Sequence[TokenLogprobs] = field(default_factory=Scores)
    cumulative_logprob: float = 0.0
    # Step results with the log-probabilities of the newest tokens, which are not in ``logprobs``
    # yet, and the row in each result.
    pending_logprobs: list[LogProbs] = field(default_factory=list)
    pending_rows: list[int] = field(default_factory=list)
    # choose(logits, token ids so far) -> token id on the host; None if the device draws
    choose: Callable[[np.ndarray, Sequence[int]], int] | None = None
    # count of output tokens sent to the client, while the sequence has no slot (else
    # ``Slots.emitted``)
    emitted: int = 0
    score: float | None = None  # score of the output in a beam search, else None
    # values that the sequence has read at tap points (named tensors of the model)
    tap_values: TapValues | None = None
    # Grammar matcher, made for the first mask. It has received the output tokens up to position
    # ``matched``.
    matcher: Any = None
    matched: int = 0

    @property
    def pair(self) -> tuple[Seq, ...]:
        """Return the sequence and its guide, or only the sequence if it has no guide."""
        return (self,) if self.guide is None else (self, self.guide)

    @property
    def masked(self) -> bool:
        return self.request.grammar is not None or self.request.params.allowed_tokens_fn is not None

    def contradiction(self) -> tuple[str, str] | None:
        """Return the error of a request whose own fields left no token to draw, and one of these fields.

        The fields include parameters of processors, if fewer than two others exclude tokens.  Return None for a
        request with fewer than two fields."""
        params = self.request.params
        fields = {
            "structured_outputs": self.request.grammar,
            "allowed_tokens_fn": params.allowed_tokens_fn,
            "allowed_token_ids": params.allowed_token_ids,
            "bad_words": params.bad_words or None,
        }
        names = [name for name, value in fields.items() if value is not None]
        if len(names) < 2:
            names += [name for name in params.extra if declared_params.of_processor(name)]
        if len(names) < 2:
            return None
        listed = f"{', '.join(names[:-1])} and {names[-1]}"
        return (
            f"nothing can be drawn: {listed} allow no token in common here; change one of them",
            names[0],
        )

    def defer_logprobs(self, lp: LogProbs, row: int) -> None:
        """Store row ``row`` of a step's log-probabilities ``lp`` for the newest token, to be converted later."""
        self.pending_logprobs.append(lp)
        self.pending_rows.append(row)

    def flush_logprobs(self) -> None:
        """Convert the pending log-probabilities of the newest tokens to entries of ``logprobs``.

        This is done for many tokens in one call, because a call in every step would take too long."""
        if self.pending_logprobs and isinstance(self.logprobs, Scores):
            before = len(self.logprobs)
            self.logprobs.add_rows(self.pending_logprobs, self.pending_rows, self.request.logprobs)
            self.cumulative_logprob = sum(self.logprobs.chosen[before:], self.cumulative_logprob)
            self.pending_logprobs.clear()
            self.pending_rows.clear()


@dataclass(eq=False)
class Request:
    """A request of a client, with its state in the engine.  Times are in seconds of ``time.monotonic``."""

    id: str
    prompt: np.ndarray  # i32 [n]
    params: SamplingParams
    arrival: float
    text: str | None = None
    # API key or client address, for fair division of the engine among clients; "" means none
    owner: str = ""
    end: int = 0  # number of tokens, prompt included, at which its sequences end at the latest
    # for each logits processor, then the sampler: the parameters of the request (Row), or None if
    # not used
    rows: tuple[Any, ...] = ()
    stops: StopRule = field(default_factory=StopRule)
    grammar: Any = None  # interfaces.grammar.Compiled
    sequences: list[Seq] = field(default_factory=list)
    scheduled: float | None = None  # time at which the first sequence of the request got a slot
    first_token: float | None = None
    finished: float | None = None
    cached_tokens: int = 0
    lora: LoRARequest | None = None  # LoRA adapter that the client named
    adapter: Adapter | None = None  # the same LoRA adapter, with its state in the engine
    # the images of the prompt, in the order of their positions
    images: tuple[PlacedImage, ...] = ()
    contents: tuple[Content, ...] = ()  # for each image, its number and state in the engine
    strategy: Any = None  # decoding strategy (plug-in) of the request
    beams: Any = None  # state of the beam search (beams.Beams); None without one
    logprobs: int = 0  # how many of the best log-probabilities per token the client receives
    # How many of the best log-probabilities of each prompt token are still to be returned; -1 means
    # none.
    prompt_topk: int = -1
    # log-probabilities of the prompt: (first position, plan.LogProbs) of each chunk, in the order
    # of computation
    prompt_parts: list[tuple[int, Any]] = field(default_factory=list)
    # how many of the best log-probabilities per token the device returns, for the client or for a
    # beam search; -1 means none
    topk: int = -1
    # for beam searches: completes(generated token ids) -> the stop string that the last token
    # completes, or None
    completes: Any = None
    # facts about the session of the request (``SamplingParams.session``), or None
    turn: SessionTurn | None = None
    # for each block of the prompt, the kind of its text, such as system prompt (see
    # ``sessions.kinds_of``)
    kinds: np.ndarray | None = None
    tenant: int = 0  # number that stands for ``owner``, or else for params.tenant
    owner_number: int = 0  # number that stands for ``owner``; 0 without an owner
    # strings (tenant, cache_salt, ...) that must be equal for requests to share cached prefixes
    salt: tuple[str, ...] = ("", "")
    speculates: bool = False  # whether steps of the request may have draft tokens
    drafted: int = 0  # count of its draft tokens that were verified
    accepted: int = 0  # count of its draft tokens that were accepted
    # whether each token is sent to the client in the step that draws it (streaming, stop strings)
    watch: bool = False
    # number of the request in the event ``tokens_streamed``; 0 if its tokens are not reported there
    stream: int = 0
    # callback for new tokens: sink(seq, new token ids, Finish or None) -> the stop string that the
    # ids complete, or None
    sink: Any = None
    # sequences that form the answer of the finished request, best first
    answer: list[Seq] = field(default_factory=list)
    on_done: Any = None  # on_done(request), called when the request has ended
    taps: tuple[Tap, ...] = ()  # named tensors of the model that the client reads or changes
    # the taps and expert routes in the engine's form, with numbers of tap points; None if the request
    # has neither
    tapped: RequestTaps | None = None
    # For embedding requests: adds up the hidden states of the prompt (``pooling.Pooling``).  None
    # for requests that generate tokens.
    pooling: Any = None
    # whether the request reads which tokens compressions keep (tap ``compression.kept``)
    reads_kept: bool = False
    tap_bytes: int = 0  # bytes of tap values that its sequences have read
    # number of tokens that a compression keeps in the KV cache; 0 means no compression (see ``compression``)
    keep: int = 0
    # Number of tokens that a row keeps when memory is short; below 1 a share of its computed
    # tokens; 0 means not compressed then.
    pressure: float = 0
    first_compression: int = 0  # number of computed tokens at which a row is first compressed
    # largest number of tokens that the KV cache holds for a compressed row of the request
    held: int = 0
    # How many of the last prompt tokens are always computed, because the compressor reads their
    # queries; the whole prompt if it reads attention sums.
    observed: int = 0
    facts: RequestFacts | None = None  # what a predictor plug-in received about the request
    predicted: int | None = None  # count of output tokens that a predictor expects; None if unknown
    # true number of output tokens, which is known when a trace is replayed
    truth: int | None = None
    # Largest number of output tokens as scheduling policies and predictors receive it; None means
    # the real limit.  The replay of a trace hides the true length with it.
    shown_out: int | None = None
    # energy account of the request (``runtime.energy.account.RequestJoules``); None without an
    # energy counter
    energy: Any = None

    def ids(self, tokens: np.ndarray) -> list[int]:
        """Return the model's token ids for the tokens i32 [n] of a sequence of this request.

        In ``tokens``, numbers that identify the contents of images stand for the placeholder tokens of the images."""
        if not self.images:
            return tokens.tolist()
        return [*self.prompt.tolist(), *tokens[len(self.prompt) :].tolist()]

    def kind_of(self, block: int) -> int:
        """Return the kind (such as system prompt) of the text in a block of the prompt, 0 for none (see
        ``BlockInfo.kind``)."""
        kinds = self.kinds
        if kinds is None or block >= len(kinds):
            return 0
        return int(kinds[block])

    @property
    def stored(self) -> int:
        """Return the largest number of tokens of one of its sequences that the KV cache must hold at a time."""
        if self.pooling is not None:
            return len(self.prompt)
        return self.held if self.keep else self.end

    @property
    def expected(self) -> int:
        """Return how many output tokens to expect: the prediction of a predictor, else the client's
        ``expected_tokens``, else the largest possible number."""
        if self.predicted is not None:
            return self.predicted
        expected = self.params.expected_tokens
        return self.most_out if expected is None else min(expected, self.most_out)

    @property
    def most_out(self) -> int:
        """Return the largest number of output tokens, as scheduling policies and predictors receive it."""
        return self.end - len(self.prompt) if self.shown_out is None else self.shown_out

    @property
    def weights_version(self) -> int:
        """Return the newest version of the weights that may have drawn its tokens."""
        versions = (seq.weights[-1][0] for seq in self.sequences if seq.weights)
        return max(versions, default=0)

    @property
    def done(self) -> bool:
        if self.finished is not None:
            return True
        return bool(self.sequences) and all(s.status == FINISHED for s in self.sequences)

    def release(self) -> None:
        """Drop the sequences and the callbacks of the ended request.  They refer to the request, so only a garbage
        collection would free them."""
        for seq in self.sequences:
            seq.guide = None
        self.sequences, self.answer, self.beams = [], [], None
        self.sink = self.on_done = None


class FinishSequence(Protocol):
    """Type of ``Engine.finish``, the function that ends a sequence, and its request with the last sequence.  Other
    modules of the engine receive it as an argument."""

    def __call__(
        self,
        seq: Seq,
        reason: FinishReason,
        stop_reason: int | str | None = None,
        error: str | None = None,
    ) -> None: ...
