"""Read parts of a safetensors file straight into tensors, with few calls of the system.

    file      [ size u64 | header (JSON) | tensor a | tensor b | tensor c ... ]
    ranges                  [0, 4) -> any memory    [4, 9) -> any memory       one call for neighbouring ranges

The calls run without the interpreter's lock, so other threads of the process go on meanwhile, and several threads read
a large file.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .pieces import PIECE, in_threads

# names of dtypes in safetensors files, for dtypes with equal bytes in files and in memory
STORED = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
MOST_PARTS = 1024  # largest number of memory ranges in one call, a limit of Linux


class FileRange(NamedTuple):
    """Bytes [begin, end) of a file, counted from the end of its header, and the memory to read them into."""

    begin: int
    end: int
    memory: memoryview


def header_of(path: Path) -> bytes:
    """Return the header of a safetensors file, which has been checked."""
    with open(path, "rb") as file:
        return file.read(int.from_bytes(file.read(8), "little"))


def memory_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor in host memory."""
    numbers: Any = tensor.view(-1).view(torch.uint8).numpy()
    return memoryview(numbers)


class ReadPiece(NamedTuple):
    """Neighbouring bytes of a file from byte ``begin`` on, and the parts of memory to read them into."""

    begin: int
    parts: list[memoryview]


def read_ranges(path: Path, first: int, ranges: Sequence[FileRange]) -> None:
    """Read ranges of a file into their memory, in pieces on several threads.  The ranges count from byte ``first``.
    OSError if the file is too short."""
    pieces = list(_pieces_of(ranges))
    if not pieces:
        return
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        in_threads([partial(_fill, file, first + piece.begin, piece.parts) for piece in pieces])
    finally:
        os.close(file)


def _pieces_of(ranges: Sequence[FileRange]) -> Iterator[ReadPiece]:
    """Yield the ranges in the order of the file, cut and joined into pieces of at most ``PIECE`` bytes."""
    piece = ReadPiece(0, [])
    size = 0
    for one in sorted(ranges, key=lambda one: one.begin):
        begin = one.begin
        memory = one.memory
        while memory:
            if begin != piece.begin + size or size == PIECE or len(piece.parts) == MOST_PARTS:
                if piece.parts:
                    yield piece
                piece = ReadPiece(begin, [])
                size = 0
            part = memory[: PIECE - size]
            piece.parts.append(part)
            size += len(part)
            begin += len(part)
            memory = memory[len(part) :]
    if piece.parts:
        yield piece


def _fill(file: int, at: int, parts: list[memoryview]) -> None:
    """Fill parts of memory, one after another, from byte ``at`` of a file.  OSError at its end."""
    while parts:
        count = os.preadv(file, parts, at)
        if not count:
            raise OSError("it ends within a tensor")
        at += count
        whole = 0
        while whole < len(parts) and count >= len(parts[whole]):
            count -= len(parts[whole])
            whole += 1
        parts = parts[whole:]
        if count:
            parts[0] = parts[0][count:]
