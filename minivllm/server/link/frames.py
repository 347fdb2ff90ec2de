"""What goes over the socket between a client and its engine: frames of a small JSON header and raw columns.

    u32 size of all that follows | u8 version | u8 kind | u8 columns | u8 0 | u32 size of the header
    header      JSON object, UTF-8
    columns     for each: u8 index into COLUMNS, 3 zero bytes, u32 entries
    data        the columns' entries in that order, little-endian, nothing between them

Both ends know the columns' names and dtypes; no type, no object and no code comes from the other side.  Every size is
checked against what is there and against ``MAX_FRAME`` before anything is made of it.  FrameError says what is wrong.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from minivllm.core.interfaces.finish import FINISH_REASONS
from minivllm.errors import EngineDeadError

VERSION = 2
MAX_FRAME = 64 * 2**20  # bytes
KINDS = ("open", "ready", "failed", "frame", "add", "abort", "cut", "ask", "stop")
COLUMNS = {
    "prompt": "<i4", "stream": "<i8", "sample": "<i4", "count": "<i4", "end": "<u1", "stop_id": "<i4", "scored": "<u1",
    "tokens": "<i4", "chosen": "<f4", "rank": "<i4", "tops": "<i4", "top_ids": "<i4", "top": "<f4", "first": "<i8",
    "first_at": "<f8", "cached": "<i4", "done": "<i8", "done_at": "<f8", "prompts": "<i8", "prompt_chosen": "<f4",
    "prompt_rank": "<i4", "prompt_top_ids": "<i4", "prompt_top": "<f4", "entered": "<f8",
    "vectors": "<f4", "tap_rows": "<i8", "tap_values": "<f4", "joules": "<f8",
}  # fmt: skip
ENDS = (None, *FINISH_REASONS)  # what the numbers in the column "end" stand for; None: the branch goes on
ROW = ("stream", "sample", "count", "end", "stop_id", "scored")  # the columns with an entry for each row of a step
_NAMES = tuple(COLUMNS)
_DTYPES = tuple(np.dtype(form) for form in COLUMNS.values())
_INDEX = {name: i for i, name in enumerate(_NAMES)}
_SIZE = struct.Struct("<I")
_HEAD = struct.Struct("<BBBBI")
_COLUMN = struct.Struct("<BxxxI")


class FrameError(EngineDeadError):
    """What came is no frame: the two ends do not understand each other any more."""


class Frame(NamedTuple):
    kind: str
    header: dict[str, Any]
    columns: dict[str, np.ndarray]


def encode(kind: str, header: Mapping[str, Any], columns: Mapping[str, np.ndarray] | None = None) -> bytes:
    """TypeError or ValueError for a header that JSON cannot hold (NaN is such a value) or a frame that is too large."""
    text = json.dumps(header, separators=(",", ":"), allow_nan=False, default=_plain).encode()
    table, data = [], []
    for name, column in (columns or {}).items():
        index = _INDEX[name]
        data.append(np.ascontiguousarray(column, _DTYPES[index]).tobytes())
        table.append(_COLUMN.pack(index, len(column)))
    body = b"".join((_HEAD.pack(VERSION, KINDS.index(kind), len(table), 0, len(text)), text, *table, *data))
    if len(body) > MAX_FRAME:
        raise ValueError(f"a frame of {len(body)} bytes; want at most {MAX_FRAME}")
    return _SIZE.pack(len(body)) + body


def decode(body: bytes | memoryview) -> Frame:
    """The frame of what follows its size.  Columns are views of ``body``, read-only."""
    body = memoryview(body)
    if len(body) < _HEAD.size:
        raise FrameError(f"a frame of {len(body)} bytes; want at least {_HEAD.size}")
    version, kind, n_columns, zero, n_header = _HEAD.unpack_from(body)
    if version != VERSION or zero or kind >= len(KINDS):
        raise FrameError(f"a frame of version {version} and kind {kind}; want version {VERSION}")
    at = _HEAD.size + n_header
    start = at + n_columns * _COLUMN.size
    if start > len(body):
        raise FrameError(f"a frame of {len(body)} bytes whose header and table take {start}")
    header = _header(bytes(body[_HEAD.size : at]))
    columns: dict[str, np.ndarray] = {}
    for i in range(n_columns):
        index, entries = _COLUMN.unpack_from(body, at + i * _COLUMN.size)
        if index >= len(_NAMES) or _NAMES[index] in columns:
            raise FrameError(f"column {index} is unknown or comes twice")
        dtype = _DTYPES[index]
        if start + entries * dtype.itemsize > len(body):
            raise FrameError(f"column {_NAMES[index]!r} of {entries} entries goes beyond its frame")
        columns[_NAMES[index]] = np.frombuffer(body, dtype, entries, start)
        start += entries * dtype.itemsize
    if start != len(body):
        raise FrameError(f"{len(body) - start} bytes behind the last column")
    return Frame(KINDS[kind], header, columns)


def size_of(head: bytes) -> int:
    """Bytes that follow the four of ``head``."""
    (size,) = _SIZE.unpack(head)
    if size > MAX_FRAME:
        raise FrameError(f"a frame of {size} bytes; want at most {MAX_FRAME}")
    return size


class Splitter:
    """A stream of bytes to frames: what is not whole yet is kept."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[Frame]:
        self._rest += data
        frames, at = [], 0
        while len(self._rest) - at >= _SIZE.size:
            end = at + _SIZE.size + size_of(bytes(self._rest[at : at + _SIZE.size]))
            if end > len(self._rest):
                break
            frames.append(decode(bytes(self._rest[at + _SIZE.size : end])))
            at = end
        del self._rest[:at]
        return frames


def _header(text: bytes) -> dict[str, Any]:
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise FrameError(f"the header of a frame is no JSON: {e}") from e
    if not isinstance(header, dict):
        raise FrameError(f"the header of a frame is a {type(header).__name__}; want an object")
    return header


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, (np.ndarray, tuple, set, frozenset)):
        return list(value)
    raise TypeError(f"{type(value).__name__} is not JSON")
