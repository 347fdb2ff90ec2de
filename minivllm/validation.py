"""Error messages for values that a pydantic model refused, in plain words and with the path of each value.

pydantic's own message is "Input should be a valid integer, unable to parse ...".  A message of this module names the
option, its value and the accepted values: ``max_num_seqs='many': expected a whole number from 1``.  The accepted values
come from the JSON Schema of the model, so the message is the same for every constraint of a field.  This also works for
the option models of plug-ins.

The module also checks values from outside (configurations, parameters, JSON) before other code reads them.  Text must
be valid Unicode: a Python string may hold half of a surrogate pair, from JSON or YAML escapes or from arguments that
are not UTF-8, and such a string cannot be encoded.  Numbers must be small, because Python does not print whole numbers
of more than 4,300 digits (``sys.set_int_max_str_digits``).  Nesting is bounded, because recursion ends at a thousand
levels.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from minivllm.errors import brief, shown, suggest

DEEPEST = 128  # largest number of nesting levels of a value; schemas for structured output may have a hundred
DIGITS, BITS = 40, 133  # largest size of a whole number in decimal digits and in bits; no option needs more
# ``_LONE`` finds JSON escapes of half a surrogate pair.  ``_ESCAPED`` finds escaped backslashes, which are removed
# before.
_ESCAPED = re.compile(r"\\\\")
_LONE = re.compile(
    r"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB][0-9a-fA-F]{2})\\u[dD][c-fC-F]"
)
# Suffixes of pydantic error types that the JSON Schema of the field explains.  Other errors show pydantic's text.
_EXPLAINED = (
    "_type", "_parsing", "_from_float", "_size", "literal_error", "enum", "greater_than", "greater_than_equal",
    "less_than", "less_than_equal", "multiple_of", "string_too_short", "string_too_long", "string_pattern_mismatch",
    "too_short", "too_long", "missing",
)  # fmt: skip
_KINDS = {
    "integer": "a whole number", "number": "a number", "boolean": "true or false", "string": "text",
    "object": "a table",
}  # fmt: skip
_MOST = 64  # largest number of reported errors, because each unknown name costs a search for a similar one
_LISTED = 8  # up to this number of names, all are listed when no name is similar


def is_text(text: str) -> bool:
    """Return whether a string can be encoded, because it has no lone surrogates."""
    try:
        return text.isascii() or bool(text.encode())
    except UnicodeEncodeError:
        return False


def lone_escape(text: str) -> bool:
    """Return whether a JSON text contains half of a surrogate pair, as an escape or as a character."""
    if "\\u" in text and _LONE.search(_ESCAPED.sub("", text)):
        return True
    return not is_text(text)


def whole(text: str) -> int:
    """Return the whole number in a JSON or TOML text.  ValueError if it has more than ``DIGITS`` digits."""
    if len(text) > DIGITS + 1:
        raise ValueError(f"the number {text[:20]}... has {len(text.lstrip('-'))} digits; expected at most {DIGITS}")
    return int(text)


def flaw(value: Any) -> str:
    """Return the flaw of a value and its place as a sentence without a subject, or "" without a flaw.

    It finds invalid Unicode, huge numbers and deep nesting.
    """
    todo: list[tuple[Any, str, int]] = [(value, "", 0)]
    while todo:
        value, at, depth = todo.pop()
        if depth > DEEPEST:
            return f"tables or lists are nested deeper than {DEEPEST} levels"
        if isinstance(value, str):
            if not is_text(value):
                return f"{at}holds half of a surrogate pair (or a byte that is not UTF-8): expected Unicode text"
        elif isinstance(value, int):
            if value.bit_length() > BITS:
                return f"{at}is a whole number of {value.bit_length()} bits: expected at most {BITS}"
        elif isinstance(value, Mapping):
            for key, inner in value.items():
                label = "a key"
                if isinstance(key, str):
                    if not is_text(key):
                        return f"{at}the key {brief(key)!r} is not Unicode text"
                    label = brief(key, 40)
                todo.append((inner, f"{label}: ", depth + 1))
        elif isinstance(value, (list, tuple)):
            todo += [(inner, at, depth + 1) for inner in value]
    return ""


def merge(raw: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``raw`` with the values of ``overrides``.  Nested tables are merged key by key."""
    merged = dict(raw)
    for key, value in overrides.items():
        inner = merged.get(key)
        if isinstance(value, Mapping) and isinstance(inner, Mapping):
            value = merge(inner, value)
        merged[key] = value
    return merged


@dataclass(frozen=True)
class FieldFault:
    """An error of one value.  ``path`` is the dotted path of the value; ``text`` is the complete sentence."""

    path: str
    text: str


def faults(exc: Any, model: Any, values: Any, at: str = "") -> list[FieldFault]:
    """Return the errors in the ``pydantic.ValidationError`` that ``model(**values)`` raised.  ``at`` is the path of
    ``values``."""
    try:
        root = model.model_json_schema()
    except Exception:  # a field of a type that JSON Schema cannot describe
        root = {}
    found: dict[tuple[Any, ...], FieldFault] = {}
    for error in exc.errors(include_url=False)[:_MOST]:
        place = _place(error, values)
        if place not in found:  # each branch of a union reports an error, but one message describes all branches
            path = ".".join(str(p) for p in ((at,) if at else ()) + place)
            found[place] = FieldFault(path, _text(error, place, path, root))
    # Drop errors of a table that contains a more exact error, such as "expected a table or text" of a union.
    outer = {place[:n] for place in found for n in range(len(place))}
    return [fault for place, fault in found.items() if place not in outer]


def source_of(origins: Mapping[str, str], path: str) -> str:
    """Return the source (file and line, variable or flag) of the value at a dotted path.

    If the value itself has none, return the source of a value inside it, or else of the nearest table around it.  ""
    means that there is none.
    """
    while path:
        if path in origins:
            return origins[path]
        inner = next((source for leaf, source in origins.items() if leaf.startswith(path + ".")), None)
        if inner is not None:
            return inner
        path = path.rpartition(".")[0]
    return ""


def sourced(found: Iterable[FieldFault], origins: Mapping[str, str]) -> list[str]:
    """Return the sentences of the errors, each with the source of its value in front."""
    return [begins(source_of(origins, fault.path)) + fault.text for fault in found]


def begins(source: str) -> str:
    """Return the beginning of a message about a value with this source.  Keywords of a Python call are not
    mentioned."""
    return "" if source in ("", "keyword") else f"{source}: "


def _place(error: Mapping[str, Any], values: Any) -> tuple[Any, ...]:
    """Return the path of an error without the names that pydantic gives to the branches of a union."""
    place: list[Any] = []
    for part in error["loc"]:
        keys: Any = ()
        if isinstance(values, Mapping):
            keys = values
        elif isinstance(values, (list, tuple)):
            keys = range(len(values))
        if part in keys:
            values = values[part]
        elif error["type"] != "missing" or part != error["loc"][-1]:
            continue
        place.append(part)
    return tuple(place)


def _text(error: Mapping[str, Any], place: tuple[Any, ...], path: str, root: Any) -> str:
    """Return the message for a pydantic error.  ``root`` is the JSON Schema of the model."""
    kind = error["type"]
    if kind == "extra_forbidden":
        names = list(_properties(_down(root, place[:-1]), root))
        near = suggest(str(place[-1]), names)
        if not near and 0 < len(names) <= _LISTED:
            near = f" There are: {', '.join(names)}."
        return f"unknown option {shown(path)}.{near}"
    want = words(_down(root, place), root) if kind.endswith(_EXPLAINED) else ""
    if kind == "missing":
        return f"{brief(path)} is missing: expected {want or 'a value'}"
    if not want:
        message = error["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
        return f"{brief(path) or 'value'}: {message.replace('Input should be', 'expected')}"
    node = _resolve(_down(root, place), root)
    hint = suggest(str(error["input"]), node.get("enum", ())) if isinstance(error["input"], str) else ""
    return f"{brief(path)}{_shown(error['input'])}: expected {want}{'.' if hint else ''}{hint}"


def _shown(value: Any) -> str:
    """Return a value for a message, after the name of its option."""
    if isinstance(value, Mapping):
        return " is a table"
    if isinstance(value, (list, tuple, set)):
        return " is a list"
    text = shown(value)
    return f"={text}" if len(text) <= 60 else f"={text[:57]}..."


def _resolve(node: Any, root: Any) -> Any:
    """Return a schema node with its references resolved, or {} if it is not a mapping."""
    while isinstance(node, Mapping) and "$ref" in node:
        node = root.get("$defs", {}).get(node["$ref"].rpartition("/")[2], {})
    return node if isinstance(node, Mapping) else {}


def _branches(node: Any, root: Any) -> list[Any]:
    """Return the alternatives of a schema node, or the node itself if it has none."""
    node = _resolve(node, root)
    inner = node.get("anyOf") or node.get("oneOf") or node.get("allOf")
    return [b for n in inner for b in _branches(n, root)] if inner else [node]


def _properties(node: Any, root: Any) -> dict[str, Any]:
    """Return the properties of all alternatives of a schema node."""
    return {name: inner for branch in _branches(node, root) for name, inner in branch.get("properties", {}).items()}


def _down(node: Any, place: Sequence[Any], root: Any = None) -> Any:
    """Return the schema of the value at a path, or {} if the schema accepts any value there."""
    root = node if root is None else root
    for part in place:
        for branch in _branches(node, root):
            inner = branch.get("items") if isinstance(part, int) else branch.get("properties", {}).get(part)
            if inner is None and not isinstance(part, int):
                inner = branch.get("additionalProperties")
            if isinstance(inner, Mapping):
                node = inner
                break
        else:
            return {}
    return node


def words(node: Any, root: Any = None) -> str:
    """Return the values that a JSON Schema accepts, in words, or "" if it describes none."""
    root = node if root is None else root
    parts = [_branch_words(branch, root) for branch in _branches(node, root) if branch.get("type") != "null"]
    if not all(parts):
        return ""
    return " or ".join(dict.fromkeys(parts))


def _branch_words(node: Mapping[str, Any], root: Any) -> str:
    """Return the values that one alternative of a schema accepts, in words, or ""."""
    if "const" in node or "enum" in node:
        values = node.get("enum", [node.get("const")])
        *names, last = [repr(v) if isinstance(v, str) else str(v) for v in values]
        return f"{', '.join(names)} or {last}" if names else last
    kind = node.get("type")
    if kind == "array":
        few, many = node.get("minItems", 0), node.get("maxItems")
        size = f" of at least {few}" if few else ""
        if many is not None:
            size = f" of {many}" if few == many else f" of {few} to {many}"
        inner = words(node["items"], root) if node.get("items") else ""
        return f"a list{size}" + (f" (each: {inner})" if inner else "")
    text = _KINDS.get(str(kind), "")
    if kind == "string":
        text += " that is not empty" if node.get("minLength") == 1 else ""
        text += f" that matches {node['pattern']}" if "pattern" in node else ""
    return " ".join(filter(None, (text, _bounds(node)))) if text else ""


def _bounds(node: Mapping[str, Any]) -> str:
    """Return the bounds of a schema node in words, or ""."""
    least, most = node.get("minimum"), node.get("maximum")
    parts = []
    if least is not None and most is not None:
        parts.append(f"from {least} to {most}")
    elif least is not None:
        parts.append(f"from {least}")
    if "exclusiveMinimum" in node:
        parts.append(f"above {node['exclusiveMinimum']}")
    if most is not None and least is None:
        parts.append(f"at most {most}" if parts else f"of at most {most}")
    if "exclusiveMaximum" in node:
        parts.append(f"below {node['exclusiveMaximum']}")
    if "multipleOf" in node:
        parts.append(f"a multiple of {node['multipleOf']}")
    if node.get("minLength", 0) > 1 or "maxLength" in node:
        parts.append(f"of {node.get('minLength', 0)} to {node.get('maxLength', 'any number of')} characters")
    return ", ".join(parts)
