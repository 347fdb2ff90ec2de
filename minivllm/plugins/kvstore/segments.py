"""Append-only files of pages: their format, and reading them back.

    file      head of 64 bytes, then records
    head      magic, version, digest of (identity, rank, ranks), checksum
    record    magic, key, size, checksum of the page, checksum of these fields      40 bytes
              the page

A file is scanned from its beginning up to the first record that is not whole, such as the last record of a process that
was killed.  A page counts only if its checksum fits when it is read.
"""

from __future__ import annotations

import os
import struct
import zlib
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import numpy as np

VERSION = 1
FILE_MAGIC, PAGE_MAGIC = b"mvllmkv1", b"mvpg"
FILE_HEAD = struct.Struct("<8sI32sI16x")
PAGE_HEAD = struct.Struct("<4s16sQII4x")
SUFFIX = ".kv"


class SegmentPlace(NamedTuple):
    """The place of a page: its file, the offset of its record, and its size in bytes."""

    file: int
    at: int
    size: int
    checksum: int


def digest_of(identity: str, rank: int, ranks: int) -> bytes:
    """Return the 32 bytes that the files of one rank of a model begin with."""
    return blake2b(f"{identity} {rank} {ranks}".encode(), digest_size=32).digest()


def file_head(digest: bytes) -> bytes:
    """Return the head of a file."""
    fields = FILE_MAGIC + VERSION.to_bytes(4, "little") + digest
    return FILE_HEAD.pack(FILE_MAGIC, VERSION, digest, zlib.crc32(fields))


def page_head(key: bytes, page: np.ndarray) -> tuple[bytes, int]:
    """Return the head of a record, and the checksum of the page."""
    checksum = zlib.crc32(page.data)
    fields = struct.pack("<4s16sQI", PAGE_MAGIC, key, page.nbytes, checksum)
    return PAGE_HEAD.pack(PAGE_MAGIC, key, page.nbytes, checksum, zlib.crc32(fields)), checksum


def read_digest(fd: int) -> bytes:
    """Return the digest in the head of a file.  ValueError if the head is of another version or damaged."""
    head = os.pread(fd, FILE_HEAD.size, 0)
    digest = FILE_HEAD.unpack(head)[2] if len(head) == FILE_HEAD.size else b""
    if head != file_head(digest):
        raise ValueError("it has no valid head")
    return digest


def scan(fd: int, digest: bytes, file: int, at: int = FILE_HEAD.size) -> tuple[dict[bytes, SegmentPlace], int]:
    """Return the places of the pages of a file by key, from the record at an offset on, and the number of bytes behind
    the last whole record.

    ValueError if the file is of another version, model or rank.
    """
    total = os.fstat(fd).st_size
    if os.pread(fd, FILE_HEAD.size, 0) != file_head(digest):
        raise ValueError("it is of another version, model or rank")
    found: dict[bytes, SegmentPlace] = {}
    while at + PAGE_HEAD.size <= total:
        head = os.pread(fd, PAGE_HEAD.size, at)
        magic, key, size, checksum, own = PAGE_HEAD.unpack(head)
        fields = head[: PAGE_HEAD.size - 8]
        if magic != PAGE_MAGIC or zlib.crc32(fields) != own or at + PAGE_HEAD.size + size > total:
            break
        found[key] = SegmentPlace(file, at, size, checksum)
        at += PAGE_HEAD.size + size
    return found, total - at


def read_page(fd: int, key: bytes, place: SegmentPlace, into: np.ndarray) -> bool:
    """Read a page into memory u8 [size].  Return False unless the record and the page are whole."""
    head = os.pread(fd, PAGE_HEAD.size, place.at)
    if len(head) < PAGE_HEAD.size:
        return False
    magic, there, size, checksum, own = PAGE_HEAD.unpack(head)
    whole = magic == PAGE_MAGIC and there == key and size == place.size == into.nbytes
    if not whole or checksum != place.checksum or zlib.crc32(head[: PAGE_HEAD.size - 8]) != own:
        return False
    view, at = memoryview(into.data), place.at + PAGE_HEAD.size
    while view.nbytes:
        n = os.preadv(fd, [view], at)
        if n <= 0:
            return False
        view, at = view[n:], at + n
    return zlib.crc32(into.data) == checksum


def write_all(fd: int, parts: list[memoryview]) -> None:
    """Append all bytes of the parts to a file.  OSError if the disk is full."""
    left = [part for part in parts if part.nbytes]
    while left:
        n = os.writev(fd, left)
        while left and n >= left[0].nbytes:
            n -= left[0].nbytes
            left.pop(0)
        if left:
            left[0] = left[0][n:]


def files_below(folder: Path) -> list[Path]:
    """Return all files of pages below a folder, the one written longest ago first."""
    found: list[tuple[float, Path]] = []
    for path in folder.glob(f"*/*{SUFFIX}"):
        try:
            found.append((path.stat().st_mtime, path))
        except OSError:  # another process has just deleted it
            continue
    return [path for _, path in sorted(found)]
