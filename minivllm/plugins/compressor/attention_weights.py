"""Compressors that read attention: of the last queries (snapkv, tova, rkv), and of the whole prompt (h2o)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d, max_pool1d, normalize, pad

from minivllm.core.interfaces.compressor import Compressor, CompressorContext, StoredTokens

PAIRS = 1 << 27  # pairs of keys whose similarity is computed at once


def last_attention(stored: StoredTokens, queries: Tensor) -> Tensor:
    """Return the attention probabilities f32 [kv_heads, group, w, n] of the last w tokens over the n stored tokens.

    ``queries`` [w, heads, dim_qk] are those of the last w tokens, each of which attends to no later token.  ``group``
    is the number of query heads of a KV head.
    """
    n, kv_heads, dim = stored.keys.shape
    w = len(queries)
    scaled = (queries.float() * stored.scale).to(stored.keys.dtype)
    grouped = scaled.view(w, kv_heads, -1, dim)
    by_head = grouped.permute(1, 2, 0, 3)
    rows = by_head.reshape(kv_heads, -1, dim)
    columns = stored.keys.permute(1, 2, 0)
    products = torch.bmm(rows, columns)
    scores = products.view(kv_heads, -1, w, n)
    square = torch.ones(w, w, dtype=torch.bool, device=scores.device)
    later = square.triu(1)
    of_window = scores[..., n - w :]
    of_window.masked_fill_(later, float("-inf"))
    return scores.softmax(dim=-1, dtype=torch.float32)


def with_newest(score: Tensor, count: int) -> Tensor:
    """Raise the last ``count`` scores above all others, which are at most 1, the newest to the highest."""
    n = score.shape[-1]
    order = torch.arange(n, device=score.device)
    high = 2 + order / n
    return torch.where(order < n - count, score, high)


class SnapKV(Compressor):
    """Keep the tokens to which the last ``window`` queries attend, and these tokens themselves (arXiv:2404.14469).

    The attention is averaged over these queries and over a KV head's query heads, and over ``kernel`` neighbours."""

    loads = ("keys",)
    joins_layers = True

    def __init__(self, options: object, ctx: CompressorContext) -> None:
        super().__init__(options, ctx)
        self.window = self.options.window

    def score(self, stored: StoredTokens) -> Tensor:
        assert stored.queries is not None
        w = len(stored.queries)
        earlier = len(stored.keys) - w
        if not earlier:
            return stored.keys.new_ones(w)
        attention = last_attention(stored, stored.queries)
        of_earlier = attention[..., :earlier].mean(dim=2)
        size = self.options.kernel
        smooth = avg_pool1d(of_earlier, size, stride=1, padding=size // 2)
        score = pad(smooth.mean(dim=1), (0, w))
        return with_newest(score, w)


class Tova(Compressor):
    """Keep the tokens to which the last query attends most, on average over all heads (TOVA, arXiv:2401.06104)."""

    loads = ("keys",)
    joins_layers = True
    window = 1

    def score(self, stored: StoredTokens) -> Tensor:
        assert stored.queries is not None
        last = stored.queries[-1:]
        attention = last_attention(stored, last)
        kv_heads, n = len(attention), attention.shape[-1]
        of_layers = attention.view(stored.layers, -1, n)
        score = of_layers.mean(dim=1, keepdim=True)
        of_heads = score.expand(-1, kv_heads // stored.layers, n)
        return with_newest(of_heads.reshape(kv_heads, n), 1)


class RKV(Compressor):
    """Keep tokens that are attended to and are not redundant, for long outputs (R-KV, arXiv:2505.24133).

    score = importance * attention of the last queries - (1 - importance) * similarity of the key to the other keys,
    both normalized over the stored tokens.  The last ``window`` tokens are kept."""

    loads = ("keys",)
    joins_layers = True

    def __init__(self, options: object, ctx: CompressorContext) -> None:
        super().__init__(options, ctx)
        self.window = self.options.window

    def score(self, stored: StoredTokens) -> Tensor:
        assert stored.queries is not None
        attention = last_attention(stored, stored.queries)
        of_query_head = attention.mean(dim=2)
        of_head = of_query_head.amax(dim=1)
        size = self.options.kernel
        largest = max_pool1d(of_head, size, stride=1, padding=size // 2)
        importance = largest / largest.sum(dim=-1, keepdim=True)
        similarity = mean_similarity(stored.keys)
        redundancy = similarity.softmax(dim=-1)
        weight = self.options.importance
        score = weight * importance - (1 - weight) * redundancy
        newest = min(self.window, len(stored.keys))
        return with_newest(score, newest)


class H2O(Compressor):
    """Keep the newest tokens, and the other tokens that received most attention from the prompt (H2O,
    arXiv:2306.14048).

    ``recent`` of the kept tokens are the newest.  Attention is summed over the queries of the prompt, or with ``mean``
    averaged over the queries that may attend to the token, as in the press ObservedAttention of kvpress.
    """

    attention_sums = True
    loads = ()
    joins_layers = True

    def score(self, stored: StoredTokens) -> Tensor:
        assert stored.attention_sums is not None and stored.sum_queries is not None
        attention = stored.attention_sums
        if self.options.mean:
            attention = attention / stored.sum_queries.clamp(min=1)
        n = attention.shape[-1]
        newest = int(self.options.recent * stored.keep)
        order = torch.arange(n, device=attention.device)
        above = attention.amax(dim=-1, keepdim=True) + 1 + order
        return torch.where(order < n - newest, attention, above)


def mean_similarity(keys: Tensor) -> Tensor:
    """Return the mean cosine similarity f32 [kv_heads, n] of each of the keys [n, kv_heads, dim] to the other keys of
    its head."""
    unit = normalize(keys.float(), dim=-1)
    unit = unit.transpose(0, 1)
    others = unit.transpose(1, 2)
    heads, n, _ = unit.shape
    sums = []
    for part in unit.split(max(1, PAIRS // (heads * n)), dim=1):
        similarity = part @ others
        sums.append(similarity.sum(dim=-1))
    total = torch.cat(sums, dim=-1)
    return (total - 1) / unit.shape[1]
