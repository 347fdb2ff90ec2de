"""The frames that a client and its engine send each other over a socket: a small JSON header and raw columns.

    u32 size of all that follows | u8 version | u8 kind | u8 number of columns | u8 0 | u32 size of the header
    header      JSON object, UTF-8
    columns     for each: u8 index into COLUMNS, 3 zero bytes, u32 number of entries
    data        the columns' entries in that order, little-endian, without gaps

Both ends have the columns' names and dtypes.  A frame therefore cannot bring types, objects or code.  Every size is
checked against the frame's size and ``MAX_FRAME`` before memory is allocated for it.  FrameError reports a bad frame.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from minivllm.core.interfaces.finish import FINISH_REASONS
from minivllm.errors import EngineDeadError

VERSION = 4
MAX_FRAME = 256 * 2**20  # largest size of a frame in bytes; images are the largest
KINDS = ("open", "ready", "failed", "frame", "add", "abort", "cut", "ask", "stop", "progress")
COLUMNS = {
    "prompt": "<i4", "stream": "<i8", "sample": "<i4", "count": "<i4", "end": "<u1", "stop_id": "<i4", "scored": "<u1",
    "tokens": "<i4", "chosen": "<f4", "rank": "<i4", "tops": "<i4", "top_ids": "<i4", "top": "<f4", "first": "<i8",
    "first_at": "<f8", "cached": "<i4", "done": "<i8", "done_at": "<f8", "prompts": "<i8", "prompt_chosen": "<f4",
    "prompt_rank": "<i4", "prompt_top_ids": "<i4", "prompt_top": "<f4", "entered": "<f8",
    "vectors": "<f4", "tap_rows": "<i8", "tap_values": "<f4", "joules": "<f8",
    "images": "<i8", "pixels": "<u1", "digests": "<u1", "route_rows": "<i8", "routes": "<i2",
}  # fmt: skip
ENDS = (None, *FINISH_REASONS)  # finish reason for each number in the column "end"; None means that the branch runs on
ROW = ("stream", "sample", "count", "end", "stop_id", "scored")  # the columns with an entry for each row of a step
_NAMES = tuple(COLUMNS)
_DTYPES = tuple(np.dtype(form) for form in COLUMNS.values())
_INDEX = {name: i for i, name in enumerate(_NAMES)}
_SIZE = struct.Struct("<I")
_HEAD = struct.Struct("<BBBBI")
_COLUMN = struct.Struct("<BxxxI")


class FrameError(EngineDeadError):
    """The received bytes are not a frame, so the two ends cannot communicate any longer."""


class Frame(NamedTuple):
    """A decoded frame; ``kind`` is one of ``KINDS``."""

    kind: str
    header: dict[str, Any]
    columns: dict[str, np.ndarray]


def encode(kind: str, header: Mapping[str, Any], columns: Mapping[str, np.ndarray] | None = None) -> bytes:
    """Return the bytes of a frame, its size first.

    Raise TypeError or ValueError for a header that JSON cannot hold, as with NaN, and for a frame that is too large.
    """
    text = json.dumps(header, separators=(",", ":"), allow_nan=False, default=_plain).encode()
    table, data = [], []
    for name, column in (columns or {}).items():
        index = _INDEX[name]
        data.append(np.ascontiguousarray(column, _DTYPES[index]).tobytes())
        table.append(_COLUMN.pack(index, len(column)))
    body = b"".join((_HEAD.pack(VERSION, KINDS.index(kind), len(table), 0, len(text)), text, *table, *data))
    if len(body) > MAX_FRAME:
        raise ValueError(f"a frame of {len(body)} bytes; expected at most {MAX_FRAME}")
    return _SIZE.pack(len(body)) + body


def decode(body: bytes | memoryview) -> Frame:
    """Return the frame in the bytes after its size.  Its columns are read-only views of ``body``.  FrameError if they
    are malformed."""
    body = memoryview(body)
    if len(body) < _HEAD.size:
        raise FrameError(f"a frame of {len(body)} bytes; expected at least {_HEAD.size}")
    version, kind, n_columns, zero, n_header = _HEAD.unpack_from(body)
    if version != VERSION or zero or kind >= len(KINDS):
        raise FrameError(f"a frame of version {version} and kind {kind}; expected version {VERSION}")
    at = _HEAD.size + n_header
    start = at + n_columns * _COLUMN.size
    if start > len(body):
        raise FrameError(f"the header and the table of columns take {start} bytes of a frame of {len(body)}")
    header = _header(bytes(body[_HEAD.size : at]))
    columns: dict[str, np.ndarray] = {}
    for i in range(n_columns):
        index, entries = _COLUMN.unpack_from(body, at + i * _COLUMN.size)
        if index >= len(_NAMES) or _NAMES[index] in columns:
            raise FrameError(f"column {index} is unknown or comes twice")
        name, dtype = _NAMES[index], _DTYPES[index]
        end = start + entries * dtype.itemsize
        if end > len(body):
            raise FrameError(f"column {name!r} of {entries} entries goes beyond its frame")
        columns[name] = np.frombuffer(body, dtype, entries, start)
        start = end
    if start != len(body):
        raise FrameError(f"{len(body) - start} bytes after the last column")
    return Frame(KINDS[kind], header, columns)


def size_of(head: bytes) -> int:
    """Return the size of a frame, without the four bytes of ``head`` that hold it.  FrameError if it exceeds the
    limit."""
    (size,) = _SIZE.unpack(head)
    if size > MAX_FRAME:
        raise FrameError(f"a frame of {size} bytes; expected at most {MAX_FRAME}")
    return size


class Splitter:
    """Splits a stream of bytes into frames, and keeps the bytes of an incomplete frame."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[Frame]:
        """Return the frames that more bytes complete.  Bytes of an incomplete frame are kept.  FrameError if one is
        malformed."""
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
        raise FrameError(f"the header of a frame is not JSON: {e}") from e
    if not isinstance(header, dict):
        raise FrameError(f"the header of a frame is a {type(header).__name__}; expected an object")
    return header


def _plain(value: Any) -> Any:
    """Return a NumPy value, tuple or set as a value that JSON has.  Raise TypeError for other types."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, (np.ndarray, tuple, set, frozenset)):
        return list(value)
    raise TypeError(f"{type(value).__name__} cannot be written as JSON")
