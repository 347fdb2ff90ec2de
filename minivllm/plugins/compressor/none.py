"""Keep all tokens."""

from __future__ import annotations

from torch import Tensor

from minivllm.core.interfaces.compressor import Compressor, StoredTokens


class NoCompression(Compressor):
    """The compressor of engines whose caches are not compressed.  The engine never calls it."""

    def score(self, stored: StoredTokens) -> Tensor:
        return stored.keys.new_ones(len(stored.keys))
