"""Request parameters as plain data: name, type, range and description.

A sampler, processor or strategy declares its additional parameters in its spec::

    Spec(..., params=(Param("top_a", float, 0.0, ge=0, le=1, wanted="a number from 0 (off) to 1", summary="..."),))

The fields of ``SamplingParams`` that have a simple range are declared in the same way.  Standard library only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

from minivllm.errors import RequestError, shown, suggest

WORDS = {
    float: "a number", int: "a whole number", bool: "True or False", str: "a text", list: "a list", dict: "a mapping",
}  # fmt: skip
NUMBERS = (float, int, bool)
OTHER_NAMES = {  # request parameter of another engine -> the parameter to use instead
    "guided_json": 'structured_outputs={"json": schema}', "guided_regex": 'structured_outputs={"regex": pattern}',
    "guided_choice": 'structured_outputs={"choice": [...]}', "guided_grammar": 'structured_outputs={"grammar": text}',
    "guided_decoding": 'structured_outputs={"json": schema}, or "regex", "choice", "grammar"',
    "response_format": 'structured_outputs={"json": schema}', "regex": 'structured_outputs={"regex": pattern}',
    "json_schema": 'structured_outputs={"json": schema}', "ebnf": 'structured_outputs={"grammar": text}',
    "max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "max_length": "max_tokens",
    "max_completion_tokens": "max_tokens", "num_return_sequences": "n",
    "do_sample": "temperature=0 for greedy decoding, a temperature above 0 to sample",
    "num_beams": "beam_width", "use_beam_search": "beam_width", "eos_token_id": "stop_token_ids",
    "stop_sequences": "stop", "stop_strings": "stop", "return_logprob": "logprobs", "top_logprobs": "logprobs",
    "use_cache": "the engine's enable_prefix_caching; the KV cache itself is always used",
    "repeat_penalty": "repetition_penalty", "random_seed": "seed", "num_predict": "max_tokens", "salt": "cache_salt",
}  # fmt: skip
BOUNDS = (("ge", "at least"), ("gt", "above"), ("le", "at most"), ("lt", "below"))


@dataclass(frozen=True)
class Param:
    """A request parameter.

    ``kind`` is float, int, bool, str, list or dict.  If ``default`` is None, a request may also pass None, which has no
    effect.  ``ge``, ``gt``, ``le`` and ``lt`` bound numbers.  ``choices`` are the accepted texts.  ``wanted`` describes
    the accepted values in error messages.  ``summary`` describes the parameter in one line.  TypeError for a
    declaration that contradicts itself.
    """

    name: str
    kind: type
    default: Any = None
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    choices: tuple[str, ...] = ()
    wanted: str = field(default="", compare=False)
    summary: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.isidentifier() or self.name.startswith("_"):
            raise TypeError(f"Param name={shown(self.name)}: expected a name such as 'top_a'")
        if self.kind not in WORDS:
            raise TypeError(f"Param {self.name!r} kind={shown(self.kind)}: expected one of {_names(WORDS)}")
        if not isinstance(self.choices, (tuple, list)) or not all(isinstance(c, str) for c in self.choices):
            raise TypeError(
                f"Param {self.name!r} choices={shown(self.choices)}: expected a tuple of texts, such as ('a',)"
            )
        if self.choices and self.kind is not str:
            raise TypeError(f"Param {self.name!r} has choices: expected none for a {self.kind.__name__}")
        if self.bounds and self.kind not in NUMBERS[:2]:
            raise TypeError(f"Param {self.name!r} has bounds: expected none for a {self.kind.__name__}")
        try:
            self.check(self.default)
        except RequestError as exc:
            raise TypeError(f"Param {self.name!r}: its default is refused: {exc}") from exc

    def __str__(self) -> str:
        limits = self.bounds or ((self.wants,) if self.choices else ())
        return ", ".join([self.kind.__name__, f"default {self.default!r}", *limits])

    @property
    def bounds(self) -> tuple[str, ...]:
        """Return the bounds in words."""
        found = ((word, getattr(self, name)) for name, word in BOUNDS)
        return tuple(f"{word} {bound:g}" for word, bound in found if bound is not None)

    @property
    def wants(self) -> str:
        """Return the accepted values in words."""
        if self.wanted:
            return self.wanted
        if self.choices:
            return f"one of {', '.join(map(repr, self.choices))}"
        return " ".join([WORDS[self.kind], " and ".join(self.bounds)]).strip()

    def check(self, value: Any) -> Any:
        """Return the value, with numbers converted to Python's types.  RequestError if its type or range is wrong."""
        if value is None and self.default is None:
            return None
        if self.kind is float:
            if not _finite(value):
                # A parameter with the default None also accepts None, so the message does not name the type.
                prefix = "" if self.default is None else "a finite number: "
                raise self._refused(value, f"{prefix}{self.wants}")
        elif not _is(value, self.kind):
            raise self._refused(value, self.wants)
        if self.kind is float or self.kind is int:
            if not self._within(value):
                raise self._refused(value, self.wants)
            return self.kind(value)
        if self.choices and value not in self.choices:
            raise self._refused(value, self.wants)
        return value

    def _within(self, value: Any) -> bool:
        """Return whether a number is within the bounds."""
        return (
            (self.ge is None or value >= self.ge)
            and (self.gt is None or value > self.gt)
            and (self.le is None or value <= self.le)
            and (self.lt is None or value < self.lt)
        )

    def _refused(self, value: Any, expected: str) -> RequestError:
        """Return the error for a wrong value."""
        return RequestError(f"{self.name}={shown(value)}: expected {expected}", self.name)


def unknown_parameter(name: str, accepted: Iterable[str]) -> RequestError:
    """Return the error for an unknown request parameter.  It suggests the parameter of this engine that replaces it, or
    a similar name."""
    hint = OTHER_NAMES.get(name)
    near = f" Use {hint}." if hint else suggest(name, sorted(accepted))
    return RequestError(f"unknown sampling parameter {shown(name)}.{near}", name)


def _names(kinds: Any) -> str:
    """Return the names of types, separated by commas."""
    return ", ".join(kind.__name__ for kind in kinds)


def _is(value: Any, kind: type) -> bool:
    """Return whether a value has the type of a parameter.  A list may also be a tuple, and a dict any mapping."""
    if kind is int:
        return is_whole(value)
    if kind is dict:
        return isinstance(value, Mapping)
    return isinstance(value, (list, tuple) if kind is list else kind)


def check_mapping(parameter: str, value: Any, expected: str, known: Sequence[str], hidden: Sequence[str] = ()) -> None:
    """Raise RequestError unless a parameter of a request is a mapping with names of fields.

    ``expected`` describes the accepted types.  The error lists the fields ``known``, but not the fields ``hidden``."""
    if not isinstance(value, Mapping):
        raise RequestError(f"{parameter} has the type {type(value).__name__}; expected {expected}", parameter)
    for name in value:
        if name not in known and name not in hidden:
            listed = f"expected {', '.join(known)}.{suggest(str(name), known)}"
            raise RequestError(f"{parameter}: unknown field {shown(name)}; {listed}", parameter)


def is_whole(value: Any) -> bool:
    """Return whether a value is a whole number, of Python or numpy, and not a bool."""
    return type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))


def _finite(value: Any) -> bool:
    """Return whether a value is a finite number, of Python or numpy, and not a bool."""
    if type(value) is float:
        return math.isfinite(value)
    if not isinstance(value, Real) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number that no float can hold
        return False
