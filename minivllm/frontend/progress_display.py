"""Show the progress of loading and capturing: bars on a terminal, lines in a log."""

from __future__ import annotations

import contextlib
import logging
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from minivllm.core.progress import WEIGHTS, listening, thinned

EVERY = 10.0  # interval in seconds between two log lines about one stage
SHORT = 1.0  # seconds of a stage that is not worth a line in a log
COLUMNS = 80  # largest width of a bar in characters


class Bars:
    """A bar for each stage on standard error.  A stage whose work is complete leaves no bar."""

    def __init__(self) -> None:
        self._bars: dict[str, Any] = {}

    def show(self, stage: str, done: int, total: int) -> None:
        """Draw how much of a stage is done.  The bar of a complete stage is closed."""
        if done >= total:
            self._close(stage)
            return
        bar = self._bars.get(stage)
        if bar is None or bar.total != total:
            self._close(stage)
            bar = self._bars[stage] = _bar(stage, total)
        bar.update(done - bar.n)

    def close(self) -> None:
        """Remove all bars."""
        for stage in list(self._bars):
            self._close(stage)

    def _close(self, stage: str) -> None:
        bar = self._bars.pop(stage, None)
        if bar is not None:
            bar.close()


def _bar(stage: str, total: int) -> Any:
    """Return a bar of a stage.  Weights are counted in bytes."""
    from tqdm import tqdm

    screen = shutil.get_terminal_size()
    place = {"file": sys.stderr, "leave": False, "ncols": min(COLUMNS, screen.columns), "nrows": screen.lines}
    size: dict[str, Any] = (
        {"unit": "B", "unit_scale": True, "unit_divisor": 1024} if stage.endswith(WEIGHTS) else {"unit": ""}
    )
    return tqdm(desc=stage, total=total, mininterval=0.0, **place, **size)


class LogLines:
    """Logs the end of each long stage, and its progress every ``EVERY`` seconds.

    ``log`` is called with a sentence and its values.
    """

    def __init__(self, log: Callable[..., None]) -> None:
        self._log = log
        self._begun: dict[str, float] = {}
        self._logged: dict[str, float] = {}  # stage -> time at which it was last logged, or began

    def show(self, stage: str, done: int, total: int) -> None:
        """Log how much of a stage is done, if it is time."""
        now = time.monotonic()
        begun = self._begun.setdefault(stage, now)
        if done < total and now - self._logged.setdefault(stage, now) < EVERY:
            return
        self._logged[stage] = now
        if done >= total:
            del self._begun[stage], self._logged[stage]
            if now - begun < SHORT:
                return
        seconds = round(now - begun, 1)
        sentence = f"{stage}: {100 * done // max(total, 1)} % after {seconds} s"
        self._log("progress", sentence=sentence, stage=stage, done=done, total=total, seconds=seconds)

    def close(self) -> None:
        """Do nothing; lines need no end."""


@contextlib.contextmanager
def shown(quiet: bool, log: Callable[..., None] | None = None) -> Iterator[None]:
    """Show the progress of this process and of its workers until the context ends, unless ``quiet``.

    Standard error gets bars if it is a terminal.  Otherwise ``log`` gets lines, and None shows nothing.  Log lines on a
    terminal are written above the bars.
    """
    terminal = sys.stderr.isatty()
    if quiet or not (terminal or log is not None):
        yield
        return
    display: Bars | LogLines = Bars() if terminal or log is None else LogLines(log)
    with contextlib.ExitStack() as held:
        if terminal:
            from tqdm.contrib.logging import logging_redirect_tqdm

            names = ("minivllm", "uvicorn.error", "asyncio")
            loggers = [logging.getLogger(name) for name in names if logging.getLogger(name).handlers]
            held.enter_context(logging_redirect_tqdm(loggers))
        held.callback(display.close)
        with listening(thinned(display.show)):
            yield
