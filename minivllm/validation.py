"""What is wrong with values that a pydantic model refused, in this project's words and with the place of each fault.

pydantic says "Input should be a valid integer, unable to parse ...".  A fault here says which option has which value
and what it takes, ``max_num_seqs='many': want a whole number from 1``.  What it takes is read from the JSON Schema of
the model, so a field says the same whichever of its constraints was broken.  Works for the models of plug-ins too.

Values from outside (configurations, parameters, JSON) are checked before anything reads them: text is Unicode, numbers
and nesting are within bounds.  A Python string may hold half of a surrogate pair, which JSON and YAML can spell and
which stands for a byte that is no UTF-8 in arguments and variables; it cannot be encoded.  A whole number of more than
4,300 digits cannot be printed (``sys.set_int_max_str_digits``).  Recursion over a value ends at a thousand levels.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from minivllm.errors import brief, shown, suggest

DEEPEST = 128  # levels of a value: a schema for structured output has a hundred
DIGITS, BITS = 40, 133  # of a whole number: no option has more
# escapes of JSON of which the other half is not beside them; a backslash that is itself escaped is none
_ESCAPED = re.compile(r"\\\\")
_LONE = re.compile(
    r"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB][0-9a-fA-F]{2})\\u[dD][c-fC-F]"
)
# the faults that a JSON Schema of the field explains; of others pydantic's or the validator's own text is told
_EXPLAINED = (
    "_type", "_parsing", "_from_float", "_size", "literal_error", "enum", "greater_than", "greater_than_equal",
    "less_than", "less_than_equal", "multiple_of", "string_too_short", "string_too_long", "string_pattern_mismatch",
    "too_short", "too_long", "missing",
)  # fmt: skip
_KINDS = {
    "integer": "a whole number", "number": "a number", "boolean": "true or false", "string": "text",
    "object": "a table",
}  # fmt: skip
_MOST = 64  # faults that are told: of a thousand unknown names each would cost a search for a near one
_LISTED = 8  # as many names are told if none is near


def is_text(text: str) -> bool:
    """Whether a string can be encoded: no lone surrogates."""
    try:
        return text.isascii() or bool(text.encode())
    except UnicodeEncodeError:
        return False


def lone_escape(text: str) -> bool:
    """Whether a JSON text has half of a surrogate pair in it, spelled as an escape or as it is."""
    if "\\u" in text and _LONE.search(_ESCAPED.sub("", text)):
        return True
    return not is_text(text)


def whole(text: str) -> int:
    """The whole number of a JSON or TOML text; ValueError for one that nothing here counts with."""
    if len(text) > DIGITS + 1:
        raise ValueError(f"the number {text[:20]}... has {len(text.lstrip('-'))} digits; want at most {DIGITS}")
    return int(text)


def flaw(value: Any) -> str:
    """What is wrong with a value, as a sentence without a subject and with the place inside; '' if nothing is."""
    todo: list[tuple[Any, str, int]] = [(value, "", 0)]
    while todo:
        value, at, depth = todo.pop()
        if depth > DEEPEST:
            return f"tables or lists are nested deeper than {DEEPEST} levels"
        if isinstance(value, str):
            if not is_text(value):
                return f"{at}holds half of a surrogate pair (or a byte that is no UTF-8): want Unicode text"
        elif isinstance(value, int):
            if value.bit_length() > BITS:
                return f"{at}is a whole number of {value.bit_length()} bits: want at most {BITS}"
        elif isinstance(value, Mapping):
            for key, inner in value.items():
                if isinstance(key, str) and not is_text(key):
                    return f"{at}the key {brief(key)!r} is no Unicode text"
                todo.append((inner, f"{brief(str(key), 40) if isinstance(key, str) else 'a key'}: ", depth + 1))
        elif isinstance(value, (list, tuple)):
            todo += [(inner, at, depth + 1) for inner in value]
    return ""


def merge(raw: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``raw`` with ``overrides`` laid over it, tables key by key."""
    made = dict(raw)
    for key, value in overrides.items():
        inner = made.get(key)
        tables = isinstance(value, Mapping) and isinstance(inner, Mapping)
        made[key] = merge(inner, value) if tables else value  # type: ignore[arg-type]
    return made


@dataclass(frozen=True)
class FieldFault:
    """``path`` is the dotted place of the value, ``text`` the whole sentence."""

    path: str
    text: str


def faults(exc: Any, model: Any, values: Any, at: str = "") -> list[FieldFault]:
    """The faults of the ``pydantic.ValidationError`` that ``model(**values)`` raised; ``at`` is where values are."""
    try:
        root = model.model_json_schema()
    except Exception:  # a field of a type that JSON Schema cannot describe
        root = {}
    found: dict[tuple[Any, ...], FieldFault] = {}
    for error in exc.errors(include_url=False)[:_MOST]:
        place = _place(error, values)
        if place not in found:  # the branches of a union complain one by one: one fault tells what all of them take
            path = ".".join(str(p) for p in ((at,) if at else ()) + place)
            found[place] = FieldFault(path, _text(error, place, path, root))
    # "want a table or text" of a union whose table was looked into adds nothing to what was found in the table
    return [f for place, f in found.items() if not any(len(p) > len(place) and p[: len(place)] == place for p in found)]


def source_of(origins: Mapping[str, str], path: str) -> str:
    """Where the value at a dotted path came from, or the nearest that holds it or that it holds; '' if nowhere."""
    while path:
        if path in origins:
            return origins[path]
        inner = next((source for leaf, source in origins.items() if leaf.startswith(path + ".")), None)
        if inner is not None:
            return inner
        path = path.rpartition(".")[0]
    return ""


def sourced(found: Iterable[FieldFault], origins: Mapping[str, str]) -> list[str]:
    """The sentences, each with the place in a file, the variable or the flag that it came from before it."""
    return [begins(source_of(origins, fault.path)) + fault.text for fault in found]


def begins(source: str) -> str:
    """How a message begins; keywords of a Python call need no telling."""
    return "" if source in ("", "keyword") else f"{source}: "


def _place(error: Mapping[str, Any], values: Any) -> tuple[Any, ...]:
    """The path of a fault without pydantic's names for the branches of a union."""
    place: list[Any] = []
    for part in error["loc"]:
        if part in (values if isinstance(values, Mapping) else range(len(values)) if _is_list(values) else ()):
            values = values[part]
        elif error["type"] != "missing" or part != error["loc"][-1]:
            continue
        place.append(part)
    return tuple(place)


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple))


def _text(error: Mapping[str, Any], place: tuple[Any, ...], path: str, root: Any) -> str:
    kind = error["type"]
    if kind == "extra_forbidden":
        known = list(_properties(_down(root, place[:-1]), root))
        near = suggest(str(place[-1]), known)
        if not near and 0 < len(known) <= _LISTED:
            near = f" There are: {', '.join(known)}."
        return f"unknown option {shown(path)}.{near}"
    want = words(_down(root, place), root) if kind.endswith(_EXPLAINED) else ""
    if kind == "missing":
        return f"{brief(path)} is missing: want {want or 'a value'}"
    if not want:
        message = error["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
        return f"{brief(path) or 'value'}: {message.replace('Input should be', 'want')}"
    node = _resolve(_down(root, place), root)
    hint = suggest(str(error["input"]), node.get("enum", ())) if isinstance(error["input"], str) else ""
    return f"{brief(path)}{_shown(error['input'])}: want {want}{'.' if hint else ''}{hint}"


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return " is a table"
    if isinstance(value, (list, tuple, set)):
        return " is a list"
    text = shown(value)
    return f"={text}" if len(text) <= 60 else f"={text[:57]}..."


def _resolve(node: Any, root: Any) -> Any:
    while isinstance(node, Mapping) and "$ref" in node:
        node = root.get("$defs", {}).get(node["$ref"].rpartition("/")[2], {})
    return node if isinstance(node, Mapping) else {}


def _branches(node: Any, root: Any) -> list[Any]:
    node = _resolve(node, root)
    inner = node.get("anyOf") or node.get("oneOf") or node.get("allOf")
    return [b for n in inner for b in _branches(n, root)] if inner else [node]


def _properties(node: Any, root: Any) -> dict[str, Any]:
    return {name: inner for branch in _branches(node, root) for name, inner in branch.get("properties", {}).items()}


def _down(node: Any, place: Sequence[Any], root: Any = None) -> Any:
    """The schema of the value at a place; {} where anything goes."""
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
    """What a value must be, in words, from its JSON Schema; '' where the schema does not say."""
    root = node if root is None else root
    told = [_one(branch, root) for branch in _branches(node, root) if branch.get("type") != "null"]
    if not told or not all(told):
        return ""
    return " or ".join(dict.fromkeys(told))


def _one(node: Mapping[str, Any], root: Any) -> str:
    if "const" in node or "enum" in node:
        names = [repr(v) if isinstance(v, str) else str(v) for v in node.get("enum", [node.get("const")])]
        return " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))
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
