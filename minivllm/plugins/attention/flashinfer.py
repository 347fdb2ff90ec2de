"""FlashInfer over the paged cache, on Hopper.

    rows that decode   xqa_batch_decode_with_kv_cache        q [B, heads, D], pages [B, n], lengths on the device
    longer rows        BatchPrefillWithPagedKVCacheWrapper   planned on the host once a step for each kind of layer

XQA reads the lengths on the device and needs no plan, so steps of decode rows can be captured.
``BatchDecodeWithPagedKVCacheWrapper`` is not used.  Its plan splits rows by lengths that the host must know exactly,
and a part that begins behind the device's length reads past the row.  The host has the exact lengths of longer rows.

Kernels are compiled on first use with nvcc and ninja, which takes half a minute for each kind of layer on 16 cores, and
kept in ``~/.cache/flashinfer``.  Source: github.com/flashinfer-ai/flashinfer; arXiv:2501.01005.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from flashinfer import BatchPrefillWithPagedKVCacheWrapper
from flashinfer.decode import xqa_batch_decode_with_kv_cache
from torch import Tensor

from minivllm.core.interfaces.attention import AttentionContext, AttnLayer, AttnMeta, AttnSpec

from .options import FlashInferOptions
from .paged import Paged, dense_pages, ragged_pages, starts

# bytes of scratch memory: 8 MiB of semaphores, and results of at most one program per multiprocessor for a row
DECODE_SPACE = 32 << 20
PREFILL_SPACE = 128 << 20  # bytes of the prefill workspace, as FlashInfer's documentation recommends
PLANS = 3  # number of wrappers per kind of layer, which are used in turn


@dataclass
class Planned:
    """A wrapper, and an event at which the device has read its last plan.

    ``plan`` fills pinned memory of the wrapper, which is copied in stream order.  The host runs ahead of the device, so
    it must not fill that memory again before the copy.
    """

    wrapper: Any
    copied: Any = None  # a CUDA event

    def wait(self) -> None:
        if self.copied is not None:
            self.copied.synchronize()

    def mark(self, device: torch.device) -> None:
        if device.type == "cuda":
            self.copied = self.copied or torch.cuda.Event()
            self.copied.record()


class FlashInfer(Paged):
    """The back end FlashInfer, with windows, without sinks, softcap and lse."""

    name = "flashinfer"

    def __init__(self, options: FlashInferOptions, ctx: AttentionContext) -> None:
        super().__init__(options, ctx)
        device = torch.device(ctx.device)
        # The library keeps semaphores in this memory, which must be zero at first, and are zero again after each call.
        self._decode_space = torch.zeros(DECODE_SPACE, dtype=torch.uint8, device=device)
        self._prefill_space = torch.empty(PREFILL_SPACE, dtype=torch.uint8, device=device)
        self._planners: dict[tuple, deque[Planned]] = {}  # kind of layer -> its wrappers, the least recently used first

    def forward(
        self,
        layer: AttnLayer,
        q: Tensor,
        meta: AttnMeta,
        out: Tensor,
        lse: Tensor | None = None,
    ) -> None:
        self.refuse("lse", lse)
        n = meta.decode_rows
        if n:
            self._decode(layer, q[:n].contiguous(), meta, out[:n])
        if n < len(meta.slots):
            cache = (layer.cache["k"], layer.cache["v"])
            self._planned(layer, q.dtype, meta).run(q[n:].contiguous(), cache, out=out[n:])

    def _decode(self, layer: AttnLayer, q: Tensor, meta: AttnMeta, out: Tensor) -> None:
        spec, n = layer.spec, len(q)
        pages = dense_pages(meta, layer.group, 0, n)
        lengths = meta.kv_len[layer.group][:n]
        most = pages.shape[1] * meta.block
        cache = (layer.cache["k"], layer.cache["v"])
        how = {"bmm1_scale": spec.softmax_scale, "window_left": _left(spec), "kv_layout": "NHD"}
        xqa_batch_decode_with_kv_cache(q, cache, self._decode_space, pages, lengths, most, out=out, **how)

    def _planned(self, layer: AttnLayer, dtype: torch.dtype, meta: AttnMeta) -> Any:
        """Return the wrapper that is planned for this step and for layers of this kind."""
        spec = layer.spec
        kind = (layer.group, spec.heads, spec.kv_heads, spec.dim_qk, spec.window, spec.softmax_scale)
        key = ("planned", kind)
        found = meta.work.get(key)
        if found is None:
            mine = self._next(kind)
            indptr, last, indices = ragged_pages(meta, layer.group, meta.decode_rows)
            q_len = meta.host_q_len[meta.decode_rows :].astype("int32")
            cu_q = starts(torch.from_numpy(q_len))
            sizes = (spec.heads, spec.kv_heads, spec.dim_qk, meta.block)
            how = {"sm_scale": spec.softmax_scale, "window_left": _left(spec)}
            dtypes = {"q_data_type": dtype, "kv_data_type": dtype}
            mine.wrapper.plan(cu_q, indptr, indices, last, *sizes, causal=True, **how, **dtypes)
            mine.mark(meta.table.device)
            found = meta.work[key] = mine.wrapper
        return found

    def _next(self, kind: tuple) -> Planned:
        """Return a wrapper of this kind whose last plan has reached the device."""
        mine = self._planners.setdefault(kind, deque())
        if len(mine) < PLANS:
            made = BatchPrefillWithPagedKVCacheWrapper(self._prefill_space, "NHD", backend=self.options.prefill)
            mine.append(Planned(made))
        else:
            mine.rotate(-1)
            mine[-1].wait()
        return mine[-1]


def _left(spec: AttnSpec) -> int:
    """Return the number of positions before a query that are visible, -1 for all."""
    return -1 if spec.window is None else spec.window - 1
