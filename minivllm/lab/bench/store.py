"""Runs of configurations that outlive an interrupted comparison: one JSON file a configuration, by its digest.

The digest covers what decides a run: the fingerprint of the bill of materials (values, sources of all parts, the
model), versions, the machine, and the workload.  A run is stored when it has ended, so what is there is whole.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from minivllm.errors import ConfigError

from .repeats import plain


def digest(bill: Mapping[str, Any], workload: Mapping[str, Any]) -> str:
    """16 characters."""
    decides = [bill["fingerprint"], bill["versions"], bill["machine"], bill["environment"], workload]
    return hashlib.sha256(json.dumps(decides, sort_keys=True, default=str).encode()).hexdigest()[:16]


class Store:
    """A folder of stored configurations, or memory alone where there is none.  ConfigError if it cannot be written."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder) if folder else None
        self._kept: dict[str, dict[str, Any]] = {}
        try:
            if self.folder:
                self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as exc:
            raise ConfigError(f"--results {folder}: {exc.strerror}; want a folder that can be written") from None

    def of(self, key: str) -> dict[str, Any]:
        """What is stored of a configuration: ``runs`` by seed (a text, as JSON has it), ``quality`` by the
        digest of the reference that it was measured against."""
        if key not in self._kept:
            self._kept[key] = self._read(key) or {"runs": {}, "quality": {}}
        return self._kept[key]

    def _read(self, key: str) -> dict[str, Any] | None:
        if self.folder is None:
            return None
        try:
            found = json.loads((self.folder / f"{key}.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return (
            found
            if isinstance(found, dict) and all(isinstance(found.get(k), dict) for k in ("runs", "quality"))
            else None
        )

    def keep(self, key: str, **more: Any) -> None:
        """Add to a configuration; who reads its file sees the old or the new one, whole."""
        found = self.of(key)
        found.update(more)
        if self.folder is not None:
            part = self.folder / f"{key}.{os.getpid()}.part"
            try:
                part.write_text(json.dumps(plain(found)), encoding="utf-8")
                os.replace(part, self.folder / f"{key}.json")
            except OSError as exc:
                raise ConfigError(f"--results {self.folder}: {exc.strerror}") from None

    def keep_run(self, key: str, seed: int, run: Mapping[str, Any]) -> None:
        self.keep(key, runs={**self.of(key)["runs"], str(seed): run})

    def keep_quality(self, key: str, reference: str, quality: Mapping[str, Any]) -> None:
        self.keep(key, quality={**self.of(key)["quality"], reference: quality})

    def scores(self, key: str) -> Path | None:
        """Where the distributions of a reference are."""
        return None if self.folder is None else self.folder / f"{key}.npz"
