"""KV formats with faults for many heads, large heads, many tokens or many slots, or whose results are overwritten."""

from __future__ import annotations

import torch

from minivllm.plugins.kvformat.plain import Fp32
from minivllm.registration.spec import ANY, Spec

SEAM = "kvformat"
LARGE = "test_sizes_of_large_models_and_caches"
FAULTS = {
    "OneResult": ("test_what_load_gave_stays_as_it_is",),
    "HeadsPastTheEighth": (LARGE,),
    "ElementsPast160": (LARGE,),
    "TokensPast300": (LARGE,),
    "SlotsIn16Bits": (LARGE,),
    "KeepsWhatItStored": ("test_what_has_ended_leaves_nothing_behind",),
}
RIGHT = ("SevenAtATime",)


def spec(name: str) -> Spec:
    limits = {"device": ANY, "sm": ANY, "dtype": ANY, "holds": {"float32", "bfloat16", "float16"}}
    return Spec(f"{__name__}:{name}", (1, 0), "for a test of the kit", limits=limits)


class OneResult(Fp32):
    """Loaded values of one shape are always in the same memory."""

    spec = spec("OneResult")

    def __init__(self, *args):
        super().__init__(*args)
        self.space = {}

    def load(self, cache, blocks, dtype):
        loaded = super().load(cache, blocks, dtype)
        keys = [(i, tuple(x.shape), dtype) for i, x in enumerate(loaded)]
        return [self.space.setdefault(key, torch.empty_like(x)).copy_(x) for key, x in zip(keys, loaded, strict=True)]


class HeadsPastTheEighth(Fp32):
    """Stores eight heads."""

    spec = spec("HeadsPastTheEighth")

    def store(self, cache, k, v, slots):
        k = k.clone()
        k[:, 8:] = 0
        super().store(cache, k, v, slots)


class ElementsPast160(Fp32):
    spec = spec("ElementsPast160")

    def store(self, cache, k, v, slots):
        v = v.clone()
        v[..., 160:] = 0
        super().store(cache, k, v, slots)


class TokensPast300(Fp32):
    spec = spec("TokensPast300")

    def store(self, cache, k, v, slots):
        super().store(cache, k[:300], v[:300], slots[:300])


class SlotsIn16Bits(Fp32):
    spec = spec("SlotsIn16Bits")

    def store(self, cache, k, v, slots):
        super().store(cache, k, v, slots % (1 << 16))


class KeepsWhatItStored(Fp32):
    """In case that it has to be stored again."""

    spec = spec("KeepsWhatItStored")

    def store(self, cache, k, v, slots):
        self.stored = [*getattr(self, "stored", ()), k.clone()]
        super().store(cache, k, v, slots)


class SevenAtATime(Fp32):
    """Right."""

    spec = spec("SevenAtATime")

    def store(self, cache, k, v, slots):
        for at in range(0, len(slots), 7):
            super().store(cache, *(x[at : at + 7] for x in (k, v, slots)))
