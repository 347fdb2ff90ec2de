"""Read files that a user names, completely or line by line, with bounds on size and time.

Except for ``read_given``, these functions open regular files of a bounded size only.  A FIFO would wait for a writer, a
device has no end, and a sparse file of a terabyte is created in a second.  Symbolic links are followed.  A Git LFS
pointer, which replaces a file that was not downloaded, is recognized by its first line
(https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md).

Every function raises ``error`` (ConfigError by default).  The message begins with the file's path, or with ``name`` if
it is set.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from minivllm.errors import ConfigError, MinivllmError, ResourceError, brief, shown
from minivllm.validation import lone_escape, whole

MIB = 1 << 20
SMALL = 4 * MIB  # size limit of files that are written by hand: configurations, keys, schemas, templates
PART = 64 * MIB  # largest size in bytes of config.json, of an index of shards and of a tokenizer's configuration
LARGE = 512 * MIB  # largest size in bytes of files of prompts, of records of runs and of tokenizers
HUGE = 8192 * MIB  # largest size in bytes of traces, which are read line by line
PATIENCE, SLOWEST = 10.0, 60.0  # time limits in seconds: of a pause of a pipe, and of reading the pipe in total
LONGEST = 16 * MIB  # largest size of a line in bytes
POINTER = b"version https://git-lfs.github.com/spec/"

Name = str | os.PathLike[str]
Error = type[MinivllmError]


def read_bytes(path: Name, most: int = SMALL, error: Error = ConfigError, name: str = "") -> bytes:
    """Return the contents of a file of at most ``most`` bytes."""
    with opened(path, most, error, name) as file:
        data = _of(file.read(most + 1), path, error, name)
    if len(data) > most:  # the system reports size 0 for files under /proc, so the size is checked again after reading
        raise error(_large(name or path, most))
    return data


def read_text(path: Name, most: int = SMALL, error: Error = ConfigError, name: str = "") -> str:
    """Return the contents of a UTF-8 file, without a byte order mark at its beginning."""
    try:
        return read_bytes(path, most, error, name).decode("utf-8-sig")
    except UnicodeDecodeError as exc:
        raise error(f"{_name(name or path)}: not UTF-8 (byte {exc.start}); save it as UTF-8") from None


def read_given(path: Name, most: int = SMALL, error: Error = ConfigError, name: str = "") -> str:
    """Return the contents of a UTF-8 file or pipe.  Shells create a pipe for ``<(command)``.

    Use it for a file that the user names explicitly and that is read once.  ``error`` if a pipe sends nothing for
    ``PATIENCE`` seconds, or more than ``most`` bytes.
    """
    at = _name(name or path)
    try:
        if not stat.S_ISFIFO(os.stat(path).st_mode):
            return read_text(path, most, error, name)
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb", buffering=0) as pipe:
            data = _drained(pipe.fileno(), most)
        return data.decode("utf-8-sig")
    except TimeoutError:
        raise error(
            f"{at}: is a FIFO that sent nothing for {PATIENCE:g} s; expected a process that writes to it"
        ) from None
    except OverflowError:
        raise error(_large(name or path, most)) from None
    except UnicodeDecodeError as exc:
        raise error(f"{at}: not UTF-8 (byte {exc.start}); write it as UTF-8") from None
    except (OSError, ValueError):
        return read_text(path, most, error, name)  # read_text raises the error with the reason, such as a missing file


def _drained(pipe: int, most: int) -> bytes:
    """Return all data of a nonblocking pipe.  TimeoutError if it sends nothing; OverflowError for more than ``most``
    bytes."""
    poll = select.poll()
    poll.register(pipe, select.POLLIN | select.POLLHUP)
    data = bytearray()
    end = time.monotonic() + SLOWEST
    while len(data) <= most:
        # Wait before reading: before a writer opens the pipe, a read would return the end of file.
        patience = max(min(PATIENCE, end - time.monotonic()), 0)
        if not poll.poll(1e3 * patience):
            raise TimeoutError
        part = os.read(pipe, MIB)
        if not part:
            return bytes(data)
        data += part
    raise OverflowError


def read_lines(path: Name, most: int = LARGE, error: Error = ConfigError, name: str = "") -> Iterator[str]:
    """Yield the lines of a UTF-8 file with their line ends, without a byte order mark at the beginning of the file."""
    with opened(path, most, error, name) as file:
        at = _name(name or path)
        for number in range(1, most):
            line = _of(file.readline(LONGEST + 1), path, error, name)
            if not line:
                return
            if len(line) > LONGEST:
                raise error(f"{at}:{number}: a line of more than {LONGEST // MIB} MiB; expected shorter lines")
            try:
                yield line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as exc:
                raise error(f"{at}:{number}: not UTF-8 (byte {exc.start} of the line); save it as UTF-8") from None


def read_json(path: Name, most: int = SMALL, error: Error = ConfigError, name: str = "", expected: str = "") -> Any:
    """Return the JSON value in a file.  ``expected`` describes the expected contents, for the message about invalid
    JSON."""
    text = read_text(path, most, error, name)
    try:
        return parse_json(text, _name(name or path), error)
    except error as exc:
        if not expected:
            raise
        raise error(f"{exc}; expected {expected}") from None


def parse_json(text: str, at: str, error: Error = ConfigError, line: int = 0, unique: bool = False) -> Any:
    """Return the JSON value in a text.

    Messages begin with ``at``, the name of the file, and ``line``, if it is not 0.  ``unique`` refuses an object that
    contains a key twice.
    """
    where = f"{at}:{line}" if line else at
    if lone_escape(text):
        raise error(f"{where}: holds half of a surrogate pair (\\ud800 to \\udfff), which is not valid text; remove it")
    try:
        return json.loads(text, parse_int=whole, object_pairs_hook=_distinct if unique else None)
    except RecursionError:
        raise error(f"{where}: lists or objects are nested deeper than Python can parse; use fewer levels") from None
    except json.JSONDecodeError as exc:
        raise error(f"{at}:{line or exc.lineno}:{exc.colno}: broken JSON: {exc.msg}") from None
    except ValueError as exc:  # a number of thousands of digits
        raise error(f"{where}: {exc}") from None


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object as a dict.  ValueError if it contains a key twice."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"the key {shown(name)} is there twice")
        found[name] = value
    return found


@contextlib.contextmanager
def opened(path: Name, most: int | None, error: Error = ConfigError, name: str = "") -> Iterator[BinaryIO]:
    """Open a file for reading.  ``most`` None means that any size is accepted."""
    try:
        _check(os.stat(path), name or path, most, error)
        # The file may have been replaced by a FIFO since the check, so do not block, and check it again.
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
        with open(file, "rb") as handle:
            _check(os.fstat(file), name or path, most, error)
            head = _of(handle.read(len(POINTER)), path, error, name)
            if head == POINTER:
                raise error(
                    f"{_name(name or path)}: is a Git LFS pointer, not the file itself; "
                    "run `git lfs pull` in its repository, or download the file"
                )
            handle.seek(0)
            yield handle
    except FileNotFoundError:
        raise error(f"{_name(name or path)}: no such file") from None
    except OSError as exc:
        raise error(f"{_name(name or path)}: {exc.strerror or exc}") from None
    except UnicodeEncodeError:
        raise error(f"{_name(name or path)}: is not valid text, so no file has that name") from None
    except MinivllmError:
        raise
    except ValueError:
        raise error(f"{_name(name or path)}: holds a null character; no file has that name") from None


def check(path: Name, most: int | None = None, error: Error = ConfigError, name: str = "") -> None:
    """Raise ``error`` if a file cannot be read completely.  Call it before a library opens the file."""
    with opened(path, most, error, name):
        pass


def check_output(path: Name, error: Error = ConfigError, name: str = "") -> None:
    """Raise ``error`` if a file cannot be written.  Call it before the work whose result goes to the file.

    An existing file is not changed, and no new file is left behind. /dev/null and the names of standard streams are
    accepted.
    """
    at = _name(name or path)
    try:
        was_there = os.path.lexists(path)
        mode = os.stat(path).st_mode if os.path.exists(path) else stat.S_IFREG
        if stat.S_ISDIR(mode):
            raise error(f"{at}: is a directory; expected the name of a file to write to")
        if not (stat.S_ISREG(mode) or os.fspath(path).startswith("/dev/")):
            raise error(f"{at}: is {_kind(mode)}; expected a regular file to write to")
        with open(path, "ab"):
            pass
        if not was_there:
            os.unlink(path)
    except MinivllmError:
        raise
    except UnicodeEncodeError:
        raise error(f"{at}: is not valid text, so no file has that name") from None
    except ValueError:
        raise error(f"{at}: holds a null character; no file has that name") from None
    except OSError as exc:
        raise error(f"{at}: {exc.strerror or exc}") from None


def write_text(path: Name, text: str) -> None:
    """Write a UTF-8 file.  ResourceError if that fails, for example because the disk is full."""
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as exc:
        raise ResourceError(f"{_name(path)}: cannot be written: {exc.strerror or exc}") from None


def is_there(path: Name) -> bool:
    """Return whether a file of any kind has that name.  ``Path.is_file`` would return False for a FIFO."""
    return os.path.lexists(path)


def real(path: Name) -> str:
    """Return the path without symbolic links, or the path itself if no file can have that name."""
    try:
        return os.path.realpath(path)
    except ValueError:
        return os.fspath(path)


def _check(found: os.stat_result, path: Name, most: int | None, error: Error) -> None:
    """Raise ``error`` unless the file is a regular file of at most ``most`` bytes."""
    if not stat.S_ISREG(found.st_mode):
        raise error(f"{_name(path)}: is {_kind(found.st_mode)}; expected a regular file")
    if most is not None and found.st_size > most:
        raise error(_large(path, most, found.st_size))


def _large(path: Name, most: int, size: int | None = None) -> str:
    """Return the message for a file of more than ``most`` bytes.  ``size`` None means that its size is unknown."""
    many = "more" if size is None else f"{size} bytes"
    return f"{_name(path)}: {many}: expected a file of at most {most // MIB} MiB"


def _kind(mode: int) -> str:
    """Return the words for a kind of file that is not regular."""
    kinds = ((stat.S_ISDIR, "a directory"), (stat.S_ISFIFO, "a FIFO"), (stat.S_ISSOCK, "a socket"))
    return next((word for test, word in kinds if test(mode)), "a device")


def _of(data: bytes | None, path: Name, error: Error, name: str) -> bytes:
    """Return the bytes ``data`` that a read of a file returned.  Raise ``error`` if the read returned None."""
    if data is None:  # some files under /proc have no data yet
        raise error(f"{_name(name or path)}: reading returned no data yet; expected a regular file")
    return data


def _name(path: Name) -> str:
    """Return a path for a message, shortened to 300 characters."""
    return brief(os.fspath(path), 300)


def expanded(name: Name, error: Error = ConfigError) -> Path:
    """Return a path in which ``~`` and ``~USER`` at the beginning are replaced by a home directory.

    ``error`` if there is no such user.
    """
    try:
        return Path(name).expanduser()
    except RuntimeError:
        user = Path(name).parts[0]
        raise error(
            f"{_name(name)}: the home directory {_name(user)} is not known; expected a path, such as ./{_name(user)}"
        ) from None


def folder_of(name: str) -> Path | None:
    """Return the directory with that name, or None if there is none.  ``~`` stands for a home directory."""
    try:
        folder = expanded(name)
    except ConfigError:  # no such user
        return None
    return folder if os.path.isdir(folder) else None


def listed(folder: Name) -> list[Path]:
    """Return the sorted entries of a directory, none if it cannot be read."""
    try:
        return sorted(Path(folder).iterdir())
    except (OSError, ValueError):
        return []


def snapshot_of(folder: Name) -> tuple[str, str] | None:
    """Return (repository id, commit) of a snapshot folder in a Hugging Face cache, or None for any other folder."""
    *_, repository, snapshots, commit = ("", "", "", *Path(folder).parts)
    kind, *name = repository.split("--")
    is_commit = len(commit) == 40 and set(commit) <= set("0123456789abcdef")
    if kind == "models" and name and snapshots == "snapshots" and is_commit:
        return "/".join(name), commit
    return None
