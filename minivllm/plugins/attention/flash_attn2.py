"""FlashAttention-2 (the package ``flash-attn``) over the paged cache, for Ampere and later GPUs.

    rows that decode   flash_attn_with_kvcache    q [B, 1, heads, D], pages [B, n], the device's lengths; split-KV
    longer rows        flash_attn_varlen_func     q [T, heads, D], cumulative lengths of queries and of keys

The library reads pages of a multiple of 256 tokens.  It replaces the values that it loads behind the end of a row by
zeros.  Source: github.com/Dao-AILab/flash-attention, ``flash_attn/flash_attn_interface.py``; arXiv:2307.08691.
"""

from __future__ import annotations

from typing import Any

from flash_attn.flash_attn_interface import flash_attn_varlen_func, flash_attn_with_kvcache
from torch import Tensor

from minivllm.core.interfaces.attention import AttnLayer, AttnMeta

from .paged import Paged, dense_pages, starts, window_sizes

Options = dict[str, Any]  # keyword arguments of the library's functions


class FlashAttn2(Paged):
    """The back end FlashAttention-2, with window, softcap and lse (natural logarithm), without sinks."""

    name = "flash_attn2"

    def forward(
        self,
        layer: AttnLayer,
        q: Tensor,
        meta: AttnMeta,
        out: Tensor,
        lse: Tensor | None = None,
    ) -> None:
        spec = layer.spec
        n = meta.decode_rows
        how: Options = {"softmax_scale": spec.softmax_scale, "causal": True}
        how["window_size"] = window_sizes(spec, -1)
        how["softcap"] = spec.softcap or 0.0
        if n:
            got, norm = self._decode(layer, q[:n], meta, how)
            out[:n].copy_(got)
            if lse is not None:
                lse[:n].copy_(norm)
        if n < len(meta.slots):
            got, norm = self._longer(layer, q[n:], meta, n, how)
            out[n:].copy_(got)
            if lse is not None:
                lse[n:].copy_(norm.t())

    def _decode(self, layer: AttnLayer, q: Tensor, meta: AttnMeta, how: Options) -> tuple[Tensor, Tensor]:
        """Compute attention for the queries of decode rows, and return the outputs [B, heads, D] and lse [B, heads]."""
        n = len(q)
        cache = layer.cache
        queries = q.unsqueeze(1)
        lengths = meta.kv_len[layer.group]
        how = how | {"cache_seqlens": lengths[:n], "return_softmax_lse": True}
        how["block_table"] = dense_pages(meta, layer.group, 0, n)
        got, norm = flash_attn_with_kvcache(queries, cache["k"], cache["v"], **how)
        return got.squeeze(1), norm.squeeze(2)  # from [B, 1, heads, D] and [B, heads, 1]

    def _longer(self, layer: AttnLayer, q: Tensor, meta: AttnMeta, first: int, how: Options) -> tuple[Tensor, Tensor]:
        """Compute attention for the rows from the row ``first`` on, and return the outputs [T, heads, D] and lse
        [heads, T].
        """
        g = layer.group
        cache = layer.cache
        pages = dense_pages(meta, g, first, len(meta.slots))
        key = ("starts", g)
        if key not in meta.work:
            q_len = meta.q_len[first:]
            kv_len = meta.kv_len[g][first:]
            meta.work[key] = (starts(q_len), starts(kv_len))
        host_q_len = meta.host_q_len[first:]
        host_kv_len = meta.host_kv_len[g, first:]
        lengths = (*meta.work[key], int(host_q_len.max()), int(host_kv_len.max()))
        how = how | {"block_table": pages, "return_attn_probs": True}
        got, norm, _ = flash_attn_varlen_func(q, cache["k"], cache["v"], *lengths, **how)
        return got, norm
