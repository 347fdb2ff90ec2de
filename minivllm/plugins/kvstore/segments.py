"""Append-only files of pages: their format, and reading them back.

    file      head of 64 bytes, then records
    head      magic, version, digest of (identity, rank, ranks), checksum
    record    magic, key, size, checksum of the page, checksum of these fields      40 bytes
              the page

A file is scanned from its beginning up to the first record that is not whole, such as the last record of a process that
was killed.  A page counts only if its checksum fits when it is read.

Large pages are read past the page cache of the system (O_DIRECT), unless they are in it, because the disk then writes
to the memory of the caller itself.
"""

from __future__ import annotations

import errno
import itertools
import os
import struct
import zlib
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import numpy as np

VERSION = 2  # in version 1 the checksum was the CRC-32 of the whole page
FILE_MAGIC, PAGE_MAGIC = b"mvllmkv1", b"mvpg"
FILE_HEAD = struct.Struct("<8sI32sI16x")
PAGE_HEAD = struct.Struct("<4s16sQII4x")
SUFFIX = ".kv"
SECTOR = 4096  # block of a checksum in bytes; O_DIRECT needs offsets, sizes and addresses that are multiples of it
DIRECT_FROM = 128 << 10  # size of a page in bytes from which on reads bypass the page cache
PROBES = itertools.count()  # counter of the checks whether a page is in the page cache


class SegmentPlace(NamedTuple):
    """The place of a page: its file, the offset of its record, and its size in bytes."""

    file: int
    at: int
    size: int
    checksum: int


def digest_of(identity: str, rank: int, ranks: int) -> bytes:
    """Return the digest of 32 bytes at the start of the files of one rank of a model."""
    return blake2b(f"{identity} {rank} {ranks}".encode(), digest_size=32).digest()


def file_head(digest: bytes) -> bytes:
    """Return the head of a file."""
    fields = FILE_MAGIC + VERSION.to_bytes(4, "little") + digest
    return FILE_HEAD.pack(FILE_MAGIC, VERSION, digest, zlib.crc32(fields))


def checksum_of(page: np.ndarray) -> int:
    """Return the checksum of a page u8 [n]: CRC-32 of the sums of its sectors as numbers u64, and of the rest.

    It takes a tenth of the time of CRC-32 of all bytes.  A sector that was damaged, lost or exchanged changes it.
    """
    whole = page.nbytes // SECTOR * SECTOR
    sums = np.add.reduce(page[:whole].view(np.uint64).reshape(-1, SECTOR // 8), axis=1)
    return zlib.crc32(page[whole:].data, zlib.crc32(sums.data))


def page_head(key: bytes, page: np.ndarray) -> tuple[bytes, int]:
    """Return the head of a record, and the checksum of the page."""
    checksum = checksum_of(page)
    fields = struct.pack("<4s16sQI", PAGE_MAGIC, key, page.nbytes, checksum)
    return PAGE_HEAD.pack(PAGE_MAGIC, key, page.nbytes, checksum, zlib.crc32(fields)), checksum


def read_digest(fd: int) -> bytes:
    """Return the digest in the head of a file.  ValueError if the head is of another version or damaged."""
    head = os.pread(fd, FILE_HEAD.size, 0)
    digest = FILE_HEAD.unpack(head)[2] if len(head) == FILE_HEAD.size else b""
    if head != file_head(digest):
        raise ValueError("it has no valid header")
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


def ordinary(size: int) -> np.ndarray:
    """Return memory u8 [size] of any content."""
    return np.empty(size, np.uint8)


def read_page(
    fd: int, key: bytes, place: SegmentPlace, empty: Callable[[int], np.ndarray] = ordinary, direct: int | None = None
) -> np.ndarray | None:
    """Return a page u8 [size], or None unless the record and the page are whole.

    ``empty`` returns memory for it.  ``direct`` is a descriptor of the file with O_DIRECT.  Large pages that are not in
    the page cache are read through it.  Threads may call this at the same time.
    """
    begin = place.at // SECTOR * SECTOR
    need = place.at - begin + PAGE_HEAD.size + place.size
    covering = -(-need // SECTOR) * SECTOR
    memory = _aligned(empty, covering)
    done = False
    if direct is not None and place.size >= DIRECT_FROM and not _is_cached(fd, begin, covering):
        done = _read_direct(direct, memory, begin, need)
    if not done and not _read_all(fd, memory[:need], begin):
        return None
    record = memory[place.at - begin : need]
    magic, there, size, checksum, own = PAGE_HEAD.unpack(record[: PAGE_HEAD.size].tobytes())
    whole = magic == PAGE_MAGIC and there == key and size == place.size and checksum == place.checksum
    if not whole or zlib.crc32(record[: PAGE_HEAD.size - 8].data) != own:
        return None
    page = record[PAGE_HEAD.size :]
    return page if checksum_of(page) == checksum else None


def _aligned(empty: Callable[[int], np.ndarray], size: int) -> np.ndarray:
    """Return memory u8 [size] whose address is a multiple of SECTOR."""
    memory = empty(size + SECTOR)
    begin = -memory.__array_interface__["data"][0] % SECTOR
    return memory[begin : begin + size]


def _is_cached(fd: int, begin: int, size: int) -> bool:
    """Return True if the page cache of the operating system has a sector of a range.

    Each call checks another sector, because the check makes the system read a missing sector, so that a second check
    would find it.
    """
    sector = next(PROBES) * 7919 % max(1, size // SECTOR - 1)
    try:
        return os.preadv(fd, [bytearray(SECTOR)], begin + sector * SECTOR, os.RWF_NOWAIT) == SECTOR
    except OSError:  # EAGAIN, or the file system does not support the check
        return False


def _read_direct(fd: int, memory: np.ndarray, begin: int, need: int) -> bool:
    """Read ``need`` bytes of a file into aligned memory past the page cache.  Return False if that is not possible."""
    try:
        return os.preadv(fd, [memory.data], begin) >= need
    except OSError as e:
        if e.errno == errno.EINVAL:  # larger sectors
            return False
        raise


def _read_all(fd: int, memory: np.ndarray, begin: int) -> bool:
    """Fill memory u8 [n] from a file.  Return False if the file ends before."""
    view = memoryview(memory.data)
    while view.nbytes:
        n = os.preadv(fd, [view], begin)
        if n <= 0:
            return False
        view, begin = view[n:], begin + n
    return True


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
        except OSError:  # another process has just deleted the file
            continue
    return [path for _, path in sorted(found)]
