"""The parameters of one request: how its tokens are drawn and when it ends.  They are checked on construction."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, fields
from inspect import Parameter, Signature
from typing import TYPE_CHECKING, Any

import numpy as np

from minivllm.core import declared_params
from minivllm.errors import RequestError, describe_error, shown
from minivllm.registration.parameters import NUMBERS, Param, is_whole, unknown_parameter
from minivllm.validation import flaw

from .plan import STOP_IDS
from .routes import RouteParams
from .session import Session
from .structured import StructuredOutputsParams

MAX_N = 128
MAX_STOPS = 16
# Names of fields that logits processors and samplers implement, not the engine.
PROCESSED = frozenset(
    (
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
# Fields with several values, which processors check further -> their accepted values.
COLLECTIONS = {
    "logit_bias": "a mapping from token id to bias",
    "bad_words": "a list of words or of token ids",
    "allowed_token_ids": "a list of token ids",
}
# Names of fields whose text may be invalid Unicode.
TEXTS = ("stop", "bad_words", "cache_salt", "tenant", "trace_headers")
INT32, INT64 = 2**31 - 1, 2**63 - 1
# Names of fields that are checked independently of other fields, in this order.
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


def _check(ok: bool, field_name: str, value: Any, expected: str) -> None:
    """Raise RequestError for a field unless ``ok``.  ``expected`` describes the accepted values."""
    if not ok:
        raise RequestError(f"{field_name}={shown(value)}: expected {expected}", field_name)


def _is_plain(value: Any, default: Any) -> bool:
    """Return whether a value of a field can be tested, compared with its default, and is no array of 0 dimensions."""
    try:
        comparable = bool(value) in (True, False) and bool(value == default) in (True, False)
    except Exception:
        return False
    return comparable and not (isinstance(value, np.ndarray) and value.ndim == 0)


@dataclass
class SamplingParams:
    """How the tokens of a request are drawn and when it stops.  Names, meanings and defaults are those of vLLM, but
    ``max_tokens`` is 64.

    ``temperature=0`` is greedy.  ``top_k`` 0 or -1 keeps all tokens.  ``logprobs=k`` reports the log-probabilities of
    the chosen token and of the k best tokens.  ``seed`` makes draws repeatable: they are a function of (logits, seed,
    position, sample).

    ``allowed_tokens_fn(ids) -> ids`` receives the tokens so far and returns the tokens allowed next; it runs on the
    host during the forward pass.  ``choose_fn(logits, ids) -> id`` chooses the token on the host, from float32 numpy
    logits.  ``logits_processors`` are functions ``f(output ids, logits) -> logits`` or ``f(prompt ids, output ids,
    logits) -> logits``.  They run on the host in order, on the row's float32 logits (a torch tensor [V]), before the
    sampler draws.

    ``best_of`` samples are generated, and the ``n`` samples of the highest cumulative log-probability are returned.
    ``beam_width`` selects beam search, which streams nothing before it ends.

    ``bad_words`` are words or lists of token ids.  The last token of such a list is not drawn after its other tokens.
    ``structured_outputs`` restricts the form of the text; it is a ``StructuredOutputsParams`` or a mapping with its
    fields.  ``session`` has facts about the session of the request, for schedulers and evictors; it is a ``Session`` or
    a mapping with its fields.  ``trace_headers`` is the W3C trace context of the caller (``traceparent``,
    ``tracestate``), for hooks that trace.

    ``routes`` reads, counts, prunes or gives the experts that the tokens use; it is a ``RouteParams``, a mapping with
    its fields, or True, which reads them.

    ``extra`` holds parameters of samplers, processors and strategies by name.  Parameters that a plug-in spec declares
    (``minivllm.plugin.Param``) are also keywords and attributes of this class, and are checked as fields are; ``extra``
    holds those that are not at their default.  A keyword takes precedence over the same name in ``extra``.
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
    session: Session | Mapping[str, Any] | None = None
    routes: RouteParams | Mapping[str, Any] | bool | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    # Type checkers see only the fields, because the parameters of plug-ins are declared at run time.
    if not TYPE_CHECKING:

        def __init__(self, **values: Any) -> None:
            """Set and check the fields and the parameters that plug-ins declare.  RequestError for a bad one."""
            declared: dict[str, Any] = {}
            if not values.keys() <= NAMES:
                declared = {k: values.pop(k) for k in list(values) if k not in NAMES}
            for name in declared:
                if declared_params.find(name) is None:
                    raise unknown_parameter(name, {*NAMES, *declared_params.everything()})
            attributes = self.__dict__
            attributes.update(DEFAULTS, extra={})
            attributes.update(values)
            try:
                self._check_all(declared)
            except RequestError:
                raise
            except (
                Exception
            ) as exc:  # arrays have no truth value, and objects may raise in comparisons
                raise self._unreadable(exc) from exc

        def __setattr__(self, name: str, value: Any) -> None:
            """Set a field without a check, or a parameter that a plug-in declares with a check."""
            if name in NAMES:
                self.__dict__[name] = value
            elif name.startswith("_") or declared_params.find(name) is None:
                raise AttributeError(f"{type(self).__name__} has no parameter {shown(name)}")
            else:
                self.__dict__["extra"] = _checked({**self.extra, name: value})

    def __getattr__(self, name: str) -> Any:
        """Return the value of a parameter that a plug-in declares, or its default.  AttributeError for other names."""
        param = None if name.startswith("_") else declared_params.find(name)
        if param is None:
            raise AttributeError(f"{type(self).__name__} has no parameter {shown(name)}")
        return self.extra.get(name, param.default)

    @classmethod
    def make(cls, **values: Any) -> SamplingParams:
        """Return parameters made from keywords.

        A type checker does not know them, so this method accepts parameters that plug-ins declare."""
        return cls(**values)

    def _check_all(self, declared: Mapping[str, Any]) -> None:
        """Check all parameters, and convert fields that accept several forms into one form.

        ``declared`` are the keywords of parameters that plug-ins declare.
        """
        attributes = self.__dict__
        for name in TEXTS:
            value = attributes[name]
            if value:
                problem = flaw(value)
                if problem:
                    raise RequestError(f"{name}: {problem}", name)
        for param in RANGED:
            value = attributes[param.name]
            if value is not param.default:
                param.check(value)
        if isinstance(self.allowed_token_ids, (range, np.ndarray)):
            self.allowed_token_ids = list(self.allowed_token_ids)
        for name, expected in COLLECTIONS.items():
            value = attributes[name]
            _check(
                value is None or isinstance(value, (Mapping, Sequence, Set)), name, value, expected
            )
        if self.extra != {} or declared:
            is_mapping = isinstance(self.extra, Mapping)
            _check(is_mapping, "extra", self.extra, "a mapping of names to values")
            self.extra = _checked({**self.extra, **declared} if declared else self.extra)
        most = self.max_tokens
        if most is not None:
            expected = f"at most max_tokens={most}"
            _check(self.min_tokens <= most, "min_tokens", self.min_tokens, expected)
        self._check_branches()
        self._check_stops()
        self._check_service()
        self._check_functions()
        self.structured_outputs = StructuredOutputsParams.of(self.structured_outputs)
        self.session = Session.of(self.session)
        self.routes = RouteParams.of(self.routes)

    def _unreadable(self, exc: Exception) -> RequestError:
        """Return the error for a field whose value raises an exception where it is tested or compared."""
        for name, value in self.__dict__.items():
            if _is_plain(value, DEFAULTS.get(name)):
                continue
            found = f"{name} has the type {type(value).__name__}"
            return RequestError(
                f"{found}: expected plain Python values; pass an array as a list", name
            )
        return RequestError(
            f"a sampling parameter cannot be read: {describe_error(exc)}; expected plain Python values"
        )

    def _check_branches(self) -> None:
        """Check the parameters that decide how many branches the request has.  RequestError names the wrong one."""
        for name in ("best_of", "beam_width"):
            value = getattr(self, name)
            ok = value is None or (is_whole(value) and self.n <= value <= MAX_N)
            _check(ok, name, value, f"a whole number from n={self.n} to {MAX_N}")
        ok = self.best_of is None or self.beam_width is None
        _check(ok, "best_of", self.best_of, "best_of or beam_width, not both")
        ok = isinstance(self.early_stopping, bool) or self.early_stopping == "never"
        _check(ok, "early_stopping", self.early_stopping, 'False, True or "never"')
        if self.best_of:
            expected = "no best_of, because tokens chosen on the host have no log-probabilities"
            for name in ("choose_fn", "logits_processors"):
                _check(not getattr(self, name), name, "given", expected)
        if self.beam_width is None:
            for name, neutral in (("length_penalty", 1.0), ("early_stopping", False)):
                value = getattr(self, name)
                _check(value == neutral, name, value, f"{neutral} without beam_width")
            return
        expected = "no beam_width, because beam search does not draw tokens"
        for name in ("allowed_tokens_fn", "choose_fn", "logits_processors", "structured_outputs"):
            _check(not getattr(self, name), name, "given", expected)

    @property
    def salt(self) -> tuple[str, str]:
        """Return (tenant, cache_salt).  Requests with different salts share no cached blocks."""
        return (self.tenant, self.cache_salt or "")

    @property
    def width(self) -> int:
        """Return the largest number of branches (sequences) that the request has at the same time."""
        return self.beam_width or max(self.n, self.best_of or 1)

    def branching(self) -> set[str]:
        """Return the names of the set parameters that the request's decoding strategy must implement."""
        if (
            self.beam_width is not None
        ):  # then best_of is not set, because the two exclude each other
            return {"beam_width"}
        return {"best_of"} if (self.best_of or self.n) > self.n else set()

    def _check_stops(self) -> None:
        """Check ``stop`` and ``stop_token_ids``, and convert both to tuples.  RequestError names the wrong one."""
        stop = self.stop
        ok = stop is None or isinstance(stop, (str, list, tuple))
        _check(ok, "stop", stop, "a string, or a list of strings")
        stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
        expected = f"at most {MAX_STOPS} strings"
        _check(len(stops) <= MAX_STOPS, "stop", f"{len(stops)} strings", expected)
        for text in stops:
            ok = isinstance(text, str) and 0 < len(text) <= 256
            _check(ok, "stop", text, "non-empty strings of at most 256 characters")
        expected = "no stop strings with detokenize=False (use stop_token_ids)"
        _check(not stops or self.detokenize, "stop", stop, expected)
        ids = () if self.stop_token_ids is None else self.stop_token_ids
        ok = isinstance(ids, (Sequence, np.ndarray)) and not isinstance(ids, (str, bytes))
        _check(ok, "stop_token_ids", ids, "a list of token ids")
        most = STOP_IDS - 8
        _check(len(ids) <= most, "stop_token_ids", f"{len(ids)} ids", f"at most {most} ids")
        ok = all(is_whole(i) and i >= 0 for i in ids)
        _check(ok, "stop_token_ids", ids, "whole numbers >= 0")
        self.stop = stops
        self.stop_token_ids = tuple(int(i) for i in ids)

    def _check_service(self) -> None:
        """Check the parameters that name the client or its trace."""
        ok = isinstance(self.tenant, str) and len(self.tenant) <= 256
        _check(ok, "tenant", self.tenant, "a name up to 256 characters")
        salt = self.cache_salt
        ok = salt is None or (isinstance(salt, str) and 0 < len(salt.encode()) <= 256)
        _check(ok, "cache_salt", salt, "a string of 1 to 256 bytes")
        headers = self.trace_headers
        if headers is not None:
            ok = isinstance(headers, Mapping)
            ok = ok and all(isinstance(text, str) for pair in headers.items() for text in pair)
            _check(ok, "trace_headers", headers, "a mapping of texts, such as traceparent")

    def _check_functions(self) -> None:
        """Check the fields that are Python functions, and that no other field of the request contradicts them.
        RequestError names the wrong field."""
        functions = self.logits_processors
        ok = functions is None or isinstance(functions, (list, tuple))
        ok = ok and all(map(callable, functions or ()))
        _check(ok, "logits_processors", functions, "a list of callables")
        self.logits_processors = tuple(functions) if functions else None
        excluded = ["logprobs", "allowed_tokens_fn", "structured_outputs"]
        for name in ("choose_fn", "logits_processors"):
            present = [other for other in excluded if getattr(self, other) is not None]
            expected = f"no {', '.join(present)}, which have no effect on tokens drawn on the host"
            _check(getattr(self, name) is None or not present, name, "given", expected)
            excluded.append("choose_fn")
        for name in ("allowed_tokens_fn", "choose_fn"):
            value = getattr(self, name)
            _check(value is None or callable(value), name, value, "a callable")

    def changed_parameters(self) -> list[str]:
        """Return the names of the parameters with an effect that a logits processor or sampler must implement."""
        attributes = self.__dict__
        changed = [
            name for name, value in NEUTRAL.items() if (attributes.get(name) or value) != value
        ]
        return changed + list(self.extra)

    def check_extra(self) -> None:
        """Check ``extra`` again, because it or the declared parameters may have changed since construction."""
        self.extra = _checked(self.extra)

    def ending_after(self, most: int) -> SamplingParams:
        """Return a copy with ``max_tokens=most``.

        Only ``most`` is checked, against ``min_tokens``.
        """
        expected = f"at least min_tokens={self.min_tokens}"
        _check(most >= max(1, self.min_tokens), "max_tokens", most, expected)
        copy = object.__new__(type(self))  # ``copy.copy`` takes longer
        copy.__dict__.update(self.__dict__, max_tokens=most)
        return copy

    @property
    def greedy(self) -> bool:
        """Return whether the most likely token is always chosen (temperature 0)."""
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
    """Return whether a name is a field or method of ``SamplingParams``, so that no plug-in can declare it."""
    return name in NAMES or hasattr(SamplingParams, name)


def _checked(extra: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return ``extra`` with converted declared parameters, and without those at their default.

    Return the same object if nothing changed.  RequestError names the parameter that is wrong.
    """
    checked: dict[str, Any] = {}
    for name, value in extra.items():
        param = declared_params.known(name)
        if param is None:
            problem = flaw({name: value})
            if problem:
                raise RequestError(f"extra: {problem}", "extra")
            checked[name] = value
            continue
        problem = "" if param.kind in NUMBERS else flaw(value)
        if problem:
            raise RequestError(f"{name}: {problem}", name)
        converted = param.check(value)
        if converted != param.default:
            checked[name] = converted
    same = len(checked) == len(extra) and all(
        checked[name] is value for name, value in extra.items()
    )
    return extra if same else checked
