"""How deep JSON is nested, as text and as values, without recursion: the libraries that read it recurse."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

MOST_BYTES = 256 << 10  # of a schema, regex or grammar as text
MOST_DEPTH = 100  # of a schema as JSON, and of groups in a regex: the libraries recurse over both


def text_depth(text: str) -> int:
    """How deep the brackets of a JSON text are nested, those in its strings left out.  As fast for long texts as numpy
    is."""
    plain = text.encode(errors="replace").replace(b"\\\\", b"").replace(b'\\"', b"")
    codes = np.frombuffer(plain, np.uint8)
    codes = codes[~np.bitwise_xor.accumulate(codes == ord('"'))] if len(codes) else codes
    steps = np.zeros(256, np.int32)
    steps[[ord(c) for c in "[{"]], steps[[ord(c) for c in "]}"]] = 1, -1
    return int(np.cumsum(steps[codes]).max(initial=0))


def value_depth(value: Any) -> int:
    """Levels of nested mappings and lists, counted up to ``MOST_DEPTH + 1``; without recursion."""
    depth, level = 0, [value]
    while level and depth <= MOST_DEPTH:
        inner: list[Any] = []
        for v in level:
            if isinstance(v, Mapping):
                inner += v.values()
            elif isinstance(v, (list, tuple)):
                inner += v
            # more values than a text of the size that is allowed can hold
            if len(inner) > MOST_BYTES:
                return MOST_DEPTH + 1
        depth += any(isinstance(v, (Mapping, list, tuple)) for v in level)
        level = inner
    return depth
