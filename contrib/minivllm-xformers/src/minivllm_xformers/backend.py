"""Attention by xFormers' memory-efficient attention (github.com/facebookresearch/xformers; Rabe and Staats,
arXiv:2112.05682).

A step is cut into at most two calls, over keys and values that are gathered from the cache once for each layer::

    rows with one token     a block of equal length for each row, cut at the device's length of the row
    longer rows             blocks of the host's lengths, which are exact for these rows

The operator is the CUTLASS one, whose kernel torch contains.  ``FwOp.apply`` is called in place of
``memory_efficient_attention``, which refuses the operator if xFormers' own extension was built for another CUDA version
than torch.  Sinks need no kernel, because they only add exp(sink) to the denominator.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from xformers.ops.fmha import Inputs, cutlass
from xformers.ops.fmha.attn_bias import (
    BlockDiagonalCausalFromBottomRightMask,
    BlockDiagonalCausalLocalAttentionFromBottomRightMask,
    BlockDiagonalCausalWithOffsetPaddedKeysMask,
)

from minivllm.plugin import AttentionBackend, AttnLayer, AttnMeta, AttnSpec, KVFormat, KVLayout, PluginError


@dataclass(frozen=True)
class Call:
    """B rows of a step, for all layers of a KV group with the same window."""

    tokens: slice  # the tokens of the rows in the step
    slots: Tensor  # i64 [K] flat cache slots of the keys, row after row
    bias: Any  # the mask, as xFormers describes it
    row: Tensor  # i64 [T] row of each token within the call
    query: Tensor  # i64 [T] number of each token within its row


class Xformers(AttentionBackend):
    """Attention with windows, sinks and ``lse``."""

    def layout(self, spec: AttnSpec, fmt: KVFormat, block: int) -> KVLayout:
        layout = fmt.layout(spec, block)
        wrong = {name: t.shape for name, t in layout.tensors.items() if t.shape[0] != block}
        if wrong:
            raise PluginError(f"xformers reads the cache token by token: KV tensors {wrong}, expected ({block}, ...)")
        return layout

    def forward(self, layer: AttnLayer, q: Tensor, meta: AttnMeta, out: Tensor, lse: Tensor | None = None) -> None:
        key = ("xformers", layer.group, layer.spec.window)
        if key not in meta.work:
            meta.work[key] = make_calls(meta, layer.group, layer.spec.window)
        for call in meta.work[key]:
            found, norm = self._attend(layer, q[call.tokens], call)
            out[call.tokens] = found
            if lse is not None:
                lse[call.tokens] = norm

    def _attend(self, layer: AttnLayer, q: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        """Return the outputs [T, heads, dim_v] and lse float32 [T, heads] of queries q [T, heads, dim_qk]."""
        spec = layer.spec
        cache = {name: t.view(-1, 1, *t.shape[2:]) for name, t in layer.cache.items()}  # blocks of one token
        k, v = self.ctx.kv_format.load(cache, call.slots, q.dtype)
        k, v = (x.repeat_interleave(spec.heads // spec.kv_heads, dim=1)[None] for x in (k, v))
        inputs = Inputs(q[None].contiguous(), k, v, attn_bias=call.bias, scale=spec.softmax_scale)
        out, context = cutlass.FwOp.apply(inputs, needs_gradient=True)  # the gradient needs lse
        out, norm = out[0], context.lse[call.row, :, call.query]  # lse is [B, heads, longest row or more]
        if spec.sinks:
            total = torch.logaddexp(norm, layer.sinks)
            out, norm = (out * (norm - total).exp()[..., None]).to(q.dtype), total
        return out, norm


def make_calls(meta: AttnMeta, group: int, window: int | None) -> list[Call]:
    """Return the calls for the rows with one token and for the longer rows."""
    calls = []
    if meta.decode_rows:
        calls.append(of_decode_rows(meta, group, window))
    if meta.decode_rows < len(meta.host_q_len):
        calls.append(of_longer_rows(meta, group, window))
    return calls


def of_decode_rows(meta: AttnMeta, group: int, window: int | None) -> Call:
    """Return the call for the rows with one token.  The host's lengths bound those of the device."""
    n = meta.decode_rows
    device = meta.table.device
    lengths = meta.kv_len[group, :n].clamp(min=1)
    longest = max(1, int(meta.host_kv_len[group, :n].max()))
    first = torch.zeros_like(lengths)
    if window is not None:
        longest, first = min(longest, window), (lengths - window).clamp(min=0)
    bias = BlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens([1] * n, longest, [longest] * n, device=device)
    bias.k_seqinfo.seqlen.copy_(lengths - first)
    keys = first[:, None] + torch.arange(longest, device=device)
    keys = torch.minimum(keys, lengths[:, None] - 1)  # a padded key is the last one, and the mask hides it
    blocks = meta.table[group].index_select(0, meta.slots[:n]).gather(1, keys // meta.block)
    slots = blocks.long() * meta.block + keys % meta.block
    row = torch.arange(n, device=device)
    return Call(slice(0, n), slots.flatten(), bias, row, torch.zeros_like(row))


def of_longer_rows(meta: AttnMeta, group: int, window: int | None) -> Call:
    """Return the call for the rows with several tokens, whose lengths the host has."""
    n, device = meta.decode_rows, meta.table.device
    counts = meta.host_q_len[n:].astype(np.int64)
    lengths = meta.host_kv_len[group, n:].astype(np.int64)
    # keys before the window of the first query are not gathered, since their blocks may be the null block
    first = np.zeros_like(lengths) if window is None else np.maximum(0, lengths - counts - window + 1)
    sizes = lengths - first
    if window is None:
        bias = BlockDiagonalCausalFromBottomRightMask.from_seqlens(counts.tolist(), sizes.tolist(), device=device)
    else:
        plain = BlockDiagonalCausalFromBottomRightMask.from_seqlens(counts.tolist(), sizes.tolist(), device=device)
        bias = BlockDiagonalCausalLocalAttentionFromBottomRightMask(
            q_seqinfo=plain.q_seqinfo, k_seqinfo=plain.k_seqinfo, _window_size=window
        )
    row, key = spread(sizes)
    of_keys = torch.from_numpy(np.stack([n + row, first[row] + key])).to(device)
    of_tokens = torch.from_numpy(np.stack(spread(counts))).to(device)
    blocks = meta.table[group][meta.slots[of_keys[0]], of_keys[1] // meta.block]
    slots = blocks.long() * meta.block + of_keys[1] % meta.block
    return Call(slice(n, n + int(counts.sum())), slots, bias, of_tokens[0], of_tokens[1])


def spread(sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return, for rows of ``sizes`` items, the row of each item and its number within the row."""
    row = np.repeat(np.arange(len(sizes)), sizes)
    starts = np.cumsum(sizes) - sizes
    return row, np.arange(int(sizes.sum())) - starts[row]
