"""The recorder of a run: it makes the bill of materials when recording begins, and adds the results at the end."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

from . import Entries
from .tally import ResultTally

if TYPE_CHECKING:
    from minivllm.config import Loaded
    from minivllm.config.resolved import Resolved


engines = 0  # the number of engines that this process has built


class RunRecorder:
    """The recorder of one LLM, AsyncLLM or server.  ``close`` writes the record to ``path``; None writes no file.

    Requests are always counted, which takes a few microseconds each.  With a path the requests are kept as well, so
    that the run can be repeated, and the bill is made before the first request, because a source may be edited during a
    long run.  If the ``[run]`` table names the prompts (`minivllm run`), these are repeated and no requests are kept.
    ConfigError if the path cannot be written.
    """

    def __init__(self, loaded: Loaded, path: str | os.PathLike[str] | None = None) -> None:
        from minivllm.frontend.record.bill import check_writable

        if path is not None:
            check_writable(path)
        self.loaded = loaded
        self.path = path
        self.tally = ResultTally(keep=path is not None and not loaded.run.prompts)
        self._bill: Entries | None = None

    def begin(self, resolved: Resolved, engine: Any) -> None:
        """Store the engine that was built and, if the recorder has a path, make its bill of materials."""
        global engines
        engines += 1
        self.first = engines == 1
        self.resolved = resolved
        self.engine = engine
        self.started = time.time()
        if self.path is not None:
            self.prepare()

    def prepare(self) -> Entries:
        """Return the bill of materials without results.

        The first call hashes the sources and reads the properties of the machine."""
        from minivllm.frontend.record import bill

        if self._bill is None:
            first = self.first and not self.tally.count
            self._bill = bill.make(self.resolved, self.loaded, self.engine.capacity, self.started, first)
        return self._bill

    def bill_of_materials(self) -> Entries:
        """Return the bill of materials with the results so far.  Before the first request ``results`` is None."""
        from minivllm.frontend.record import bill, values

        prepared = self.prepare()
        results = None
        if self.tally.count:
            values.look_again(prepared["parts"])
            results = self.tally.results(self.engine.stats())
        return bill.finish(prepared, results, self.tally.requests or None)

    def write(self, path: str | os.PathLike[str], record: Entries | None = None) -> None:
        """Write a record, by default ``bill_of_materials()``.  ConfigError if the file cannot be written."""
        from minivllm.frontend.record import bill

        bill.write(path, record or self.bill_of_materials())

    def close(self) -> None:
        """Write the record to ``path``.  Later calls do nothing."""
        path, self.path = self.path, None
        if path is not None:
            self.write(path)
