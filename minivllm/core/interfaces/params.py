"""What a client asks of one request: how tokens are drawn, and when it ends.  Checked where it is made."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from minivllm.errors import RequestError, shown, suggest
from minivllm.plain import flaw

from .plan import STOP_IDS
from .structured import StructuredOutputsParams

MAX_N = 128
MAX_STOPS = 16
PROCESSED = frozenset((  # what processors and samplers do, not the engine
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "logit_bias", "bad_words", "allowed_token_ids", "no_repeat_ngram_size", "temperature_schedule", "typical_p",
    "mirostat_tau", "mirostat_eta",
))  # fmt: skip
TEXTS = ("stop", "bad_words", "cache_salt", "tenant", "trace_headers", "extra")  # what may hold text that is none
RANGES = (  # field, least, most, what to say of it; both ends are in the range unless said otherwise
    ("temperature", 0, 2, "a number from 0 (greedy) to 2"), ("top_p", 1e-300, 1, "a number in (0, 1]"),
    ("min_p", 0, 1, "a number in [0, 1]"), ("typical_p", 1e-300, 1, "a number in (0, 1]"),
    ("repetition_penalty", 1e-6, 1e6, "a positive number, at most 1e6"),
    ("presence_penalty", -2, 2, "a number from -2 to 2"), ("frequency_penalty", -2, 2, "a number from -2 to 2"),
    ("mirostat_eta", 1e-6, 1, "a number in (0, 1]"),
)  # fmt: skip


def _check(ok: bool, field_name: str, value: Any, want: str) -> None:
    if not ok:
        raise RequestError(f"{field_name}={shown(value)}: want {want}", field_name)


def _number(value: Any) -> bool:
    if not isinstance(value, (int, float, np.integer, np.floating)) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond all floats
        return False


def _whole(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


@dataclass
class SamplingParams:
    """How tokens are drawn and when to stop; names, meanings and defaults are vLLM's (``max_tokens`` is 64).

    ``temperature=0`` is greedy.  ``top_k`` 0 or -1 keeps all.  ``logprobs=k`` reports the chosen token and the k best.
    ``seed`` makes the draws repeatable: they depend on (logits, seed, position, sample) alone.
    ``allowed_tokens_fn(ids) -> ids`` restricts the next token given the tokens so far; it runs on the host while the
    forward pass runs.  ``choose_fn(logits, ids) -> id`` picks the token on the host (float32 numpy logits).
    ``best_of`` samples are drawn and the ``n`` of the highest cumulative log-probability given; ``beam_width`` asks for
    beam search, of which nothing is streamed before its end.
    ``logits_processors``: functions ``f(output ids, logits) -> logits`` or ``f(prompt ids, output ids, logits) ->
    logits``, run on the host in order on the row's float32 logits (a torch tensor [V]), before the sampler draws.
    ``bad_words``: words, or lists of token ids, whose last token is not drawn where the others came before it.
    ``structured_outputs``: what the text must fit, as in ``StructuredOutputsParams`` (an object of it or a mapping).
    ``trace_headers``: W3C trace context (``traceparent``, ``tracestate``) of the caller, for hooks that trace.
    ``extra`` holds parameters of processors and samplers from other packages, by name.
    """

    n: int = 1
    best_of: int | None = None
    beam_width: int | None = None
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    bad_words: Sequence[str | Sequence[int]] | None = None
    allowed_token_ids: Sequence[int] | None = None
    no_repeat_ngram_size: int = 0
    temperature_schedule: Mapping[str, Any] | None = None
    typical_p: float = 1.0
    mirostat_tau: float | None = None
    mirostat_eta: float = 0.1
    seed: int | None = None
    max_tokens: int | None = 64
    min_tokens: int = 0
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    priority: int = 0
    tenant: str = ""
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    expected_tokens: int | None = None
    cache_salt: str | None = None
    trace_headers: Mapping[str, str] | None = None
    allowed_tokens_fn: Callable[[Sequence[int]], Sequence[int]] | None = None
    choose_fn: Callable[[np.ndarray, Sequence[int]], int] | None = None
    logits_processors: Sequence[Callable[..., Any]] | None = None
    structured_outputs: StructuredOutputsParams | Mapping[str, Any] | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def make(cls, **values: Any) -> SamplingParams:
        """From keywords; an unknown one is refused with the nearest name."""
        for name in values:
            if name not in NAMES:
                raise RequestError(f"unknown sampling parameter {shown(name)}.{suggest(name, sorted(NAMES))}", name)
        return cls(**values)

    def __post_init__(self) -> None:
        for name in TEXTS:
            if (value := getattr(self, name)) and (what := flaw(value)):
                raise RequestError(f"{name}: {what}", name)
        for name in ("include_stop_str_in_output", "ignore_eos", "detokenize", "skip_special_tokens"):
            _check(isinstance(getattr(self, name), bool), name, getattr(self, name), "True or False")
        _check(isinstance(self.extra, Mapping), "extra", self.extra, "a mapping of names to values")
        for name, least, highest, want in RANGES:
            value = getattr(self, name)
            _check(_number(value), name, value, f"a finite number: {want}")
            _check(least <= value <= highest, name, value, want)
        _check(_whole(self.n) and 1 <= self.n <= MAX_N, "n", self.n, f"a whole number from 1 to {MAX_N}")
        _check(_whole(self.top_k) and self.top_k >= -1, "top_k", self.top_k, "-1 or 0 (all) or a positive whole number")
        if isinstance(self.allowed_token_ids, (range, np.ndarray)):
            self.allowed_token_ids = list(self.allowed_token_ids)
        tau, ngram = self.mirostat_tau, self.no_repeat_ngram_size
        _check(tau is None or (_number(tau) and 0 < tau <= 64), "mirostat_tau", tau, "bits, above 0 and up to 64")
        _check(_whole(ngram) and ngram >= 0, "no_repeat_ngram_size", ngram, "0 (off) or a positive whole number")
        if self.seed is not None:
            _check(_whole(self.seed) and -(2**63) <= self.seed < 2**63, "seed", self.seed, "a 64-bit whole number")
        most = self.max_tokens
        _check(most is None or (_whole(most) and 1 <= most < 2**31), "max_tokens", most, "a whole number >= 1")
        _check(_whole(self.min_tokens) and self.min_tokens >= 0, "min_tokens", self.min_tokens, "a whole number >= 0")
        if most is not None:
            _check(self.min_tokens <= most, "min_tokens", self.min_tokens, f"at most max_tokens={most}")
        for name in ("logprobs", "prompt_logprobs"):
            k, want = getattr(self, name), "a whole number from 0, or -1 for the whole vocabulary"
            _check(k is None or (_whole(k) and k >= -1), name, k, want)
        self._check_branches()
        self._check_stops()
        self._check_service()
        self.structured_outputs = StructuredOutputsParams.of(self.structured_outputs)

    def _check_branches(self) -> None:
        for name in ("best_of", "beam_width"):
            value, want = getattr(self, name), f"a whole number from n={self.n} to {MAX_N}"
            _check(value is None or (_whole(value) and self.n <= value <= MAX_N), name, value, want)
        _check(self.best_of is None or self.beam_width is None, "best_of", self.best_of, "it or beam_width, not both")
        ok = _number(self.length_penalty) and abs(self.length_penalty) <= 10
        _check(ok, "length_penalty", self.length_penalty, "a number from -10 to 10")
        ok = isinstance(self.early_stopping, bool) or self.early_stopping == "never"
        _check(ok, "early_stopping", self.early_stopping, 'False, True or "never"')
        for name in ("choose_fn", "logits_processors") if self.best_of else ():
            _check(not getattr(self, name), name, "given", "it without best_of: the host gives no log-probabilities")
        if self.beam_width is None:
            for name, neutral in (("length_penalty", 1.0), ("early_stopping", False)):
                _check(getattr(self, name) == neutral, name, getattr(self, name), "beam_width beside it")
            return
        for name in ("allowed_tokens_fn", "choose_fn", "logits_processors", "structured_outputs"):
            _check(not getattr(self, name), name, "given", "it without beam_width: beams are no rows that draw")

    @property
    def salt(self) -> tuple[str, str]:
        """(tenant, cache_salt): requests that differ in it share nothing that is kept."""
        return (self.tenant, self.cache_salt or "")

    @property
    def width(self) -> int:
        """Branches that the request may have at once."""
        return self.beam_width or max(self.n, self.best_of or 1)

    def branching(self) -> set[str]:
        """Names of the parameters that a strategy has to honour."""
        own = {"beam_width": self.beam_width is not None, "best_of": (self.best_of or self.n) > self.n}
        return {name for name, asked in own.items() if asked}

    def _check_stops(self) -> None:
        stop, ids = self.stop, self.stop_token_ids
        listed = stop is None or isinstance(stop, (str, list, tuple))
        _check(listed, "stop", stop, "a string, or a list of strings")
        stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
        _check(len(stops) <= MAX_STOPS, "stop", f"{len(stops)} strings", f"at most {MAX_STOPS} strings")
        for s in stops:
            _check(isinstance(s, str) and 0 < len(s) <= 256, "stop", s, "non-empty strings of at most 256 characters")
        want = "no stop strings with detokenize=False (use stop_token_ids)"
        _check(not stops or self.detokenize, "stop", stop, want)
        listed = ids is None or (isinstance(ids, (Sequence, np.ndarray)) and not isinstance(ids, (str, bytes)))
        _check(listed, "stop_token_ids", ids, "a list of token ids")
        ids, most = () if ids is None else ids, STOP_IDS - 8
        _check(len(ids) <= most, "stop_token_ids", f"{len(ids)} ids", f"at most {most} ids")
        _check(all(_whole(i) and i >= 0 for i in ids), "stop_token_ids", ids, "whole numbers >= 0")
        self.stop, self.stop_token_ids = stops, tuple(int(i) for i in ids)

    def _check_service(self) -> None:
        _check(_whole(self.priority) and abs(self.priority) < 2**31, "priority", self.priority, "a 32-bit whole number")
        ok = isinstance(self.tenant, str) and len(self.tenant) <= 256
        _check(ok, "tenant", self.tenant, "a name up to 256 characters")
        want, value = "a whole number >= 1", self.expected_tokens
        _check(value is None or (_whole(value) and 1 <= value < 2**31), "expected_tokens", value, want)
        for name in ("ttft_ms", "tpot_ms"):
            value = getattr(self, name)
            _check(value is None or (_number(value) and value > 0), name, value, "a positive number of milliseconds")
        ok = self.cache_salt is None or (isinstance(self.cache_salt, str) and 0 < len(self.cache_salt.encode()) <= 256)
        _check(ok, "cache_salt", self.cache_salt, "a string of 1 to 256 bytes")
        trace = self.trace_headers
        ok = isinstance(trace, Mapping) and all(isinstance(text, str) for pair in trace.items() for text in pair)
        _check(ok or trace is None, "trace_headers", trace, "a mapping of texts, such as traceparent")
        own = self.logits_processors
        _check(own is None or isinstance(own, (list, tuple)), "logits_processors", own, "a list of callables")
        _check(all(map(callable, own or ())), "logits_processors", own, "a list of callables")
        self.logits_processors = tuple(own) if own else None
        for name in ("choose_fn", "logits_processors"):
            masks = ("logprobs", "allowed_tokens_fn", "structured_outputs")
            beside = (*masks, *(("choose_fn",) if name != "choose_fn" else ()))
            there = [other for other in beside if getattr(self, other) is not None]
            want = f"no {', '.join(there)} beside it: the token is drawn on the host, where that has no say"
            _check(getattr(self, name) is None or not there, name, "given", want)
        for name in ("allowed_tokens_fn", "choose_fn"):
            value = getattr(self, name)
            _check(value is None or callable(value), name, value, "a callable")

    def asked(self) -> list[str]:
        """Names of the parameters that some processor or sampler has to honour: those that are not neutral."""
        changed = [name for name, value in NEUTRAL.items() if (getattr(self, name) or value) != value]
        return changed + list(self.extra)

    def ending_after(self, most: int) -> SamplingParams:
        """The same with ``max_tokens=most``, at least ``min_tokens``, which is all that is checked: the rest was."""
        _check(most >= max(1, self.min_tokens), "max_tokens", most, f"at least min_tokens={self.min_tokens}")
        made = copy.copy(self)
        made.max_tokens = most
        return made

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


NAMES = frozenset(f.name for f in fields(SamplingParams))
NEUTRAL = {f.name: f.default for f in fields(SamplingParams) if f.name in PROCESSED}
