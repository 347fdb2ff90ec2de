"""Conversion of arguments to JSON, from the syntaxes of calls that are no JSON."""

from __future__ import annotations

import ast
import json
import math
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from minivllm.core.json_schema.references import find

from .parts import NAME

MOST_PARTS = 1 << 13  # largest number of commas in converted arguments, whose conversion takes up to 50 ms
MOST_LEVELS = 24  # largest nesting of references and alternatives of a schema
SPACE = re.compile(r"[ \t\n\r]*")
NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][-+]?\d+)?")
WORDS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
TYPES = {
    dict: "object",
    list: "array",
    int: "integer",
    float: "number",
    bool: "boolean",
    str: "string",
    type(None): "null",
}
SURROGATE = re.compile("[\ud800-\udfff]")


def dumped(value: Any) -> str:
    """Return a value as JSON text without surrogates.  ValueError for infinity and NaN."""
    return sound(json.dumps(value, ensure_ascii=False, allow_nan=False))


def sound(text: str) -> str:
    """Return a text in which pairs of surrogates are replaced by their characters, and other surrogates by U+FFFD."""
    if text.isascii() or not SURROGATE.search(text):
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def types_of(schema: Any, root: Any = None, level: int = 0) -> frozenset[str]:
    """Return the types that a schema allows, or an empty set if it does not name them.

    ``root`` is the whole schema, in which references are found.  ``level`` counts references and alternatives.
    """
    if not isinstance(schema, Mapping) or level > MOST_LEVELS:
        return frozenset()
    found: set[str] = set()
    declared = schema.get("type")
    if isinstance(declared, str):
        found.add(declared)
    elif isinstance(declared, list):
        found.update(name for name in declared if isinstance(name, str))
    else:
        found.update(_listed_types(schema))
    for member in ("anyOf", "oneOf", "allOf"):
        options = schema.get(member)
        if not isinstance(options, list) or (member == "allOf" and len(options) > 1):
            continue
        for option in options:
            found |= types_of(option, root, level + 1)
    if "$ref" in schema and root is not None:
        found |= types_of(find(root, schema["$ref"]), root, level + 1)
    return frozenset(found)


def _listed_types(schema: Mapping[str, Any]) -> Iterator[str]:
    """Yield the types of the values that a schema lists."""
    listed = schema.get("enum")
    values = listed if isinstance(listed, list) else []
    for value in [*values, *([schema["const"]] if "const" in schema else [])]:
        yield TYPES.get(type(value), "object")


def typed(text: str, schema: Any, root: Any = None) -> str:
    """Return the JSON of an argument, made from its text: of a type that its schema allows, else a string.

    ``root`` is the schema of all arguments, in which references are found."""
    types = types_of(schema, root)
    if types == {"string"}:
        return dumped(text)
    stripped = text.strip()
    value, spelling = _read(stripped)
    if spelling is None:
        return dumped(text)
    kind = TYPES[type(value)]
    if kind == "number" and "number" not in types and math.isfinite(value) and value == int(value):
        kind = "integer"  # JSON Schema counts 1.0 as an integer
    fits = kind in types or (kind == "integer" and "number" in types)
    return dumped(text) if types and not fits else spelling


def _read(text: str) -> tuple[Any, str | None]:
    """Return the value of a text that is JSON or a word of Python, and its JSON spelling, or None if it is neither."""
    if text in WORDS:
        return WORDS[text], dumped(WORDS[text])
    try:
        value = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None, None
    return value, None if isinstance(value, str) else text


def is_json(text: str) -> bool:
    """Return whether a text is JSON."""
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse(word: str) -> Any:
    """Raise ValueError for NaN and Infinity, which are no JSON."""
    raise ValueError(word)


# ---- JSON objects ----------------------------------------------------------------------------------------------------


def call_of(text: str) -> tuple[str, str] | None:
    """Return the name and the arguments (JSON text) of an object that is a call, or None for another text.

    The arguments may also be text in a string, which is returned unchanged.  The members may be within a member
    ``function``.
    """
    try:
        found = json.loads(text)
        found = found.get("function", found)
        name = found.get("name")
        value = found.get("arguments", found.get("parameters"))
        arguments = sound(value) if isinstance(value, str) else dumped(value or {})
    except (AttributeError, ValueError, RecursionError):
        return None
    return (name, arguments) if _is_name(name) and isinstance(value, (dict, str, type(None))) else None


def _is_name(name: Any) -> bool:
    """Return whether a value is the name of a function."""
    return isinstance(name, str) and NAME.fullmatch(name) is not None


# ---- Python ----------------------------------------------------------------------------------------------------------


def python_arguments(text: str) -> str | None:
    """Return the keyword arguments of a call in Python as JSON.

    ``text`` is the text after "(", including ")".  None means that an argument is no literal or no keyword, or that
    there are too many."""
    if text.count(",") > MOST_PARTS:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python warns of a string with an unknown escape
            call = ast.parse(f"f({text}", mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            return None
        found = {}
        for keyword in call.keywords:
            if keyword.arg is None:
                return None
            found[keyword.arg] = _literal(keyword.value)
        return dumped(found)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _literal(node: ast.expr) -> Any:
    """Return the JSON value of a Python literal.  ValueError for another expression, or for a value that JSON does not
    have."""
    if isinstance(node, ast.Name) and node.id in WORDS:
        return WORDS[node.id]
    if isinstance(node, (ast.List, ast.Tuple)):
        return [_literal(element) for element in node.elts]
    if isinstance(node, ast.Dict) and None not in node.keys:
        keys = [ast.literal_eval(key) for key in node.keys if key is not None]
        if not all(isinstance(key, str) for key in keys):
            raise ValueError("a key of a dict is not a string")
        return dict(zip(keys, map(_literal, node.values), strict=True))
    value = ast.literal_eval(node)
    if not isinstance(value, (str, int, float, bool, type(None))):
        raise ValueError("no JSON value")
    # such as 1e999: JSON has no infinity, so the largest finite number stands for it
    if isinstance(value, float) and math.isinf(value):
        return math.copysign(sys.float_info.max, value)
    return value


# ---- objects with quotes that are tags -------------------------------------------------------------------------------


def quoted_arguments(text: str, quotes: tuple[str, ...], spell: Callable[[str], str]) -> str | None:
    """Convert an object with unquoted keys, whose strings are enclosed in two ``quotes``, to JSON.

    ``spell`` returns a text with tags instead of marks.  None means that the text is no such object, or has too many
    members.
    """
    if text.count(",") > MOST_PARTS:
        return None
    quote = "|".join(map(re.escape, quotes))
    kinds = [
        rf"(?:{quote})(.*?)(?:{quote})",
        r'("(?:[^"\\]|\\.)*")',
        r"([{}\[\],:])",
        r'([^{}\[\],:"\s][^{}\[\],:]*)',
    ]
    token = re.compile("|".join(kinds), re.S)
    out: list[str] = []
    at = 0
    text = text.strip()
    while at < len(text):
        match = token.match(text, at)
        if match is None:
            return None
        string, json_string, mark, word = match.groups()
        if mark is not None:
            out.append(mark)
        elif string is not None:
            out.append(dumped(spell(string)))
        elif json_string is not None:
            out.append(spell(json_string))
        else:
            is_key = text[match.end() : match.end() + 1] == ":" and out[-1:] in (["{"], [","])
            out.append(_bare(spell(word.strip()), is_key))
        space = SPACE.match(text, match.end())
        at = space.end() if space else match.end()
    found = "".join(out)
    try:
        return found if isinstance(json.loads(found), dict) else None
    except (ValueError, RecursionError):
        return None


def _bare(word: str, is_key: bool) -> str:
    """Return the JSON text of a key or value that is written without quotes."""
    if is_key:
        return dumped(word)
    if word in WORDS:
        return dumped(WORDS[word])
    return word if NUMBER.fullmatch(word) else dumped(word)
