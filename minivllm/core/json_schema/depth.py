"""Measure the nesting of JSON, as text and as values, without recursion.  Libraries that read JSON recurse over it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

MOST_BYTES = 256 << 10  # largest number of bytes of a schema, regular expression or grammar
MOST_DEPTH = (
    # Largest nesting depth of a schema, and of the groups of a regular expression; libraries
    # recurse over both.
    100
)


def text_depth(text: str) -> int:
    """Return the nesting depth of the brackets in a JSON text, without the brackets in strings.

    It uses numpy, so it is fast for long texts.
    """
    plain = text.encode(errors="replace").replace(b"\\\\", b"").replace(b'\\"', b"")
    codes = np.frombuffer(plain, np.uint8)
    codes = codes[~np.bitwise_xor.accumulate(codes == ord('"'))] if len(codes) else codes
    steps = np.zeros(256, np.int32)
    steps[list(b"[{")] = 1
    steps[list(b"]}")] = -1
    return int(np.cumsum(steps[codes]).max(initial=0))


def value_depth(value: Any) -> int:
    """Return the nesting depth of mappings and lists, counted up to ``MOST_DEPTH + 1``."""
    depth, level = 0, [value]
    while level and depth <= MOST_DEPTH:
        inner: list[Any] = []
        for v in level:
            if isinstance(v, Mapping):
                inner += v.values()
            elif isinstance(v, (list, tuple)):
                inner += v
            # more values than a text of the largest size can have
            if len(inner) > MOST_BYTES:
                return MOST_DEPTH + 1
        depth += any(isinstance(v, (Mapping, list, tuple)) for v in level)
        level = inner
    return depth
