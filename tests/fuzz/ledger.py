"""A file of earlier results, with a line of JSON for each seed that has failed, and one for each run.

Lines are only appended.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .cases import VERSION


@dataclass
class Ledger:
    """The results of earlier runs.

    ``failed`` maps each (seed, dtype) that has failed to the kind of its last fault, or "" if it has passed since.  It
    has the entries of this device, this executor ("" means the default) and this generator.  ``next`` is the first seed
    that no run of this generator has used on any device.
    """

    device: str
    paths: list[Path] = field(default_factory=list)
    executor: str = ""
    failed: dict[tuple[int, str], str] = field(default_factory=dict)
    next: int = 0
    other: int = 0  # lines of other generators, whose seeds mean other cases

    def __post_init__(self) -> None:
        for path in self.paths:
            if path.exists():
                for line in path.read_text(encoding="utf-8").splitlines():
                    if line.strip():
                        self._read(json.loads(line))

    def _read(self, line: dict[str, Any]) -> None:
        if line.get("generator") != VERSION:
            self.other += 1
        elif "run" in line:
            self.next = max(self.next, line["run"]["last_seed"] + 1)
        elif (line["device"], line.get("executor", "")) == (self.device, self.executor):
            self.failed[line["seed"], line["dtype"]] = line["kind"]

    def note(self, seed: int, dtype: str, kind: str, message: str, requests: int) -> None:
        """Note the result of a seed.  ``kind`` is "" if it passed.

        A line is written if the seed failed or had failed, and the result is new.
        """
        if self.failed.get((seed, dtype), "") != kind:
            self.failed[seed, dtype] = kind
            outcome = "fault" if kind else "passed"
            self.add(
                {
                    "seed": seed,
                    "dtype": dtype,
                    "outcome": outcome,
                    "kind": kind,
                    "message": message[:300],
                    "requests": requests,
                    **({"executor": self.executor} if self.executor else {}),
                }
            )

    def add(self, line: dict[str, Any]) -> None:
        """Append to the first file."""
        if self.paths:
            with self.paths[0].open("a", encoding="utf-8") as file:
                file.write(json.dumps({"generator": VERSION, "device": self.device, **line}) + "\n")
