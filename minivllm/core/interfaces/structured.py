"""What a client asks of an answer's form; names and meanings are vLLM's."""

from __future__ import annotations

import json as jsonlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from minivllm.core.json_schema.closing import closed
from minivllm.core.json_schema.depth import MOST_BYTES, MOST_DEPTH, text_depth, value_depth
from minivllm.errors import RequestError, brief, shown, suggest

from .grammar import GrammarSource

FORMS = ("json", "regex", "choice", "grammar", "json_object")
MOST_CHOICES = 10_000
NAME = "structured_outputs"


def _check(ok: bool, name: str, value: Any, want: str) -> None:
    if not ok:
        quoted = brief(value, 80) if isinstance(value, str) else shown(value)
        raise RequestError(f"{NAME}.{name}={quoted}: want {want}", NAME)


@dataclass
class StructuredOutputsParams:
    """Exactly one form: ``json`` (a JSON schema, as text, mapping or pydantic model), ``json_object=True`` (any JSON
    object), ``regex``, ``choice`` (a list of texts) or ``grammar`` (Lark, or GBNF as llama.cpp has it).

    For JSON: ``disable_any_whitespace`` allows no whitespace between its tokens, ``whitespace_pattern`` is a regular
    expression for what is allowed there, and ``disable_additional_properties`` forbids properties that an object's
    schema does not declare, where the schema says nothing of it.
    """

    json: str | Mapping[str, Any] | bool | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None

    @classmethod
    def of(cls, value: Any) -> StructuredOutputsParams | None:
        """From an object of it, a mapping or None; RequestError for anything else."""
        if value is None or isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise RequestError(
                f"{NAME} of {type(value).__name__}: want StructuredOutputsParams or a mapping", NAME
            )
        known = [f.name for f in fields(cls)]
        for name in value:
            if name not in known:
                raise RequestError(
                    f"{NAME}: unknown field {shown(name)}.{suggest(str(name), known)}", NAME
                )
        return cls(**value)

    def __post_init__(self) -> None:
        for name in ("disable_any_whitespace", "disable_additional_properties"):
            _check(
                isinstance(getattr(self, name), bool), name, getattr(self, name), "True or False"
            )
        off = self.json_object is None or self.json_object is False
        _check(off or self.json_object is True, "json_object", self.json_object, "True or None")
        given = [
            name
            for name in FORMS
            if getattr(self, name) is not None and not (off and name == "json_object")
        ]
        if len(given) != 1:
            have = " and ".join(given) or "none"
            raise RequestError(
                f"{NAME}: {have} given; want exactly one of {', '.join(FORMS)}", NAME
            )
        if hasattr(self.json, "model_json_schema"):
            self.json = self.json.model_json_schema()  # type: ignore[union-attr]
        for name in ("regex", "grammar"):
            value = getattr(self, name)
            _check(
                value is None or (isinstance(value, str) and value != ""),
                name,
                value,
                "a text that is not empty",
            )
        if self.choice is not None:
            ok = (
                isinstance(self.choice, Sequence)
                and not isinstance(self.choice, str)
                and len(self.choice) > 0
            )
            ok = ok and all(isinstance(c, str) and c for c in self.choice)
            _check(ok, "choice", self.choice, "a list of texts, none of them empty")
            count = len(self.choice)
            _check(count <= MOST_CHOICES, "choice", f"{count} texts", f"at most {MOST_CHOICES}")
        self._check_whitespace(given[0])
        self._source = self._read(given[0])

    def _check_whitespace(self, form: str) -> None:
        """What is asked of JSON alone."""
        pattern = self.whitespace_pattern
        _check(
            pattern is None or isinstance(pattern, str),
            "whitespace_pattern",
            pattern,
            "a regular expression",
        )
        if form not in ("json", "json_object"):
            for name in (
                "disable_any_whitespace",
                "disable_additional_properties",
                "whitespace_pattern",
            ):
                value = getattr(self, name)
                _check(
                    value is None or value is False,
                    name,
                    value,
                    f"it beside json only, not {form}",
                )
        both = pattern is not None and self.disable_any_whitespace
        _check(
            not both,
            "whitespace_pattern",
            pattern,
            "it without disable_any_whitespace=True: there is none then",
        )

    @property
    def source(self) -> GrammarSource:
        """The form as a plug-in takes it."""
        return self._source

    def _read(self, form: str) -> GrammarSource:
        if form in ("json", "json_object"):
            schema = {"type": "object"} if form == "json_object" else self._schema()
            if self.disable_additional_properties:
                schema = self._closed(schema)
            text = jsonlib.dumps(schema, ensure_ascii=False)
            self._measure(form, text)
            return GrammarSource(
                "json", text, not self.disable_any_whitespace, self.whitespace_pattern
            )
        if form == "choice":
            text = jsonlib.dumps(list(dict.fromkeys(self.choice or ())), ensure_ascii=False)
        else:
            text = str(getattr(self, form))
        self._measure(form, text)
        if form == "regex":
            depth = group_depth(text)
            _check(
                depth <= MOST_DEPTH,
                form,
                f"groups within {depth} others",
                f"at most {MOST_DEPTH} within each other",
            )
        return GrammarSource(form, text)

    def _measure(self, form: str, text: str) -> None:
        try:
            size = len(text.encode())
        except UnicodeEncodeError:
            raise RequestError(
                f"{NAME}.{form} is no valid Unicode: want text without lone surrogates", NAME
            ) from None
        _check(size <= MOST_BYTES, form, f"{size} bytes", f"at most {MOST_BYTES}")

    def _closed(self, schema: Any) -> Any:
        try:
            return closed(schema)
        except ValueError as e:
            raise RequestError(f"{NAME}.json: {e}", NAME) from None

    def _schema(self) -> Any:
        """The schema as plain JSON values.  Its depth is looked at before anything recurses over it."""
        value: Any = self.json
        if isinstance(value, str):
            self._measure("json", value)
            deep = text_depth(value)
            _check(
                deep <= MOST_DEPTH,
                "json",
                f"a schema {deep} levels deep",
                f"at most {MOST_DEPTH} levels",
            )
            try:
                value = jsonlib.loads(value)
            except ValueError as e:
                raise RequestError(f"{NAME}.json is no JSON: {e}", NAME) from None
        _check(
            isinstance(value, (Mapping, bool)), "json", value, "a schema: an object, true or false"
        )
        deep = value_depth(value)
        _check(
            deep <= MOST_DEPTH,
            "json",
            "a schema that is deeper, or contains itself",
            f"at most {MOST_DEPTH} levels",
        )
        try:
            text = jsonlib.dumps(value, default=dict, allow_nan=False, ensure_ascii=False)
        except (TypeError, ValueError) as e:
            raise RequestError(f"{NAME}.json: not every value is JSON: {e}", NAME) from None
        self._measure("json", text)
        return jsonlib.loads(text)


def group_depth(regex: str) -> int:
    """How deep the groups of a regular expression are nested; characters that stand for themselves do not count."""
    depth = most = 0
    escaped = listed = False
    for c in regex:
        if escaped:
            escaped = False
        elif c == "\\":
            escaped = True
        elif listed:
            listed = c != "]"
        elif c == "[":
            listed = True
        elif c == "(":
            depth += 1
            most = max(most, depth)
        elif c == ")":
            depth -= 1
    return most
