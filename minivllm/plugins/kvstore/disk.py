"""Files as a tier of the KV cache, which survive the process and are shared by engines.

    PATH/IDENTITY/r0of1-4711-0.kv     a file of this engine: locked, pages are appended
                  r0of1-4712-3.kv     a file of another engine that runs: locked by it, only read here
                  r0of1-3000-0.kv     a file of an engine that has ended: locked by the first engine that opens it

A name has the rank, the number of ranks, the process id and a number.  The owner of a file holds its lock, which the
system releases when the process ends.  Only the owner appends to a file and deletes it.  At its start an engine appends
to files of ended engines that are not full (``LARGEST`` bytes at most).  At most ``DESCRIPTORS`` files are open: the
file that was not read for longest is closed, and opened and locked again for its next read.  If the files take more
than the limit, files of other models and of ended engines are deleted first, the oldest first.  Then the file with the
fewest pages in use is deleted, and these pages move to the newest file.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import json
import os
import resource
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from urllib.parse import quote, unquote

import numpy as np

from minivllm.core.interfaces.kvstore import KVStore, StoreContext
from minivllm.errors import ResourceError
from minivllm.files import expanded

from .ahead import ReadAhead
from .options import DiskStoreOptions
from .segments import (
    DIRECT_FROM,
    FILE_HEAD,
    PAGE_HEAD,
    SUFFIX,
    SegmentPlace,
    digest_of,
    file_head,
    files_below,
    page_head,
    read_page,
    scan,
    write_all,
)

LARGEST = 256 << 20  # size in bytes after which the next file is started
DESCRIPTORS = 256  # largest number of open files; also at most an eighth of the process's limit of descriptors
FILES = 16  # the limit of the store is divided among at least this number of files
IN_USE = 0.7  # share of the limit for pages in use; the rest are removed pages that wait for a file to be deleted
# ABOUT: a file that describes the model for people; NAMED: the suffix of files with the keys of a named prefix
ABOUT, NAMED = "about.txt", ".name"
NUMBERS = itertools.count()  # numbers for the names of this process's files


class PageFile:
    """A file of pages.  ``owned`` means that this store holds the lock of the file, or held it when it closed the
    file."""

    def __init__(self, path: Path, fd: int, owned: bool, size: int, ended: bool) -> None:
        self.path, self.owned, self.size = path, owned, size
        self.fd: int | None = fd  # None if the file is closed
        self.direct: int | None = None  # file descriptor for reads with O_DIRECT, None until the first such read
        self.has_direct = True  # False after O_DIRECT has failed on this file system
        self.ended = ended  # True if no further record may be appended
        self.live = 0  # size in bytes of the records that are in use


class DiskStore(KVStore):
    """Appends pages to files, and finds the pages of earlier processes by scanning the files."""

    eager = True
    keeps_names = True

    def __init__(self, options: DiskStoreOptions, ctx: StoreContext) -> None:
        super().__init__(options, ctx)
        self.eager, self.patience = options.eager, options.patience
        self.always = options.load == "always"
        self.root = expanded(options.path)
        self.folder = self.root / ctx.identity[:32]
        self._prefix = f"r{ctx.rank}of{ctx.ranks}-"
        self.digest = digest_of(ctx.identity, ctx.rank, ctx.ranks)
        self.share = options.bytes // ctx.ranks
        self.largest = max(1 << 16, min(LARGEST, self.share // FILES))
        self.files: dict[int, PageFile] = {}
        # numbers of the files with an open descriptor, the least recently used one first
        self.opened: dict[int, None] = {}
        self.places: dict[bytes, SegmentPlace] = {}
        self.found: list[bytes] = []  # keys of pages of other processes that ``look`` has not returned yet
        self.newest: int | None = None
        self.numbers = itertools.count()
        self.ahead = ReadAhead()
        self.skipped = 0  # files and ends of files that could not be used
        self.foreign: list[tuple[Path, int]] = []  # (file of another model, size), the oldest first
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / ABOUT).write_text(ctx.label, encoding="utf-8")
            self._open_all()
            self.found.clear()  # ``keys`` returns them
            self._find_foreign()
        except OSError as e:
            if e.errno in (errno.EMFILE, errno.ENFILE):
                limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
                raise ResourceError(
                    f"kvstore disk: no more files can be opened ({e.strerror}; this process may have {limit}); raise "
                    "the limit with `ulimit -n`"
                ) from e
            raise ResourceError(
                f"kvstore disk: the folder {self.folder} cannot be used ({e.strerror}); expected a folder that can be "
                "written, in the option path"
            ) from e

    @property
    def limit(self) -> int:
        return int(IN_USE * self.options.bytes)

    def keys(self) -> Mapping[bytes, int]:
        return {key: place.size for key, place in self.places.items()}

    # ---- files ---------------------------------------------------------------------------------------------------

    def _open_all(self) -> None:
        """Open the files of this rank that are there, and index their pages."""
        for path in files_below(self.root):
            if path.parent == self.folder and path.name.startswith(self._prefix):
                self._open(path)

    def _open(self, path: Path) -> None:
        """Open a file and index its pages.  OSError if the process may open no more files."""
        try:
            fd = _open_file(path)
        except OSError as e:
            if e.errno in (errno.EMFILE, errno.ENFILE):
                raise
            self.skipped += 1  # another process has just deleted the file
            return
        number = next(self.numbers)
        try:
            owned = _lock(fd)
            found, behind = scan(fd, self.digest, number)
        except (OSError, ValueError):
            os.close(fd)
            self.skipped += 1
            return
        damaged = behind > 0
        self.skipped += owned and damaged
        size = os.fstat(fd).st_size
        self.files[number] = PageFile(path, fd, owned, size if owned else size - behind, damaged)
        self._add(found)
        self._used(number)

    def _fd(self, number: int) -> int:
        """Return the descriptor of a file.  A closed file is opened and locked again; OSError if that fails."""
        file = self.files[number]
        if file.fd is None:
            file.fd = _open_file(file.path)
            file.owned = file.owned and _lock(file.fd)
            self._extend(number)
        self._used(number)
        return file.fd

    def _used(self, number: int) -> None:
        """Mark a file as used last, and close the files that were used longest ago while too many are open.

        Files of other engines are closed before files whose lock this store holds.
        """
        self.opened.pop(number, None)
        self.opened[number] = None
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        most = DESCRIPTORS if limit < 0 else min(DESCRIPTORS, limit // 8)  # a file may have two descriptors
        while len(self.opened) > max(most, 8):
            others = [one for one in self.opened if one not in (number, self.newest)]
            self._release(next((one for one in others if not self.files[one].owned), others[0]))

    def _release(self, number: int) -> None:
        """Close the descriptors of a file, which releases its lock."""
        file = self.files[number]
        if file.fd is not None:
            self.ahead.release(number)
            del self.opened[number]
            os.close(file.fd)
            if file.direct is not None:
                os.close(file.direct)
            file.fd = file.direct = None

    def _extend(self, number: int) -> None:
        """Index the records that another process has appended to a file."""
        file = self.files[number]
        fd = file.fd
        assert fd is not None
        total = os.fstat(fd).st_size
        if total > file.size and not (file.owned and file.ended):
            found, behind = scan(fd, self.digest, number, file.size)
            file.size = total - behind
            file.ended = behind > 0
            self._add(found)

    def _hold(self, number: int) -> bool:
        """Lock an owned file, and return True; False if another process has taken or deleted it."""
        file = self.files[number]
        if file.owned:
            try:
                self._fd(number)
            except FileNotFoundError:
                self._forget(number)
                return False
        return file.owned

    def _add(self, found: Mapping[bytes, SegmentPlace]) -> None:
        """Index pages that were found in files."""
        for key, place in found.items():
            if key not in self.places:
                self.places[key] = place
                self.files[place.file].live += PAGE_HEAD.size + place.size
                self.found.append(key)

    def look(self) -> Mapping[bytes, int]:
        known = {file.path for file in self.files.values()}
        for path in files_below(self.root):
            if path.parent == self.folder and path.name.startswith(self._prefix) and path not in known:
                self._open(path)
        for number, file in list(self.files.items()):
            if file.owned:
                continue
            try:
                state = file.path.stat()
                if state.st_size > file.size:
                    self._fd(number)
                    self._extend(number)
            except FileNotFoundError:  # the process that owns the file has deleted it
                self._forget(number)
        new = {key: self.places[key].size for key in self.found if key in self.places}
        self.found.clear()
        return new

    def _forget(self, number: int) -> None:
        """Close a file, and forget its pages."""
        for key in [key for key, place in self.places.items() if place.file == number]:
            del self.places[key]
        self._close(number, delete=False)

    def _begin(self) -> PageFile:
        """Create a new file of pages and return it."""
        name = f"{self._prefix}{os.getpid()}-{next(NUMBERS)}{SUFFIX}"
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / name
        if os.path.exists(path):  # a file of an earlier process with the same number
            path = self.folder / f"{path.stem}-{os.urandom(4).hex()}{SUFFIX}"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            owned = _lock(fd)
            write_all(fd, [memoryview(file_head(self.digest))])
        except OSError:  # the disk is full
            os.close(fd)
            path.unlink(missing_ok=True)
            raise
        file = PageFile(path, fd, owned, FILE_HEAD.size, ended=False)
        number = next(self.numbers)
        self.files[number], self.newest = file, number
        self._used(number)
        self._find_foreign()
        return file

    def _file_for(self, need: int) -> PageFile:
        """Return the file to which a record of ``need`` bytes is appended."""
        newest = None if self.newest is None else self.files[self.newest]
        largest = max(self.largest, FILE_HEAD.size + need)
        if newest is not None and newest.size + need <= largest:
            return newest
        able = [
            (file.size, number)
            for number, file in self.files.items()
            if file.owned and not file.ended and file.size + need <= largest
        ]
        for _, number in sorted(able, reverse=True):
            if not self._hold(number):
                continue
            file = self.files[number]
            deleted = not os.fstat(self._fd(number)).st_nlink
            file.ended = file.ended or deleted
            if not file.ended and file.size + need <= largest:
                self.newest = number
                return file
        return self._begin()

    def _close(self, number: int, delete: bool) -> None:
        """Close a file, and ``delete`` it from the folder."""
        file = self.files[number]
        if delete:
            file.path.unlink(missing_ok=True)
        self._release(number)
        del self.files[number]
        if number == self.newest:
            self.newest = None

    # ---- space ---------------------------------------------------------------------------------------------------

    def _make_room(self, need: int) -> bool:
        """Delete files until ``need`` more bytes are within the limit.  Return False if that is not possible."""
        while self._taken() + need > self.share:
            if not self._delete_foreign() and not self._compact():
                return False
        return True

    def _taken(self) -> int:
        """Return the bytes of the files that this rank owns, and of other models' files."""
        own = sum(file.size for file in self.files.values() if file.owned)
        return own + sum(size for _, size in self.foreign)

    def _find_foreign(self) -> None:
        """List the files of other models without named prefixes, with their sizes, the oldest first.

        Only rank 0 counts them.
        """
        self.foreign = []
        for path in () if self.ctx.rank else files_below(self.root):
            kept = path.parent == self.folder or any(path.parent.glob(f"*{NAMED}"))
            if not kept:
                with contextlib.suppress(OSError):  # another process may just have deleted the file
                    self.foreign.append((path, path.stat().st_size))

    def _delete_foreign(self) -> bool:
        """Delete the oldest file of another model, or stop counting it if an engine uses it.  Return False if there is
        none."""
        if not self.foreign:
            return False
        path, _ = self.foreign.pop(0)
        try:
            fd = _open_file(path)
        except OSError:  # another process has deleted the file
            return True
        try:
            if _lock(fd):
                path.unlink(missing_ok=True)
        finally:
            os.close(fd)
        return True

    def _compact(self) -> bool:
        """Delete the owned file with the fewest bytes in use, and append its pages in use to the newest file.

        Return False if no file has unused bytes.
        """
        able = [
            (file.live, number)
            for number, file in self.files.items()
            if file.owned and number != self.newest and file.live < file.size - FILE_HEAD.size
        ]
        if not able:
            newest = None if self.newest is None else self.files[self.newest]
            if newest is None or newest.live >= newest.size - FILE_HEAD.size:
                return False
            newest.ended = True
            self.newest = None  # the next record is written to another file, so that this file can be compacted
            return True
        number = min(able)[1]
        if not self._hold(number):  # another process has taken or deleted the file
            return True
        self.files[number].ended = True
        moving = [(key, place) for key, place in self.places.items() if place.file == number]
        for key, place in moving:
            page = self._read(key, place)
            if number not in self.files:  # another process has deleted the file
                return True
            if page is None:
                del self.places[key]
            else:
                self._append(key, page)
            self.files[number].live -= PAGE_HEAD.size + place.size
        self._close(number, delete=True)
        return True

    def _append(self, key: bytes, page: np.ndarray) -> None:
        head, checksum = page_head(key, page)
        file = self._file_for(len(head) + page.nbytes)
        assert self.newest is not None
        at = file.size
        fd = self._fd(self.newest)
        try:
            write_all(fd, [memoryview(head), memoryview(page.data)])
        except OSError:
            self._cut(fd, file)
            raise
        if page.nbytes >= DIRECT_FROM:  # the disk begins to write at once, and not when memory is full
            os.posix_fadvise(fd, at, len(head) + page.nbytes, os.POSIX_FADV_DONTNEED)
        file.size += len(head) + page.nbytes
        file.live += len(head) + page.nbytes
        self.places[key] = SegmentPlace(self.newest, at, page.nbytes, checksum)

    def _cut(self, fd: int, file: PageFile) -> None:
        """Remove a part of a record from the end of a file, or begin another file if that fails."""
        try:
            os.ftruncate(fd, file.size)
        except OSError:
            file.ended = True
            self.newest = None

    # ---- pages ---------------------------------------------------------------------------------------------------

    def put(self, key: bytes, page: np.ndarray) -> bool:
        if key in self.places:
            return True
        if not self._make_room(PAGE_HEAD.size + page.nbytes):
            return False
        self._append(key, np.ascontiguousarray(page))
        return True

    def get(self, key: bytes) -> np.ndarray | None:
        place = self.places.get(key)
        if place is None:
            return None
        read = self.ahead.take(key)
        page = self._read(key, place) if read is None else read.result()
        self.ahead.start(self._begin_read)
        if page is None:
            self.drop([key])
        return page

    def expect(self, keys: Sequence[bytes]) -> None:
        self.ahead.expect(keys)
        self.ahead.start(self._begin_read)

    def _begin_read(self, key: bytes) -> tuple[int, Callable[[], np.ndarray | None]] | None:
        """Return the number of the file of a large page, and a function that reads the page in any thread."""
        place = self.places.get(key)
        if place is None or place.size < DIRECT_FROM:
            return None
        try:
            fd = self._fd(place.file)
        except OSError:  # ``get`` meets the same error
            return None
        return place.file, partial(read_page, fd, key, place, self.ctx.empty, self._direct(place.file))

    def _direct(self, number: int) -> int | None:
        """Return the descriptor of an open file for reads with O_DIRECT; None if the file system has none."""
        file = self.files[number]
        if file.direct is None and file.has_direct:
            try:
                file.direct = os.open(file.path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
            except OSError:
                file.has_direct = False
        return file.direct

    def _read(self, key: bytes, place: SegmentPlace) -> np.ndarray | None:
        """Return a page, or None if it is damaged or its file has been deleted."""
        try:
            fd = self._fd(place.file)
        except FileNotFoundError:
            self._forget(place.file)
            return None
        direct = self._direct(place.file) if place.size >= DIRECT_FROM else None
        return read_page(fd, key, place, self.ctx.empty, direct)

    def drop(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            place = self.places.pop(key, None)
            if place is None:
                continue
            self.ahead.forget(key)
            file = self.files[place.file]
            file.live -= PAGE_HEAD.size + place.size
            empty = file.owned and not file.live and place.file != self.newest
            # only an empty file without pages of other processes is deleted
            if empty and self._hold(place.file) and not file.live:
                self._close(place.file, delete=True)

    # ---- names ---------------------------------------------------------------------------------------------------

    def _name_file(self, name: str) -> Path:
        return self.folder / f"{self._prefix}{quote(name, safe='')}{NAMED}"

    def names(self) -> Mapping[str, Sequence[bytes]]:
        found = {}
        for path in self.folder.glob(f"{self._prefix}*{NAMED}"):
            # the file may be deleted or damaged
            with contextlib.suppress(OSError, ValueError, TypeError, RecursionError):
                name = unquote(path.name.removeprefix(self._prefix).removesuffix(NAMED))
                found[name] = [bytes.fromhex(key) for key in json.loads(path.read_text())]
        return found

    def mark(self, name: str, keys: Sequence[bytes] | None) -> bool:
        path = self._name_file(name)
        if keys is None:
            path.unlink(missing_ok=True)
            return True
        self.folder.mkdir(parents=True, exist_ok=True)
        new = path.with_suffix(f".{os.getpid()}.new")
        new.write_text(json.dumps([key.hex() for key in keys]))
        new.replace(path)
        return True

    def close(self) -> None:
        self.ahead.close()
        for number in list(self.files):
            self._close(number, delete=False)
        self.places.clear()


def _open_file(path: Path) -> int:
    fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)  # a page is not read ahead of its load
    return fd


def _lock(fd: int) -> bool:
    """Lock a file and return True, or return False if another process or store holds the lock."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
