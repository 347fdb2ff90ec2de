"""Wrong quantizers that store more than they declare once they are used, and right ones with many scales."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F

from minivllm.device.layers.linear import no_adapter
from minivllm.plugins.quantizer.int8 import Int8Weight

from . import quantizers, quantizers_packed
from .quantizers import Faulty
from .quantizers_packed import Int4, Int4Weight

SEAM = "quantizer"
RECEIVED = "test_what_lives_on_the_device_is_told"
PRODUCTS = "test_products_are_those_of_the_weight_that_is_held"
FAULTS = {
    "DenseOnTheFirst": (RECEIVED,),
    "DenseForMany": (RECEIVED,),
    "BytesOnTheFirst": (RECEIVED,),
    "XByAddress": (PRODUCTS,),
    "ScalesOfThreeBits": (RECEIVED,),
    "DenseOnTheHost": (RECEIVED,),
    "DenseElsewhere": (RECEIVED,),
    "TensorsOnTheFirst": (RECEIVED,),
    "XById": (PRODUCTS,),
    "BytesOfFourBits": (RECEIVED,),
}
RIGHT = ("BitAndAHalfOfScales", "TwoPlanes")


def spec8(name):
    return replace(quantizers.spec(name), impl=f"{__name__}:{name}")


def spec4(name, bits=4):
    return replace(quantizers_packed.spec(name, bits), impl=f"{__name__}:{name}")


class Dense(Int8Weight):
    """Unpacks the weight when it is first needed, and keeps it."""

    dense = None
    most = 0  # tokens up to which it is unpacked anew

    def apply(self, x, out=None, adapter=None):
        no_adapter(self, adapter)
        if len(x) <= self.most:
            return super().apply(x, out, adapter)
        if self.dense is None:
            self.keep((self.weight.float() * self.scale[:, None]).to(x.dtype))
        y = F.linear(x, self.kept())
        return y if out is None else out.copy_(y)

    def keep(self, dense):
        self.dense = dense

    def kept(self):
        return self.dense


class DenseOnTheFirst(Faulty):
    spec = spec8("DenseOnTheFirst")
    made = Dense


class DenseForMany(Faulty):
    """For steps of many tokens only."""

    spec = spec8("DenseForMany")

    class made(Dense):
        most = 128


class DenseOnTheHost(Faulty):
    """An array of numpy is no tensor."""

    spec = spec8("DenseOnTheHost")

    class made(Dense):
        def keep(self, dense):
            self.dense = dense.float().numpy().copy()

        def kept(self):
            return torch.from_numpy(self.dense.copy())


class DenseElsewhere(Faulty):
    """Keeps the weight in a dictionary of the module, which is not counted."""

    spec = spec8("DenseElsewhere")

    class made(Dense):
        everywhere: dict = {}

        def keep(self, dense):
            self.dense = True
            self.everywhere[id(self)] = dense

        def kept(self):
            return self.everywhere[id(self)]


class TensorsOnTheFirst(Faulty):
    """Adds it to ``tensors``, when the memory for the KV cache has been counted."""

    spec = spec8("TensorsOnTheFirst")

    class made(Dense):
        def keep(self, dense):
            self.tensors = {**self.tensors, "dense": dense}
            self.dense = dense


class BytesOnTheFirst(Faulty):
    """``bytes`` is computed once, before the first product, and not updated."""

    spec = spec8("BytesOnTheFirst")

    class made(Int8Weight):
        more = 0

        def apply(self, x, out=None, adapter=None):
            self.more = 4096
            return super().apply(x, out, adapter)

        @property
        def bytes(self):
            return sum(t.nbytes for t in self.tensors.values()) + self.more


class XByAddress(Faulty):
    """Reuses results for inputs at an address that it has seen before."""

    spec = spec8("XByAddress")

    class made(Int8Weight):
        known = None

        def name(self, x):
            return x.data_ptr(), x.shape, x.stride()

        def apply(self, x, out=None, adapter=None):
            if self.known is None or self.known[0] != self.name(x) or len(x) == 1:
                self.known = self.name(x), x, super().apply(x, None, adapter)
            return self.known[2].clone() if out is None else out.copy_(self.known[2])


class XById(XByAddress):
    spec = spec8("XById")

    class made(XByAddress.made):
        def name(self, x):
            return id(x)


class Grouped(Int4Weight):
    """Scales that are kept for 16 inputs, all alike."""

    scales = torch.float16, torch.uint8

    def __init__(self, info):
        super().__init__(info)
        groups = -(-info.in_features // 16)
        for i, dtype in enumerate(self.scales):
            self.tensors[f"of_groups_{i}"] = torch.ones(info.out_features, groups, dtype=dtype, device=info.device)


class BitAndAHalfOfScales(Int4):
    """Right.  A float16 scale and a one-byte zero point for 16 inputs."""

    spec = spec4("BitAndAHalfOfScales")
    made = Grouped


class TwoPlanes(Int4):
    """Right.  The low and the high half of each byte are in separate tensors."""

    spec = spec4("TwoPlanes")

    class made(Int4Weight):
        def __init__(self, info):
            super().__init__(info)
            self.halves = None

        def finish(self):
            low, high = (self.packed & 0x33).clone(), (self.packed & 0xCC).clone()
            even = lambda x: x[: x.numel() // 2 * 2]  # noqa: E731
            both = [x.flatten() for x in (low, high >> 2)]
            pad = [F.pad(x, (0, x.numel() % 2)) for x in both]
            self.shape, self.packed = self.packed.shape, None
            self.tensors = {"scale": self.scale}
            for name, x in zip(("low", "high"), pad, strict=True):
                x = even(x).view(-1, 2)
                self.tensors[name] = x[:, 0] | x[:, 1] << 2

        def unpack(self):
            low, high = (
                torch.stack((self.tensors[n] & 0x33, self.tensors[n] >> 2 & 0x33), 1).flatten() for n in ("low", "high")
            )
            n = self.shape.numel()
            packed = (low[:n] | high[:n] << 2).view(self.shape)
            return torch.stack((packed & 15, packed >> 4), -1).flatten(1)[:, : self.info.in_features]


class ScalesOfThreeBits(Int4):
    """More of scales than anyone needs."""

    spec = spec4("ScalesOfThreeBits")

    class made(Grouped):
        scales = torch.float32, torch.float16


class BytesOfFourBits(Int4):
    """Claims three bits."""

    spec = spec4("BytesOfFourBits", 3)
