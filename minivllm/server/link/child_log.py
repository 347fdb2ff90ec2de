"""The log of the engine's process in the log of the server: one record stays one message, a traceback with it.

The process writes a record as a line of JSON behind ``MARK`` (``LineFormatter``); what it, a library or a process of
its own prints otherwise is taken line by line, a traceback as one message (``PrintedLog``).
"""

from __future__ import annotations

import json
import logging

MARK = "\x1eminivllm "  # no line that is printed begins like that
BEGIN = "Traceback (most recent call last):"
BETWEEN = ("During handling of the above", "The above exception was")  # lines between two exceptions of a chain
MOST = 20_000  # characters of a traceback

log = logging.getLogger("minivllm.engine")


class LineFormatter(logging.Formatter):
    """Writes a record as one line, for ``PrintedLog``."""

    def format(self, record: logging.LogRecord) -> str:
        trace = self.formatException(record.exc_info) if record.exc_info else ""
        return MARK + json.dumps([record.levelno, record.getMessage(), trace[-MOST:]])


class PrintedLog:
    """Makes records of what a process prints.  ``said``: its last lines, for an error."""

    def __init__(self, tail: int) -> None:
        self._tail, self._rest, self.said = tail, "", ""
        self._trace: list[str] = []  # lines of a traceback that has not ended

    def feed(self, text: str) -> None:
        """Take what has come."""
        *lines, rest = (self._rest + text).split("\n")
        self._rest = rest if rest.startswith(MARK) else rest[-self._tail :]
        for line in lines:
            self._line(line.rstrip())

    def end(self) -> None:
        """Nothing more comes."""
        if self._rest.strip():
            self._line(self._rest.rstrip())
        self._flush()

    def _line(self, line: str) -> None:
        if line.startswith(MARK):
            self._flush()
            self._record(line[len(MARK) :])
        elif self._trace and self._goes_on(line):
            self._trace.append(line)
        elif line.strip().startswith(BEGIN):
            self._flush()
            self._trace = [line]
        elif line.strip():
            self._flush()
            self._tell(logging.WARNING, line)

    def _goes_on(self, line: str) -> bool:
        """Whether a line belongs to the traceback before it; one that says what was raised follows an indented one."""
        begins = not line or line[0].isspace() or line.startswith((BEGIN, *BETWEEN))
        return begins or self._trace[-1][:1].isspace()

    def _record(self, text: str) -> None:
        try:
            level, message, trace = json.loads(text)
            self._tell(int(level), str(message), str(trace))
        except (ValueError, TypeError):
            self._tell(logging.WARNING, text)

    def _flush(self) -> None:
        """Tell of a traceback that has ended: by what was raised."""
        lines, self._trace = self._trace, []
        while lines and not lines[-1].strip():
            lines.pop()
        if lines:
            self._tell(logging.WARNING, lines[-1].strip(), "\n".join(lines)[-MOST:])

    def _tell(self, level: int, message: str, trace: str = "") -> None:
        self.said = (self.said + message + "\n")[-self._tail :]
        log.log(level, "%s", message, extra={"event": {"traceback": trace} if trace else {}})
