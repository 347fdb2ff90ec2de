"""Attention back ends that are right when they run alone and wrong on a device that runs behind the host, or in
captures.

Each has one fault, which is also visible on a CPU.
"""

from __future__ import annotations

from functools import partial

import torch

from minivllm.core.interfaces.attention import AttentionBackend
from minivllm.registration.spec import Spec

from .attention import LIMITS, RowByRow
from .attention import spec as any_spec

SEAM = "attention"
ANSWER = "test_any_steps_give_the_answer_of_the_definition"
BORDER = "test_rows_end_at_either_side_of_a_block_border"
NULL = "test_the_null_block_is_never_multiplied"
GRAPH = "test_a_captured_step_replays_on_new_data"
FAULTS = {
    "SeesByThePlaceInTheTables": ("test_where_the_rotary_tables_have_a_token_says_nothing_of_what_it_sees",),
    "ReadsBelowTheWindow": (NULL,),
    "WholeFirstTile": (NULL,),
    "PaddingInTheSum": (NULL,),
    "TableOfTheCapture": (GRAPH,),
    "LengthsOfTheCapture": (GRAPH,),
    "RowsOfTheHost": (GRAPH,),
    "TokensBehindTheLastRow": (GRAPH,),
    "ScratchOfALongerRow": (ANSWER, BORDER),
}
RIGHT = ("Gathered",)
SMALL = {**LIMITS, "dtype": {"float32"}, "kv_format": {"fp32"}, "dim_qk": {16}, "dim_v": {16}, "block": {4, 16}}


def spec(name):
    return Spec(
        f"{__name__}:{name}",
        (1, 3),
        "for a test of the kit",
        limits=SMALL,
        features=frozenset({"window"}),
        traits={"graph": "mixed", "plan": "device"},
    )


class Gathered(AttentionBackend):
    """Right.  For each token it gathers all positions up to the host's bound, and masks them by the device's lengths.

    Nothing waits for the device, so a step can be captured.
    """

    spec = spec("Gathered")

    def forward(self, layer, q, meta, out, lse=None):
        if lse is not None:
            raise NotImplementedError("gathered gives its result only")
        spec, group = layer.spec, layer.group
        key = torch.arange(self.longest(meta, group), device=q.device)
        row = self.row(meta)
        position = self.position(meta, group, row)[:, None]
        table = self.table(meta)[group, meta.slots[row]]
        index = (key // meta.block).clamp(max=table.shape[1] - 1)
        at = table[:, index].long() * meta.block + key % meta.block  # [T, keys]
        seen = (key <= position) & (key < self.lengths(meta, group)[row][:, None])
        if spec.window is not None:
            seen &= key > position - spec.window
        k, v = (x.flatten(0, 1)[at] for x in (layer.cache["k"], layer.cache["v"]))
        k = k.masked_fill(~seen[..., None, None], 0)
        v = self.values(v, seen, table[:, index], position, spec)
        queries = q.reshape(len(q), spec.kv_heads, -1, spec.dim_qk)
        s = torch.einsum("tkgd,tnkd->tkgn", queries, k) * spec.softmax_scale
        p = s.masked_fill(~seen[:, None, None], -1e30).softmax(-1) * seen[:, None, None]
        out.copy_(torch.einsum("tkgn,tnkd->tkgd", p, v).flatten(1, 2))

    def longest(self, meta, group):
        return int(meta.host_kv_len[group].max())

    def lengths(self, meta, group):
        return meta.kv_len[group]

    def row(self, meta):
        return meta.row

    def position(self, meta, group, row):
        """The queries of a row are the last ones of its context."""
        here = torch.arange(len(meta.row), device=meta.row.device)
        return self.lengths(meta, group)[row] - meta.cu_q[row + 1] + here

    def table(self, meta):
        return meta.table

    def values(self, v, seen, blocks, position, spec):
        return v.masked_fill(~seen[..., None, None], 0)


# ---- the null block -------------------------------------------------------------------------------------------------


class SeesByThePlaceInTheTables(Gathered):
    spec = spec("SeesByThePlaceInTheTables")

    def position(self, meta, group, row):
        return meta.position


class ReadsBelowTheWindow(Gathered):
    """Keys before the window have a probability of 0, but are multiplied by it."""

    spec = spec("ReadsBelowTheWindow")

    def values(self, v, seen, blocks, position, spec):
        key = torch.arange(seen.shape[1], device=v.device)
        return v.masked_fill((key > position)[..., None, None], 0)


class WholeFirstTile(Gathered):
    """Tiles begin at multiples of 32, and the tile in which a window begins is read from its first key on."""

    spec = spec("WholeFirstTile")

    def values(self, v, seen, blocks, position, spec):
        key = torch.arange(seen.shape[1], device=v.device)
        first = (position - (spec.window or 1 << 30) + 1).clamp(min=0) // 32 * 32
        return v.masked_fill(((key > position) | (key < first))[..., None, None], 0)


class PaddingInTheSum(Gathered):
    """A batch is as long as its longest row, and missing keys of shorter rows are read from the null block."""

    spec = spec("PaddingInTheSum")

    def values(self, v, seen, blocks, position, spec):
        return v.masked_fill(~seen[..., None, None] & (blocks != 0)[..., None, None], 0)


# ---- captures -------------------------------------------------------------------------------------------------------


class TableOfTheCapture(Gathered):
    """Replays read a copy of the block table from the time of the capture."""

    spec = spec("TableOfTheCapture")

    def plan(self, meta, key):
        kept = self.__dict__.setdefault("kept", {})
        if key.kind != "eager" and key not in kept:
            kept[key] = meta.table.clone()
        self.now = kept.get(key)

    def table(self, meta):
        return meta.table if self.now is None else self.now


class LengthsOfTheCapture(Gathered):
    """The length that the host named at the capture is taken for each row's own."""

    spec = spec("LengthsOfTheCapture")

    def plan(self, meta, key):
        self.captured = key.kind != "eager"

    def lengths(self, meta, group):
        if not self.captured:
            return meta.kv_len[group]
        return torch.from_numpy(meta.host_kv_len[group]).to(meta.row.device)


class RowsOfTheHost(Gathered):
    """Tokens are assigned to rows by the host's row lengths, which are only bounds in a capture."""

    spec = spec("RowsOfTheHost")

    def row(self, meta):
        lengths = torch.from_numpy(meta.host_q_len.astype("int64"))
        row = torch.repeat_interleave(torch.arange(len(lengths)), lengths)[: len(meta.row)]
        return row.to(meta.row.device)


class TokensBehindTheLastRow(Gathered):
    """The padding tokens of a capture are stored in the block where the first row begins."""

    spec = spec("TokensBehindTheLastRow")

    def write(self, layer, q, k, v, meta, pre):
        slots = meta.slot_map[layer.group]
        first = meta.table[layer.group, meta.slots[0], 0].long() * meta.block
        behind = torch.arange(len(slots), device=slots.device) >= meta.cu_q[-1]
        self.ctx.kv_format.store(layer.cache, k, v, torch.where(behind, first, slots))
        return q


class ScratchOfALongerRow(RowByRow):
    """Partial sums are in one buffer, and a row adds all of them, including sums of a longer row before it."""

    spec = partial(any_spec, module=__name__)("ScratchOfALongerRow", frozenset({"window"}))

    def softmax(self, s, sink):
        self.parts = []
        return super().softmax(s, sink)

    def mixed(self, p, v, dtype):
        scratch = self.__dict__.setdefault("scratch", {})
        for i, (a, b) in enumerate(zip(p.split(16, 1), v.split(16, 0), strict=True)):
            scratch[i, a.shape[0], b.shape[1]] = a @ b
        return sum(x for (_, n, dim), x in scratch.items() if (n, dim) == (p.shape[0], v.shape[1]))

    def forward(self, layer, q, meta, out, lse=None):
        if lse is not None:
            raise NotImplementedError("gives its result only")
        super().forward(layer, q, meta, out)
