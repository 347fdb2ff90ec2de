"""KV formats whose scales have a smaller range than keys and values, and a right one that declares the range."""

from __future__ import annotations

import torch

from minivllm.core.interfaces.kvformat import KVFormat, KVLayout, TensorSpec
from minivllm.registration.spec import ANY, Spec

SEAM = "kvformat"
STORED = "test_what_is_stored_comes_back_and_nothing_else_changes"
FAULTS = {
    "HalfScale": (STORED,),
    "HalfStep": (STORED,),
    "ScaleWithoutFloor": (STORED,),
    "Squares": (STORED,),
    "ByteElements": (STORED,),
    "CountsOnTheHost": ("test_it_does_not_wait_for_the_device",),
}
RIGHT = ("HalfScaleWithinLimits", "BrainScale")
SUITE = {"HalfScaleWithinLimits": {"largest": 60_000.0}}


def spec(name):
    limits = {"device": ANY, "sm": ANY, "dtype": ANY, "holds": frozenset()}
    return Spec(f"{__name__}:{name}", (1, 0), "for a test of the kit", limits=limits)


class Scaled(KVFormat):
    """Eight bits with a scale for each token and head, whose dtype and unit vary."""

    dtype, scales, unit = "int8", "float32", 127

    def layout(self, spec, block):
        plain = super().layout(spec, block).tensors
        return KVLayout(
            block, {**plain, **{f"{n}_scale": TensorSpec((block, spec.kv_heads), self.scales) for n in plain}}
        )

    def size(self, x):
        return x.float().abs().amax(-1)

    def store(self, cache, k, v, slot_map):
        for name, x in (("k", k), ("v", v)):
            if name in cache:
                scale = (self.size(x) * (1 / self.unit)).to(getattr(torch, self.scales))
                step = scale.float() * (self.unit / 127)
                codes = (x.float() / self.positive(step)[..., None]).round().clamp(-127, 127)
                for to, values in ((name, codes), (f"{name}_scale", scale)):
                    cache[to].view(-1, *cache[to].shape[2:])[slot_map] = values.to(cache[to].dtype)

    def positive(self, step):
        return step.clamp(min=1e-37)

    def load(self, cache, blocks, dtype):
        out = []
        for name in ("k", "v" if "v" in cache else "k"):
            step = cache[f"{name}_scale"][blocks].float() * (self.unit / 127)
            out.append(
                (cache[name][blocks].float() * step[..., None]).to(dtype).flatten(blocks.dim() - 1, blocks.dim())
            )
        return tuple(out)


class HalfScale(Scaled):
    """The greatest element of a head in float16: infinite from 65,520 on."""

    spec, scales, unit = spec("HalfScale"), "float16", 1


class HalfStep(Scaled):
    """The step in float16: infinite from 8.3 million on, and 0 for small heads."""

    spec, scales = spec("HalfStep"), "float16"


class HalfScaleWithinLimits(HalfScale):
    """Right.  The test class declares how large its numbers may be, and small numbers have a lower bound."""

    spec = spec("HalfScaleWithinLimits")

    def size(self, x):
        return super().size(x).clamp(min=2e-5)


class BrainScale(Scaled):
    """Right.  A bfloat16 scale that is rounded up, so that no element is clipped."""

    spec, scales, unit = spec("BrainScale"), "bfloat16", 1

    def size(self, x):
        size = super().size(x).contiguous()
        return ((size.view(torch.int32) + 0xFFFF) & ~0xFFFF).view(torch.float32)


class ScaleWithoutFloor(Scaled):
    """Divides by a step of 0 where a head is too small for the step, but not where it is all zeros."""

    spec, scales, dtype = spec("ScaleWithoutFloor"), "float16", "float16"

    def size(self, x):
        return super().size(x).clamp(max=1e6)

    def positive(self, step):
        return step if bool((step > 0).any()) else torch.ones_like(step)


class Squares(Scaled):
    """Takes the norm of a head for its size, by squares that overflow."""

    spec = spec("Squares")

    def size(self, x):
        return x.float().square().sum(-1).sqrt()


class ByteElements(KVFormat):
    """float8 without scales from a cast that wraps: 1e5 comes back as NaN."""

    spec = spec("ByteElements")
    dtype = "float16"

    def store(self, cache, k, v, slot_map):
        for name, x in (("k", k), ("v", v)):
            if name in cache:
                cache[name].view(-1, *cache[name].shape[2:])[slot_map] = (x.float() * 4).half() / 4

    def load(self, cache, blocks, dtype):
        out = [cache[n][blocks].to(dtype) for n in ("k", "v" if "v" in cache else "k")]
        return tuple(x.flatten(blocks.dim() - 1, blocks.dim()) for x in out)


class CountsOnTheHost(Scaled):
    """Stores the rows that are not zero, by a mask."""

    spec = spec("CountsOnTheHost")

    def store(self, cache, k, v, slot_map):
        some = (k != 0).flatten(1).any(1) | (v != 0).flatten(1).any(1) | (slot_map >= 0)
        super().store(cache, k[some], v[some], slot_map[some])
