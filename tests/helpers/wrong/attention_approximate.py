"""Approximate back ends with one fault each, and right ones."""

from __future__ import annotations

import torch

from minivllm.core.interfaces.attention import AttentionBackend
from minivllm.registration.spec import ANY, MultipleOf, Spec

SEAM = "attention"
LONG = "test_long_rows_are_exact_over_the_keys_that_are_selected"
NUMBER = "test_the_number_of_selected_keys_is_declared_and_smaller_than_all"
OWN = "test_a_selection_depends_on_its_own_row_alone"
FAULTS = {
    "ReadsOneMore": (LONG,),
    "SelectsMoreThanItSays": (LONG,),
    "SaysNothing": (LONG,),
    "SelectsNothing": (LONG,),
    "NaNWhereNothingFits": (LONG,),
    "LooksAhead": (LONG,),
    "SelectsAll": (NUMBER,),
    "MostOfNothing": (NUMBER,),
    "ByTheLongestRow": (OWN,),
    "OneMaskForAllRows": (LONG,),
    "NumbersForBools": (LONG,),
}
RIGHT = ("LastKeys",)


def spec(name: str) -> Spec:
    limits = dict.fromkeys(("device", "sm", "dim_qk", "dim_v", "queries_per_kv"), ANY)
    limits |= {"dtype": {"float32"}, "kv_format": {"fp32"}, "block": MultipleOf(1)}
    traits = {"graph": "none", "approximate": True}
    return Spec(f"{__name__}:{name}", (1, 5), "for a test of the kit", limits=limits, traits=traits)


class LastKeys(AttentionBackend):
    """Right.  Every query attends to the 20 keys before it, and to the first key."""

    spec, most, reads = spec("LastKeys"), 21, 0

    def most_keys(self, visible, queries):
        return min(visible, self.most)

    def mask(self, q, k, meta, row):
        n, length = len(q), len(k)
        key, query = torch.arange(length), torch.arange(length - n, length)[:, None]
        return ((key <= query) & ((key > query - 20) | (key == 0)))[:, None].expand(n, q.shape[1], length)

    def rows(self, layer, q, meta):
        start = 0
        for row, n in enumerate(meta.host_q_len.tolist()):
            length = max(int(meta.kv_len[layer.group, row]), n)
            blocks = meta.table[layer.group, meta.slots[row], : -(-length // meta.block)].long()
            k, v = self.ctx.kv_format.load(layer.cache, blocks, torch.float32)
            yield (
                slice(start, start + n),
                k[:length],
                v[:length],
                self.mask(q[start : start + n], k[:length], meta, row),
            )
            start += n

    def selected(self, layer, q, meta):
        return [mask for _, _, _, mask in self.rows(layer, q, meta)]

    def forward(self, layer, q, meta, out, lse=None):
        if lse is not None:
            raise NotImplementedError("lse is not claimed")
        group = layer.spec.heads // layer.spec.kv_heads
        for at, k, v, mask in self.rows(layer, q, meta):
            k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
            s = torch.einsum("qhd,khd->hqk", q[at], k) * layer.spec.softmax_scale
            p = s.masked_fill(~self.read(mask).transpose(0, 1), -torch.inf).softmax(-1)
            out[at] = torch.einsum("hqk,khd->qhd", p, v)

    def read(self, mask):
        return mask


class ReadsOneMore(LastKeys):
    """Attends to the second key too, and does not declare it."""

    spec = spec("ReadsOneMore")

    def read(self, mask):
        more = mask.clone()
        more[..., 1 : 2 * (mask.shape[-1] > 2 * mask.shape[0])] = True
        return more


class SelectsMoreThanItSays(LastKeys):
    spec, most = spec("SelectsMoreThanItSays"), 20


class SaysNothing(LastKeys):
    spec = spec("SaysNothing")
    selected = AttentionBackend.selected


class SelectsNothing(LastKeys):
    """Of long contexts, and answers zeros."""

    spec = spec("SelectsNothing")

    def mask(self, q, k, meta, row):
        return super().mask(q, k, meta, row) & (len(k) < 200)

    def forward(self, layer, q, meta, out, lse=None):
        super().forward(layer, q, meta, out, lse)
        out.nan_to_num_(0.0)


class NaNWhereNothingFits(SelectsNothing):
    spec = spec("NaNWhereNothingFits")
    forward = LastKeys.forward


class LooksAhead(LastKeys):
    """The first query of a chunk attends to the key of the second one."""

    spec = spec("LooksAhead")

    def mask(self, q, k, meta, row):
        mask = super().mask(q, k, meta, row).clone()
        if len(q) > 1:
            mask[0, :, len(k) - len(q) + 1] = True
        return mask


class SelectsAll(LastKeys):
    """Exact attention."""

    spec, most = spec("SelectsAll"), 1 << 60

    def mask(self, q, k, meta, row):
        n, length = len(q), len(k)
        return (torch.arange(length) <= torch.arange(length - n, length)[:, None])[:, None].expand(n, q.shape[1], -1)


class MostOfNothing(LastKeys):
    """A budget that may be 0."""

    spec = spec("MostOfNothing")

    def most_keys(self, visible, queries):
        return min(visible // 2, self.most)


class ByTheLongestRow(LastKeys):
    """Selects by the size of the queries of the whole step."""

    spec = spec("ByTheLongestRow")

    def rows(self, layer, q, meta):
        self.wide = float(q.abs().max()) > 12
        return super().rows(layer, q, meta)

    def mask(self, q, k, meta, row):
        mask = super().mask(q, k, meta, row).clone()
        if self.wide and len(k) > 40:
            mask[..., 0] = False
        return mask


class OneMaskForAllRows(LastKeys):
    """Gives the selection of the first row for each."""

    spec = spec("OneMaskForAllRows")

    def selected(self, layer, q, meta):
        found = super().selected(layer, q, meta)
        return [found[0]] * len(found)


class NumbersForBools(LastKeys):
    spec = spec("NumbersForBools")

    def selected(self, layer, q, meta):
        return [mask.float() for mask in super().selected(layer, q, meta)]
