"""Values from outside (configurations, parameters, JSON): text that is Unicode, numbers and nesting within bounds.

Python's strings hold more than text: half of a surrogate pair, which JSON and YAML can spell and which stands for a
byte that is no UTF-8 in arguments and variables, cannot be encoded, so whoever writes it down fails.  A whole number of
more than 4,300 digits cannot be printed (``sys.set_int_max_str_digits``).  What recurses over a value ends at a
thousand levels.  All three are refused where a value comes in.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from minivllm.errors import brief

DEEPEST = 128  # levels of a value: a schema for structured output has a hundred
DIGITS, BITS = 40, 133  # of a whole number: no option has more
# escapes of JSON of which the other half is not beside them; a backslash that is itself escaped is none
_ESCAPED = re.compile(r"\\\\")
_LONE = re.compile(
    r"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB][0-9a-fA-F]{2})\\u[dD][c-fC-F]"
)


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
