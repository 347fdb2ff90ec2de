"""Attention back ends that write wrong places, keep data beyond its step, or make a false claim, with one
fault each.
"""

from __future__ import annotations

from functools import partial

import torch

from minivllm.core.interfaces.kvformat import KVLayout
from minivllm.device.layers.norm import rms_norm
from minivllm.device.layers.rotary import gather_rotary, prepare_qk, rotate
from minivllm.registration.spec import Spec

from .attention import ALL, LIMITS, RowByRow, spec

SEAM = "attention"
ANSWER = "test_any_steps_give_the_answer_of_the_definition"
WRITE = "test_write_fills_the_named_slots_and_nothing_else"
FAULTS = {
    "AssumesContiguous": (ANSWER,),
    "OnePlanForAllLayers": ("test_layers_of_several_kv_groups_share_a_step",),
    "OneTableOnly": ("test_rows_of_the_tables_may_lie_behind_all_positions",),
    "WritesBehindOut": (ANSWER,),
    "LeavesOutOfTheLastRow": (ANSWER,),
    "ScalesQueriesInPlace": (ANSWER,),
    "CleansTheCache": (ANSWER,),
    "CountsInMeta": (ANSWER,),
    "StalePlan": ("test_steps_of_one_shape_over_other_blocks",),
    "IgnoresWhatItDoesNotClaim": ("test_an_output_that_is_not_claimed_is_refused",),
    "WritesTheNeighbour": (WRITE,),
    "SkipsBlockEnd": (WRITE,),
    "WritesToItsOwnSlots": (WRITE,),
    "WritesWithoutHeadsTwoAndUp": (WRITE,),
    "RotatesPairsSideBySide": ("test_write_normalises_and_rotates",),
    "RotatesBeforeNorm": ("test_write_normalises_and_rotates",),
    "RotatesByRowPosition": ("test_write_normalises_and_rotates",),
    "ReturnsPlainQueries": ("test_write_normalises_and_rotates",),
    "HalfNorm": ("test_write_normalises_and_rotates",),
    "NormalisesValuesToNaN": ("test_write_normalises_and_rotates",),
    "SaysAnotherBlock": ("test_the_layout_is_that_of_one_block",),
    "NoSuchGraph": ("test_the_spec_speaks_of_every_fact_and_of_nothing_else",),
}
RIGHT = ()
spec = partial(spec, module=__name__)


# ---- what is given and given back -----------------------------------------------------------------------------------


class AssumesContiguous(RowByRow):
    """Reads q by its pointer."""

    spec = spec("AssumesContiguous")

    def forward(self, layer, q, meta, out, lse=None):
        t, heads, dim = q.shape
        q = q.as_strided((t, heads, dim), (heads * dim, dim, 1))
        super().forward(layer, q, meta, out, lse)


class WritesBehindOut(RowByRow):
    """Stores whole tiles of four tokens."""

    spec = spec("WritesBehindOut")

    def forward(self, layer, q, meta, out, lse=None):
        super().forward(layer, q, meta, out, lse)
        whole = -(-len(out) // 4) * 4 - len(out)
        out.as_strided((whole, *out.shape[1:]), out.stride(), out.storage_offset() + out.numel()).zero_()


class LeavesOutOfTheLastRow(RowByRow):
    """Leaves the last query of the last row to the next step."""

    spec = spec("LeavesOutOfTheLastRow")

    def forward(self, layer, q, meta, out, lse=None):
        kept = out[-1].clone()
        super().forward(layer, q, meta, out, lse)
        out[-1] = kept


class ScalesQueriesInPlace(RowByRow):
    spec = spec("ScalesQueriesInPlace")

    def forward(self, layer, q, meta, out, lse=None):
        q.mul_(2.0)
        super().forward(layer, q / 2, meta, out, lse)


class CleansTheCache(RowByRow):
    """Clears the null block, so that its content is harmless."""

    spec = spec("CleansTheCache")

    def forward(self, layer, q, meta, out, lse=None):
        for x in layer.cache.values():
            x[0] = 0
        super().forward(layer, q, meta, out, lse)


class CountsInMeta(RowByRow):
    """Turns kv_len into last positions, for itself."""

    spec = spec("CountsInMeta")

    def forward(self, layer, q, meta, out, lse=None):
        super().forward(layer, q, meta, out, lse)
        meta.kv_len = meta.kv_len - 1


class StalePlan(RowByRow):
    """Uses the data that it prepared for a step again for the next step of the same shape."""

    spec = spec("StalePlan")

    def plan(self, meta, key):
        self.plans = getattr(self, "plans", {})
        meta.work = self.plans.setdefault(tuple(meta.host_q_len), {})

    def slots(self, layer, meta, row, positions):
        key = (layer.group, row)
        if key not in meta.work or len(meta.work[key]) != len(positions):
            meta.work[key] = super().slots(layer, meta, row, positions)
        return meta.work[key]


class OnePlanForAllLayers(RowByRow):
    """Masks and slots are made by the first layer, whatever the others are."""

    spec = spec("OnePlanForAllLayers")

    def slots(self, layer, meta, row, positions):
        if row not in meta.work:
            meta.work[row] = super().slots(layer, meta, row, positions)
        return meta.work[row]


class IgnoresWhatItDoesNotClaim(RowByRow):
    spec = spec("IgnoresWhatItDoesNotClaim", frozenset({"window"}))

    def forward(self, layer, q, meta, out, lse=None):
        super().forward(layer, q, meta, out)


# ---- write and layout -----------------------------------------------------------------------------------------------


class OneTableOnly(RowByRow):
    """Rows behind the largest position that it has met are taken from the beginning."""

    spec = spec("OneTableOnly")

    def write(self, layer, q, k, v, meta, pre):
        position = meta.position % 60
        q, k = (q, k) if pre is None else prepare_qk(q, k, position, pre)
        self.ctx.kv_format.store(layer.cache, k, v, meta.slot_map[layer.group])
        return q


class WritesTheNeighbour(RowByRow):
    """Stores two tokens at a time."""

    spec = spec("WritesTheNeighbour")

    def write(self, layer, q, k, v, meta, pre):
        slots = meta.slot_map[layer.group]
        last = slots[-1:] + 1
        if int(last) < len(layer.cache["k"]) * meta.block and int(last) not in slots.tolist():
            self.ctx.kv_format.store(layer.cache, k[-1:], v[-1:], last)
        return super().write(layer, q, k, v, meta, pre)


class SkipsBlockEnd(RowByRow):
    """A chunk that ends with a block loses its last token."""

    spec = spec("SkipsBlockEnd")

    def write(self, layer, q, k, v, meta, pre):
        q, k = (q, k) if pre is None else prepare_qk(q, k, meta.position, pre)
        slots = meta.slot_map[layer.group]
        n = len(slots) - int(slots[-1] % meta.block == meta.block - 1)
        self.ctx.kv_format.store(layer.cache, k[:n], v[:n], slots[:n])
        return q


class WritesToItsOwnSlots(RowByRow):
    """Works the slots out from the table: rows that have ended write where they wrote before."""

    spec = spec("WritesToItsOwnSlots")

    def write(self, layer, q, k, v, meta, pre):
        q, k = (q, k) if pre is None else prepare_qk(q, k, meta.position, pre)
        blocks = meta.table[layer.group, meta.slots[meta.row], meta.position // meta.block].long()
        self.ctx.kv_format.store(layer.cache, k, v, blocks * meta.block + meta.position % meta.block)
        return q


class WritesWithoutHeadsTwoAndUp(RowByRow):
    """The grid has room for two KV heads."""

    spec = spec("WritesWithoutHeadsTwoAndUp")

    def write(self, layer, q, k, v, meta, pre):
        q, k = (q, k) if pre is None else prepare_qk(q, k, meta.position, pre)
        cache = {name: x[:, :, :2] for name, x in layer.cache.items()}
        slots = meta.slot_map[layer.group]
        for name, x in (("k", k), ("v", v)):
            if name in cache:
                cache[name][slots // meta.block, slots % meta.block] = x[:, :2].to(cache[name].dtype)
        return q


class RotatesPairsSideBySide(RowByRow):
    """(x[2i], x[2i + 1]) instead of rotate-half pairs."""

    spec = spec("RotatesPairsSideBySide")

    def write(self, layer, q, k, v, meta, pre):
        if pre is None or pre.cos is None or pre.cos.shape[1] != layer.spec.dim_qk:
            return super().write(layer, q, k, v, meta, pre)
        there = lambda x: x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)  # noqa: E731
        back = lambda x: x.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)  # noqa: E731
        norm = [None if w is None else there(w) for w in (pre.q_norm, pre.k_norm)]
        other = type(pre)(pre.cos, pre.sin, *norm, eps=pre.eps)
        q, k = (back(x) for x in prepare_qk(there(q), there(k), meta.position, other))
        return super().write(layer, q, k, v, meta, None)


class RotatesBeforeNorm(RowByRow):
    spec = spec("RotatesBeforeNorm")

    def write(self, layer, q, k, v, meta, pre):
        if pre is not None and pre.cos is not None:
            q, k = (rotate(x, *gather_rotary(pre, meta.position)) for x in (q, k))
        if pre is not None:
            norms = ((q, pre.q_norm), (k, pre.k_norm))
            q, k = (x if w is None else rms_norm(x.contiguous(), w, pre.eps) for x, w in norms)
        return super().write(layer, q, k, v, meta, None)


class RotatesByRowPosition(RowByRow):
    """Every chunk starts at position 0."""

    spec = spec("RotatesByRowPosition")

    def write(self, layer, q, k, v, meta, pre):
        if pre is not None:
            within = torch.arange(len(q)) - meta.cu_q[meta.row].long()
            q, k = prepare_qk(q, k, within, pre)
        return super().write(layer, q, k, v, meta, None)


class ReturnsPlainQueries(RowByRow):
    spec = spec("ReturnsPlainQueries")

    def write(self, layer, q, k, v, meta, pre):
        super().write(layer, q, k, v, meta, pre)
        return q


class HalfNorm(RowByRow):
    """The mean square in the dtype of a half, whatever the model's is."""

    spec = spec("HalfNorm")

    def write(self, layer, q, k, v, meta, pre):
        if pre is not None and pre.q_norm is not None:
            pre = type(pre)(pre.cos, pre.sin, pre.q_norm.half().to(q), pre.k_norm, eps=pre.eps * 1.5)
        return super().write(layer, q, k, v, meta, pre)


class NormalisesValuesToNaN(RowByRow):
    """Divides the values by the square root of a negative number, if keys are normalised."""

    spec = spec("NormalisesValuesToNaN")

    def write(self, layer, q, k, v, meta, pre):
        if pre is not None and pre.k_norm is not None:
            v = torch.full_like(v, torch.nan)
        return super().write(layer, q, k, v, meta, pre)


class SaysAnotherBlock(RowByRow):
    spec = spec("SaysAnotherBlock")

    def layout(self, spec, fmt, block):
        return KVLayout(16, fmt.layout(spec, block).tensors)


class NoSuchGraph(RowByRow):
    spec = Spec(f"{__name__}:NoSuchGraph", (1, 0), "misspelt", limits=LIMITS, features=ALL, traits={"graph": "all"})
