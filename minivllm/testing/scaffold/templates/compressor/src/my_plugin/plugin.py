"""Keep the tokens whose values are largest.  Change ``score`` to keep others.

The engine calls ``score`` for each layer of a request when its prompt was computed, keeps the tokens with the highest
scores, and frees the memory of the others.
"""

from __future__ import annotations

from torch import Tensor

from minivllm.plugin import Compressor, StoredTokens


class MyPlugin(Compressor):
    """A compressor that reads values."""

    def score(self, stored: StoredTokens) -> Tensor:
        norms = stored.values.float().norm(dim=-1)
        return norms.T
