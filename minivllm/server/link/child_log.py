"""Copy the log of the engine's process into the server's log.

The engine's process writes each log record as a line of JSON after ``MARK`` (``LineFormatter``).  ``PrintedLog`` turns
such a line into a record again.  It also makes a record of each other printed line, which may come from a library or a
child process.  A printed traceback becomes one record.
"""

from __future__ import annotations

import json
import logging

MARK = "\x1eminivllm "  # prefix of the lines for the parent process; no ordinary line begins with it
BEGIN = "Traceback (most recent call last):"
BETWEEN = ("During handling of the above", "The above exception was")  # lines between two exceptions of a chain
MOST = 20_000  # number of last characters of a traceback that are kept

log = logging.getLogger("minivllm.engine")


class LineFormatter(logging.Formatter):
    """Formats a record as one line, which ``PrintedLog`` reads."""

    def format(self, record: logging.LogRecord) -> str:
        trace = self.formatException(record.exc_info) if record.exc_info else ""
        return MARK + json.dumps([record.levelno, record.getMessage(), trace[-MOST:]])


class PrintedLog:
    """Logs the output of a process.  ``last_output`` has its last ``tail`` characters, for an error message."""

    def __init__(self, tail: int) -> None:
        self._tail = tail
        self._rest = ""  # an incomplete line
        self.last_output = ""
        self._trace: list[str] = []  # lines of an incomplete traceback

    def feed(self, text: str) -> None:
        """Log the complete lines of a piece of output, and keep the rest."""
        *lines, rest = (self._rest + text).split("\n")
        self._rest = rest if rest.startswith(MARK) else rest[-self._tail :]
        for line in lines:
            self._line(line.rstrip())

    def end(self) -> None:
        """Log the rest of the output, at its end."""
        if self._rest.strip():
            self._line(self._rest.rstrip())
        self._flush()

    def _line(self, line: str) -> None:
        """Log a line of the child's output, or add it to a traceback."""
        if line.startswith(MARK):
            self._flush()
            self._record(line[len(MARK) :])
        elif self._trace and self._continues(line):
            self._trace.append(line)
        elif line.strip().startswith(BEGIN):
            self._flush()
            self._trace = [line]
        elif line.strip():
            self._flush()
            self._log(logging.WARNING, line)

    def _continues(self, line: str) -> bool:
        """Return whether a line belongs to the traceback before it."""
        if not line or line[0].isspace() or line.startswith((BEGIN, *BETWEEN)):
            return True
        return self._trace[-1][:1].isspace()  # the line with the exception follows an indented line

    def _record(self, text: str) -> None:
        """Log a record that ``LineFormatter`` has formatted."""
        try:
            level, message, trace = json.loads(text)
            self._log(int(level), str(message), str(trace))
        except (ValueError, TypeError):
            self._log(logging.WARNING, text)

    def _flush(self) -> None:
        """Log a complete traceback, with its last line, the exception, as the message."""
        lines = self._trace
        self._trace = []
        while lines and not lines[-1].strip():
            lines.pop()
        if lines:
            self._log(logging.WARNING, lines[-1].strip(), "\n".join(lines)[-MOST:])

    def _log(self, level: int, message: str, trace: str = "") -> None:
        self.last_output = (self.last_output + message + "\n")[-self._tail :]
        log.log(level, "%s", message, extra={"event": {"traceback": trace} if trace else {}})
