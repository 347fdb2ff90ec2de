"""Read parts of a safetensors file straight into tensors, with few calls of the system.

    file      [ size u64 | header (JSON) | tensor a | tensor b | tensor c ... ]
    ranges                  [0, 4) -> any memory    [4, 9) -> any memory       one call for neighbouring ranges

The calls run without the interpreter's lock, so other threads of the process go on meanwhile.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

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


def read_ranges(path: Path, first: int, ranges: Sequence[FileRange]) -> None:
    """Read ranges of a file into their memory.  The ranges count from byte ``first``.  OSError if the file is too
    short."""
    if not ranges:
        return
    ordered = sorted(ranges, key=lambda one: one.begin)
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        begin = ordered[0].begin
        end = ordered[0].begin
        parts = list[memoryview]()
        for one in ordered:
            if one.begin != end or len(parts) == MOST_PARTS:
                _fill(file, first + begin, parts)
                begin = one.begin
                parts = []
            parts.append(one.memory)
            end = one.end
        _fill(file, first + begin, parts)
    finally:
        os.close(file)


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
