"""A request and its life: what a client asks for, and the sequences that the engine makes of it.

Request ──strategy.start──► Sequence (one per branch)

WAITING ──admitted──► RUNNING ──stop, length, abort, error──► FINISHED
   ▲                     │
   └──── preempted ◄─────┘      (blocks freed, tokens kept; it waits until its steps in flight have come back)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import numpy as np

from minivllm.errors import RequestError, suggest

from .interfaces.plan import STOP_IDS

MAX_LOGPROBS = 20
MAX_N = 128
WAITING, RUNNING, FINISHED = 0, 1, 2
PROCESSED = frozenset((  # what processors and samplers do, not the engine
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "logit_bias",
))  # fmt: skip


def _check(ok: bool, field_name: str, value: Any, want: str) -> None:
    if not ok:
        raise RequestError(f"{field_name}={value!r}: want {want}", field_name)


def _number(value: Any) -> bool:
    return (
        isinstance(value, (int, float, np.integer, np.floating))
        and not isinstance(value, bool)
        and math.isfinite(value)
    )


def _whole(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


@dataclass
class SamplingParams:
    """How tokens are drawn and when to stop; names, meanings and defaults are vLLM's (``max_tokens`` is 64).

    ``temperature=0`` is greedy.  ``top_k`` 0 or -1 keeps all.  ``logprobs=k`` reports the chosen token and the k best.
    ``seed`` makes the draws repeatable: they depend on (logits, seed, position, sample) alone.
    ``allowed_tokens_fn(ids) -> ids`` restricts the next token given the tokens so far; it runs on the host while the
    forward pass runs.  ``choose_fn(logits, ids) -> id`` picks the token on the host (float32 numpy logits).
    ``extra`` holds parameters of processors and samplers from other packages, by name.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    seed: int | None = None
    max_tokens: int | None = 64
    min_tokens: int = 0
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    priority: int = 0
    tenant: str = ""
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    expected_tokens: int | None = None
    cache_salt: str | None = None
    allowed_tokens_fn: Callable[[Sequence[int]], Sequence[int]] | None = None
    choose_fn: Callable[[np.ndarray, Sequence[int]], int] | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def make(cls, **values: Any) -> SamplingParams:
        """From keywords; an unknown one is refused with the nearest name."""
        known = [f.name for f in fields(cls)]
        for name in values:
            if name not in known:
                raise RequestError(f"unknown sampling parameter {name!r}.{suggest(name, known)}", name)
        return cls(**values)

    def __post_init__(self) -> None:
        for name in ("include_stop_str_in_output", "ignore_eos", "detokenize", "skip_special_tokens"):
            _check(isinstance(getattr(self, name), bool), name, getattr(self, name), "True or False")
        _check(isinstance(self.extra, Mapping), "extra", self.extra, "a mapping of names to values")
        for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
            _check(_number(getattr(self, name)), name, getattr(self, name), "a finite number")
        _check(_whole(self.n) and 1 <= self.n <= MAX_N, "n", self.n, f"a whole number from 1 to {MAX_N}")
        _check(0 <= self.temperature <= 100, "temperature", self.temperature, "0 (greedy) to 100")
        _check(0 < self.top_p <= 1, "top_p", self.top_p, "a number in (0, 1]")
        _check(_whole(self.top_k) and self.top_k >= -1, "top_k", self.top_k, "-1 or 0 (all) or a positive whole number")
        _check(0 <= self.min_p <= 1, "min_p", self.min_p, "a number in [0, 1]")
        _check(self.repetition_penalty > 0, "repetition_penalty", self.repetition_penalty, "a positive number")
        for name in ("presence_penalty", "frequency_penalty"):
            _check(-2 <= getattr(self, name) <= 2, name, getattr(self, name), "a number from -2 to 2")
        if self.seed is not None:
            _check(_whole(self.seed) and -(2**63) <= self.seed < 2**63, "seed", self.seed, "a 64-bit whole number")
        if self.max_tokens is not None:
            _check(
                _whole(self.max_tokens) and self.max_tokens >= 1, "max_tokens", self.max_tokens, "a whole number >= 1"
            )
        _check(_whole(self.min_tokens) and self.min_tokens >= 0, "min_tokens", self.min_tokens, "a whole number >= 0")
        if self.max_tokens is not None:
            _check(
                self.min_tokens <= self.max_tokens,
                "min_tokens",
                self.min_tokens,
                f"at most max_tokens={self.max_tokens}",
            )
        if self.logprobs is not None:
            ok = _whole(self.logprobs) and 0 <= self.logprobs <= MAX_LOGPROBS
            _check(ok, "logprobs", self.logprobs, f"0 to {MAX_LOGPROBS}")
        self._check_stops()
        self._check_service()

    def _check_stops(self) -> None:
        stops = [self.stop] if isinstance(self.stop, str) else list(self.stop or ())
        for s in stops:
            _check(isinstance(s, str) and 0 < len(s) <= 256, "stop", s, "non-empty strings of at most 256 characters")
        _check(len(stops) <= 16, "stop", f"{len(stops)} strings", "at most 16 strings")
        _check(
            not stops or self.detokenize,
            "stop",
            self.stop,
            "no stop strings with detokenize=False (use stop_token_ids)",
        )
        _check(
            self.stop_token_ids is None or isinstance(self.stop_token_ids, Sequence),
            "stop_token_ids",
            self.stop_token_ids,
            "a list of token ids",
        )
        ids = list(self.stop_token_ids or ())
        _check(all(_whole(i) and i >= 0 for i in ids), "stop_token_ids", ids, "whole numbers >= 0")
        _check(len(ids) <= STOP_IDS - 8, "stop_token_ids", f"{len(ids)} ids", f"at most {STOP_IDS - 8} ids")
        self.stop, self.stop_token_ids = tuple(stops), tuple(int(i) for i in ids)

    def _check_service(self) -> None:
        _check(_whole(self.priority) and abs(self.priority) < 2**31, "priority", self.priority, "a 32-bit whole number")
        _check(
            isinstance(self.tenant, str) and len(self.tenant) <= 256,
            "tenant",
            self.tenant,
            "a name up to 256 characters",
        )
        want, value = "a whole number >= 1", self.expected_tokens
        _check(value is None or (_whole(value) and 1 <= value < 2**31), "expected_tokens", value, want)
        for name in ("ttft_ms", "tpot_ms"):
            value = getattr(self, name)
            _check(value is None or (_number(value) and value > 0), name, value, "a positive number of milliseconds")
        ok = self.cache_salt is None or (isinstance(self.cache_salt, str) and 0 < len(self.cache_salt.encode()) <= 256)
        _check(ok, "cache_salt", self.cache_salt, "a string of 1 to 256 bytes")
        _check(
            self.choose_fn is None or (self.logprobs is None and self.allowed_tokens_fn is None),
            "choose_fn",
            "given",
            "it alone: the callable sees the logits, so logprobs and allowed_tokens_fn have no say beside it",
        )
        for name in ("allowed_tokens_fn", "choose_fn"):
            _check(
                getattr(self, name) is None or callable(getattr(self, name)), name, getattr(self, name), "a callable"
            )

    def asked(self) -> list[str]:
        """Names of the parameters that some processor or sampler has to honour: those that are not neutral."""
        neutral = {f.name: f.default for f in fields(self) if f.name in PROCESSED}
        return [name for name, value in neutral.items() if (getattr(self, name) or value) != value] + list(self.extra)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


class TokenLogprobs(NamedTuple):
    """One position as it comes from the device: the chosen token's, and the best with their ids, best first."""

    chosen: float
    rank: int
    top_ids: Sequence[int] = ()
    top: Sequence[float] = ()


@dataclass(eq=False)
class Seq:
    """One branch of a request as the planner and the engine see it (a sequence, in prose)."""

    id: int
    request: Request
    sample: int
    seed: int
    status: int = WAITING
    slot: int = -1
    serial: int = -1  # stamp of its stay in the slot: results of an older stay are dropped
    tokens: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))  # [known] while it has no slot
    known: int = 0  # tokens known to the host while it has no slot
    queued: bool = False  # it is in the planner's queue, by key in its lane
    key: float = 0.0
    lane: int = 0
    row: bytes = b""  # what a policy is shown of it while it is queued
    hint: tuple[int, int, int] | None = None  # of ``KVCache.hints``, since it was queued
    in_flight: int = 0  # steps whose results are still to come while it has no slot
    preempted: int = 0
    keys: list[int] = field(default_factory=list)  # hash chain of its full blocks, in the prefix index
    branches: list[Seq] = field(default_factory=list)  # sequences that fork from it once the prompt is computed
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    logprobs: list[Any] = field(default_factory=list)  # TokenLogprobs, one per generated token that is settled
    cumulative_logprob: float = 0.0
    unsettled: list[tuple[Any, int]] = field(default_factory=list)  # (plan.LogProbs, row) of the tokens after those
    published: int = 0  # output tokens handed to the text side

    def settle(self) -> None:
        """Make entries of the log-probabilities that have come: not before somebody asks, a step has no time for it."""
        k = self.request.params.logprobs
        for lp, j in self.unsettled:
            chosen = float(lp.chosen[j])
            entry = TokenLogprobs(chosen, int(lp.rank[j]), lp.top_ids[j, :k].tolist(), lp.top[j, :k].tolist())
            self.logprobs.append(entry)
            self.cumulative_logprob += chosen
        self.unsettled.clear()


@dataclass(eq=False)
class Request:
    """What the client asked for.  Times are seconds of ``time.monotonic``."""

    id: str
    prompt: np.ndarray  # i32 [n]
    params: SamplingParams
    arrival: float
    text: str | None = None
    end: int = 0  # known length at which a sequence of it ends
    eos_ids: tuple[int, ...] = ()
    rows: tuple[Any, ...] = ()  # per processor: Row or None, the sampler last
    stop_ids: tuple[int, ...] = ()
    sequences: list[Seq] = field(default_factory=list)
    first_token: float | None = None
    finished: float | None = None
    cached_tokens: int = 0
    strategy: Any = None  # the DecodingStrategy that made its sequences
    tenant: int = 0  # number of params.tenant
    salt: tuple[str, str] = ("", "")  # (tenant, cache_salt): the prefix cache keeps what differs in it apart
    watch: bool = False  # somebody wants each token as it comes (a stream, a stop string)
    sink: Any = None  # sink(seq, new token ids, ended or None) -> the stop string that they complete, or None
    on_done: Any = None  # on_done(request), once, when its last sequence has ended

    @property
    def expected(self) -> int:
        """Output tokens to reckon with: what the client expects, or the most that there can be."""
        most = self.end - len(self.prompt)
        return most if self.params.expected_tokens is None else min(self.params.expected_tokens, most)

    @property
    def done(self) -> bool:
        return bool(self.sequences) and all(s.status == FINISHED for s in self.sequences)
