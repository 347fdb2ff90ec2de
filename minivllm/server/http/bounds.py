"""Bounds of a body's shape, counted in its bytes before anything is made of them.

Objects and lists cost far more than their bytes, so a body within ``max_body_bytes`` may still hold millions of them.
The count takes a few passes over the bytes, whatever they hold.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from minivllm.server.errors import ApiError

MOST_FIELDS = 256  # of the body itself: those that are known are fewer than a hundred
MOST_DEPTH = 128  # objects and lists within each other: a schema may have 100, and lies within some
MOST_HOLDERS = 20_000  # objects and lists: 4,096 messages of a few parts each
MOST_VALUES = 1 << 17  # beside the token ids of a prompt
MOST_IN_FIELD = 4096  # values of any field but these
MOST_IN = {"allowed_token_ids": MOST_VALUES} | dict.fromkeys(
    (  # the last two lines: forms of the text under the names of other servers
        "messages",
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
IDS = ("prompt", "tokens")  # fields of which token ids are counted by those who read them
OPEN, SHUT = (ord("["), ord("{")), (ord("]"), ord("}"))


@dataclass(frozen=True)
class JsonShape:
    """What a JSON text holds: objects and lists (``holders``), how deep they are nested, all values together."""

    holders: int
    depth: int
    values: int


def shape_of(raw: bytes) -> JsonShape:
    """Exact for valid JSON; for anything else it says nothing, but it takes no longer."""
    plain = raw.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in raw else raw
    codes = np.frombuffer(plain, np.uint8)
    quotes = codes == ord('"')
    inside = np.bitwise_xor.accumulate(quotes) if quotes.any() else quotes
    codes = codes[~inside]
    opened = (codes == OPEN[0]) | (codes == OPEN[1])
    steps = opened.astype(np.int8) - ((codes == SHUT[0]) | (codes == SHUT[1])).astype(np.int8)
    steps = steps[steps != 0]
    depth = int(np.cumsum(steps, dtype=np.int32).max(initial=0))
    holders = int(opened.sum())
    return JsonShape(holders, depth, holders + int((codes == ord(",")).sum()) + 1)


def check_shape(raw: bytes) -> None:
    """ApiError (400) for more than a request can need; ``check_values`` looks at the rest once it has been read."""
    if raw.count(b"[") + raw.count(b"{") <= MOST_DEPTH:
        return  # with as few of them, those in strings counted too, it is neither deep nor large
    shape = shape_of(raw)
    if shape.depth > MOST_DEPTH:
        raise ApiError(400, f"the JSON of the body is nested too deeply: want at most {MOST_DEPTH} levels")
    if shape.holders > MOST_HOLDERS:
        what = f"the body holds {shape.holders} objects and lists"
        raise ApiError(400, f"{what}; want at most {MOST_HOLDERS}")


def check_values(values: int) -> None:
    """ApiError (400) for too many values, those of long lists of token ids not counted."""
    if values > MOST_VALUES:
        raise ApiError(400, f"the body holds {values} values beside its token ids; want at most {MOST_VALUES}")


def check_fields(body: dict[str, Any]) -> None:
    """ApiError (400) for a body with more names than any request has, or a field that holds more than any does: every
    value of a parameter is looked at several times, and sent to the engine."""
    if len(body) > MOST_FIELDS:
        raise ApiError(400, f"the body has {len(body)} fields; want at most {MOST_FIELDS}")
    for name, value in body.items():
        most = MOST_IN.get(name, MOST_IN_FIELD)
        if name not in IDS and (many := values_in(value, most)) > most:
            raise ApiError(400, f"{name[:64]} holds {many} values or more; want at most {most}", name[:64])


def values_in(value: Any, most: int) -> int:
    """How many values lists and objects hold within each other, counted until there are more than ``most``."""
    count, todo = 0, [value]
    while todo and count <= most:
        inner = todo.pop()
        if isinstance(inner, (dict, list)):
            count += len(inner)
            if count <= most:
                todo += inner.values() if isinstance(inner, dict) else inner
    return count
