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

from .paged import Paged, dense_pages, starts


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
        spec, n = layer.spec, meta.decode_rows
        how: dict[str, Any] = {
            "softmax_scale": spec.softmax_scale,
            "causal": True,
            "softcap": spec.softcap or 0.0,
            "window_size": (-1, -1) if spec.window is None else (spec.window - 1, 0),
        }
        if n:
            got, norm = flash_attn_with_kvcache(
                q[:n].unsqueeze(1),
                layer.cache["k"],
                layer.cache["v"],
                cache_seqlens=meta.kv_len[layer.group][:n],
                block_table=dense_pages(meta, layer.group, 0, n),
                return_softmax_lse=True,
                **how,
            )
            out[:n].copy_(got.squeeze(1))  # [B, 1, heads, D]
            if lse is not None:
                lse[:n].copy_(norm.squeeze(2))  # [B, heads, 1]
        if n < len(meta.slots):
            got, norm = self._longer(layer, q[n:], meta, n, how)
            out[n:].copy_(got)
            if lse is not None:
                lse[n:].copy_(norm.t())

    def _longer(
        self, layer: AttnLayer, q: Tensor, meta: AttnMeta, first: int, how: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        """Compute attention for the rows from the row ``first`` on, and return the outputs [T, heads, D] and lse
        [heads, T].
        """
        g, pages = layer.group, dense_pages(meta, layer.group, first, len(meta.slots))
        key = ("starts", g)
        if key not in meta.work:
            meta.work[key] = (starts(meta.q_len[first:]), starts(meta.kv_len[g][first:]))
        cu_q, cu_k = meta.work[key]
        got, norm, _ = flash_attn_varlen_func(
            q,
            layer.cache["k"],
            layer.cache["v"],
            cu_q,
            cu_k,
            int(meta.host_q_len[first:].max()),
            int(meta.host_kv_len[g, first:].max()),
            block_table=pages,
            return_attn_probs=True,
            **how,
        )
        return got, norm
