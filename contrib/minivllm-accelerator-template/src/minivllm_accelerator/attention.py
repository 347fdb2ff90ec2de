"""Attention on the accelerator: batches of few shapes for ``Device.attend``.

The rows with one token are one batch.  Each row with several tokens is a batch of its own.  Numbers of rows, queries
and pages are rounded up to powers of two.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minivllm.plugin import (
    AttentionBackend,
    AttentionContext,
    AttnLayer,
    AttnMeta,
    AttnSpec,
    KVFormat,
    KVLayout,
    PluginError,
    QKPre,
)

from .device import Batch, Device
from .options import AcceleratorOptions
from .reference import Reference


def make_device(options: AcceleratorOptions | None) -> Device:
    """Return the device that the options name."""
    chosen = (options or AcceleratorOptions()).device
    return Reference() if chosen == "reference" else Device()


class AcceleratorAttention(AttentionBackend):
    """Attention by ``Device.store`` and ``Device.attend``."""

    def __init__(self, options: AcceleratorOptions | None, ctx: AttentionContext) -> None:
        super().__init__(options, ctx)
        self.device = make_device(options)

    def layout(self, spec: AttnSpec, fmt: KVFormat, block: int) -> KVLayout:
        layout = fmt.layout(spec, block)
        if set(layout.tensors) != {"k", "v"}:
            raise PluginError(f"the KV format stores {sorted(layout.tensors)}; Device.store expects k and v")
        return layout

    def write(self, layer: AttnLayer, q: Tensor, k: Tensor, v: Tensor, meta: AttnMeta, pre: QKPre | None) -> Tensor:
        if pre is not None:
            q, k = self.ctx.prepare_qk(q, k, meta.position, pre)
        self.device.store(layer.cache, k, v, meta.slot_map[layer.group])
        return q

    def forward(self, layer: AttnLayer, q: Tensor, meta: AttnMeta, out: Tensor, lse: Tensor | None = None) -> None:
        if lse is not None:
            raise PluginError("minivllm-accelerator-template computes no lse; expected lse=None")
        start = 0
        if meta.decode_rows:
            start = meta.decode_rows
            self._attend(layer, q, meta, out, slice(0, start), slice(0, start), 1)
        for row in range(meta.decode_rows, len(meta.host_q_len)):
            count = int(meta.host_q_len[row])
            self._attend(layer, q, meta, out, slice(row, row + 1), slice(start, start + count), count)
            start += count

    def _attend(
        self, layer: AttnLayer, q: Tensor, meta: AttnMeta, out: Tensor, rows: slice, tokens: slice, queries: int
    ) -> None:
        """Compute the outputs of rows with ``queries`` tokens each, which are ``tokens`` of the step."""
        key = ("accelerator", layer.group, rows.start)
        if key not in meta.work:
            meta.work[key] = padded_rows(meta, layer.group, rows)
        pages, q_len, kv_len = meta.work[key]
        batch = Batch(pages, q_len, kv_len, layer.spec.window, layer.spec.softmax_scale)
        count = rows.stop - rows.start
        padded = q.new_zeros(len(pages), power(queries), *q.shape[1:])
        padded[:count, :queries] = q[tokens].unflatten(0, (count, queries))
        found = self.device.attend(padded, layer.cache, batch)
        out[tokens] = found[:count, :queries].flatten(0, 1)


def padded_rows(meta: AttnMeta, group: int, rows: slice) -> tuple[Tensor, Tensor, Tensor]:
    """Return pages i32 [R, P], q_len i32 [R] and kv_len i32 [R] of rows, with R and P rounded up."""
    count = rows.stop - rows.start
    longest = max(1, int(meta.host_kv_len[group, rows].max()))
    width = -(-longest // meta.block)
    table = meta.table[group].index_select(0, meta.slots[rows])[:, :width]
    pages = table.new_zeros(power(count), power(width))
    pages[:count, : table.shape[1]] = table
    lengths = torch.stack([meta.q_len[rows], meta.kv_len[group, rows]])
    q_len, kv_len = lengths.new_zeros(2, len(pages))
    q_len[:count], kv_len[:count] = lengths
    return pages, q_len, kv_len


def power(n: int) -> int:
    """Return the smallest power of two that is at least ``n``."""
    return 1 << max(0, n - 1).bit_length()
