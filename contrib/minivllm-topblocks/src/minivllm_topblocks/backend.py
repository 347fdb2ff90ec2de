"""Attention of rows that decode to the blocks whose keys can score highest (Tang et al., Quest, arXiv:2406.10774).

The score of a query q with any key k of a block is at most sum_i max(q_i * low_i, q_i * high_i), where low and high are
the smallest and largest elements of the block's keys.  The blocks with the largest bounds are attended to exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from minivllm.plugin import AttentionBackend, AttentionContext, AttnLayer, AttnMeta, PluginError

from .options import TopBlocksOptions


class TopBlocks(AttentionBackend):
    """Attend to a selection of blocks, one row after another, in float32 (the trait ``approximate``)."""

    options: TopBlocksOptions

    def __init__(self, options: Any, ctx: AttentionContext) -> None:
        super().__init__(options or TopBlocksOptions(), ctx)

    def most_keys(self, visible: int, queries: int) -> int:
        """Return the number of tokens of ``blocks`` blocks, or of all keys for a row with several new tokens."""
        return visible if queries > 1 else min(visible, self.options.blocks * self.ctx.block)

    def selected(self, layer: AttnLayer, q: Tensor, meta: AttnMeta) -> Sequence[Tensor]:
        found, start = [], 0
        for row, n in enumerate(meta.host_q_len.tolist()):
            k, _ = self._keys(layer, meta, row, n)
            found.append(self._select(q[start : start + n], k))
            start += n
        return found

    def forward(self, layer: AttnLayer, q: Tensor, meta: AttnMeta, out: Tensor, lse: Tensor | None = None) -> None:
        if lse is not None:
            raise PluginError("topblocks: expected lse=None, log-sum-exps are not implemented")
        start = 0
        for row, n in enumerate(meta.host_q_len.tolist()):
            queries = q[start : start + n]
            k, v = self._keys(layer, meta, row, n)
            group = layer.spec.heads // layer.spec.kv_heads
            scores = torch.einsum("qhd,khd->hqk", queries.float(), k.repeat_interleave(group, dim=1))
            left_out = ~self._select(queries, k).transpose(0, 1)
            p = (scores * layer.spec.softmax_scale).masked_fill(left_out, -torch.inf).softmax(dim=-1)
            attended = torch.einsum("hqk,khd->qhd", p, v.repeat_interleave(group, dim=1))
            out[start : start + n] = attended.to(out.dtype)
            start += n

    def _keys(self, layer: AttnLayer, meta: AttnMeta, row: int, queries: int) -> tuple[Tensor, Tensor]:
        """Return k and v [length, kv_heads, dim] float32 of the row's context, this step's tokens included."""
        length = max(int(meta.kv_len[layer.group, row]), queries)
        blocks = meta.table[layer.group, meta.slots[row], : -(-length // meta.block)].long()
        k, v = self.ctx.kv_format.load(layer.cache, blocks, torch.float32)
        return k[:length], v[:length]

    def _select(self, q: Tensor, k: Tensor) -> Tensor:
        """Return which keys each query attends to, bool [q_len, heads, length], for k [length, kv_heads, dim]."""
        (n, heads, _), (length, kv_heads, _) = q.shape, k.shape
        position = torch.arange(length, device=k.device)
        if n > 1:
            seen = position <= torch.arange(length - n, length, device=k.device)[:, None]
            return seen[:, None].expand(n, heads, length)
        block, most = self.ctx.block, self.options.blocks
        count = -(-length // block)
        if count <= most:
            return torch.ones(n, heads, length, dtype=torch.bool, device=k.device)
        padded = torch.cat([k, k[-1:].expand(count * block - length, -1, -1)]).unflatten(0, (count, block))
        low, high = padded.amin(dim=1), padded.amax(dim=1)  # [count, kv_heads, dim]
        query = q[0].float().unflatten(0, (kv_heads, heads // kv_heads))  # [kv_heads, group, dim]
        bound = torch.maximum(query[None] * low[:, :, None], query[None] * high[:, :, None]).sum(-1).flatten(1)
        bound[0] = bound[-1] = torch.inf  # [count, heads]
        best = bound.topk(most, dim=0).indices
        chosen = torch.zeros(count, heads, dtype=torch.bool, device=k.device).scatter_(0, best, True)
        return chosen.T.repeat_interleave(block, dim=1)[None, :, :length]
