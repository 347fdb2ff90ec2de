"""Compressors that read keys only, or nothing: streaming, knorm, keydiff, random."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.linalg import vector_norm
from torch.nn.functional import cosine_similarity, normalize

from minivllm.core.interfaces.compressor import Compressor, CompressorContext, StoredTokens


class Streaming(Compressor):
    """Keep the first ``sinks`` tokens and the newest ones (StreamingLLM, arXiv:2309.17453).

    The option ``rerotate`` rotates the kept keys to new, dense positions as there.  Otherwise keys keep the rotation of
    their positions."""

    loads = ()
    joins_layers = True

    def __init__(self, options: object, ctx: CompressorContext) -> None:
        super().__init__(options, ctx)
        self.rerotates = self.options.rerotate

    def score(self, stored: StoredTokens) -> Tensor:
        n = len(stored.keys)
        order = torch.arange(n, device=stored.keys.device)
        first = order < min(self.options.sinks, stored.keep)
        return torch.where(first, n, order).float()


class KNorm(Compressor):
    """Keep the keys with the smallest norm, which attract most attention (arXiv:2406.11430)."""

    loads = ("keys",)
    joins_layers = True

    def score(self, stored: StoredTokens) -> Tensor:
        norms = vector_norm(stored.keys, dim=-1, dtype=torch.float32)
        return -norms.T


class KeyDiff(Compressor):
    """Keep the keys that differ most from the mean direction of all keys (KeyDiff, arXiv:2504.15364)."""

    loads = ("keys",)
    joins_layers = True

    def score(self, stored: StoredTokens) -> Tensor:
        keys = stored.keys.float()
        unit = normalize(keys, dim=-1)
        mean = unit.mean(dim=0, keepdim=True)
        similarity = cosine_similarity(keys, mean, dim=-1)
        return -similarity.T


class Random(Compressor):
    """Keep random tokens, chosen separately for each layer and head.  It is a control for experiments."""

    loads = ()

    def score(self, stored: StoredTokens) -> Tensor:
        n, heads = stored.keys.shape[:2]
        generator = torch.Generator()
        mixed = hash((stored.seed, stored.layer, stored.computed))
        generator.manual_seed(mixed % 2**63)
        drawn = torch.rand(heads, n, generator=generator)
        return drawn.to(stored.keys.device, non_blocking=True)
