"""Store the runs of a comparison, so that an interrupted comparison can continue: one JSON file per configuration.

The file's name is a digest of everything that a run depends on: the fingerprint of the bill of materials (values,
sources of all plug-ins, the model), versions, the machine and the workload.  A run is stored when it has ended, so all
stored runs are complete.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from minivllm.errors import ConfigError

from . import Result, Row
from .repeats import plain


def digest(bill: Row, workload: Row) -> str:
    """Return a digest of a configuration and its workload, 16 hexadecimal characters."""
    parts = [bill["fingerprint"], bill["versions"], bill["machine"], bill["environment"], workload]
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class Store:
    """The stored configurations, in a folder, or only in memory for the folder "".

    Raise ConfigError if the folder cannot be written to.
    """

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder) if folder else None
        self._kept: dict[str, Result] = {}
        try:
            if self.folder:
                self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as exc:
            raise ConfigError(f"--results {folder}: {exc.strerror}; expected a folder that can be written to") from None

    def of(self, key: str) -> Result:
        """Return the stored results of the configuration with the digest ``key``.

        ``runs`` are by seed (as text, for JSON), ``quality`` by the digest of its reference configuration.
        """
        if key not in self._kept:
            self._kept[key] = self._read(key) or {"runs": {}, "quality": {}}
        return self._kept[key]

    def _read(self, key: str) -> Result | None:
        """Return the content of a configuration's file, None if it does not exist or is damaged."""
        if self.folder is None:
            return None
        try:
            found = json.loads((self.folder / f"{key}.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        if not isinstance(found, dict) or not all(isinstance(found.get(key), dict) for key in ("runs", "quality")):
            return None
        return found

    def keep(self, key: str, **more: Any) -> None:
        """Replace fields of a configuration in the store.

        Its file is replaced atomically, so that a reader never sees a part of it.
        """
        found = self.of(key)
        found.update(more)
        if self.folder is not None:
            part = self.folder / f"{key}.{os.getpid()}.part"
            try:
                part.write_text(json.dumps(plain(found)), encoding="utf-8")
                os.replace(part, self.folder / f"{key}.json")
            except OSError as exc:
                raise ConfigError(f"--results {self.folder}: {exc.strerror}") from None

    def keep_run(self, key: str, seed: int, run: Row) -> None:
        """Store a run of a configuration."""
        self.keep(key, runs={**self.of(key)["runs"], str(seed): run})

    def keep_quality(self, key: str, reference: str, quality: Row) -> None:
        """Store the quality of a configuration against a reference configuration."""
        self.keep(key, quality={**self.of(key)["quality"], reference: quality})

    def scores(self, key: str) -> Path | None:
        """Return the path for the token distributions of a reference, None without a folder."""
        return None if self.folder is None else self.folder / f"{key}.npz"
