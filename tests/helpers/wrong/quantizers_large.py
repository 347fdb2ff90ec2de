"""Wrong quantizers for large modules and steps, and faults in loading a checkpoint."""

from __future__ import annotations

from dataclasses import replace

import torch

from minivllm.device.layers.linear import part_rows
from minivllm.device.layers.module import check_shape
from minivllm.plugins.quantizer.int8 import Int8Weight

from .quantizers import Faulty, Quantizes
from .quantizers import spec as made

SEAM = "quantizer"
LARGE = "test_large_modules_and_steps_lose_nothing"
LOADS = "test_loading_leaves_the_checkpoint_as_it_is"
FAULTS = {
    "DividesTheCheckpoint": (LOADS,),
    "NoFloat64": (LOADS,),
    "NoTokensPast512": (LARGE,),
    "NoOutputsPast2048": (LARGE,),
    "InputsIn13Bits": (LARGE,),
}
RIGHT = ()


def spec(name):
    return replace(made(name), impl=f"{__name__}:{name}")


class DividesTheCheckpoint(Faulty):
    """A tensor of float32 is not copied by ``float()``."""

    spec = spec("DividesTheCheckpoint")

    class made(Quantizes):
        def load(self, param, tensor, part):
            rows = part_rows(self.info, part)
            check_shape(tensor, self.weight[rows].shape)
            w = tensor.to(self.weight.device).float()
            self.scale[rows] = self.scale_of(w)
            self.weight[rows] = self.whole(w.div_(self.scale[rows, None])).to(torch.int8)


class NoFloat64(Faulty):
    spec = spec("NoFloat64")

    class made(Int8Weight):
        def load(self, param, tensor, part):
            super().load(param, {2: tensor.float(), 4: tensor}[tensor.element_size()], part)


class _Loses(Int8Weight):
    """``lose(y)`` [T, out] writes to a product."""

    def apply(self, x, out=None, adapter=None):
        y = super().apply(x, out, adapter)
        self.lose(y)
        return y


class NoTokensPast512(Faulty):
    spec = spec("NoTokensPast512")

    class made(_Loses):
        def lose(self, y):
            y[512:] = 0


class NoOutputsPast2048(Faulty):
    spec = spec("NoOutputsPast2048")

    class made(_Loses):
        def lose(self, y):
            y[:, 2048:] = 0


class InputsIn13Bits(Faulty):
    spec = spec("InputsIn13Bits")

    class made(Int8Weight):
        def apply(self, x, out=None, adapter=None):
            x = x.clone()
            x[:, 8192:] = 0
            return super().apply(x, out, adapter)
