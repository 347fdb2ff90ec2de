"""The server's log: one line an event on standard error, JSON or text, whatever is in it.

A request's line has its ids, route, status, times and token counts; never a prompt, an answer or a key.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any

from .errors import printable

log = logging.getLogger("minivllm.server")


class JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        row: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        row.update(getattr(record, "event", {}))
        if record.exc_info:
            row["traceback"] = self.formatException(record.exc_info)
        return json.dumps(row, default=str)


class TextLines(logging.Formatter):
    """For people.  An event with ``told`` is that sentence."""

    def format(self, record: logging.LogRecord) -> str:
        if sentence := getattr(record, "told", ""):
            return printable(f"minivllm: {sentence}", 20_000)
        more = " ".join(f"{key}={value}" for key, value in getattr(record, "event", {}).items() if value is not None)
        line = f"minivllm: {record.levelname.lower()}: {record.getMessage()} {more}".rstrip()
        if record.exc_info:
            line += " | " + self.formatException(record.exc_info)
        return printable(line, 20_000)


def set_up(form: str, level: str = "info") -> None:
    """Write the logs of the server, the engine and uvicorn to standard error; what others set up is left alone.
    ``form``: json, text, or auto, which is text on a terminal and JSON elsewhere."""
    if form == "auto":
        form = "text" if sys.stderr.isatty() else "json"
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if form == "json" else TextLines())
    for name in ("minivllm", "uvicorn.error", "asyncio"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
    log.setLevel(level.upper())
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)


def event(message: str, level: int = logging.INFO, told: str = "", **values: Any) -> None:
    """``told``: the event as a sentence, for text logs."""
    log.log(level, message, extra={"event": values, "told": told})
