"""Presses with the arguments and the inputs of those of kvpress."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from .scorer_press import BasePress, ScorerPress


@dataclass
class KnormPress(ScorerPress):
    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        return -keys.norm(dim=-1)


@dataclass
class KeyDiffPress(ScorerPress):
    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        mean = functional.normalize(keys, dim=-1).mean(dim=2, keepdim=True)
        return -functional.cosine_similarity(keys, mean, dim=-1)


@dataclass
class CURPress(ScorerPress):
    num_sinks: int = 4
    use_random_leverage: bool = False

    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        scores = keys.square().sum(-1) * values.square().sum(-1)
        scores = scores / scores.sum(-1, keepdim=True)
        scores[..., : self.num_sinks] = 1
        return scores


@dataclass
class RandomPress(ScorerPress):
    seed: int | None = None

    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        generator = None
        if self.seed is not None:
            generator = torch.Generator().manual_seed(self.seed)
        return torch.rand(keys.shape[:-1], generator=generator)


@dataclass
class StreamingLLMPress(ScorerPress):
    n_sink: int = 4

    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        n = keys.shape[2]
        assert n > self.n_sink
        removed = n - int(n * (1 - self.compression_ratio))
        scores = torch.ones_like(keys[..., 0])
        scores[..., self.n_sink : self.n_sink + removed] = 0
        return scores


@dataclass
class SnapKVPress(ScorerPress):
    window_size: int = 64
    kernel_size: int = 5

    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        assert hidden_states.shape[1] > self.window_size
        kv_heads, w = keys.shape[1], self.window_size
        groups = module.config.num_attention_heads // kv_heads
        mean = attentions[..., -w:, :-w].mean(dim=-2)
        smooth = functional.avg_pool1d(mean, self.kernel_size, stride=1, padding=self.kernel_size // 2)
        scores = smooth.view(1, kv_heads, groups, -1).mean(dim=2)
        return functional.pad(scores, (0, w), value=scores.max().item() + 1)


@dataclass
class ExpectedAttentionPress(ScorerPress):
    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        return module.q_proj(hidden_states)


@dataclass
class KVzipPress(BasePress):
    compression_ratio: float = 0.0
