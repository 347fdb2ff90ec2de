"""Paged attention in Triton: decode rows and longer rows by a kernel each, and a fused write.

Nothing here waits for the device or reads from it, and all sizes of a launch come from ``GraphKey`` where there is one,
so a step can be captured.  Runs wherever Triton does, and on a CPU under ``TRITON_INTERPRET=1``.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from minivllm.core.interfaces.attention import AttentionBackend, AttnLayer, AttnMeta, AttnSpec, GraphKey, QKPre
from minivllm.core.interfaces.kvformat import KVFormat, KVLayout
from minivllm.errors import PluginError

from .triton_decode import DecodeWork, deal, decode, in_float32
from .triton_prefill import make_tiles, prefill, tile_lines, tiles_on_device
from .triton_widen import pays, widened
from .triton_write import fits, write

FIXED_LINES = 64  # of a tile of queries if results must not depend on the batch
EAGER = GraphKey()


class Triton(AttentionBackend):
    """Contract as in ``AttentionBackend``; window, sinks, softcap, alibi, v_in_k and lse are supported.

    ``lse`` is the natural logarithm of the softmax's denominator, the sink included.
    """

    def layout(self, spec: AttnSpec, fmt: KVFormat, block: int) -> KVLayout:
        layout = fmt.layout(spec, block)
        want = {"k": (block, spec.kv_heads, spec.dim_qk), "v": (block, spec.kv_heads, spec.dim_v)}
        if "k_scale" in layout.tensors:  # as ``kvformat.scaled`` has them
            want |= dict.fromkeys(("k_scale", "v_scale"), (block, spec.kv_heads))
        for name, t in layout.tensors.items():
            if t.shape != want.get(name):
                raise PluginError(
                    f"triton: KV tensor {name!r} is {t.shape}: expected {want.get(name, 'no such tensor')}"
                )
        return layout

    def write(self, layer: AttnLayer, q: Tensor, k: Tensor, v: Tensor, meta: AttnMeta, pre: QKPre | None) -> Tensor:
        if fits(q, k, v, pre):
            return write(layer, q, k, v, meta, pre, self.ctx.batch_invariant)
        if self.ctx.batch_invariant:
            raise PluginError(
                f"triton: batch_invariant=true with heads of {q.shape[2]} elements, or a rotary embedding of an odd "
                "part of them: expected even numbers"
            )
        return super().write(layer, q, k, v, meta, pre)

    def plan(self, meta: AttnMeta, key: GraphKey) -> None:
        meta.work.clear()
        meta.work["key"] = key

    def forward(
        self,
        layer: AttnLayer,
        q: Tensor,
        meta: AttnMeta,
        out: Tensor,
        lse: Tensor | None = None,
    ) -> None:
        if q.stride(2) != 1 or q.stride(1) != q.shape[2]:
            q = q.contiguous()
        if self.ctx.batch_invariant:  # one kernel and one tile for every query, whoever else is in the step
            prefill(layer, q, meta, out, lse, self._fixed_tiles(meta, layer.spec, q), fixed=True)
            return
        rows, mixed = meta.decode_rows, meta.work.get("key", EAGER).kind == "mixed"
        if rows:
            work, known = self._work(meta, layer, rows, mixed, in_float32(q))
            decode(layer, q, meta, out, lse, work, known)
            meta.work["settled"] = True  # what later layers read of the step itself, they may read at once
        if mixed or rows < len(meta.host_q_len):
            tiles = self._tiles(meta, layer.spec, q)
            if not mixed and pays(layer, q, meta):
                layer, meta = widened(layer, q, meta)
            prefill(layer, q, meta, out, lse, tiles)

    def _work(self, meta: AttnMeta, layer: AttnLayer, rows: int, mixed: bool, exact: bool) -> tuple[DecodeWork, bool]:
        """Return the work of a layer's rows, and whether an earlier layer had the same work."""
        spec = layer.spec
        key = ("work", layer.group, spec.window, spec.heads, spec.kv_heads, spec.dim_qk, spec.dim_v)
        known = key in meta.work
        if not known:
            group, longest = layer.group, int(meta.host_kv_len[layer.group][:rows].max())
            meta.work[key] = deal(spec, meta.kv_len[group], meta.q_len, meta.slots, rows, longest, mixed, exact)
        return meta.work[key], known

    def _tiles(self, meta: AttnMeta, spec: AttnSpec, q: Tensor) -> tuple[Tensor, Tensor, int]:
        group = spec.heads // spec.kv_heads
        key = ("tiles", group)
        found = meta.work.get(key)
        captured = meta.work.get("key", EAGER)
        if found is None and captured.kind == "mixed":
            lines = tile_lines(group, captured.tokens)
            most = captured.tokens // (lines // group) + captured.rows
            found = meta.work[key] = (*tiles_on_device(meta.q_len, most, lines // group), lines)
        if found is None:
            longest = int(meta.host_q_len[meta.decode_rows :].max())
            lines = tile_lines(group, longest)
            row, token = make_tiles(meta.host_q_len, meta.decode_rows, lines // group)
            packed = torch.from_numpy(np.stack([row, token]))
            packed = packed.to(q.device, non_blocking=True)
            found = meta.work[key] = (packed[0], packed[1], lines)
        return found

    def _fixed_tiles(self, meta: AttnMeta, spec: AttnSpec, q: Tensor) -> tuple[Tensor, Tensor, int]:
        """Return tiles of ``FIXED_LINES`` lines over all rows, including rows of one token."""
        tokens = FIXED_LINES // (spec.heads // spec.kv_heads)
        found, captured = meta.work.get(("fixed", tokens)), meta.work.get("key", EAGER)
        if found is None:
            if captured.kind == "eager":
                packed = torch.from_numpy(np.stack(make_tiles(meta.host_q_len, 0, tokens)))
                row, token = packed.to(q.device, non_blocking=True)
            else:
                most = captured.rows if captured.kind == "decode" else captured.tokens // tokens + captured.rows
                row, token = tiles_on_device(meta.q_len, most, tokens, least=1)
            found = meta.work["fixed", tokens] = (row, token)
        return *found, FIXED_LINES
