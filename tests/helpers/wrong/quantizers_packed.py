"""Quantizers of other formats, right and wrong: packed int4, groups, a checkpoint that comes quantized."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from minivllm.core.interfaces.quantizer import Quantizer, WeightScheme
from minivllm.device.layers.linear import no_adapter, part_rows
from minivllm.device.layers.module import check_shape
from minivllm.errors import ModelError, PluginError
from minivllm.plugins.quantizer.int8 import Int8Weight
from minivllm.plugins.quantizer.none import refuse_quantized
from minivllm.registration.spec import ANY, Spec

SEAM = "quantizer"
HELD = "test_each_element_is_held_within_half_a_step"
GRID = "test_weights_that_the_format_has_come_back_exactly"
FAULTS = {
    "NibblesTheWrongWay": (HELD, GRID),
    "LosesTheLastInput": (HELD, GRID),
    "ClaimsFewerBits": ("test_what_lives_on_the_device_is_told",),
}
RIGHT = ("Int4", "Transposed", "Groups")


def spec(name: str, bits: int | None, *features: str, checkpoint: str = "none") -> Spec:
    dtypes = {"bfloat16", "float16", "float32"}
    limits = {"device": ANY, "sm": ANY, "dtype": dtypes, "checkpoint": {checkpoint}}
    options = "minivllm.plugins.quantizer.options:Int8Options" if name == "Groups" else ""
    traits = {"bits": bits} if bits else {}
    return Spec(f"{__name__}:{name}", (1, 0), "another format", options, 0, limits, frozenset(features), traits=traits)


class Int4Weight(WeightScheme):
    """Two elements in a byte, the even input in the low half, and one float32 scale per output row."""

    def __init__(self, info):
        self.info, self.width = info, (info.in_features + 1) // 2
        self.packed = torch.zeros(info.out_features, self.width, dtype=torch.uint8, device=info.device)
        self.scale = torch.zeros(info.out_features, 1, device=info.device)
        self.tensors = {"packed": self.packed, "scale": self.scale}

    def params(self):
        return {"weight": (self.info.out_features, self.info.in_features)}

    def pack(self, q):
        return q[:, ::2] | q[:, 1::2] << 4

    def unpack(self):
        return torch.stack((self.packed & 15, self.packed >> 4), -1).flatten(1)[:, : self.info.in_features]

    def load(self, param, tensor, part):
        rows = part_rows(self.info, part)
        n = rows.stop - rows.start
        check_shape(tensor, (n, self.info.in_features))
        w = tensor.to(self.packed.device).float()
        scale = w.abs().amax(1, keepdim=True) / 7
        q = torch.where(scale > 0, w / scale, 0).round().clamp(-7, 7)
        padded = torch.zeros(n, 2 * self.width, dtype=torch.uint8, device=w.device)
        padded[:, : w.shape[1]] = (q + 8).to(torch.uint8)
        self.packed[rows], self.scale[rows] = self.pack(padded), scale

    def weight(self):
        return (self.unpack().float() - 8) * self.scale

    def apply(self, x, out=None, adapter=None):
        no_adapter(self, adapter)
        y = F.linear(x, self.weight().to(x.dtype))
        return y if out is None else out.copy_(y)


class Int4(Quantizer):
    """Right.  Four bits."""

    spec = spec("Int4", 4)
    made: type = Int4Weight

    def __init__(self, options=None, checkpoint=None):
        super().__init__(options, checkpoint)
        refuse_quantized(checkpoint, "int4")

    def scheme(self, m):
        return self.made(m) if m.kind == "linear" else None


class NibblesTheWrongWay(Int4):
    """An odd number of inputs is packed from the other end."""

    spec = spec("NibblesTheWrongWay", 4)

    class made(Int4Weight):
        def pack(self, q):
            return super().pack(q) if self.info.in_features % 2 == 0 else q[:, 1::2] | q[:, ::2] << 4


class LosesTheLastInput(Int4):
    spec = spec("LosesTheLastInput", 4)

    class made(Int4Weight):
        def pack(self, q):
            if self.info.in_features % 2:
                q[:, -2:] = 8
            return super().pack(q)


class ClaimsFewerBits(Int4):
    """Four bits, a byte each."""

    spec = spec("ClaimsFewerBits", 4)

    class made(Int4Weight):
        def __init__(self, info):
            super().__init__(info)
            self.tensors["spare"] = self.packed.clone()


class Transposed(Int4):
    """Right.  The weight is stored transposed without loss, and slices are correct."""

    spec = spec("Transposed", None, "sliceable")

    class made(WeightScheme):
        def __init__(self, info):
            self.info = info
            shape = (info.in_features, info.out_features)
            self.weight = torch.empty(shape, dtype=getattr(torch, info.dtype), device=info.device)
            self.tensors = {"weight": self.weight}

        def params(self):
            return {"weight": (self.info.out_features, self.info.in_features)}

        def load(self, param, tensor, part):
            mine = self.weight[:, part_rows(self.info, part)]
            check_shape(tensor, mine.T.shape)
            mine.copy_(tensor.T)

        def apply(self, x, out=None, adapter=None):
            no_adapter(self, adapter)
            return torch.matmul(x, self.weight, out=out)


class Groups(Int4):
    """Right.  Eight bits with a scale for each 32 inputs, for modules that 32 divides."""

    spec = spec("Groups", 8)

    def __init__(self, options=None, checkpoint=None):
        super().__init__(options, checkpoint)
        self.unused = set(options.skip)

    def scheme(self, m):
        named = {p for p in self.options.skip if m.name.startswith(p.rstrip("*"))}
        self.unused -= named
        fits = m.in_features % 32 == 0 and m.kind != "embedding"
        return _GroupsWeight(m) if fits and not named else None

    def finish(self):
        if self.unused:
            raise PluginError(f"skip={sorted(self.unused)} names no module")


class _GroupsWeight(WeightScheme):
    def __init__(self, info):
        self.info, self.parts = info, {}
        self.tensors = {}

    def params(self):
        return {"weight": (self.info.out_features, self.info.in_features)}

    def load(self, param, tensor, part):
        check_shape(tensor, (dict(self.info.parts)[part], self.info.in_features))
        self.parts[part] = tensor.to(self.info.device).float().unflatten(1, (-1, 32))

    def finish(self):
        w = torch.cat([self.parts.pop(name) for name, _ in self.info.parts])
        scale = w.abs().amax(2, keepdim=True) / 127
        q = (w / scale.clamp(min=torch.finfo(torch.float32).tiny)).round().clamp(-127, 127).to(torch.int8)
        self.tensors = {"q": q, "scale": scale}

    def apply(self, x, out=None, adapter=None):
        no_adapter(self, adapter)
        y = F.linear(x, (self.tensors["q"] * self.tensors["scale"]).flatten(1).to(x.dtype))
        return y if out is None else out.copy_(y)


class Prepacked(Int4):
    """Right.

    It reads a checkpoint of int8 weights and scales, in the layout of ``tests/plugins/test_quantizers.py``.
    """

    spec = spec("Prepacked", 8, checkpoint="prepacked")

    def __init__(self, options=None, checkpoint=None):
        Quantizer.__init__(self, options, checkpoint)
        if (checkpoint or {}).get("quant_method") != "prepacked":
            raise ModelError(f"not a prepacked checkpoint: {checkpoint}")

    class made(Int8Weight):
        def params(self):
            return {"qweight": tuple(self.weight.shape), "scales": (self.info.out_features, 1)}

        def slice(self, param, tensor, split, shard):
            whole = split == "row" and param == "scales"
            return tensor if whole else super().slice(param, tensor, split, shard)

        def load(self, param, tensor, part):
            rows = part_rows(self.info, part)
            target = self.weight[rows] if param == "qweight" else self.scale[rows, None]
            if tensor.shape != target.shape:
                raise ModelError(f"{param} of shape {list(tensor.shape)}, expected {list(target.shape)}")
            target.copy_(tensor)
