"""Files that a user names: read whole or by lines, within bounds, and refused by name before they can hold anybody up.

What is opened here, but for ``read_given``, is a regular file of a bounded size.  A FIFO waits for a writer, a device
has no end, a sparse file of a terabyte takes a second to make; a link is what it leads to.  The file that Git LFS
leaves where it has not fetched the real one is told by its first line
(https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md).

Every function raises ``error`` (ConfigError unless told otherwise) with the file's name, or ``name``, before the rest.
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

from minivllm.errors import ConfigError, MinivllmError, brief, shown
from minivllm.validation import lone_escape, whole

MIB = 1 << 20
SMALL = 4 * MIB  # configurations, keys, schemas, templates: what somebody wrote
PART = 64 * MIB  # config.json, an index of shards, the configuration of a tokenizer
LARGE = 512 * MIB  # prompts, records of runs, tokenizers
HUGE = 8192 * MIB  # traces, which are read line by line
PATIENCE, SLOWEST = 10.0, 60.0  # seconds: that a pipe may say nothing, and that it may take altogether
LONGEST = 16 * MIB  # bytes of a line
POINTER = b"version https://git-lfs.github.com/spec/"

Name = str | os.PathLike[str]
Error = type[MinivllmError]


def read_bytes(path: Name, most: int = SMALL, error: Error = ConfigError, name: str = "") -> bytes:
    """The whole file, of at most ``most`` bytes."""
    with opened(path, most, error, name) as file:
        data = _of(file.read(most + 1), path, error, name)
    if len(data) > most:  # files under /proc say that they are empty
        raise error(_large(name or path, most))
    return data


def read_text(path: Name, most: int = SMALL, error: Error = ConfigError, name: str = "") -> str:
    """The whole file as UTF-8; a byte order mark, with which some editors begin a file, is left out."""
    try:
        return read_bytes(path, most, error, name).decode("utf-8-sig")
    except UnicodeDecodeError as exc:
        raise error(f"{_name(name or path)}: not UTF-8 (byte {exc.start}); save it as UTF-8") from None


def read_given(path: Name, most: int = SMALL, error: Error = ConfigError, name: str = "") -> str:
    """``read_text``, and of a pipe as well, which a shell makes of ``<(command)``: for a file that is named on purpose
    and read once.  ``error`` if nothing comes of a pipe for ``PATIENCE`` seconds, or more than ``most`` bytes do."""
    at = _name(name or path)
    try:
        if not stat.S_ISFIFO(os.stat(path).st_mode):
            return read_text(path, most, error, name)
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb", buffering=0) as pipe:
            data = _drained(pipe.fileno(), most)
        return data.decode("utf-8-sig")
    except TimeoutError:
        raise error(f"{at}: is a FIFO, of which nothing has come for {PATIENCE:g} s; want who writes to it") from None
    except OverflowError:
        raise error(_large(name or path, most)) from None
    except UnicodeDecodeError as exc:
        raise error(f"{at}: not UTF-8 (byte {exc.start}); write it as UTF-8") from None
    except (OSError, ValueError):
        return read_text(path, most, error, name)  # which says what is wrong


def _drained(pipe: int, most: int) -> bytes:
    """All that comes of a pipe, which does not block.  TimeoutError; OverflowError for more than ``most`` bytes."""
    ready, size = select.poll(), 0
    parts: list[bytes] = []
    ready.register(pipe, select.POLLIN | select.POLLHUP)
    end = time.monotonic() + SLOWEST
    while size <= most:
        # where nobody has opened its other end yet, this waits; a read would say that all has come
        if not ready.poll(1e3 * max(min(PATIENCE, end - time.monotonic()), 0)):
            raise TimeoutError
        if not (part := os.read(pipe, min(MIB, most + 1 - size) or 1)):
            return b"".join(parts)
        parts.append(part)
        size += len(part)
    raise OverflowError


def read_lines(path: Name, most: int = LARGE, error: Error = ConfigError, name: str = "") -> Iterator[str]:
    """The lines of a UTF-8 file with their ends, one at a time."""
    with opened(path, most, error, name) as file:
        at = _name(name or path)
        for number in range(1, most):
            line = _of(file.readline(LONGEST + 1), path, error, name)
            if not line:
                return
            if len(line) > LONGEST:
                raise error(f"{at}:{number}: a line of more than {LONGEST // MIB} MiB; want shorter ones")
            try:
                yield line.decode("utf-8")
            except UnicodeDecodeError as exc:
                raise error(f"{at}:{number}: not UTF-8 (byte {exc.start} of the line); save it as UTF-8") from None


def read_json(path: Name, most: int = SMALL, error: Error = ConfigError, name: str = "", want: str = "") -> Any:
    """The JSON value in a file.  ``want`` says what it should be, where it is none."""
    text, at = read_text(path, most, error, name), _name(name or path)
    try:
        return parse_json(text, at, error)
    except error as exc:
        if not want:
            raise
        raise error(f"{exc}; want {want}") from None


def parse_json(text: str, at: str, error: Error = ConfigError, line: int = 0, unique: bool = False) -> Any:
    """Return the JSON value in a text; errors begin with ``at``, its file, and ``line``.  ``unique`` refuses an object
    that has a key twice."""
    where = f"{at}:{line}" if line else at
    try:
        if lone_escape(text):
            raise error(f"{where}: holds half of a surrogate pair (\\ud800 to \\udfff), which is no text")
        return json.loads(text, parse_int=whole, object_pairs_hook=_distinct if unique else None)
    except RecursionError:
        raise error(f"{where}: lists or objects are nested too deeply") from None
    except json.JSONDecodeError as exc:
        raise error(f"{at}:{line or exc.lineno}:{exc.colno}: broken JSON: {exc.msg}") from None
    except ValueError as exc:  # a number of thousands of digits
        raise error(f"{where}: {exc}") from None


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON; ValueError if it has a key twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {shown(next(name for name in names if names.count(name) > 1))} is there twice")
    return found


@contextlib.contextmanager
def opened(path: Name, most: int | None, error: Error = ConfigError, name: str = "") -> Iterator[BinaryIO]:
    """The file, open for reading; ``most`` None: of any size."""
    try:
        _check(os.stat(path), name or path, most, error)
        # between the look and this it may have become something else, which must not be waited for
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
        with open(file, "rb") as handle:
            _check(os.fstat(file), name or path, most, error)
            head = _of(handle.read(len(POINTER)), path, error, name)
            if head == POINTER:
                raise error(
                    f"{_name(name or path)}: is a Git LFS pointer, not the file that it stands for; "
                    "run `git lfs pull` in its repository, or download the file"
                )
            handle.seek(0)
            yield handle
    except FileNotFoundError:
        raise error(f"{_name(name or path)}: no such file") from None
    except OSError as exc:
        raise error(f"{_name(name or path)}: {exc.strerror or exc}") from None
    except UnicodeEncodeError:
        raise error(f"{_name(name or path)}: is no text, so no name of a file") from None
    except MinivllmError:
        raise
    except ValueError:
        raise error(f"{_name(name or path)}: holds a null character; no file has that name") from None


def check(path: Name, most: int | None = None, error: Error = ConfigError, name: str = "") -> None:
    """``error`` if the file, which a library is about to open, is none that can be read whole."""
    with opened(path, most, error, name):
        pass


def check_output(path: Name, error: Error = ConfigError, name: str = "") -> None:
    """``error``, before the work, if a file could not be written there.  What is there stays as it is, and where
    nothing is, nothing is left.  /dev/null, and the standard streams by their names, will do."""
    at = _name(name or path)
    try:
        was_there = os.path.lexists(path)
        mode = os.stat(path).st_mode if os.path.exists(path) else stat.S_IFREG
        if stat.S_ISDIR(mode):
            raise error(f"{at}: Is a directory")
        if not (stat.S_ISREG(mode) or os.fspath(path).startswith("/dev/")):
            raise error(f"{at}: is {_kind(mode)}; want a regular file to write to")
        with open(path, "ab"):
            pass
        if not was_there:
            os.unlink(path)
    except MinivllmError:
        raise
    except UnicodeEncodeError:
        raise error(f"{at}: is no text, so no name of a file") from None
    except ValueError:
        raise error(f"{at}: holds a null character; no file has that name") from None
    except OSError as exc:
        raise error(f"{at}: {exc.strerror or exc}") from None


def is_there(path: Name) -> bool:
    """Whether something, of whatever kind, has that name: unlike ``Path.is_file``, which takes a FIFO for nothing."""
    return os.path.lexists(path)


def real(path: Name) -> str:
    """The path without links; as it is, where no file has such a name."""
    try:
        return os.path.realpath(path)
    except ValueError:
        return os.fspath(path)


def _check(found: os.stat_result, path: Name, most: int | None, error: Error) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise error(f"{_name(path)}: is {_kind(found.st_mode)}; want a regular file")
    if most is not None and found.st_size > most:
        raise error(_large(path, most, found.st_size))


def _large(path: Name, most: int, size: int | None = None) -> str:
    many = "more" if size is None else f"{size} bytes"
    return f"{_name(path)}: {many}: want a file of at most {most // MIB} MiB"


def _kind(mode: int) -> str:
    kinds = ((stat.S_ISDIR, "a directory"), (stat.S_ISFIFO, "a FIFO"), (stat.S_ISSOCK, "a socket"))
    return next((word for test, word in kinds if test(mode)), "a device")


def _of(data: bytes | None, path: Name, error: Error, name: str) -> bytes:
    if data is None:  # some files under /proc have nothing to say yet
        raise error(f"{_name(name or path)}: nothing to be read from it now; want a regular file")
    return data


def _name(path: Name) -> str:
    return brief(os.fspath(path), 300)


def folder_of(name: str) -> Path | None:
    """The directory of that name, with ``~`` for a home; None if there is none, whatever the name."""
    try:
        folder = Path(name).expanduser()
    except RuntimeError:  # no such user
        return None
    return folder if os.path.isdir(folder) else None


def snapshot_of(folder: Name) -> tuple[str, str] | None:
    """(id, commit) of a snapshot in a Hugging Face cache, which its folder's path says; None for another folder."""
    *_, repository, snapshots, commit = ("", "", "", *Path(folder).parts)
    kind, *name = repository.split("--")
    hexadecimal = len(commit) == 40 and set(commit) <= set("0123456789abcdef")
    return ("/".join(name), commit) if kind == "models" and name and snapshots == "snapshots" and hexadecimal else None
