"""Repair of standard streams that the caller has closed (``2>&-``), or whose encoding lacks characters.

Python has None in place of such a stream.  The next file or socket that opens would get its file descriptor, and a
library that prints would write into that file.  So the descriptor is opened on /dev/null.  Standard input is then
empty, and text for standard error is lost.  Losing standard output is an error, because it is the result of a command.
"""

from __future__ import annotations

import codecs
import contextlib
import io
import json
import os
import sys

NAMES = ("stdin", "stdout", "stderr")


class Lost(io.TextIOBase):
    """A replacement for closed standard output.  ``written`` is True once a text was written to it."""

    written = False
    encoding = "utf-8"

    def write(self, text: str) -> int:
        self.written |= bool(text)
        return len(text)

    def fileno(self) -> int:
        return 1

    def writable(self) -> bool:
        return True


def open_closed_streams() -> Lost | None:
    """Open closed standard streams on /dev/null.  Return the replacement of standard output if that was closed, else
    None."""
    lost = None
    for number, name in enumerate(NAMES):
        try:
            os.fstat(number)
        except OSError:
            _open_null(number)
        if getattr(sys, name) is not None:
            continue
        if name == "stdout":
            lost = sys.stdout = Lost()  # type: ignore[assignment]
        else:
            stream = io.FileIO(number, "r" if number == 0 else "w", closefd=False)
            buffered = io.BufferedReader(stream) if number == 0 else io.BufferedWriter(stream)
            setattr(sys, name, io.TextIOWrapper(buffered, "utf-8", line_buffering=number != 0))
    return lost


def escape_unencodable() -> None:
    """Set standard output to write characters that its encoding lacks (``PYTHONIOENCODING=ascii``) as JSON escapes."""
    codecs.register_error("json", _json_escape)
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors in ("strict", "surrogateescape"):
        sys.stdout.reconfigure(errors="json")


def _json_escape(error: UnicodeError) -> tuple[str, int]:
    """Return the escapes of the characters that cannot be encoded, and the position behind them."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return json.dumps(error.object[error.start : error.end])[1:-1], error.end


def _open_null(number: int) -> None:
    """Open /dev/null as file descriptor ``number``."""
    descriptor = os.open(os.devnull, os.O_RDONLY if number == 0 else os.O_WRONLY)
    if descriptor != number:
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.set_inheritable(number, True)


def discard_output() -> None:
    """Redirect standard output to /dev/null, so that flushing its buffer at exit does not fail."""
    with contextlib.suppress(OSError, ValueError):
        sink = os.open(os.devnull, os.O_WRONLY)
        os.dup2(sink, sys.stdout.fileno())
        os.close(sink)
