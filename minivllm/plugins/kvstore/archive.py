"""The files of a disk store from outside of an engine: list, verify, export and import them."""

from __future__ import annotations

import io
import json
import os
import re
import stat
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO
from urllib.parse import quote, unquote

import numpy as np

from minivllm.errors import ConfigError, brief, shown

from .disk import ABOUT, NAMED
from .segments import (
    FILE_HEAD,
    SUFFIX,
    SegmentPlace,
    file_head,
    page_head,
    read_digest,
    read_page,
    scan,
)

MEMBER = re.compile(r"[0-9a-f]{32}/(r\d+of\d+-[\w.%~-]+\.(kv|name)|about\.txt)")
LONGEST_ABOUT = 1000  # largest number of characters of a description that is shown
LARGEST_NAME = 64 << 20  # largest size in bytes of a file that lists the page keys of a named prefix


@dataclass
class ModelFiles:
    """The files of one model in the folder of a disk store."""

    folder: Path
    about: str
    files: int = 0
    bytes: int = 0
    pages: int = 0
    damaged: int = 0  # pages with a wrong checksum, counted by ``verify``
    unusable: int = 0  # files without a valid head, and ends of files without a whole record
    changed: float = 0.0  # time of the last change of the newest file
    names: tuple[str, ...] = ()


def models(root: Path, verify: bool = False) -> list[ModelFiles]:
    """Return the files of each model, the newest first.  ``verify`` reads all pages.  ConfigError without a folder."""
    if not os.path.isdir(root):
        raise ConfigError(f"{root}: no such folder; expected the option path of a disk store")
    found = [_files_of(folder, verify) for folder in sorted(root.iterdir()) if _is_model(folder)]
    return sorted(found, key=lambda one: -one.changed)


def _is_model(folder: Path) -> bool:
    return os.path.isdir(folder) and re.fullmatch(r"[0-9a-f]{32}", folder.name) is not None


def _files_of(folder: Path, verify: bool) -> ModelFiles:
    """Read the heads of all records of a model, and with ``verify`` the pages."""
    about = folder / ABOUT
    text = about.read_text(encoding="utf-8", errors="replace") if os.path.isfile(about) else ""
    found = ModelFiles(folder, brief(text, LONGEST_ABOUT))
    names = {unquote(path.name.partition("-")[2].removesuffix(NAMED)) for path in folder.glob(f"*{NAMED}")}
    found.names = tuple(sorted(names))
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        state = path.stat()
        found.files += 1
        found.bytes += state.st_size
        found.changed = max(found.changed, state.st_mtime)
        try:
            places, behind = _places(path)
        except ValueError:
            found.unusable += 1
            continue
        found.unusable += behind > 0
        found.pages += len(places)
        if verify:
            found.damaged += sum(page is None for _, page in _pages(path, places))
    return found


def _places(path: Path) -> tuple[dict[bytes, SegmentPlace], int]:
    """Return the places of the pages of a file, and the bytes behind the last record.  ValueError without a head."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return scan(fd, read_digest(fd), 0)
    finally:
        os.close(fd)


def _pages(path: Path, places: dict[bytes, SegmentPlace]) -> Iterator[tuple[bytes, np.ndarray | None]]:
    """Yield the key and the page of each place.  The page is None if it is damaged."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        for key, place in places.items():
            yield key, read_page(fd, key, place)
    finally:
        os.close(fd)


def export(root: Path, name: str, target: Path) -> int:
    """Write the pages of a named prefix to a tar file, and return their number.

    ConfigError if no model has the name, if several have it, or if a page is missing."""
    having = [one for one in models(root) if name in one.names]
    if len(having) != 1:
        known = sorted({known for one in models(root) for known in one.names})
        what = "several models have" if having else "no model has"
        raise ConfigError(f"{what} a prefix {shown(name)} in {root}; there are: {', '.join(known) or 'none'}")
    folder, pages = having[0].folder, 0
    with _private(target) as file, tarfile.open(fileobj=file, mode="w") as tar:
        _add(tar, f"{folder.name}/{ABOUT}", having[0].about.encode())
        for marked in sorted(folder.glob(f"*-{quote(name, safe='')}{NAMED}")):
            rank = marked.name.partition("-")[0]
            keys = _keys(marked, marked.read_bytes())
            data = _collect(folder, rank, keys)
            _add(tar, f"{folder.name}/{marked.name}", marked.read_bytes())
            _add(tar, f"{folder.name}/{rank}-export{SUFFIX}", data)
            pages += len(keys)
    return pages


def _keys(source: Path, content: bytes) -> list[bytes]:
    """Return the page keys in the content of a file of a named prefix.  ConfigError if ``source``, the file or archive
    that holds it, is damaged."""
    try:
        return [bytes.fromhex(key) for key in json.loads(content)]
    except (ValueError, TypeError, RecursionError):
        raise ConfigError(f"{source}: the list of the prefix's pages is damaged; save the prefix again") from None


def _collect(folder: Path, rank: str, keys: list[bytes]) -> bytes:
    """Return a file with these pages of a rank.  ConfigError if one is missing."""
    wanted = set(keys)
    parts: list[bytes] = []
    for path in sorted(folder.glob(f"{rank}-*{SUFFIX}")):
        try:
            places, _ = _places(path)
        except ValueError:
            continue
        if not parts:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            parts.append(file_head(read_digest(fd)))
            os.close(fd)
        for key, page in _pages(path, {k: p for k, p in places.items() if k in wanted}):
            if page is not None:
                parts += [page_head(key, page)[0], page.tobytes()]
                wanted.discard(key)
    if wanted:
        raise ConfigError(
            f"{len(wanted)} of {len(keys)} pages are missing or damaged in {folder}: save the prefix again"
        )
    return b"".join(parts)


def _private(path: Path) -> BinaryIO:
    """Open a file to write that no other user can read, because prompts can be recovered from it.  ConfigError if that
    is impossible."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    except OSError as e:
        raise ConfigError(f"{path}: cannot be written ({e.strerror}); expected a file in an existing folder") from None
    if stat.S_ISREG(os.fstat(fd).st_mode):
        os.fchmod(fd, 0o600)  # sets the mode of a file that existed before
    return os.fdopen(fd, "wb")


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size, info.mode = len(data), 0o600
    tar.addfile(info, io.BytesIO(data))


def import_from(root: Path, source: Path) -> int:
    """Add the files of an archive of ``export`` to a folder, and return the number of their pages.

    ConfigError if the file is damaged or has other members; no page is added then.
    """
    try:
        with tarfile.open(source, "r:") as tar:  # without compression, so no member is larger than the file
            members = [_member(tar, info) for info in tar.getmembers()]
    except (OSError, tarfile.TarError) as e:
        raise ConfigError(f"{source}: cannot be read ({e}); expected a file of `minivllm cache export`") from e
    for name, data in members:
        if name.endswith(NAMED):
            _keys(source, data)
    pages = sum(_whole(source, data) for name, data in members if name.endswith(SUFFIX))
    for name, data in members:
        path = root / name
        if name.endswith(SUFFIX):
            path = path.with_name(f"{path.stem}-{os.urandom(6).hex()}{SUFFIX}")
        try:
            _write(path, data)
        except OSError as e:
            raise ConfigError(f"{path}: cannot be written ({e.strerror}); expected a folder with enough room") from None
    return pages


def _write(path: Path, data: bytes) -> None:
    """Write a file of an archive under a temporary name, and rename it when it is whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.new")
    with _private(new) as file:
        file.write(data)
    new.replace(path)


def _member(tar: tarfile.TarFile, info: tarfile.TarInfo) -> tuple[str, bytes]:
    """Return the name and the content of a member.  ConfigError for a name that no export has."""
    plain = info.isfile() and not info.issparse()  # a sparse member may be much larger than its archive
    file = tar.extractfile(info) if plain and MEMBER.fullmatch(info.name) else None
    if file is None or (info.name.endswith(NAMED) and info.size > LARGEST_NAME):
        raise ConfigError(f"{tar.name!s}: the member {shown(info.name)} is not of `minivllm cache export`")
    return info.name, file.read()


def _whole(source: Path, data: bytes) -> int:
    """Return the number of pages of a file of pages.  ConfigError if it is damaged."""
    with os.fdopen(os.memfd_create("pages"), "r+b") as file:
        file.write(data)
        file.flush()
        path = Path(f"/proc/self/fd/{file.fileno()}")
        try:
            places, behind = _places(path)
        except ValueError:
            places, behind = {}, len(data)
        lost = sum(page is None for _, page in _pages(path, places))
    if behind or lost or len(data) < FILE_HEAD.size:
        raise ConfigError(f"{source}: it is damaged; export it again")
    return len(places)
