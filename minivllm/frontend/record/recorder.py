"""Writes the record of a run: the bill of what was wired, made when recording begins, and the results at the end."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

from .tally import ResultTally

if TYPE_CHECKING:
    from minivllm.config import Loaded
    from minivllm.config.resolve import Resolved


engines = 0  # that were built in this process


class RunRecorder:
    """One for each front door.  ``path`` is where ``close`` writes, None for nowhere; ConfigError if that cannot be.

    Requests are counted always, in a few microseconds each.  With a path they are kept as well, so that the run can be
    started again, and the bill is made before the first request: a source may be edited while a long run goes on.
    Where ``[run]`` names the prompts (the command line), those are what is started again.
    """

    def __init__(self, loaded: Loaded, path: str | os.PathLike[str] | None = None) -> None:
        from minivllm.frontend.record.bill import check_writable

        if path is not None:
            check_writable(path)
        self.loaded, self.path = loaded, path
        self.tally = ResultTally(keep=path is not None and not loaded.run.prompts)
        self._bill: dict[str, Any] | None = None

    def begin(self, resolved: Resolved, engine: Any) -> None:
        """The engine has been built."""
        global engines
        engines += 1
        self.first = engines == 1
        self.resolved, self.engine, self.started = resolved, engine, time.time()
        if self.path is not None:
            self.prepare()

    def prepare(self) -> dict[str, Any]:
        """Make the bill without results, once: hash the sources, look at the machine."""
        from minivllm.frontend.record import bill

        if self._bill is None:
            first = self.first and not self.tally.count
            self._bill = bill.make(self.resolved, self.loaded, self.engine.capacity, self.started, first)
        return self._bill

    def bill_of_materials(self) -> dict[str, Any]:
        """The bill with the results so far; ``results`` is None before the first request."""
        from minivllm.frontend.record import bill, values

        made, results = self.prepare(), None
        if self.tally.count:
            values.look_again(made["parts"])
            results = self.tally.results(self.engine.stats())
        return bill.finish(made, results, self.tally.requests or None)

    def write(self, path: str | os.PathLike[str], made: dict[str, Any] | None = None) -> None:
        """ConfigError if it cannot be written."""
        from minivllm.frontend.record import bill

        bill.write(path, made or self.bill_of_materials())

    def close(self) -> None:
        """Write to the path that was asked for, once."""
        path, self.path = self.path, None
        if path is not None:
            self.write(path)
