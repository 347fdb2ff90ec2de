"""A counter of joules for machines without one, in the form of Linux's powercap files that a thread updates."""

from __future__ import annotations

import threading
import time
from pathlib import Path


class Powercap:
    """The files of powercap.  ``folder`` is for ``energy=rapl:FOLDER``.

    The counter grows by ``watts`` from ``start`` on, and is updated every ``each`` seconds.
    """

    def __init__(self, folder: Path, watts: float = 50.0, each: float = 0.01) -> None:
        self.folder, self.watts, self.each = folder, watts, each
        domain = folder / "intel-rapl:0"
        domain.mkdir(parents=True)
        (domain / "max_energy_range_uj").write_text("262143328850")
        self.file = domain / "energy_uj"
        self.tell(0.0)
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def tell(self, joules: float) -> None:
        new = self.file.with_suffix(".new")
        new.write_text(str(round(1e6 * joules)))
        new.replace(self.file)  # so that a reader sees either the old or the new file

    @property
    def joules(self) -> float:
        return int(self.file.read_text()) / 1e6

    def _run(self) -> None:
        begin = time.monotonic()
        while not self._done.wait(self.each):
            self.tell(self.watts * (time.monotonic() - begin))

    def __enter__(self) -> Powercap:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
