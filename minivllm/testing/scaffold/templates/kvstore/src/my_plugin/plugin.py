"""Keep pages of the KV cache in memory, compressed.  Change ``put`` and ``get`` to keep them elsewhere.

One thread makes all calls, and no step waits for them.  An exception costs the page and nothing else.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from minivllm.plugin import KVStore, StoreContext

LIMIT = 1 << 30  # bytes of pages, before they are compressed


class MyPlugin(KVStore):
    """A store in memory."""

    def __init__(self, options: Any, ctx: StoreContext) -> None:
        super().__init__(options, ctx)
        self.pages: dict[bytes, bytes] = {}
        self.sizes: dict[bytes, int] = {}

    @property
    def limit(self) -> int:
        return LIMIT

    def keys(self) -> Mapping[bytes, int]:
        return dict(self.sizes)

    def put(self, key: bytes, page: np.ndarray) -> bool:
        self.pages[key] = zlib.compress(page.tobytes(), 1)
        self.sizes[key] = page.nbytes
        return True

    def get(self, key: bytes) -> np.ndarray | None:
        if key not in self.pages:
            return None
        page = self.ctx.empty(self.sizes[key])
        buffer = zlib.decompress(self.pages[key])
        page[:] = np.frombuffer(buffer, np.uint8)
        return page

    def drop(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self.pages.pop(key, None)
            self.sizes.pop(key, None)
