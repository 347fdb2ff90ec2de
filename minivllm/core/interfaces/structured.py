"""The form that a client requires of the text of an answer.  Names and meanings are those of vLLM."""

from __future__ import annotations

import json as jsonlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from minivllm.core.json_schema.closing import closed
from minivllm.core.json_schema.depth import MOST_BYTES, MOST_DEPTH, text_depth, value_depth
from minivllm.errors import RequestError, brief, shown
from minivllm.registration.parameters import check_mapping

from .grammar import GrammarSource

FORMS = ("json", "regex", "choice", "grammar", "json_object", "reply")
MOST_CHOICES = 10_000
NAME = "structured_outputs"


def _refused(message: str) -> RequestError:
    """Return the error for wrong structured outputs."""
    return RequestError(message, NAME)


def _check_size(form: str, text: str) -> None:
    """Check that a text is valid Unicode of at most ``MOST_BYTES`` bytes."""
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        problem = f"{NAME}.{form} is not valid Unicode"
        raise _refused(f"{problem}: expected text without lone surrogates") from None
    _check(size <= MOST_BYTES, form, f"{size} bytes", f"at most {MOST_BYTES}")


def _dumped(form: str, value: Any) -> str:
    """Return a value as JSON text.  RequestError if it is not JSON or too large."""
    try:
        text = jsonlib.dumps(value, default=dict, allow_nan=False, ensure_ascii=False)
    except (TypeError, ValueError) as e:
        raise _refused(f"{NAME}.json: not every value is JSON: {e}") from None
    _check_size(form, text)
    return text


def _check(ok: bool, name: str, value: Any, expected: str) -> None:
    """Raise RequestError for a field unless ``ok``.  ``expected`` describes the accepted values."""
    if not ok:
        quoted = brief(value, 80) if isinstance(value, str) else shown(value)
        raise RequestError(f"{NAME}.{name}={quoted}: expected {expected}", NAME)


@dataclass
class StructuredOutputsParams:
    """The required form of a text.  Exactly one of these fields is set: ``json`` (a JSON schema, as text, mapping or
    pydantic model), ``json_object=True`` (any JSON object), ``regex``, ``choice`` (a list of texts) or ``grammar``
    (Lark, or the GBNF of llama.cpp).  A server sets ``reply`` for calls of functions (``GrammarSource``).

    Further fields for JSON: ``disable_any_whitespace`` allows no whitespace between JSON tokens.
    ``whitespace_pattern`` is a regular expression for the allowed whitespace.  ``disable_additional_properties``
    forbids properties that an object's schema does not declare, unless the schema allows them explicitly.
    """

    json: str | Mapping[str, Any] | bool | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    reply: str | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None

    @classmethod
    def of(cls, value: Any) -> StructuredOutputsParams | None:
        """Return the parameters from an object of this class, a mapping or None.  RequestError for anything else."""
        if value is None or isinstance(value, cls):
            return value
        known = [f.name for f in fields(cls) if f.name != "reply"]
        check_mapping(NAME, value, "StructuredOutputsParams or a mapping", known, hidden=["reply"])
        return cls(**value)

    def __post_init__(self) -> None:
        """Check the fields and compute ``source``.  RequestError names the wrong field."""
        for name in ("disable_any_whitespace", "disable_additional_properties"):
            value = getattr(self, name)
            _check(isinstance(value, bool), name, value, "True or False")
        form = self._form()
        if hasattr(self.json, "model_json_schema"):
            self.json = self.json.model_json_schema()  # type: ignore[union-attr]
        for name in ("regex", "grammar", "reply"):
            value = getattr(self, name)
            ok = value is None or (isinstance(value, str) and value != "")
            _check(ok, name, value, "a text that is not empty")
        choice: Any = self.choice
        if choice is not None:
            ok = isinstance(choice, Sequence) and not isinstance(choice, str) and len(choice) > 0
            ok = ok and all(isinstance(text, str) and text for text in choice)
            _check(ok, "choice", choice, "a list of texts, none of them empty")
            count = len(choice)
            _check(count <= MOST_CHOICES, "choice", f"{count} texts", f"at most {MOST_CHOICES}")
        self._check_whitespace(form)
        self._source = self._read(form)

    def _form(self) -> str:
        """Return the name of the one form that is set.  RequestError unless exactly one is set."""
        enabled = self.json_object
        ok = enabled is None or isinstance(enabled, bool)
        _check(ok, "json_object", enabled, "True or None")
        forms = [name for name in FORMS if getattr(self, name) is not None]
        if enabled is False:
            forms.remove("json_object")
        if len(forms) != 1:
            found = " and ".join(forms) or "none"
            raise _refused(
                f"{NAME}: {found} given; expected exactly one of json, regex, choice, grammar, json_object"
            )
        return forms[0]

    def _check_whitespace(self, form: str) -> None:
        """Check the fields that apply to JSON only.  RequestError if one is set with another form, or if they
        contradict each other."""
        pattern = self.whitespace_pattern
        ok = pattern is None or isinstance(pattern, str)
        _check(ok, "whitespace_pattern", pattern, "a regular expression")
        if form not in ("json", "json_object"):
            names = "disable_any_whitespace disable_additional_properties whitespace_pattern"
            for name in names.split():
                value = getattr(self, name)
                absent = value is None or value is False
                _check(absent, name, value, f"no {name} with {form}, only with json")
        both = pattern is not None and self.disable_any_whitespace
        expected = "no whitespace_pattern with disable_any_whitespace=True, which allows none"
        _check(not both, "whitespace_pattern", pattern, expected)

    @property
    def source(self) -> GrammarSource:
        """Return the form as the source of a grammar plug-in."""
        return self._source

    def _read(self, form: str) -> GrammarSource:
        """Return the grammar source of a form.  RequestError if it is malformed or too large."""
        if form in ("json", "json_object"):
            schema = {"type": "object"} if form == "json_object" else self._schema()
            if self.disable_additional_properties:
                try:
                    schema = closed(schema)
                except ValueError as e:
                    raise _refused(f"{NAME}.json: {e}") from None
            spaced = not self.disable_any_whitespace
            return GrammarSource("json", _dumped(form, schema), spaced, self.whitespace_pattern)
        if form == "choice":
            return GrammarSource(form, _dumped(form, list(dict.fromkeys(self.choice or ()))))
        text = str(getattr(self, form))
        _check_size(form, text)
        if form == "regex":
            depth = group_depth(text)
            expected = f"at most {MOST_DEPTH} within each other"
            _check(depth <= MOST_DEPTH, form, f"groups within {depth} others", expected)
        return GrammarSource(form, text)

    def _schema(self) -> Any:
        """Return the schema as plain JSON values.  Check its depth before any function recurses over it."""
        value: Any = self.json
        expected = f"at most {MOST_DEPTH} levels"
        if isinstance(value, str):
            _check_size("json", value)
            depth = text_depth(value)
            _check(depth <= MOST_DEPTH, "json", f"a schema {depth} levels deep", expected)
            try:
                value = jsonlib.loads(value)
            except ValueError as e:
                raise _refused(f"{NAME}.json is not JSON: {e}") from None
        _check(
            isinstance(value, (Mapping, bool)), "json", value, "a schema: an object, true or false"
        )
        bounded = value_depth(value) <= MOST_DEPTH
        _check(bounded, "json", "a schema that is deeper, or contains itself", expected)
        return jsonlib.loads(_dumped("json", value))


def group_depth(regex: str) -> int:
    """Return the nesting depth of the groups of a regular expression.

    Escaped parentheses, and parentheses in character classes, do not count.
    """
    depth = most = 0
    escaped = in_class = False
    for c in regex:
        if escaped:
            escaped = False
        elif c == "\\":
            escaped = True
        elif in_class:
            in_class = c != "]"
        elif c == "[":
            in_class = True
        elif c == "(":
            depth += 1
            most = max(most, depth)
        elif c == ")":
            depth -= 1
    return most
