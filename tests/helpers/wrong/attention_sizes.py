"""Wrong attention back ends: right up to a size, and no further."""

from __future__ import annotations

import torch

from .attention import RowByRow
from .attention import spec as made

SEAM = "attention"
LONG = "test_long_prompts_and_contexts"
FAULTS = {
    "HeadsOfAnyFour": ("test_many_heads_have_keys_of_their_own",),
    "WindowsByTheTile": ("test_a_window_of_any_length_is_exact",),
    "SixteenRows": ("test_many_rows_of_a_step_get_their_own",),
    "MaskOf512": (LONG,),
    "TableOf4500Keys": (LONG,),
    "KeepsItsOutputs": ("test_what_has_ended_leaves_nothing_behind",),
}
RIGHT = ("GrowsAWorkspace",)


def spec(name):
    return made(name, module=__name__)


class HeadsOfAnyFour(RowByRow):
    """The grid has room for four KV heads."""

    spec = spec("HeadsOfAnyFour")

    def kv_head(self, head, group, spec):
        return head // group % 4


class WindowsByTheTile(RowByRow):
    """A window of several tiles of 16 keys begins where a tile does."""

    spec = spec("WindowsByTheTile")

    def hidden(self, spec, n, length):
        if (spec.window or 0) <= 32:
            return super().hidden(spec, n, length)
        key, query = torch.arange(length), torch.arange(length - n, length)[:, None]
        return (key > query) | (key < (query - spec.window + 1).clamp(min=0) // 16 * 16)


class SixteenRows(RowByRow):
    """The grid has room for 16 rows."""

    spec = spec("SixteenRows")

    def keys(self, layer, meta, row, length):
        return super().keys(layer, meta, row % 16, length)


class MaskOf512(RowByRow):
    """The causal mask is made once for 512 queries, and later queries see all keys."""

    spec = spec("MaskOf512")

    def hidden(self, spec, n, length):
        hidden = super().hidden(spec, n, length)
        hidden[512:] = hidden[-1]
        return hidden


class TableOf4500Keys(RowByRow):
    """There is memory for partial sums of 4,500 keys, and for longer rows the first ones are lost."""

    spec = spec("TableOf4500Keys")

    def hidden(self, spec, n, length):
        hidden = super().hidden(spec, n, length)
        return hidden | (torch.arange(length) < length - 4500)


class KeepsItsOutputs(RowByRow):
    """For a look at them later."""

    spec = spec("KeepsItsOutputs")

    def forward(self, layer, q, meta, out, *more):
        self.made = [*getattr(self, "made", ()), out]
        super().forward(layer, q, meta, out, *more)


class GrowsAWorkspace(RowByRow):
    """Right.  Partial results are in its own memory, which grows with the largest step."""

    spec = spec("GrowsAWorkspace")
    space = torch.empty(0)

    def mixed(self, p, v, dtype):
        n = p.shape[0] * v.shape[-1]
        if self.space.numel() < n:
            self.space = torch.empty(n)
        return torch.matmul(p, v, out=self.space[:n].view(p.shape[0], -1))
