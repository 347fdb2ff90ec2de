"""The folder of an adapter: adapter_config.json and adapter_model.safetensors.  No torch.

PEFT writes such folders.  ``peft_type`` in adapter_config.json names the method that reads the folder.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from minivllm import files
from minivllm.core.interfaces.adapter import AdapterMethod, adapter_refusal
from minivllm.core.interfaces.adapters import AdapterFiles
from minivllm.errors import RequestError, shown

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PICKLED = ("adapter_model.bin", "adapter_model.pt", "adapter_model.pth")
TYPE = "peft_type"
MOST_CHECKED = 4096  # largest number of folders whose results ``AdapterChecks`` keeps


class AdapterChecks:
    """The methods of an engine on the host, by the ``peft_type`` of the folders that they read."""

    def __init__(self, methods: Mapping[str, AdapterMethod]) -> None:
        self.methods = methods
        self._checked: dict[str, AdapterFiles] = {}  # results by folder

    def __call__(self, folder: str) -> AdapterFiles:
        """Check the folder of an adapter without reading its weights.  RequestError for a malformed folder.

        Each request with the adapter calls this, so files that have not changed since the last call are not read again.
        """
        stamp = None
        with suppress(RequestError, ValueError):  # the check names what is wrong
            stamp = stamp_of(Path(folder))
        known = self._checked.get(folder)
        if known is not None and known.stamp == stamp:
            return known
        found = self._check(folder)
        if found.stamp == stamp:  # else the files changed during the check
            if len(self._checked) >= MOST_CHECKED:
                self._checked.clear()
            self._checked[folder] = found
        return found

    def _check(self, folder: str) -> AdapterFiles:
        path = Path(folder)
        if not os.path.isdir(path):
            raise adapter_refusal(folder, f"no such folder; expected one with {CONFIG} and {WEIGHTS}")
        config = read_config(folder)
        self.methods[method_of(folder, config, self.methods)].check(folder, config)
        if not files.is_there(path / WEIGHTS):
            pickled = next((name for name in PICKLED if files.is_there(path / name)), None)
            found = f"only {pickled}, a pickle, which is never opened; " if pickled else ""
            raise adapter_refusal(folder, f"no {WEIGHTS}: {found}save the adapter with safe_serialization=True")
        files.check(path / WEIGHTS, error=RequestError)
        return AdapterFiles(str(path), stamp_of(path))


def read_config(folder: str) -> dict[str, Any]:
    """Read adapter_config.json.  RequestError if it is missing or malformed."""
    path = Path(folder) / CONFIG
    if not files.is_there(path):
        raise adapter_refusal(folder, f"no {CONFIG}; expected the folder that PEFT's save_pretrained wrote")
    config = files.read_json(path, files.SMALL, RequestError)
    if not isinstance(config, dict):
        raise adapter_refusal(
            folder, f"{CONFIG} is a {type(config).__name__}; expected an object with the fields of PEFT's configuration"
        )
    return config


def method_of(folder: str, config: Mapping[str, Any], methods: Mapping[str, Any]) -> str:
    """Return the ``peft_type`` of a folder, a key of ``methods``.  RequestError if none of them reads the folder."""
    found = config.get(TYPE)
    if isinstance(found, str) and found in methods:
        return found
    expected = " or ".join(repr(one) for one in sorted(methods))
    what = f"{TYPE}={shown(found)}: expected {expected}; the option adapters names the methods of the engine"
    raise adapter_refusal(folder, what)


def stamp_of(folder: Path) -> str:
    """Return a digest of the place of an adapter, and of the sizes and times of its files."""
    sha = hashlib.sha256(os.fsencode(os.path.realpath(folder)))
    for name in (CONFIG, WEIGHTS):
        try:
            state = os.stat(folder / name)
        except OSError as e:
            raise adapter_refusal(str(folder), f"{name} cannot be read: {e.strerror}") from None
        sha.update(f" {state.st_size} {state.st_mtime_ns} {state.st_ino}".encode())
    return sha.hexdigest()[:32]
