"""CPU memory as a tier of the KV cache."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from minivllm.core.interfaces.kvstore import KVStore, StoreContext

from .options import CpuStoreOptions


class CpuStore(KVStore):
    """Keeps pages of the KV cache as arrays in host memory, which is pinned if the device is a GPU."""

    eager = False
    keeps_pages = True

    def __init__(self, options: CpuStoreOptions, ctx: StoreContext) -> None:
        super().__init__(options, ctx)
        self.eager, self.patience = options.eager, options.patience
        self.always = options.load == "always"
        self._pages: dict[bytes, np.ndarray] = {}
        self._used = 0

    @property
    def limit(self) -> int:
        return self.options.bytes

    def keys(self) -> Mapping[bytes, int]:
        return {key: page.nbytes for key, page in self._pages.items()}

    def put(self, key: bytes, page: np.ndarray) -> bool:
        if key in self._pages:
            return True
        if self._used + page.nbytes > self.limit // self.ctx.ranks:
            return False
        self._pages[key] = page
        self._used += page.nbytes
        return True

    def get(self, key: bytes) -> np.ndarray | None:
        return self._pages.get(key)

    def drop(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            page = self._pages.pop(key, None)
            if page is not None:
                self._used -= page.nbytes

    def close(self) -> None:
        self._pages.clear()
        self._used = 0
