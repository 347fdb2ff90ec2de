"""The base classes of presses."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class BasePress:
    """A press: it removes tokens from the cache of a layer."""


@dataclass
class ScorerPress(BasePress):
    """A press that keeps the tokens with the highest scores."""

    compression_ratio: float = 0.0

    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        """Return the scores [1, kv_heads, n] of keys and values [1, kv_heads, n, dim]."""
        raise NotImplementedError

    def compress(self, module, hidden_states, keys, values, attentions, kwargs):
        """Return the keys and values that stay."""
        scores = self.score(module, hidden_states, keys, values, attentions, kwargs)
        kept = int(keys.shape[2] * (1 - self.compression_ratio))
        at = scores.topk(kept, dim=-1).indices[..., None].expand(-1, -1, -1, keys.shape[-1])
        return keys.gather(2, at), values.gather(2, at)
