"""The adapters (LoRA) that a server serves: each has a name, which requests send as ``model``.

They come from the configuration (``lora_modules``).  Operators may load more from folders within ``lora_dir``.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from minivllm.core.interfaces.adapters import MOST_NAME, LoRARequest
from minivllm.errors import ConfigError, shown
from minivllm.server.errors import ApiError

if TYPE_CHECKING:
    from minivllm.server.link.client import EngineClient

MOST_PATH = 1024  # largest number of characters of a path
MOST = 4096  # largest number of adapters that a server has names for


class ServedAdapters:
    """The adapters of a server by name.  ``names`` are the names of the model; those of adapters are appended.

    ``folder`` is the folder within which operators may load adapters; None means that they may load none."""

    def __init__(self, names: list[str], modules: Sequence[str], folder: str | None) -> None:
        self.names, self.folder = names, None if folder is None else os.path.realpath(folder)
        self.by_name: dict[str, LoRARequest] = {}
        self.loading: set[str] = set()
        self._number = 0
        for module in modules:
            name, _, path = module.partition("=")
            if name in names:
                problem = f"lora_modules: {shown(name)} is the name of the model"
                raise ConfigError(f"{problem}: expected another name for the adapter")
            self.by_name[name] = self._request(name, path)
            names.append(name)

    def _request(self, name: str, path: str) -> LoRARequest:
        self._number += 1
        return LoRARequest(name, self._number, path)

    def new(self, name: str, path: str) -> LoRARequest:
        """Return an adapter to load.  ApiError (400) for a name in use, and for a path outside of the folder."""
        if self.folder is None:
            raise ApiError(400, "adapters are loaded from a folder that the server names: start it with --lora-dir")
        if len(name) > MOST_NAME:
            text = f"lora_name has {len(name)} characters; expected at most {MOST_NAME}"
            raise ApiError(400, text, "lora_name")
        if name in self.names or name in self.loading:
            text = f"lora_name={shown(name)} is in use: choose another name, or unload it first"
            raise ApiError(400, text, "lora_name")
        if len(self.names) + len(self.loading) > MOST:
            raise ApiError(400, f"{MOST} adapters have names: unload one first", "lora_name")
        if "\0" in path or len(path) > MOST_PATH:
            problem = f"expected a path of at most {MOST_PATH} characters, without zero bytes"
            raise ApiError(400, f"lora_path={shown(path)}: {problem}", "lora_path")
        whole = os.path.realpath(os.path.join(self.folder, path))
        if os.path.commonpath([whole, self.folder]) != self.folder or whole == self.folder:
            raise ApiError(400, f"lora_path={shown(path)}: expected a folder within the server's lora_dir", "lora_path")
        return self._request(name, whole)

    async def load(self, client: EngineClient, adapter: LoRARequest) -> None:
        """Load an adapter and serve it under its name.  RequestError if it does not fit the model."""
        self.loading.add(adapter.lora_name)
        try:
            await client.load_adapter(adapter)
        finally:
            self.loading.discard(adapter.lora_name)
        self.by_name[adapter.lora_name] = adapter
        self.names.append(adapter.lora_name)

    async def open(self, client: EngineClient) -> None:
        """Load the adapters of the configuration.  RequestError if one does not fit the model."""
        for adapter in self.by_name.values():
            await client.load_adapter(adapter)

    async def unload(self, client: EngineClient, name: str) -> None:
        """Remove an adapter by its name.  Running requests keep it.  ApiError (404) for an unknown name."""
        if self.by_name.pop(name, None) is None:
            raise ApiError(404, f"no adapter is named {shown(name)}", "lora_name")
        self.names.remove(name)
        await client.unload_adapter(name)
