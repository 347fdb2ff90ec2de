"""Attention back ends that keep data of a step and recognize the step by its tensors, or whose running softmax stops
too early.

Each has one fault.
"""

from __future__ import annotations

from functools import partial

import torch

from .attention import RowByRow, spec

SEAM = "attention"
STEPS = "test_steps_of_one_shape_over_other_blocks"
RISE = "test_scores_that_rise_along_a_long_context"
FAULTS = {
    "TableById": (STEPS,),
    "PeakOf32Blocks": (RISE,),
    "SlotsByAddress": (STEPS,),
    "PeakOf2048Keys": (RISE,),
    "TableByAddress": (STEPS,),
    "LengthsById": (STEPS,),
    "SumsAreNotScaled": (RISE,),
    "PeakOfTheLastBlock": (RISE,),
}
RIGHT = ("Running",)
spec = partial(spec, module=__name__)


class Keeps(RowByRow):
    """Copies a tensor of the metadata once, to the host."""

    def __init__(self, options, ctx):
        super().__init__(options, ctx)
        self.copies = {}

    def name(self, tensor):
        return id(tensor)

    def copied(self, tensor):
        if self.name(tensor) not in self.copies:
            self.copies[self.name(tensor)] = tensor, tensor.clone()  # the first keeps its id from others
        return self.copies[self.name(tensor)][1]


class TableById(Keeps):
    """The block table is read once: there is one tensor for it."""

    spec = spec("TableById")

    def slots(self, layer, meta, row, positions):
        blocks = self.copied(meta.table)[layer.group, meta.slots[row], positions // meta.block].long()
        return blocks * meta.block + positions % meta.block


class TableByAddress(TableById):
    spec = spec("TableByAddress")

    def name(self, tensor):
        return tensor.data_ptr(), tensor.shape


class SlotsByAddress(Keeps):
    spec = spec("SlotsByAddress")

    def name(self, tensor):
        return tensor.data_ptr(), tensor.shape

    def slots(self, layer, meta, row, positions):
        blocks = meta.table[layer.group, self.copied(meta.slots)[row], positions // meta.block].long()
        return blocks * meta.block + positions % meta.block


class LengthsById(Keeps):
    spec = spec("LengthsById")

    def length(self, layer, meta, row):
        return int(self.copied(meta.kv_len)[layer.group, row])


class Running(RowByRow):
    """Right.  The softmax runs over tiles of 16 keys."""

    spec = spec("Running")
    tile = 16

    def softmax(self, s, sink):
        peak, total = torch.full_like(s[:, :1], -1e30), torch.zeros_like(s[:, :1])
        for i, part in enumerate(s.split(self.tile, dim=1)):
            new = self.peak(i, peak, part)
            total = total * self.scale(i, peak, new) + (part - new).exp().sum(-1, keepdim=True)
            peak = new
        if sink is not None:
            new = torch.maximum(peak, sink)
            total, peak = total * (peak - new).exp() + (sink - new).exp(), new
        return (s - peak).exp() / total, (peak + total.log())[:, 0]

    def peak(self, i, peak, part):
        return torch.maximum(peak, part.amax(-1, keepdim=True))

    def scale(self, i, peak, new):
        return (peak - new).exp()


class PeakOf32Blocks(Running):
    """The maximum of the first 512 keys is used for all keys."""

    spec = spec("PeakOf32Blocks")
    last = 32

    def peak(self, i, peak, part):
        return super().peak(i, peak, part) if i < self.last else peak


class PeakOf2048Keys(PeakOf32Blocks):
    spec = spec("PeakOf2048Keys")
    last = 128


class SumsAreNotScaled(Running):
    """The sums are rescaled in the first loop but not in the second."""

    spec = spec("SumsAreNotScaled")

    def scale(self, i, peak, new):
        return super().scale(i, peak, new) if i < 20 else torch.ones_like(peak)


class PeakOfTheLastBlock(Running):
    """The maximum begins anew in a loop of its own, and the sums so far lose their scale if the new maximum is
    smaller.
    """

    spec = spec("PeakOfTheLastBlock")

    def peak(self, i, peak, part):
        return part.amax(-1, keepdim=True).clamp(min=-1e30) if i >= 32 else super().peak(i, peak, part)
