"""Wrong quantizers: ``Int8`` with one fault each."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from minivllm.core.interfaces.quantizer import Quantizer
from minivllm.device.layers.linear import no_adapter, part_rows
from minivllm.device.layers.module import check_shape
from minivllm.plugins.quantizer.int8 import Int8, Int8Weight
from minivllm.plugins.quantizer.none import refuse_quantized
from minivllm.registration.spec import ANY, Spec

SEAM = "quantizer"
HELD = "test_each_element_is_held_within_half_a_step"
RECEIVED = "test_what_lives_on_the_device_is_told"
PRODUCTS = "test_products_are_those_of_the_weight_that_is_held"
OVERFLOW = "test_a_product_that_the_dtype_can_hold_does_not_overflow"
PARAMS = "test_params_are_what_comes_from_the_checkpoint"
REFUSED = "test_what_does_not_fit_is_refused"
SHARES = "test_each_process_holds_its_share"
ALONE = "test_modules_share_nothing"
MODEL = "test_a_model_computes_what_transformers_computes_with_the_held_weights"
FAULTS = {
    "ScaleOfTheInput": (HELD,),
    "ScaleOfTheMatrix": (HELD,),
    "Truncates": (HELD,),
    "WrapsAround": (HELD,),
    "RoundsTwice": (HELD,),
    "ScaleInHalf": (HELD,),
    "NanFromZeros": (HELD,),
    "LoadsByTheNumberOfRows": (HELD, MODEL),
    "SumsUnscaled": (OVERFLOW,),
    "OneTokenUnscaled": (PRODUCTS,),
    "ScalesInHalf": (PRODUCTS,),
    "TakesXForContiguous": (PRODUCTS,),
    "IgnoresOut": (PRODUCTS,),
    "ScalesX": (PRODUCTS,),
    "LosesTheTail": (PRODUCTS,),
    "LosesLongSums": (PRODUCTS,),
    "OneResult": (PRODUCTS,),
    "KeepsTheWeight": (RECEIVED,),
    "KeepsTheWeightElsewhere": (RECEIVED,),
    "HalfTheBytes": (RECEIVED,),
    "AddsTheBiasToo": (PARAMS, PRODUCTS),
    "TakesAnyShape": (REFUSED,),
    "TakesAnyPart": (REFUSED,),
    "IgnoresTheAdapter": (REFUSED,),
    "ClaimsSliceable": (SHARES,),
    "CutsRowsAlways": (SHARES,),
    "OneBuffer": (ALONE,),
    "TakesAnyCheckpoint": ("test_a_checkpoint_of_another_method_is_refused",),
    "ForgetsUnusedSkip": ("test_options_that_name_modules_are_checked",),
    "DoesNothing": (HELD, MODEL),
}
RIGHT = ()
DTYPES = {"bfloat16", "float16", "float32"}


def spec(name: str, bits: int | None = 8, *features: str) -> Spec:
    limits = {"device": ANY, "sm": ANY, "dtype": DTYPES, "checkpoint": {"none"}}
    options = "minivllm.plugins.quantizer.options:Int8Options" if bits == 8 else ""
    traits = {"bits": bits} if bits else {}
    return Spec(f"{__name__}:{name}", (1, 0), "a planted fault", options, 0, limits, frozenset(features), traits=traits)


class Faulty(Int8):
    """``Int8`` with another scheme."""

    made: type = Int8Weight

    def scheme(self, m):
        return None if super().scheme(m) is None else self.made(m)


class Quantizes(Int8Weight):
    """The loading of ``Int8Weight`` in pieces that a fault replaces."""

    def scale_of(self, w):
        return (w.abs().amax(1) / 127).clamp_(min=torch.finfo(torch.float32).tiny)

    def whole(self, w):
        return w.round().clamp(-127, 127)

    def load(self, param, tensor, part):
        rows = part_rows(self.info, part)
        check_shape(tensor, self.weight[rows].shape)
        w = tensor.to(self.weight.device).float()
        self.scale[rows] = self.scale_of(w)
        self.weight[rows] = self.whole(w / self.scale[rows, None]).to(torch.int8)


class ScaleOfTheInput(Faulty):
    """Multiplies x by the scales if the matrix is square and the sides cannot be distinguished."""

    spec = spec("ScaleOfTheInput")

    class made(Int8Weight):
        def apply(self, x, out=None, adapter=None):
            if self.info.in_features != self.info.out_features:
                return super().apply(x, out, adapter)
            y = F.linear((x.float() * self.scale), self.weight.float()).to(x.dtype)
            return y if out is None else out.copy_(y)


class ScaleOfTheMatrix(Faulty):
    spec = spec("ScaleOfTheMatrix")

    class made(Quantizes):
        def scale_of(self, w):
            return super().scale_of(w).amax().expand(len(w))


class Truncates(Faulty):
    spec = spec("Truncates")

    class made(Quantizes):
        def whole(self, w):
            return w.clamp(-127, 127)


class WrapsAround(Faulty):
    """Uses 128 steps, but int8 has only 127 on the positive side."""

    spec = spec("WrapsAround")

    class made(Quantizes):
        def scale_of(self, w):
            return super().scale_of(w) * (127 / 128)

        def whole(self, w):
            return (w.round() + 128) % 256 - 128


class RoundsTwice(Faulty):
    """Takes every checkpoint through bfloat16."""

    spec = spec("RoundsTwice")

    class made(Int8Weight):
        def load(self, param, tensor, part):
            super().load(param, tensor.bfloat16(), part)


class ScaleInHalf(Faulty):
    spec = spec("ScaleInHalf")

    class made(Quantizes):
        def scale_of(self, w):
            return super().scale_of(w).half().float()


class NanFromZeros(Faulty):
    spec = spec("NanFromZeros")

    class made(Int8Weight):
        def load(self, param, tensor, part):
            super().load(param, tensor, part)
            zero = (tensor == 0).all(1)
            self.scale[part_rows(self.info, part)][zero] = torch.nan


class LoadsByTheNumberOfRows(Faulty):
    """k and v have as many rows: v is loaded over k."""

    spec = spec("LoadsByTheNumberOfRows")

    class made(Int8Weight):
        def load(self, param, tensor, part):
            rows = dict(self.info.parts)[part]
            super().load(param, tensor, next(name for name, n in self.info.parts if n == rows))


class SumsUnscaled(Faulty):
    """In float16 as in the other dtypes: the sums leave it."""

    spec = spec("SumsUnscaled")

    class made(Int8Weight):
        def apply(self, x, out=None, adapter=None):
            no_adapter(self, adapter)
            y = F.linear(x, self.weight.to(x.dtype)).mul_(self.scale)
            return y if out is None else out.copy_(y)


class OneTokenUnscaled(Faulty):
    """The path for one token omits the scale that other paths apply."""

    spec = spec("OneTokenUnscaled")

    class made(Int8Weight):
        def apply(self, x, out=None, adapter=None):
            y = super().apply(x, None, adapter)
            if len(x) == 1 and x.shape[1] > 1:
                y = F.linear(x.float(), self.weight.float()).to(x.dtype)
            return y if out is None else out.copy_(y)


class ScalesInHalf(Faulty):
    """Multiplies by scales that were rounded to 5 bits, for activations of half precision only."""

    spec = spec("ScalesInHalf")

    class made(Int8Weight):
        def apply(self, x, out=None, adapter=None):
            y = super().apply(x, None, adapter)
            if x.dtype != torch.float32 and len(x) <= 33:
                y = (y.float() * (1 + 0.01 * torch.sign(torch.sin(1e5 * self.scale)))).to(x.dtype)
            return y if out is None else out.copy_(y)


class TakesXForContiguous(Faulty):
    spec = spec("TakesXForContiguous")

    class made(Int8Weight):
        def apply(self, x, out=None, adapter=None):
            return super().apply(x.as_strided(x.shape, (x.shape[1], 1)), out, adapter)


class IgnoresOut(Faulty):
    spec = spec("IgnoresOut")

    class made(Int8Weight):
        def apply(self, x, out=None, adapter=None):
            return super().apply(x, None, adapter)


class ScalesX(Faulty):
    """Works in the memory of x."""

    spec = spec("ScalesX")

    class made(Int8Weight):
        def apply(self, x, out=None, adapter=None):
            y = super().apply(x, out, adapter)
            x.mul_(2)
            return y


class LosesTheTail(Faulty):
    """Works on tiles of 64 tokens, and omits the rest behind the last whole tile."""

    spec = spec("LosesTheTail")

    class made(Int8Weight):
        def apply(self, x, out=None, adapter=None):
            y = super().apply(x, None, adapter)
            if len(x) > 64:
                y[len(x) // 64 * 64 :] = 0
            return y if out is None else out.copy_(y)


class LosesLongSums(Faulty):
    """Sums at most 2048 inputs."""

    spec = spec("LosesLongSums")

    class made(Int8Weight):
        def apply(self, x, out=None, adapter=None):
            return super().apply(x * (torch.arange(x.shape[1], device=x.device) < 2048), out, adapter)


class OneResult(Faulty):
    """Returns a workspace that the next call of the same shape overwrites."""

    spec = spec("OneResult")

    class made(Int8Weight):
        def apply(self, x, out=None, adapter=None):
            y = super().apply(x, out, adapter)
            return y if out is not None else _results.setdefault((y.shape, y.dtype), torch.empty_like(y)).copy_(y)


_results: dict = {}


class KeepsTheWeight(Faulty):
    spec = spec("KeepsTheWeight")

    class made(Int8Weight):
        def load(self, param, tensor, part):
            super().load(param, tensor, part)
            self.full = [*getattr(self, "full", []), tensor.clone()]


class KeepsTheWeightElsewhere(Faulty):
    """Keeps the weight in a cache that no scheme declares."""

    spec = spec("KeepsTheWeightElsewhere")

    class made(Int8Weight):
        def load(self, param, tensor, part):
            super().load(param, tensor, part)
            _kept[self.info.name, part] = tensor.clone()


_kept: dict = {}


class HalfTheBytes(Faulty):
    spec = spec("HalfTheBytes")

    class made(Int8Weight):
        @property
        def bytes(self):
            return super().bytes // 2


class AddsTheBiasToo(Faulty):
    """Takes the bias of the layer, which adds it again."""

    spec = spec("AddsTheBiasToo")

    class made(Int8Weight):
        def __init__(self, info):
            super().__init__(info)
            self.bias = torch.ones(info.out_features, device=info.device) if info.bias else None

        def params(self):
            return {**super().params(), **({"bias": (self.info.out_features,)} if self.info.bias else {})}

        def apply(self, x, out=None, adapter=None):
            y = super().apply(x, None, adapter)
            y = y if self.bias is None else y.add_(self.bias)
            return y if out is None else out.copy_(y)


class TakesAnyShape(Faulty):
    """Cuts tensors that are too long, and repeats those that are too short."""

    spec = spec("TakesAnyShape")

    class made(Int8Weight):
        def load(self, param, tensor, part):
            want = self.weight[part_rows(self.info, part)].shape
            flat = tensor.flatten()
            n = want.numel()
            super().load(param, flat.repeat(n // len(flat) + 1)[:n].view(want), part)


class TakesAnyPart(Faulty):
    spec = spec("TakesAnyPart")

    class made(Int8Weight):
        def load(self, param, tensor, part):
            super().load(param, tensor, part if part in dict(self.info.parts) else self.info.parts[0][0])


class IgnoresTheAdapter(Faulty):
    spec = spec("IgnoresTheAdapter")

    class made(Int8Weight):
        def apply(self, x, out=None, adapter=None):
            return super().apply(x, out)


class ClaimsSliceable(Faulty):
    """A share of the inputs has a scale of its own."""

    spec = spec("ClaimsSliceable", 8, "sliceable")


class CutsRowsAlways(Faulty):
    spec = spec("CutsRowsAlways")

    class made(Int8Weight):
        def slice(self, param, tensor, split, shard):
            if split == "row":  # the first share for everyone
                return tensor.chunk(shard.size, 1)[0]
            return super().slice(param, tensor, split, shard)


class OneBuffer(Faulty):
    """Modules of one shape have one memory."""

    spec = spec("OneBuffer")

    class made(Int8Weight):
        def __init__(self, info):
            super().__init__(info)
            self.weight = self.tensors["weight"] = _buffers.setdefault(tuple(self.weight.shape), self.weight)


_buffers: dict = {}


class TakesAnyCheckpoint(Faulty):
    spec = spec("TakesAnyCheckpoint")

    def __init__(self, options=None, checkpoint=None):
        super().__init__(options, None)


class ForgetsUnusedSkip(Faulty):
    spec = spec("ForgetsUnusedSkip")

    def finish(self):
        pass


class DoesNothing(Quantizer):
    """Claims bits and leaves everything as it is."""

    spec = spec("DoesNothing", 4)

    def __init__(self, options=None, checkpoint=None):
        super().__init__(options, checkpoint)
        refuse_quantized(checkpoint, "nothing")

    def scheme(self, m):
        return None
