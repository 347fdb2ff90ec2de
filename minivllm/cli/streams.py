"""Standard streams that the caller has closed (``2>&-``): Python has None in their place, and the next file or socket
that is opened gets their number, so that what a library prints would go into it.

Such a stream is opened on /dev/null.  Standard input is empty then, and what is said on standard error is lost; what a
command writes to standard output is its result, so losing that is an error once it is known.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys

NAMES = ("stdin", "stdout", "stderr")


class Lost(io.TextIOBase):
    """Standard output that nobody gets.  ``any``: something was written."""

    any = False
    encoding = "utf-8"

    def write(self, text: str) -> int:
        self.any |= bool(text)
        return len(text)

    def fileno(self) -> int:
        return 1

    def writable(self) -> bool:
        return True


def mend() -> Lost | None:
    """Open the standard streams that are closed; what stands for standard output if that is among them."""
    lost = None
    for number, name in enumerate(NAMES):
        try:
            os.fstat(number)
        except OSError:
            _hold(number)
        if getattr(sys, name) is not None:
            continue
        if name == "stdout":
            lost = sys.stdout = Lost()  # type: ignore[assignment]
        else:
            stream = io.FileIO(number, "r" if number == 0 else "w", closefd=False)
            buffered = io.BufferedReader(stream) if number == 0 else io.BufferedWriter(stream)
            setattr(sys, name, io.TextIOWrapper(buffered, "utf-8", line_buffering=number != 0))
    return lost


def _hold(number: int) -> None:
    """Open /dev/null as this file descriptor."""
    found = os.open(os.devnull, os.O_RDONLY if number == 0 else os.O_WRONLY)
    if found != number:
        os.dup2(found, number)
        os.close(found)
    os.set_inheritable(number, True)


def discard_output() -> None:
    """Drop what standard output still holds, so that Python does not fail on it when it ends."""
    with contextlib.suppress(OSError, ValueError):
        sink = os.open(os.devnull, os.O_WRONLY)
        os.dup2(sink, sys.stdout.fileno())
        os.close(sink)
