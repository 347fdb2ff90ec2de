"""Files as a tier of the KV cache, which survive the process and are shared by engines.

    PATH/IDENTITY/r0of1-4711-0.kv     a file of this engine: locked, pages are appended
                  r0of1-4712-3.kv     a file of another engine that runs: locked by it, only read here
                  r0of1-3000-0.kv     a file of an engine that has ended: locked by whoever opens it first

The owner of a file holds its lock, which the system releases when the process ends.  Only the owner appends to a file
and deletes it.  If the files take more than the limit, files of other models and of ended engines are deleted first,
the oldest first.  Then the file with the fewest pages in use is deleted, and these pages move to the newest file.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from urllib.parse import quote, unquote

import numpy as np

from minivllm.core.interfaces.kvstore import KVStore, StoreContext
from minivllm.errors import ResourceError

from .options import DiskStoreOptions
from .segments import (
    FILE_HEAD,
    PAGE_HEAD,
    SUFFIX,
    Place,
    digest_of,
    file_head,
    files_below,
    page_head,
    read_page,
    scan,
    write_all,
)

LARGEST = 256 << 20  # bytes of a file, after which the next one is begun
FILES = 16  # files that the limit is divided into, at least
IN_USE = 0.7  # share of the limit for pages in use; the rest are removed pages that wait for a file to be deleted
ABOUT, NAMED = "about.txt", ".name"  # the model, for readers; files with the keys of a named prefix
NUMBERS = itertools.count()  # of the files of this process


class PageFile:
    """An open file of pages.  ``owned`` means that this store holds its lock."""

    def __init__(self, path: Path, fd: int, owned: bool, size: int) -> None:
        self.path, self.fd, self.owned, self.size = path, fd, owned, size
        self.live = 0  # bytes of the records in use


class DiskStore(KVStore):
    """Appends pages to files, and finds the pages of earlier processes by scanning the files."""

    eager = True
    keeps_names = True

    def __init__(self, options: DiskStoreOptions, ctx: StoreContext) -> None:
        super().__init__(options, ctx)
        self.eager, self.patience = options.eager, options.patience
        self.always = options.load == "always"
        self.root = Path(options.path).expanduser()
        self.folder = self.root / ctx.identity[:32]
        self._prefix = f"r{ctx.rank}of{ctx.ranks}-"
        self.digest = digest_of(ctx.identity, ctx.rank, ctx.ranks)
        self.share = options.bytes // ctx.ranks
        self.largest = max(1 << 16, min(LARGEST, self.share // FILES))
        self.files: dict[int, PageFile] = {}
        self.places: dict[bytes, Place] = {}
        self.newest: int | None = None
        self.numbers = itertools.count()
        self.skipped = 0  # files and ends of files that could not be used
        self.foreign: list[tuple[Path, int]] = []  # files of other models and their sizes, the oldest first
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / ABOUT).write_text(ctx.label, encoding="utf-8")
            self._open_all()
            self._find_foreign()
        except OSError as e:
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
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:  # another process has just deleted it
            self.skipped += 1
            return
        number = next(self.numbers)
        try:
            owned = _lock(fd)
            found, behind = scan(fd, self.digest, number)
        except (OSError, ValueError):
            os.close(fd)
            self.skipped += 1
            return
        self.skipped += owned and behind > 0
        size = os.fstat(fd).st_size
        self.files[number] = PageFile(path, fd, owned, size if owned else size - behind)
        self._add(found)

    def _add(self, found: Mapping[bytes, Place]) -> dict[bytes, int]:
        """Index pages that were found in files, and return the sizes of those that are new."""
        new = {}
        for key, place in found.items():
            if key not in self.places:
                self.places[key] = place
                self.files[place.file].live += PAGE_HEAD.size + place.size
                new[key] = place.size
        return new

    def look(self) -> Mapping[bytes, int]:
        before = set(self.places)
        known = {file.path for file in self.files.values()}
        for path in files_below(self.root):
            if path.parent == self.folder and path.name.startswith(self._prefix) and path not in known:
                self._open(path)
        for number, file in list(self.files.items()):
            if file.owned:
                continue
            state = os.fstat(file.fd)
            if not state.st_nlink:  # its owner has deleted it
                self._forget(number)
            elif state.st_size > file.size:
                found, behind = scan(file.fd, self.digest, number, file.size)
                file.size = state.st_size - behind
                self._add(found)
        return {key: place.size for key, place in self.places.items() if key not in before}

    def _forget(self, number: int) -> None:
        """Close a file, and forget its pages."""
        for key in [key for key, place in self.places.items() if place.file == number]:
            del self.places[key]
        self._close(number, delete=False)

    def _begin(self) -> PageFile:
        """Begin a new file and return it."""
        name = f"{self._prefix}{os.getpid()}-{next(NUMBERS)}{SUFFIX}"
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / name
        if path.exists():  # of an earlier process with the same number
            path = self.folder / f"{path.stem}-{os.urandom(4).hex()}{SUFFIX}"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
        file = PageFile(path, fd, _lock(fd), 0)
        number = next(self.numbers)
        self.files[number], self.newest = file, number
        write_all(fd, [memoryview(file_head(self.digest))])
        file.size = FILE_HEAD.size
        self._find_foreign()
        return file

    def _file_for(self, need: int) -> PageFile:
        """Return the file to which a record of ``need`` bytes is appended."""
        newest = None if self.newest is None else self.files[self.newest]
        if newest is None or newest.size + need > max(self.largest, FILE_HEAD.size + need):
            return self._begin()
        return newest

    def _close(self, number: int, delete: bool) -> None:
        file = self.files.pop(number)
        if number == self.newest:
            self.newest = None
        if delete:
            file.path.unlink(missing_ok=True)
        os.close(file.fd)

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
        """List the files of other models without named prefixes, and their sizes, the oldest first.  Rank 0 alone
        counts them."""
        self.foreign = []
        for path in () if self.ctx.rank else files_below(self.root):
            kept = path.parent == self.folder or any(path.parent.glob(f"*{NAMED}"))
            if not kept:
                with contextlib.suppress(OSError):  # another process may just have deleted it
                    self.foreign.append((path, path.stat().st_size))

    def _delete_foreign(self) -> bool:
        """Delete the oldest file of another model that no engine uses.  Return False if there is none."""
        while self.foreign:
            path, _ = self.foreign.pop(0)
            try:
                fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            except OSError:
                continue
            try:
                if _lock(fd):
                    path.unlink(missing_ok=True)
                    return True
            finally:
                os.close(fd)
        return False

    def _compact(self) -> bool:
        """Delete the owned file with the fewest bytes in use, and append its pages in use to the newest file.  Return
        False if no file has anything to remove."""
        able = [
            (file.live, number)
            for number, file in self.files.items()
            if file.owned and number != self.newest and file.live < file.size - FILE_HEAD.size
        ]
        if not able:
            newest = None if self.newest is None else self.files[self.newest]
            if newest is None or newest.live >= newest.size - FILE_HEAD.size:
                return False
            self.newest = None  # the next record begins a file, and this one can be compacted
            return True
        number = min(able)[1]
        moving = [(key, place) for key, place in self.places.items() if place.file == number]
        for key, place in moving:
            page = self._read(key, place)
            del self.places[key]
            self.files[number].live -= PAGE_HEAD.size + place.size
            if page is not None:
                self._append(key, page)
        self._close(number, delete=True)
        return True

    def _append(self, key: bytes, page: np.ndarray) -> None:
        head, checksum = page_head(key, page)
        file = self._file_for(len(head) + page.nbytes)
        at = file.size
        try:
            write_all(file.fd, [memoryview(head), memoryview(page.data)])
        except OSError:
            self._cut(file)
            raise
        file.size += len(head) + page.nbytes
        file.live += len(head) + page.nbytes
        assert self.newest is not None
        self.places[key] = Place(self.newest, at, page.nbytes, checksum)

    def _cut(self, file: PageFile) -> None:
        """Remove a part of a record from the end of a file, or begin another file if that fails."""
        try:
            os.ftruncate(file.fd, file.size)
        except OSError:
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
        page = self._read(key, place)
        if page is None:
            self.drop([key])
        return page

    def _read(self, key: bytes, place: Place) -> np.ndarray | None:
        page = self.ctx.empty(place.size)
        return page if read_page(self.files[place.file].fd, key, place, page) else None

    def drop(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            place = self.places.pop(key, None)
            if place is None:
                continue
            file = self.files[place.file]
            file.live -= PAGE_HEAD.size + place.size
            if file.owned and not file.live and place.file != self.newest:
                self._close(place.file, delete=True)

    # ---- names ---------------------------------------------------------------------------------------------------

    def _name_file(self, name: str) -> Path:
        return self.folder / f"{self._prefix}{quote(name, safe='')}{NAMED}"

    def names(self) -> Mapping[str, Sequence[bytes]]:
        found = {}
        for path in self.folder.glob(f"{self._prefix}*{NAMED}"):
            with contextlib.suppress(OSError, ValueError):  # it was deleted, or is damaged
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
        for number in list(self.files):
            self._close(number, delete=False)
        self.places.clear()


def _lock(fd: int) -> bool:
    """Take the lock of a file, and return True; False if another process or store has it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
