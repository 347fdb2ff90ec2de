"""The server's log on standard error: one line for each event, as JSON or as text.

The line of a request has its ids, route, status, times and token counts.  It never has a prompt, an answer or a key.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any

from .errors import printable

MOST = 20_000  # largest number of characters of a line of text
log = logging.getLogger("minivllm.server")


class JsonLines(logging.Formatter):
    """Formats each record as one JSON object."""

    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        row = {"time": f"{seconds}.{int(record.msecs):03}Z", "level": record.levelname.lower()}
        row["logger"] = record.name
        row["message"] = record.getMessage()
        row.update(getattr(record, "event", {}))
        if record.exc_info:
            row["traceback"] = self.formatException(record.exc_info)
        return json.dumps(row, default=str)


class TextLogLines(logging.Formatter):
    """Formats each record as one line of text: the event's sentence if it has one, else its message and values."""

    def format(self, record: logging.LogRecord) -> str:
        if sentence := getattr(record, "sentence", ""):
            return printable(f"minivllm: {sentence}", MOST)
        values = getattr(record, "event", {})
        words = [f"{key}={value}" for key, value in values.items() if value is not None]
        line = " ".join([f"minivllm: {record.levelname.lower()}: {record.getMessage()}", *words]).rstrip()
        if record.exc_info:
            line += " | " + self.formatException(record.exc_info)
        return printable(line, MOST)


def set_up(form: str, level: str = "info") -> None:
    """Write the logs of the server, the engine, uvicorn and asyncio to standard error.

    Loggers of other packages are not changed.
    ``form`` is "json", "text" or "auto".  "auto" means text on a terminal and JSON elsewhere.
    """
    if form == "auto":
        form = "text" if sys.stderr.isatty() else "json"
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if form == "json" else TextLogLines())
    for name in ("minivllm", "uvicorn.error", "asyncio"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
    log.setLevel(level.upper())
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)


def event(message: str, level: int = logging.INFO, sentence: str = "", **values: Any) -> None:
    """Log an event with its values.  Text logs show the ``sentence`` instead of the values, if there is one."""
    log.log(level, message, extra={"event": values, "sentence": sentence})
