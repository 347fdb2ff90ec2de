"""Limits on the number of JSON values in a request body, checked on its bytes before they are parsed.

A Python dict or list takes far more memory than its JSON.  A body within ``max_body_bytes`` may have millions of them.
Counting them takes a few passes over the bytes, whatever the bytes are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from minivllm.server.errors import ApiError

MOST_FIELDS = 256  # largest number of fields of a body; fewer than a hundred are defined
MOST_DEPTH = 128  # largest nesting of objects and lists; a JSON schema may have 100 levels, inside of other objects
MOST_HOLDERS = 20_000  # largest number of objects and lists of a body, enough for 4,096 messages of a few parts each
MOST_VALUES = 1 << 17  # largest number of values of a body, without the token ids of a prompt
MOST_IN_FIELD = 4096  # largest number of values of a field that is not in MOST_IN
MOST_IN = {"allowed_token_ids": MOST_VALUES} | dict.fromkeys(
    (  # the last six names are used by other servers for structured output
        "messages",
        "input",
        "tools",
        "structured_outputs",
        "response_format",
        "guided_json",
        "guided_choice",
        "guided_grammar",
        "json_schema",
        "grammar",
        "format",
    ),
    1 << 16,
)
IDS = ("prompt", "tokens")  # fields that may hold token ids; the code that reads them checks their number
# fields that may hold token ids, but whose other values are limited as other fields are
INPUTS = ("input", "text_1", "text_2")
OPEN, SHUT = (ord("["), ord("{")), (ord("]"), ord("}"))


@dataclass(frozen=True)
class JsonShape:
    """The size of a JSON text: its number of objects and lists (``holders``), their deepest nesting, and its number
    of values."""

    holders: int
    depth: int
    values: int


def shape_of(raw: bytes) -> JsonShape:
    """Return the shape of a JSON text.  It is exact for valid JSON and meaningless for other bytes."""
    plain = raw.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in raw else raw
    codes = np.frombuffer(plain, np.uint8)
    quotes = codes == ord('"')
    inside = np.bitwise_xor.accumulate(quotes) if quotes.any() else quotes
    codes = codes[~inside]
    opened = (codes == OPEN[0]) | (codes == OPEN[1])
    closed = (codes == SHUT[0]) | (codes == SHUT[1])
    steps = opened.astype(np.int8) - closed.astype(np.int8)
    steps = steps[steps != 0]
    depth = int(np.cumsum(steps, dtype=np.int32).max(initial=0))
    holders = int(opened.sum())
    return JsonShape(holders, depth, holders + int((codes == ord(",")).sum()) + 1)


def check_shape(raw: bytes) -> None:
    """Raise ApiError (400) if a JSON text has too many objects and lists, or nests them too deeply.

    ``check_values`` checks the number of values once the text has been parsed.
    """
    if raw.count(b"[") + raw.count(b"{") <= MOST_DEPTH:
        return  # with so few brackets, also counting brackets in strings, a text is neither deep nor large
    shape = shape_of(raw)
    if shape.depth > MOST_DEPTH:
        raise ApiError(400, f"the JSON of the body is nested too deeply: expected at most {MOST_DEPTH} levels")
    if shape.holders > MOST_HOLDERS:
        problem = f"the body holds {shape.holders} objects and lists"
        raise ApiError(400, f"{problem}; expected at most {MOST_HOLDERS}")


def check_values(values: int) -> None:
    """Raise ApiError (400) if ``values``, the count of a body's values without long lists of ids, is too large."""
    if values > MOST_VALUES:
        raise ApiError(400, f"the body holds {values} values beside its token ids; expected at most {MOST_VALUES}")


def check_fields(body: dict[str, Any]) -> None:
    """Raise ApiError (400) for a body with too many fields, or a field with too many values.

    The limits are low because each value is checked several times and sent to the engine.
    """
    if len(body) > MOST_FIELDS:
        raise ApiError(400, f"the body has {len(body)} fields; expected at most {MOST_FIELDS}")
    for name, value in body.items():
        if name in IDS or (name in INPUTS and holds_ids(value)):
            continue
        most = MOST_IN.get(name, MOST_IN_FIELD)
        count = values_in(value, most)
        if count > most:
            raise ApiError(400, f"{name[:64]} holds {count} values or more; expected at most {most}", name[:64])


def holds_ids(value: Any) -> bool:
    """Return whether a value is a list of whole numbers, or a list of such lists."""
    if not isinstance(value, list):
        return False
    kinds = set(map(type, value))
    if kinds == {list}:
        kinds = set()
        for ids in value:
            kinds.update(map(type, ids))
    return kinds == {int}


def values_in(value: Any, most: int) -> int:
    """Return the number of values in nested lists and objects, or a number above ``most`` if there are more."""
    count, todo = 0, [value]
    while todo and count <= most:
        inner = todo.pop()
        if isinstance(inner, (dict, list)):
            count += len(inner)
            if count <= most:
                todo += inner.values() if isinstance(inner, dict) else inner
    return count
