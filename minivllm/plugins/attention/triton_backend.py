"""Paged attention in Triton, with a fused write.

Rows of one token have a kernel (``triton_decode``), and longer rows another (``triton_prefill``).  On a Hopper some
steps use a third one for longer rows (``triton_hopper``, chosen in ``hopper_choice``).

No function waits for the device or reads from it, and ``GraphKey`` has all sizes of a captured launch, so a step can be
captured.  The back end runs on each GPU that Triton supports, and on a CPU under ``TRITON_INTERPRET=1``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from minivllm.core.interfaces.attention import (
    AttentionBackend,
    AttentionContext,
    AttnLayer,
    AttnMeta,
    AttnSpec,
    GraphKey,
    QKPre,
)
from minivllm.core.interfaces.kvformat import KVFormat, KVLayout
from minivllm.device.kernels.launch import capability
from minivllm.errors import PluginError

from .hopper_check import disagreement
from .hopper_choice import LINES, Variant, choose, kernel_module, refusal
from .triton_decode import DecodeWork, deal, decode, in_float32
from .triton_fixed import attend as attend_fixed
from .triton_fixed_check import short_lines_agree
from .triton_prefill import Tiles, make_tiles, prefill, tile_lines, tiles_on_device, tokens_ahead
from .triton_shared import FEWEST_ROWS, SharedWork, attend_shared, find_shared
from .triton_widen import pays, widened
from .triton_write import fits, write

if TYPE_CHECKING:
    from .options import TritonOptions

FIXED_LINES = 64  # lines of a tile of queries if results must not depend on the batch
EAGER = GraphKey()
# Bytes of keys and values of a layer that a step must save before it reads shared prefixes once.  It is an estimate and
# was not measured: an H200 reads them in 7 microseconds.
SAVES_FROM = 32 << 20


class Triton(AttentionBackend):
    """The back end with kernels in Triton.

    It supports window, sinks, softcap, alibi, v_in_k, spans and lse.  ``lse`` is the natural logarithm of the softmax's
    denominator, including the sink.
    """

    def __init__(self, options: TritonOptions | None, ctx: AttentionContext) -> None:
        super().__init__(options, ctx)
        # layers of these shapes do not use the Hopper kernel, since it gave different results when the engine started
        self.unfit: set[AttnSpec] = set()
        # for layers of these shapes, smaller tiles for single tokens gave the bits of the usual tiles
        self.short: set[AttnSpec] = set()
        wanted = "auto" if options is None else options.shared_prefixes
        if wanted != "off" and not ctx.batch_invariant:
            self.shares_from = SAVES_FROM if wanted == "auto" else 1

    def layout(self, spec: AttnSpec, fmt: KVFormat, block: int) -> KVLayout:
        layout = fmt.layout(spec, block)
        heads = (block, spec.kv_heads)
        want = {"k": (*heads, spec.dim_qk), "v": (*heads, spec.dim_v)}
        if "k_scale" in layout.tensors:  # as in ``kvformat.scaled``
            want |= {"k_scale": heads, "v_scale": heads}
        for name, t in layout.tensors.items():
            if t.shape != want.get(name):
                raise PluginError(
                    f"triton: KV tensor {name!r} is {t.shape}: expected {want.get(name, 'no such tensor')}"
                )
        self._note_kernel(spec, layout.tensors["k"].dtype, block)
        device = torch.device(self.ctx.device)
        if self.ctx.batch_invariant and capability(device) >= 9:
            dtype = getattr(torch, self.ctx.dtype)
            self.short.discard(spec)  # a rehearsal may have added it
            if short_lines_agree(spec, dtype, layout, FIXED_LINES, device):
                self.short.add(spec)
        return layout

    def _note_kernel(self, spec: AttnSpec, kv_dtype: str, block: int) -> None:
        """Add a note for the user: which kernel computes rows of several tokens, if this device has two kernels for
        them.
        """
        device, dtype = torch.device(self.ctx.device), self.ctx.dtype
        if capability(device) != 9 or self.ctx.batch_invariant:
            return
        why = refusal(spec, dtype, kv_dtype, block)
        if self.options is not None and self.options.hopper == "off":
            why = "attention.options.hopper is off"
        elif kernel_module() is None:
            why = "it needs triton 3.6 or later"
        # the kernel reads either the cache, or a copy of it in this dtype; the dtype of keys and values is therefore
        # not tested
        elif not refusal(spec, dtype, dtype, block):
            wrong = disagreement(spec, getattr(torch, dtype), block, device)
            if wrong:
                self.unfit.add(spec)
                why = wrong
        window = "" if spec.window is None else f" with a window of {spec.window} tokens"
        shape = f"heads of {spec.dim_qk} elements{window}"
        note = f"long rows use the Hopper kernel: {shape}"
        if why:
            note = f"long rows do not use the Hopper kernel: {shape}; {why}"
        if note not in self.notes:
            self.notes.append(note)

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
        # the keys are cut into parts at fixed positions, whose results are merged in order
        captured = meta.work.get("key", EAGER)
        if self.ctx.batch_invariant:
            single = captured.kind == "decode"
            if captured.kind == "eager":
                single = int(meta.host_q_len.max()) == 1
            tiles, known = self._fixed_tiles(meta, layer.spec, q)
            attend_fixed(layer, q, meta, out, lse, tiles, single, known, layer.spec in self.short)
            meta.work["settled"] = True  # later layers may read the inputs of the step without waiting
            return
        rows, mixed = meta.decode_rows, captured.kind == "mixed"
        if rows:
            exact = in_float32(q)
            shared = self._shared(meta, layer, rows, mixed, exact)
            work, known = self._work(meta, layer, rows, mixed, exact, shared)
            if shared is not None:
                attend_shared(layer, q, meta, shared)
            decode(layer, q, meta, out, lse, work, known)
            meta.work["settled"] = True  # later layers may read the inputs of the step without waiting
        if mixed or rows < len(meta.host_q_len):
            copied = not mixed and pays(layer, q, meta)
            variant = self._variant(layer, q, meta, copied)
            tiles = self._tiles(meta, layer.spec, q, variant is not None)
            if copied:
                layer, meta = widened(layer, q, meta)
            if variant is None:
                ahead = self._ahead(meta, layer.group, q.device)
                prefill(layer, q, meta, out, lse, tiles, ahead=ahead)
            else:
                kernel_module().attend(layer, q, meta, out, lse, tiles, variant)

    def _ahead(self, meta: AttnMeta, group: int, device: torch.device) -> Tensor | None:
        """Return the number of later positions that each token of a step attends to, or None if there are none."""
        key = ("ahead", group)
        if key not in meta.work:
            meta.work[key] = tokens_ahead(meta, group, device)
        found: Tensor | None = meta.work[key]
        return found

    def _shared(self, meta: AttnMeta, layer: AttnLayer, rows: int, mixed: bool, exact: bool) -> SharedWork | None:
        """Return the prefixes that several rows of a step share, or None if each row reads its keys separately.

        With ``mixed`` the step also has rows of several tokens, and with ``exact`` products are computed in float32.
        """
        spec = layer.spec
        group = layer.group
        captured = meta.work.get("key", EAGER)
        if not captured.shared or self.shares_from is None:
            return None
        if rows < FEWEST_ROWS or spec.window is not None:
            return None
        key = ("shared", group, spec.heads, spec.kv_heads, spec.dim_qk, spec.dim_v)
        if key not in meta.work:
            lengths = meta.kv_len[group]
            table = meta.table[group]
            meta.work[key] = find_shared(spec, lengths, meta, table, rows, mixed, exact)
        return meta.work[key]

    def _work(
        self, meta: AttnMeta, layer: AttnLayer, rows: int, mixed: bool, exact: bool, shared: SharedWork | None
    ) -> tuple[DecodeWork, bool]:
        """Return how the keys of a layer's decode rows are divided among programs, and whether an earlier layer had the
        same division.

        With ``mixed`` the step also has rows of several tokens, and with ``exact`` products are computed in float32.
        """
        spec = layer.spec
        group = layer.group
        key = ("work", group, spec.window, spec.heads, spec.kv_heads, spec.dim_qk, spec.dim_v)
        known = key in meta.work
        if not known:
            host_lengths = meta.host_kv_len[group][:rows]
            longest = int(host_lengths.max())
            columns = meta.kv_len[group], meta.q_len, meta.slots
            parts = None if shared is None else shared.parts
            meta.work[key] = deal(spec, *columns, rows, longest, mixed, exact, parts)
        return meta.work[key], known

    def _variant(self, layer: AttnLayer, q: Tensor, meta: AttnMeta, copied: bool) -> Variant | None:
        """Return the variant of the Hopper kernel for the rows of several tokens, None for ``triton_prefill``.

        ``copied`` means that the kernel will read a copy of the keys and values in the dtype of q."""
        spec = layer.spec
        key = ("variant", layer.group, spec, copied)
        if key not in meta.work:
            chosen = None
            if self._has_hopper(q.device):
                chosen = self._choose(layer, q, meta, copied)
            meta.work[key] = chosen
        found: Variant | None = meta.work[key]
        return found

    def _has_hopper(self, device: torch.device) -> bool:
        if capability(device) != 9:
            return False
        if self.options is not None and self.options.hopper == "off":
            return False
        return kernel_module() is not None

    def _choose(self, layer: AttnLayer, q: Tensor, meta: AttnMeta, copied: bool) -> Variant | None:
        spec = layer.spec
        captured = meta.work.get("key", EAGER)
        if spec in self.unfit:
            return None
        if self._ahead(meta, layer.group, q.device) is not None:
            return None
        if copied and spec.window is not None:
            # the copy begins at a multiple of the key tile of ``triton_prefill``, which differs from the key tile of
            # the Hopper kernel
            return None
        stored = q.dtype if copied else layer.cache["k"].dtype
        names = [str(dtype).removeprefix("torch.") for dtype in (q.dtype, stored)]
        if refusal(spec, *names, meta.block):
            return None
        tokens = LINES // (spec.heads // spec.kv_heads)
        if captured.kind == "mixed":
            tiles = captured.tokens // tokens
            return choose(spec, tiles, captured.tokens, captured.span)
        q_len = meta.host_q_len[meta.decode_rows :].astype(np.int64)
        kv_len = meta.host_kv_len[layer.group][meta.decode_rows :]
        tiles_of_row = -(-q_len // tokens)
        tiles = int(tiles_of_row.sum())
        total = int(q_len.sum())
        pairs = int((q_len * kv_len).sum())
        return choose(spec, tiles, total, pairs // total)

    def _tiles(self, meta: AttnMeta, spec: AttnSpec, q: Tensor, hopper: bool) -> Tiles:
        """Return the tiles of the rows of several tokens.

        ``hopper`` means that they are for the Hopper kernel.  Layers with equal groups of heads share them."""
        group = spec.heads // spec.kv_heads
        key = ("tiles", group, hopper)
        if key not in meta.work:
            captured = meta.work.get("key", EAGER)
            if captured.kind == "mixed":
                meta.work[key] = self._captured_tiles(meta, group, hopper, captured)
            else:
                meta.work[key] = self._host_tiles(meta, group, hopper, q.device)
        found: Tiles = meta.work[key]
        return found

    def _captured_tiles(self, meta: AttnMeta, group: int, hopper: bool, captured: GraphKey) -> Tiles:
        """Return tiles of queries that the device computes, as many as a captured step of this size may need.

        ``group`` is the number of query heads per KV head.  The Hopper kernel has tiles of its own size, and needs
        their number on the device.
        """
        lines = LINES if hopper else tile_lines(group, captured.tokens)
        tokens = lines // group
        most = captured.tokens // tokens + captured.rows
        row, token = tiles_on_device(meta.q_len, meta.kv_len[0], most, tokens)
        count = None
        if hopper:
            used = row >= 0
            count = used.sum(0, keepdim=True, dtype=torch.int32)
        return Tiles(row, token, lines, count)

    def _host_tiles(self, meta: AttnMeta, group: int, hopper: bool, device: torch.device) -> Tiles:
        """Return tiles of queries that the host computes from the lengths that it has, and copies to the device.

        ``group`` is the number of query heads per KV head.  The Hopper kernel has tiles of its own size.
        """
        first = meta.decode_rows
        q_len = meta.host_q_len
        longest = int(q_len[first:].max())
        lines = LINES if hopper else tile_lines(group, longest)
        row, token = make_tiles(q_len, meta.host_kv_len[0], first, lines // group)
        n = len(row)
        count = np.array([n], np.int32)
        packed = np.concatenate([row, token, count])
        moved = torch.from_numpy(packed).to(device, non_blocking=True)
        rows, tokens, counts = moved.tensor_split([n, 2 * n])
        return Tiles(rows, tokens, lines, counts)

    def _fixed_tiles(self, meta: AttnMeta, spec: AttnSpec, q: Tensor) -> tuple[Tiles, bool]:
        """Return tiles of ``FIXED_LINES`` lines over all rows, including rows of one token, and whether an earlier
        layer had the same tiles."""
        tokens = FIXED_LINES // (spec.heads // spec.kv_heads)
        captured = meta.work.get("key", EAGER)
        key = ("fixed", tokens)
        known = key in meta.work
        if not known and captured.kind == "eager":
            tiles = make_tiles(meta.host_q_len, meta.host_kv_len[0], 0, tokens)
            packed = torch.from_numpy(np.stack(tiles))
            row, token = packed.to(q.device, non_blocking=True)
            meta.work[key] = row, token
        elif not known:
            most = captured.rows
            if captured.kind != "decode":
                most += captured.tokens // tokens
            meta.work[key] = tiles_on_device(meta.q_len, meta.kv_len[0], most, tokens, least=1)
        row, token = meta.work[key]
        return Tiles(row, token, FIXED_LINES), known
