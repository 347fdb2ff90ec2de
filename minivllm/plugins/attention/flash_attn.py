"""FlashAttention-4 (the CuTe DSL kernels of the package ``flash-attn-4``) over the paged cache, on Hopper.

One call of ``flash_attn_varlen_func`` serves all rows of a step, with one or several tokens.

    q [T, heads, D], cu_q ──┐
    page table [R, pages] ──┼──► out [T, heads, D], lse [heads, T]        lengths (``seqused_k``) are on the device
    kv_len [R] ─────────────┘

Two limits of the library determine the spec.  A page that is exactly one key tile is loaded whole, including stale
memory behind the end of a row, where 0 * NaN is NaN.  Other pages are loaded row by row, with zeros behind the end.  So
the spec excludes sizes that are a tile of some kernel (64 to 128).  The library also does not split the keys of one row
over several programs on this device, so small batches over long contexts decode slowly.

Kernels are compiled on first use, which takes a few seconds for each kind of layer.
``FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=1`` keeps them on disk.  Source: github.com/Dao-AILab/flash-attention,
``flash_attn/cute``; arXiv:2307.08691, 2407.08608.
"""

from __future__ import annotations

from typing import Any

from flash_attn.cute import flash_attn_varlen_func
from torch import Tensor

from minivllm.core.interfaces.attention import AttnLayer, AttnMeta

from .paged import EAGER, Paged, dense_pages, window_sizes


class FlashAttn(Paged):
    """The back end FlashAttention-4, with window, sinks, softcap and lse (natural logarithm, with the sink)."""

    name = "flash_attn"

    def forward(
        self,
        layer: AttnLayer,
        q: Tensor,
        meta: AttnMeta,
        out: Tensor,
        lse: Tensor | None = None,
    ) -> None:
        spec, g = layer.spec, layer.group
        pages = dense_pages(meta, g, 0, len(meta.slots))
        most_q = self._most_queries(meta)
        most_k = pages.shape[1] * meta.block
        window = window_sizes(spec, None)
        sinks = layer.sinks if spec.sinks else None
        rows: dict[str, Any] = {"cu_seqlens_q": meta.cu_q, "seqused_k": meta.kv_len[g], "page_table": pages}
        rows |= {"max_seqlen_q": most_q, "max_seqlen_k": most_k}
        how: dict[str, Any] = {"softmax_scale": spec.softmax_scale, "causal": True, "window_size": window}
        how |= {"learnable_sink": sinks, "softcap": spec.softcap or 0.0, "return_lse": lse is not None}
        got, norm = flash_attn_varlen_func(q, layer.cache["k"], layer.cache["v"], **rows, **how)
        out.copy_(got)
        if lse is not None:
            lse.copy_(norm.t())

    def _most_queries(self, meta: AttnMeta) -> int:
        """Return an upper bound of the number of queries of a row, from which the library computes its grid.

        A captured step uses the largest possible number.
        """
        key: Any = meta.work.get("key", EAGER)
        return key.tokens if key.kind == "mixed" else int(meta.host_q_len.max())
