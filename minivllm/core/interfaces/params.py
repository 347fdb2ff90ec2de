"""What a client asks of one request: how tokens are drawn, and when it ends.  Checked where it is made."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from inspect import Parameter, Signature
from typing import TYPE_CHECKING, Any

import numpy as np

from minivllm.core import declared_params
from minivllm.errors import RequestError, shown
from minivllm.registration.parameters import NUMBERS, Param, is_whole, unknown_parameter
from minivllm.validation import flaw

from .plan import STOP_IDS
from .structured import StructuredOutputsParams

MAX_N = 128
MAX_STOPS = 16
PROCESSED = frozenset(
    (  # what processors and samplers do, not the engine
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "logit_bias",
        "bad_words",
        "allowed_token_ids",
    )
)
# what may hold text that is none
TEXTS = ("stop", "bad_words", "cache_salt", "tenant", "trace_headers")
INT32, INT64 = 2**31 - 1, 2**63 - 1
# the fields that can be told right or wrong by themselves, in the order in which they are looked at
RANGED = (
    Param("include_stop_str_in_output", bool, False),
    Param("ignore_eos", bool, False),
    Param("detokenize", bool, True),
    Param("skip_special_tokens", bool, True),
    Param("temperature", float, 1.0, ge=0, le=2, wanted="a number from 0 (greedy) to 2"),
    Param("top_p", float, 1.0, gt=0, le=1, wanted="a number in (0, 1]"),
    Param("min_p", float, 0.0, ge=0, le=1, wanted="a number in [0, 1]"),
    Param(
        "repetition_penalty", float, 1.0, ge=1e-6, le=1e6, wanted="a positive number, at most 1e6"
    ),
    Param("presence_penalty", float, 0.0, ge=-2, le=2, wanted="a number from -2 to 2"),
    Param("frequency_penalty", float, 0.0, ge=-2, le=2, wanted="a number from -2 to 2"),
    Param("n", int, 1, ge=1, le=MAX_N, wanted=f"a whole number from 1 to {MAX_N}"),
    Param("top_k", int, 0, ge=-1, wanted="-1 or 0 (all) or a positive whole number"),
    Param("seed", int, ge=-INT64 - 1, le=INT64, wanted="a 64-bit whole number"),
    Param("max_tokens", int, ge=1, le=INT32, wanted="a whole number >= 1"),
    Param("min_tokens", int, 0, ge=0, wanted="a whole number >= 0"),
    Param("logprobs", int, ge=-1, wanted="a whole number from 0, or -1 for the whole vocabulary"),
    Param(
        "prompt_logprobs",
        int,
        ge=-1,
        wanted="a whole number from 0, or -1 for the whole vocabulary",
    ),
    Param("length_penalty", float, 1.0, ge=-10, le=10, wanted="a number from -10 to 10"),
    Param("priority", int, 0, ge=-INT32, le=INT32, wanted="a 32-bit whole number"),
    Param("expected_tokens", int, ge=1, le=INT32, wanted="a whole number >= 1"),
    Param("ttft_ms", float, gt=0, wanted="a positive number of milliseconds"),
    Param("tpot_ms", float, gt=0, wanted="a positive number of milliseconds"),
)


def _check(ok: bool, field_name: str, value: Any, want: str) -> None:
    if not ok:
        raise RequestError(f"{field_name}={shown(value)}: want {want}", field_name)


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
    ``extra`` holds the parameters that samplers, processors and strategies have of their own, by name.  Those that a
    spec declares (``minivllm.plugin.Param``) are keywords and attributes too, are checked as fields are, and are in
    ``extra`` only where they are not at their default; a keyword counts before the same name in ``extra``.
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

    if not TYPE_CHECKING:  # which sees the fields; what plug-ins declare is known at run time alone

        def __init__(self, **values: Any) -> None:
            own = (
                {}
                if values.keys() <= NAMES
                else {k: values.pop(k) for k in list(values) if k not in NAMES}
            )
            for name in own:
                if declared_params.find(name) is None:
                    raise unknown_parameter(name, {*NAMES, *declared_params.everything()})
            given = self.__dict__
            given.update(DEFAULTS, extra={})
            given.update(values)
            self._take(own)

        def __setattr__(self, name: str, value: Any) -> None:
            if name in NAMES:
                self.__dict__[name] = value
            elif name.startswith("_") or declared_params.find(name) is None:
                raise AttributeError(f"{type(self).__name__} has no parameter {shown(name)}")
            else:
                self.__dict__["extra"] = _checked({**self.extra, name: value})

    def __getattr__(self, name: str) -> Any:
        """A parameter that a plug-in declares: as it was given, else its default."""
        param = None if name.startswith("_") else declared_params.find(name)
        if param is None:
            raise AttributeError(f"{type(self).__name__} has no parameter {shown(name)}")
        return self.extra.get(name, param.default)

    @classmethod
    def make(cls, **values: Any) -> SamplingParams:
        """From keywords of which a type checker knows nothing, as those that plug-ins declare."""
        return cls(**values)

    def _take(self, own: Mapping[str, Any]) -> None:
        """Check all, and bring what comes in several forms into one.  ``own``: keywords that plug-ins declare."""
        given = self.__dict__
        for name in TEXTS:
            if (value := given[name]) and (what := flaw(value)):
                raise RequestError(f"{name}: {what}", name)
        for param in RANGED:
            if (value := given[param.name]) is not param.default:
                param.check(value)
        if isinstance(self.allowed_token_ids, (range, np.ndarray)):
            self.allowed_token_ids = list(self.allowed_token_ids)
        if self.extra != {} or own:
            _check(
                isinstance(self.extra, Mapping), "extra", self.extra, "a mapping of names to values"
            )
            self.extra = _checked({**self.extra, **own} if own else self.extra)
        if (most := self.max_tokens) is not None:
            _check(
                self.min_tokens <= most, "min_tokens", self.min_tokens, f"at most max_tokens={most}"
            )
        self._check_branches()
        self._check_stops()
        self._check_service()
        self._check_functions()
        self.structured_outputs = StructuredOutputsParams.of(self.structured_outputs)

    def _check_branches(self) -> None:
        for name in ("best_of", "beam_width"):
            value, want = getattr(self, name), f"a whole number from n={self.n} to {MAX_N}"
            _check(
                value is None or (is_whole(value) and self.n <= value <= MAX_N), name, value, want
            )
        _check(
            self.best_of is None or self.beam_width is None,
            "best_of",
            self.best_of,
            "it or beam_width, not both",
        )
        ok = isinstance(self.early_stopping, bool) or self.early_stopping == "never"
        _check(ok, "early_stopping", self.early_stopping, 'False, True or "never"')
        for name in ("choose_fn", "logits_processors") if self.best_of else ():
            _check(
                not getattr(self, name),
                name,
                "given",
                "it without best_of: the host gives no log-probabilities",
            )
        if self.beam_width is None:
            for name, neutral in (("length_penalty", 1.0), ("early_stopping", False)):
                _check(
                    getattr(self, name) == neutral,
                    name,
                    getattr(self, name),
                    "beam_width beside it",
                )
            return
        for name in ("allowed_tokens_fn", "choose_fn", "logits_processors", "structured_outputs"):
            _check(
                not getattr(self, name),
                name,
                "given",
                "it without beam_width: beams are no rows that draw",
            )

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
        own = {
            "beam_width": self.beam_width is not None,
            "best_of": (self.best_of or self.n) > self.n,
        }
        return {name for name, asked in own.items() if asked}

    def _check_stops(self) -> None:
        stop, ids = self.stop, self.stop_token_ids
        listed = stop is None or isinstance(stop, (str, list, tuple))
        _check(listed, "stop", stop, "a string, or a list of strings")
        stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
        _check(
            len(stops) <= MAX_STOPS, "stop", f"{len(stops)} strings", f"at most {MAX_STOPS} strings"
        )
        for s in stops:
            _check(
                isinstance(s, str) and 0 < len(s) <= 256,
                "stop",
                s,
                "non-empty strings of at most 256 characters",
            )
        want = "no stop strings with detokenize=False (use stop_token_ids)"
        _check(not stops or self.detokenize, "stop", stop, want)
        listed = ids is None or (
            isinstance(ids, (Sequence, np.ndarray)) and not isinstance(ids, (str, bytes))
        )
        _check(listed, "stop_token_ids", ids, "a list of token ids")
        ids, most = () if ids is None else ids, STOP_IDS - 8
        _check(len(ids) <= most, "stop_token_ids", f"{len(ids)} ids", f"at most {most} ids")
        _check(
            all(is_whole(i) and i >= 0 for i in ids), "stop_token_ids", ids, "whole numbers >= 0"
        )
        self.stop, self.stop_token_ids = stops, tuple(int(i) for i in ids)

    def _check_service(self) -> None:
        ok = isinstance(self.tenant, str) and len(self.tenant) <= 256
        _check(ok, "tenant", self.tenant, "a name up to 256 characters")
        ok = self.cache_salt is None or (
            isinstance(self.cache_salt, str) and 0 < len(self.cache_salt.encode()) <= 256
        )
        _check(ok, "cache_salt", self.cache_salt, "a string of 1 to 256 bytes")
        trace = self.trace_headers
        ok = isinstance(trace, Mapping) and all(
            isinstance(text, str) for pair in trace.items() for text in pair
        )
        _check(
            ok or trace is None, "trace_headers", trace, "a mapping of texts, such as traceparent"
        )

    def _check_functions(self) -> None:
        own = self.logits_processors
        _check(
            own is None or isinstance(own, (list, tuple)),
            "logits_processors",
            own,
            "a list of callables",
        )
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
        given = self.__dict__
        changed = [name for name, value in NEUTRAL.items() if (given.get(name) or value) != value]
        return changed + list(self.extra)

    def check_extra(self) -> None:
        """Again, for what was put into ``extra``, or declared, since it was made."""
        self.extra = _checked(self.extra)

    def ending_after(self, most: int) -> SamplingParams:
        """The same with ``max_tokens=most``, at least ``min_tokens``, which is all that is checked: the rest was."""
        _check(
            most >= max(1, self.min_tokens),
            "max_tokens",
            most,
            f"at least min_tokens={self.min_tokens}",
        )
        made = object.__new__(type(self))  # what ``copy`` asks for takes long
        made.__dict__.update(self.__dict__, max_tokens=most)
        return made

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


NAMES = frozenset(f.name for f in fields(SamplingParams))
DEFAULTS: dict[str, Any] = {f.name: f.default for f in fields(SamplingParams) if f.name != "extra"}
_keywords = [
    Parameter(name, Parameter.KEYWORD_ONLY, default=value)
    for name, value in {**DEFAULTS, "extra": {}}.items()
]
_signature = Signature([*_keywords, Parameter("declared", Parameter.VAR_KEYWORD)])
SamplingParams.__signature__ = _signature  # type: ignore[attr-defined]  # for help() and notebooks
NEUTRAL = {f.name: f.default for f in fields(SamplingParams) if f.name in PROCESSED}


def is_own(name: str) -> bool:
    """Whether a name is a field or a method of ``SamplingParams``, so that no plug-in can declare it."""
    return name in NAMES or hasattr(SamplingParams, name)


def _checked(extra: Mapping[str, Any]) -> Mapping[str, Any]:
    """``extra`` with declared parameters as their declarations want them, without those at their defaults; the same
    object if nothing was to be done.  RequestError names the parameter that is wrong."""
    found, same = {}, True
    for name, given in extra.items():
        value, param = given, declared_params.known(name)
        if param is None or param.kind not in NUMBERS:
            who = "extra" if param is None else name
            if what := flaw({name: given} if param is None else given):
                raise RequestError(f"{who}: {what}", who)
        if param is not None:
            value = param.check(given)
            if value == param.default:
                same = False
                continue
        found[name], same = value, same and value is given
    return extra if same else found
