"""Attention by torch's FlexAttention (Dong et al., "Flex Attention: A Programming Model for Generating Optimized
Attention Kernels", MLSys 2025, arXiv:2412.05496): what a layer does to scores is a small function, and the kernel is
made of it.

A step is cut into batches: all rows that decode are one, each row with several tokens is one of its own.  The keys and
values of a batch are gathered from the cache once a layer, tightly: padding repeats a row's last slot and is masked, so
that what lies in foreign or stale slots, NaN included, is never multiplied::

    decode rows   q [R, heads, 1, dim]     k [R, kv_heads, longest, dim]
    a prefill     q [1, heads, n, dim]     k [1, kv_heads, its keys, dim]

Row b sees key j if ``start[b] + j`` lies in the causal window of its query's position.  Sinks need no kernel: they only
add exp(sink) to the denominator, which is known from the log-sum-exp.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, flex_attention

from minivllm.plugin import (
    AttentionBackend,
    AttentionContext,
    AttnLayer,
    AttnMeta,
    AttnSpec,
    KVFormat,
    KVLayout,
    PluginError,
)

from .options import FlexOptions

HIDDEN = float("-inf")


@dataclass(frozen=True)
class Batch:
    """B rows of n queries each, and K keys of each row; made once per step for all layers of a KV group and window."""

    tokens: slice  # the B * n tokens of the rows in the step
    slots: Tensor  # i64 [B, K] flat cache slots of the keys
    first: Tensor  # i64 [B] position of key 0
    query: Tensor  # i64 [B] position of query 0


class Flex(AttentionBackend):
    """Attention by FlexAttention, with windows, sinks, soft cap and ``lse``."""

    def __init__(self, options: FlexOptions | None, ctx: AttentionContext) -> None:
        options = options or FlexOptions()
        super().__init__(options, ctx)
        # the C++ code that torch 2.13 makes of the kernel for a CPU does not compile for varying sizes, and has no
        # log-sum-exp
        on = options.compile == "auto" and not ctx.device.startswith("cpu")
        self.flex: Callable[..., Any] = torch.compile(flex_attention, dynamic=True) if on else flex_attention
        if not on:  # torch advises to compile the function, which would be wrong here
            warnings.filterwarnings("ignore", "flex_attention called without torch.compile")

    def layout(self, spec: AttnSpec, fmt: KVFormat, block: int) -> KVLayout:
        layout = fmt.layout(spec, block)
        wrong = {name: t.shape for name, t in layout.tensors.items() if t.shape[0] != block}
        if wrong:
            raise PluginError(f"flex reads the cache token by token: KV tensors {wrong}, expected ({block}, ...)")
        return layout

    def forward(
        self,
        layer: AttnLayer,
        q: Tensor,
        meta: AttnMeta,
        out: Tensor,
        lse: Tensor | None = None,
    ) -> None:
        key = ("flex", layer.group, layer.spec.window)
        if key not in meta.work:
            meta.work[key] = make_batches(meta, layer.group, layer.spec.window)
        for batch in meta.work[key]:
            o, norm = self._attend(layer, q[batch.tokens], batch, lse is not None)
            out[batch.tokens] = o
            if lse is not None:
                lse[batch.tokens] = norm

    def _attend(self, layer: AttnLayer, q: Tensor, batch: Batch, lse: bool) -> tuple[Tensor, Tensor | None]:
        """Return the outputs [B * n, heads, dim_v] of queries q [B * n, heads, dim_qk].

        With ``lse`` also return the log-sum-exps, float32 [B * n, heads].
        """
        spec, rows = layer.spec, len(batch.slots)
        # views the cache as blocks of one token
        cache = {name: t.view(-1, 1, *t.shape[2:]) for name, t in layer.cache.items()}
        k, v = self.ctx.kv_format.load(cache, batch.slots, q.dtype)
        args = (q.view(rows, -1, spec.heads, spec.dim_qk).transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        more = dict(score_mod=score_mod(spec, batch), scale=spec.softmax_scale, enable_gqa=spec.heads != spec.kv_heads)
        if not (lse or spec.sinks):
            return self.flex(*args, **more).transpose(1, 2).flatten(0, 1), None
        o, aux = self.flex(*args, **more, return_aux=AuxRequest(lse=True))
        o, norm = (x.transpose(1, 2).flatten(0, 1) for x in (o, aux.lse.float()))
        if spec.sinks:
            assert layer.sinks is not None
            total = torch.logaddexp(norm, layer.sinks)
            o, norm = (o * (norm - total).exp()[..., None]).to(q.dtype), total
        return o, norm


def score_mod(spec: AttnSpec, batch: Batch) -> Callable[..., Tensor]:
    """Return the score modification of query i and key j of row b."""
    first, query, window, softcap = batch.first, batch.query, spec.window, spec.softcap

    def modify(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        asks, at = query[b] + i, first[b] + j
        seen = at <= asks
        if window is not None:
            seen = seen & (at > asks - window)
        return torch.where(seen, score, HIDDEN)

    return modify


def make_batches(meta: AttnMeta, group: int, window: int | None) -> list[Batch]:
    """Return a batch of the decode rows, then one for each longer row."""
    batches, n = [], meta.decode_rows
    if n:
        # the host's lengths are upper bounds, so the device's lengths are used
        last = (meta.kv_len[group, :n].long() - 1).clamp(min=0)
        longest = max(int(meta.host_kv_len[group, :n].max()), 1)
        first = torch.zeros_like(last)
        if window is not None:
            longest, first = min(longest, window), (last - window + 1).clamp(min=0)
        batches.append(make_batch(meta, group, slice(0, n), slice(0, n), first, last, longest))
    start = n
    for row in range(n, len(meta.host_q_len)):
        count, length = int(meta.host_q_len[row]), int(meta.host_kv_len[group, row])
        begin = 0 if window is None else max(0, length - count - window + 1)
        first, query = (torch.tensor([x], device=meta.table.device) for x in (begin, length - count))
        tokens = slice(start, start + count)
        batches.append(make_batch(meta, group, slice(row, row + 1), tokens, first, query, length - begin, count))
        start += count
    return batches


def make_batch(
    meta: AttnMeta, group: int, rows: slice, tokens: slice, first: Tensor, query: Tensor, keys: int, queries: int = 1
) -> Batch:
    """Return the batch of ``rows``: ``keys`` keys from position ``first`` i64 [B] on, for ``queries`` queries from
    position ``query`` i64 [B] on."""
    at = first[:, None] + torch.arange(keys, device=first.device)
    at = torch.minimum(at, (query + queries - 1)[:, None])  # padding repeats the last key, which ``score_mod`` masks
    blocks = meta.table[group].index_select(0, meta.slots[rows]).gather(1, at // meta.block)
    return Batch(tokens, blocks.long() * meta.block + at % meta.block, first, query)
