"""Shared code of the back ends over libraries, with the plain paged layout, the write, and page tables for libraries.

The cache is NHD, ``k`` and ``v`` [blocks, block, kv_heads, dim].  Each library reads it in place, without a gather or
copy.  A page is a block.  The table has two forms::

    dense    i32 [rows, pages]       one line per row; entries behind a row's end are never read
    ragged   indptr i32 [rows + 1]   pages of row r at indices[indptr[r] : indptr[r + 1]]; ``last`` tokens in its last

The lengths of rows that decode stay on the device, because only the device has them.  The host's bounds determine the
size of a launch.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minivllm.core.interfaces.attention import (
    NULL_BLOCK,
    AttentionBackend,
    AttentionContext,
    AttnLayer,
    AttnMeta,
    AttnSpec,
    GraphKey,
    QKPre,
)
from minivllm.core.interfaces.kvformat import KVFormat, KVLayout
from minivllm.errors import PluginError

EAGER = GraphKey()


class Paged(AttentionBackend):
    """Base of the back ends over libraries.  ``name`` is their name in errors.

    The contract is that of ``AttentionBackend``.  ``write`` is one Triton kernel if Triton is installed and ``fuse`` is
    on.
    """

    name: str

    def __init__(self, options: Any, ctx: AttentionContext) -> None:
        super().__init__(options, ctx)
        on_cuda = ctx.device.startswith("cuda")
        self._fused = ctx.fuse and on_cuda and find_spec("triton") is not None

    def layout(self, spec: AttnSpec, fmt: KVFormat, block: int) -> KVLayout:
        if spec.dim_qk != spec.dim_v:
            raise PluginError(f"{self.name}: dim_v={spec.dim_v}: expected the value of dim_qk, {spec.dim_qk}")
        layout = fmt.layout(spec, block)
        shape = (block, spec.kv_heads, spec.dim_qk)
        want = {"k": shape, "v": shape}
        found = {name: t.shape for name, t in layout.tensors.items()}
        if found != want:
            raise PluginError(f"{self.name}: the KV format's tensors are {found}: expected {want}")
        return layout

    def write(self, layer: AttnLayer, q: Tensor, k: Tensor, v: Tensor, meta: AttnMeta, pre: QKPre | None) -> Tensor:
        q = self._write(layer, q, k, v, meta, pre)
        if layer.spec.window is not None:
            # The libraries load the first key tile of a window whole, and multiply the keys before the window by 0.
            # Their blocks may be the null block, to which a failed row may have written NaN.
            for x in layer.cache.values():
                x[NULL_BLOCK].zero_()
        return q

    def _write(self, layer: AttnLayer, q: Tensor, k: Tensor, v: Tensor, meta: AttnMeta, pre: QKPre | None) -> Tensor:
        if self._fused:
            from .triton_write import fits, write

            if fits(q, k, v, pre):
                return write(layer, q, k, v, meta, pre)
        return super().write(layer, q, k, v, meta, pre)

    def plan(self, meta: AttnMeta, key: GraphKey) -> None:
        meta.work.clear()
        meta.work["key"] = key

    def refuse(self, what: str, value: Tensor | None) -> None:
        """Raise PluginError if a caller requests an output that the plug-in does not declare."""
        if value is not None:
            raise PluginError(f"{self.name} does not return {what}: expected {what}=None")


def dense_pages(meta: AttnMeta, group: int, first: int, last: int) -> Tensor:
    """Return the pages i32 [last - first, n] of rows [first, last), where n suffices for the host's bound on their
    lengths.
    """
    key = ("pages", group, first, last)
    found = meta.work.get(key)
    if found is None:
        host_lengths = meta.host_kv_len[group, first:last]
        longest = int(host_lengths.max())
        most = max(1, -(-longest // meta.block))
        slots = meta.slots[first:last]
        table = meta.table[group].index_select(0, slots)
        found = table[:, :most].contiguous()
        meta.work[key] = found
    return found


RaggedPages = tuple[Tensor, Tensor, Tensor]  # indptr, last, indices


def ragged_pages(meta: AttnMeta, group: int, first: int) -> RaggedPages:
    """Return the pages of the rows from ``first`` on, as indptr i32 [rows + 1], last i32 [rows] and indices i32.

    The first two are on the host, ``indices`` on the device.  These rows have several tokens in the step, so the host
    has their exact lengths.
    """
    key = ("ragged", group, first)
    if key not in meta.work:
        lens = meta.host_kv_len[group, first:].astype(np.int64)
        counts = -(-lens // meta.block)
        ends = np.cumsum(counts)
        indptr = np.concatenate([[0], ends])
        rows = np.arange(first, first + len(lens))
        row = np.repeat(rows, counts)
        before = np.repeat(indptr[:-1], counts)
        column = np.arange(indptr[-1]) - before
        at = torch.from_numpy(np.stack([row, column]))
        row_there, column_there = at.to(meta.table.device, non_blocking=True)
        slots = meta.slots[row_there]
        full = counts - 1
        last = lens - full * meta.block
        indices = meta.table[group][slots, column_there]
        meta.work[key] = _host_i32(indptr), _host_i32(last), indices
    found: RaggedPages = meta.work[key]
    return found


def _host_i32(values: np.ndarray) -> Tensor:
    return torch.from_numpy(values.astype(np.int32))


def window_sizes(spec: AttnSpec, unlimited: int | None) -> tuple[int | None, int | None]:
    """Return how many positions before and behind its own a query may see, as FlashAttention expects them.

    ``unlimited`` is the library's value for no limit.
    """
    if spec.window is None:
        return unlimited, unlimited
    return spec.window - 1, 0


def starts(lengths: Tensor) -> Tensor:
    """Return cumulative lengths i32 [rows + 1] that start at 0, on the device of the lengths i32 [rows]."""
    out = lengths.new_zeros(len(lengths) + 1)
    torch.cumsum(lengths, 0, dtype=torch.int32, out=out[1:])
    return out
