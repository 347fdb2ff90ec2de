"""Wrong KV formats, which are the plain ones with one fault each, and right formats of other kinds."""

from __future__ import annotations

import torch

from minivllm.core.interfaces.kvformat import KVFormat, KVLayout, TensorSpec
from minivllm.plugins.kvformat.plain import Bf16, Fp16, Fp32
from minivllm.registration.spec import ANY, Spec

SEAM = "kvformat"
STORED = "test_what_is_stored_comes_back_and_nothing_else_changes"
LAYOUT = "test_the_layout_says_what_is_allocated"
HOLDS = "test_what_it_holds_it_holds_without_loss"
LOAD = "test_load_gives_blocks_in_the_order_asked_for_and_in_each_dtype"
FAULTS = {
    "SwapsKeysAndValues": (STORED,),
    "OneSlotOff": (STORED,),
    "WritesTwo": (STORED,),
    "ClearsTheRestOfTheBlock": (STORED,),
    "ScaleOfTheBlock": (STORED,),
    "LastHeadLost": (STORED,),
    "OddTailLost": (STORED, HOLDS),
    "ByWayOfBfloat16": (STORED, HOLDS),
    "FlushesSubnormals": (STORED, HOLDS),
    "Saturates": (HOLDS,),
    "Truncates": (STORED,),
    "SaysItHoldsFloat32": (HOLDS,),
    "AssumesContiguous": (STORED,),
    "NormalisesInPlace": (STORED,),
    "FailsOnNothing": (STORED,),
    "SumsDuplicates": (STORED, "test_several_tokens_may_go_to_the_null_block"),
    "SortsBlocks": (LOAD,),
    "FlatBlocksOnly": (LOAD,),
    "AlwaysFloat32": (LOAD,),
    "NaNInHalf": (LOAD,),
    "RemembersTheFirstLayout": ("test_a_format_has_no_state",),
    "LiesAboutBytes": (LAYOUT,),
    "LiesAboutBlock": (LAYOUT,),
    "LiesAboutDtype": (LAYOUT,),
    "KeepsValuesTwice": ("test_values_that_lie_in_the_keys_are_not_kept_twice",),
}
RIGHT = ("Int8", "Float8", "OneTensor")


def spec(name, *holds):
    limits = {"device": ANY, "sm": ANY, "dtype": ANY, "holds": frozenset(holds)}
    return Spec(f"{__name__}:{name}", (1, 0), "for a test of the kit", limits=limits)


def flat(t):
    return t.view(-1, *t.shape[2:])


class Int8(KVFormat):
    """Right.  Eight bits with a scale for each token and head."""

    spec = spec("Int8")
    dtype = "int8"

    def layout(self, spec, block):
        plain = super().layout(spec, block).tensors
        scales = {f"{n}_scale": TensorSpec((block, spec.kv_heads), "float32") for n in plain}
        return KVLayout(block, {**plain, **scales})

    def store(self, cache, k, v, slot_map):
        for name, x in (("k", k), ("v", v)):
            if name in cache:
                scale = x.float().abs().amax(-1) / 127
                flat(cache[name])[slot_map] = (x.float() / scale.clamp(min=1e-30)[..., None]).round().to(torch.int8)
                flat(cache[f"{name}_scale"])[slot_map] = scale

    def load(self, cache, blocks, dtype):
        out = []
        for name in ("k", "v" if "v" in cache else "k"):
            x = cache[name][blocks].to(dtype) * cache[f"{name}_scale"][blocks].to(dtype)[..., None]
            out.append(x.flatten(blocks.dim() - 1, blocks.dim()))
        return tuple(out)


class Float8(Bf16):
    """Right.  float8 without scales."""

    spec = spec("Float8")
    dtype = "float8_e4m3fn"

    def store(self, cache, k, v, slot_map):
        for name, x in (("k", k), ("v", v)):
            if name in cache:
                t = cache[name]
                flat(t.view(torch.uint8))[slot_map] = x.float().to(t.dtype).view(torch.uint8)

    def load(self, cache, blocks, dtype):
        out = [
            cache[n].view(torch.uint8)[blocks].view(torch.float8_e4m3fn) for n in ("k", "v" if "v" in cache else "k")
        ]
        return tuple(x.to(dtype).flatten(blocks.dim() - 1, blocks.dim()) for x in out)


class OneTensor(KVFormat):
    """Right.  Keys and values are in one tensor, heads first."""

    spec = spec("OneTensor", "bfloat16", "float16", "float32")
    dtype = "float32"

    def layout(self, spec, block):
        wide = spec.dim_qk + (0 if spec.v_in_k else spec.dim_v)
        marks = TensorSpec((1,), "uint8") if spec.v_in_k else TensorSpec((2, spec.dim_qk), "uint8")
        return KVLayout(block, {"kv": TensorSpec((spec.kv_heads, block, wide), "float32"), "split": marks})

    def store(self, cache, k, v, slot_map):
        both = k if cache["split"].dim() == 2 else torch.cat([k, v], -1)
        block = cache["kv"].shape[2]
        cache["kv"][slot_map // block, :, slot_map % block] = both.float()

    def load(self, cache, blocks, dtype):
        x = cache["kv"][blocks].transpose(-2, -3).flatten(blocks.dim() - 1, blocks.dim()).to(dtype)
        if cache["split"].dim() == 2:
            return x, x
        dim_qk = cache["split"].shape[-1]
        return x[..., :dim_qk], x[..., dim_qk:]


# ---- store ----------------------------------------------------------------------------------------------------------


class SwapsKeysAndValues(Fp32):
    spec = spec("SwapsKeysAndValues")

    def load(self, cache, blocks, dtype):
        return super().load(cache, blocks, dtype)[::-1]


class OneSlotOff(Fp32):
    """Counts slots from the second on, to and fro only within ``load``."""

    spec = spec("OneSlotOff")

    def store(self, cache, k, v, slot_map):
        super().store(cache, k, v, slot_map + 1)


class WritesTwo(Fp32):
    """Writes pairs of slots."""

    spec = spec("WritesTwo")

    def store(self, cache, k, v, slot_map):
        super().store(cache, k, v, slot_map ^ 1 if cache["k"].shape[1] % 2 == 0 else slot_map)
        super().store(cache, k, v, slot_map)


class ClearsTheRestOfTheBlock(Fp32):
    """Clears the rest of a token's block, in the belief that it belongs to an earlier owner."""

    spec = spec("ClearsTheRestOfTheBlock")

    def store(self, cache, k, v, slot_map):
        super().store(cache, k, v, slot_map)
        block = cache["k"].shape[1]
        for slot in slot_map.tolist():
            rest = [s for s in range(slot + 1, (slot // block + 1) * block) if s not in slot_map]
            for t in cache.values():
                flat(t)[rest] = 0


class ScaleOfTheBlock(Int8):
    """Has one scale for the heads of a block, so that a new token changes the other tokens of its block."""

    spec = spec("ScaleOfTheBlock")

    def store(self, cache, k, v, slot_map):
        super().store(cache, k, v, slot_map)
        for slot in slot_map.tolist():
            for name in ("k_scale", "v_scale"):
                if name in cache:
                    cache[name][slot // cache[name].shape[1]] = flat(cache[name])[slot].clone()


class LastHeadLost(Fp32):
    """The grid covers heads in pairs."""

    spec = spec("LastHeadLost")

    def store(self, cache, k, v, slot_map):
        n = max(k.shape[1] // 2 * 2, 1)
        super().store({name: t[:, :, :n] for name, t in cache.items()}, k[:, :n], v[:, :n], slot_map)

    def load(self, cache, blocks, dtype):
        return tuple(x.clone() for x in super().load(cache, blocks, dtype))


class OddTailLost(Fp32):
    """Copies eight elements at a time."""

    spec = spec("OddTailLost", "float32")

    def store(self, cache, k, v, slot_map):
        for name, x in (("k", k), ("v", v)):
            if name in cache:
                n = x.shape[-1] // 8 * 8
                flat(cache[name])[slot_map, :, :n] = x[..., :n].float()


class ByWayOfBfloat16(Fp16):
    spec = spec("ByWayOfBfloat16", "float16")

    def store(self, cache, k, v, slot_map):
        super().store(cache, k.bfloat16(), v.bfloat16(), slot_map)


class FlushesSubnormals(Fp16):
    spec = spec("FlushesSubnormals", "float16")

    def store(self, cache, k, v, slot_map):
        k, v = (x.masked_fill(x.abs() < torch.finfo(torch.float16).smallest_normal, 0) for x in (k, v))
        super().store(cache, k, v, slot_map)


class Saturates(Fp16):
    """An infinity becomes the greatest number, and a row that should end goes on."""

    spec = spec("Saturates", "float16")

    def store(self, cache, k, v, slot_map):
        super().store(cache, k.clamp(-65504, 65504), v.clamp(-65504, 65504), slot_map)


class Truncates(Bf16):
    """Cuts float32 off instead of rounding to the nearest."""

    spec = spec("Truncates", "bfloat16")

    def store(self, cache, k, v, slot_map):
        cut = lambda x: (x.float().view(torch.int32) & -65536).view(torch.float32)  # noqa: E731
        super().store(cache, cut(k.contiguous()), cut(v.contiguous()), slot_map)


class SaysItHoldsFloat32(Bf16):
    spec = spec("SaysItHoldsFloat32", "bfloat16", "float32")


class AssumesContiguous(Fp32):
    """Reads its arguments by their pointers."""

    spec = spec("AssumesContiguous")

    def store(self, cache, k, v, slot_map):
        k, v = (x.as_strided(x.shape, (x.shape[1] * x.shape[2], x.shape[2], 1)) for x in (k, v))
        super().store(cache, k, v, slot_map)


class NormalisesInPlace(Int8):
    """Divides k by its scale in place."""

    spec = spec("NormalisesInPlace")

    def store(self, cache, k, v, slot_map):
        super().store(cache, k, v, slot_map)
        k.div_(k.abs().amax(-1, keepdim=True).clamp(min=1e-20))


class FailsOnNothing(Fp32):
    """Reads the first token before it checks whether there is one."""

    spec = spec("FailsOnNothing")

    def store(self, cache, k, v, slot_map):
        assert int(slot_map[0]) >= 0
        super().store(cache, k, v, slot_map)


class SumsDuplicates(Fp32):
    """Adds to the stored values after subtracting them, so that rows for one slot add up, and rounding errors
    remain.
    """

    spec = spec("SumsDuplicates")

    def store(self, cache, k, v, slot_map):
        assert len(slot_map.unique()) == len(slot_map), "a slot is named twice"
        for name, x in (("k", k), ("v", v)):
            if name in cache:
                flat(cache[name]).index_add_(0, slot_map, x.float() - flat(cache[name])[slot_map])


# ---- load -----------------------------------------------------------------------------------------------------------


class SortsBlocks(Fp32):
    """Reads each block once, in the order of memory."""

    spec = spec("SortsBlocks")

    def load(self, cache, blocks, dtype):
        return super().load(cache, blocks.sort(dim=-1).values, dtype)


class FlatBlocksOnly(Fp32):
    """Several rows come back as one."""

    spec = spec("FlatBlocksOnly")

    def load(self, cache, blocks, dtype):
        return super().load(cache, blocks.flatten(), dtype)


class AlwaysFloat32(Fp32):
    spec = spec("AlwaysFloat32")

    def load(self, cache, blocks, dtype):
        return super().load(cache, blocks, torch.float32)


class NaNInHalf(Fp32):
    """Gives NaN for keys below 0 in half precision."""

    spec = spec("NaNInHalf")

    def load(self, cache, blocks, dtype):
        k, v = super().load(cache, blocks, dtype)
        return (k, v) if dtype == torch.float32 else (k.where(k >= 0, torch.nan), v)


class RemembersTheFirstLayout(Fp32):
    """Keeps the tensors of the cache that it saw last between ``store`` and ``load``."""

    spec = spec("RemembersTheFirstLayout")

    def store(self, cache, k, v, slot_map):
        super().store(cache, k, v, slot_map)
        self.last = k.shape[1]

    def load(self, cache, blocks, dtype):
        k, v = super().load(cache, blocks, dtype)
        if getattr(self, "last", k.shape[-2]) != k.shape[-2]:
            return torch.zeros_like(k), v
        return k, v


# ---- layout ---------------------------------------------------------------------------------------------------------


class HalfBytes(KVLayout):
    @property
    def bytes(self):
        return super().bytes // 2


class LiesAboutBytes(Fp32):
    spec = spec("LiesAboutBytes")

    def layout(self, spec, block):
        return HalfBytes(block, super().layout(spec, block).tensors)


class LiesAboutBlock(Fp32):
    spec = spec("LiesAboutBlock")

    def layout(self, spec, block):
        return KVLayout(max(block, 16), super().layout(spec, block).tensors)


class LiesAboutDtype(Fp32):
    """Names a dtype that torch does not have."""

    spec = spec("LiesAboutDtype")

    def layout(self, spec, block):
        tensors = super().layout(spec, block).tensors
        return KVLayout(block, {name: TensorSpec(t.shape, "float") for name, t in tensors.items()})


class KeepsValuesTwice(Fp32):
    spec = spec("KeepsValuesTwice")

    def layout(self, spec, block):
        tensors = {
            "k": TensorSpec((block, spec.kv_heads, spec.dim_qk), self.dtype),
            "v": TensorSpec((block, spec.kv_heads, spec.dim_v), self.dtype),
        }
        return KVLayout(block, tensors)
