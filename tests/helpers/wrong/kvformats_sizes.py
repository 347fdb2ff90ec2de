"""KV formats that support some sizes only, and wrong ones that recognize a step by its tensors."""

from __future__ import annotations

from minivllm.errors import ConfigError
from minivllm.plugins.kvformat.plain import Fp32
from minivllm.registration.spec import ANY, Spec

SEAM = "kvformat"
STORED = "test_what_is_stored_comes_back_and_nothing_else_changes"
SINGLY = "test_one_slot_after_another_is_the_same_as_all_at_once"
LAYOUT = "test_the_layout_says_what_is_allocated"
FAULTS = {
    "SlotsById": (SINGLY,),
    "KeysByAddress": (SINGLY,),
    "RefusesAll": (STORED, LAYOUT),
    "RefusesWithoutWords": (STORED,),
    "Trips": (STORED, LAYOUT),
}
RIGHT = ("SixteenAtATime", "OnlyOneSize", "NoneInTheKeys")
SUITE = {"OnlyOneSize": {"dims": (64,), "kv_heads": (2,), "blocks": (16,)}}


def spec(name: str) -> Spec:
    limits = {"device": ANY, "sm": ANY, "dtype": ANY, "holds": {"float32", "bfloat16", "float16"}}
    return Spec(f"{__name__}:{name}", (1, 0), "for a test of the kit", limits=limits)


class SixteenAtATime(Fp32):
    """Right.  It supports heads of multiples of 16 elements, and declares this."""

    spec = spec("SixteenAtATime")

    def layout(self, spec, block):
        if spec.dim_qk % 16 or spec.dim_v % 16 or block % 4:
            raise ConfigError(f"head size {spec.dim_qk} in blocks of {block}: expected multiples of 16 and of 4")
        return super().layout(spec, block)


class OnlyOneSize(Fp32):
    """Right.  It supports one size, which its test class declares."""

    spec = spec("OnlyOneSize")

    def layout(self, spec, block):
        assert (spec.kv_heads, spec.dim_qk, spec.dim_v, block) == (2, 64, 64, 16)
        return super().layout(spec, block)


class NoneInTheKeys(Fp32):
    """Right.  Keys and values have one size and are in separate tensors."""

    spec = spec("NoneInTheKeys")

    def layout(self, spec, block):
        if spec.v_in_k or spec.dim_v != spec.dim_qk:
            raise ConfigError("expected values as large as the keys, and not in them")
        return super().layout(spec, block)


class RefusesAll(Fp32):
    spec = spec("RefusesAll")

    def layout(self, spec, block):
        raise ConfigError("not today")


class RefusesWithoutWords(Fp32):
    spec = spec("RefusesWithoutWords")

    def layout(self, spec, block):
        if spec.dim_qk % 2:
            raise ConfigError("")
        return super().layout(spec, block)


class Trips(Fp32):
    """Falls over heads that it does not take, where a user would see a traceback."""

    spec = spec("Trips")

    def layout(self, spec, block):
        return super().layout(spec, block) if spec.dim_qk % 8 == 0 else {}["no room for " + str(spec.dim_qk)]


class SlotsById(Fp32):
    """Copies the slots to its own memory once for each tensor object."""

    spec = spec("SlotsById")

    def __init__(self, *args):
        super().__init__(*args)
        self.known = {}

    def store(self, cache, k, v, slots):
        if id(slots) not in self.known:
            self.known[id(slots)] = slots, slots.clone()
        super().store(cache, k, v, self.known[id(slots)][1])


class KeysByAddress(Fp32):
    """Casts the keys of a step once."""

    spec = spec("KeysByAddress")

    def __init__(self, *args):
        super().__init__(*args)
        self.known = {}

    def store(self, cache, k, v, slots):
        place = k.data_ptr(), k.shape
        if place not in self.known:
            self.known[place] = k, k.clone()
        super().store(cache, self.known[place][1], v, slots)
