"""Tests of int4 alone: its bytes, its scales, and its treatment of modules by name.

The conformance kit tests the rest.  It is run here with options other than the defaults.
"""

from __future__ import annotations

import weakref
from importlib import import_module

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from minivllm import LLM
from minivllm.core.interfaces.quantizer import ModuleInfo, Shard
from minivllm.device.layers.linear import Dense
from minivllm.device.loading.weights import weight_bytes
from minivllm.errors import ModelError, OptionError, PluginError
from minivllm.plugins.model.qwen3_moe import Qwen3Moe
from minivllm.plugins.quantizer import fast, int4, tiled
from minivllm.plugins.quantizer.int4 import Int4, Int4Weight
from minivllm.plugins.quantizer.int8 import Int8Weight
from minivllm.plugins.quantizer.options import Int4Options
from minivllm.testing import QuantizerConformance
from minivllm.testing.harness import Harness
from minivllm.testing.tiny import ARCHS, tiny_dir

PROMPT = [5, 17, 3, 44, 60, 21, 9, 33]
SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}  # sizes of a tiny model whose inputs 32 divides
FORMS = [(32, True), (64, True), (128, False), (32, False)]  # (group, symmetric)


def info(inp=256, rows=(24, 8), kind="linear", name="layers.3.mlp.down", **more) -> ModuleInfo:
    parts = tuple(zip("abcdefgh", rows, strict=False))
    return ModuleInfo(name, kind, inp, parts, more.pop("dtype", "float32"), "cpu", **more)


def loaded(weight: torch.Tensor, group=32, symmetric=True, clip=False, **more) -> Int4Weight:
    scheme = Int4Weight(info(weight.shape[1], (len(weight),), **more), group, symmetric, clip)
    scheme.load("weight", weight, "a")
    scheme.finish()
    return scheme


def parts_of(scheme: Int4Weight) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(codes, scale, zero) of every element, float64, read byte by byte."""
    packed, scale = scheme.tensors["weight"], scheme.tensors["scale"]
    zero = scheme.tensors.get("zero", torch.full_like(scale, 8))
    rows, inp = packed.shape[0], 2 * packed.shape[1]
    codes = torch.empty(rows, inp, dtype=torch.float64)
    for row in range(rows):
        for i in range(inp):
            block, place = divmod(i, 32)
            byte = int(packed[row, 16 * block + place % 16])
            codes[row, i] = byte & 15 if place < 16 else byte >> 4
    group = inp // scale.shape[1]
    return codes, *(t.double().repeat_interleave(group, 1) for t in (scale, zero))


def held(scheme: Int4Weight) -> torch.Tensor:
    return scheme.apply(torch.eye(scheme.info.in_features)).T.double()


def squared_error(scheme: Int4Weight, weight: torch.Tensor, group: int) -> torch.Tensor:
    """Of each group."""
    return (held(scheme) - weight.double()).square().view(len(weight), -1, group).sum(2)


# ---- what is held ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("group", "symmetric"), FORMS)
def test_a_block_of_16_bytes_has_16_inputs_in_its_low_halves_and_the_next_16_in_its_high_halves(group, symmetric):
    torch.manual_seed(0)
    scheme = loaded(torch.randn(5, 256), group, symmetric)
    tensors = scheme.tensors
    assert set(tensors) == {"weight", "scale"} | ({"zero"} if not symmetric else set())
    assert tensors["weight"].dtype == torch.uint8 and tensors["weight"].shape == (5, 128)
    for name in set(tensors) - {"weight"}:
        assert tensors[name].dtype == torch.float32 and tensors[name].shape == (5, 256 // group)
    codes, scale, zero = parts_of(scheme)
    assert codes.unique().tolist() == list(range(16))
    torch.testing.assert_close(held(scheme), scale * (codes - zero), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("group", "symmetric"), FORMS)
@pytest.mark.parametrize("clip", [True, False])
def test_an_element_is_off_by_half_a_scale_at_most_where_it_is_not_cut_off(group, symmetric, clip):
    torch.manual_seed(1)
    weight = torch.randn(40, 256) * torch.logspace(-20, 20, 40)[:, None] + torch.linspace(-3, 3, 256)
    scheme = loaded(weight, group, symmetric, clip)
    codes, scale, zero = parts_of(scheme)
    exact = weight.double() / scale + zero  # where the element lies between the points 0 to 15 of the grid
    inside = (exact > -0.5 - 1e-3) & (exact < 15.5 + 1e-3)
    assert ((codes - exact).abs()[inside] <= 0.5 + 1e-3).all()
    assert torch.equal(codes[~inside], (exact[~inside] > 0) * 15.0)
    assert bool(inside.all()) != clip


def test_with_clip_the_scale_is_the_one_of_the_least_squared_error_among_twenty():
    torch.manual_seed(2)
    weight = torch.randn(4, 64) ** 3
    for group, symmetric in ((32, True), (64, False)):
        found = squared_error(loaded(weight, group, symmetric, clip=True), weight, group)
        for row in range(4):
            for g, w in enumerate(weight[row].double().split(group)):
                low, high = float(w.min()), float(w.max())
                errors = []
                for i in range(10 if symmetric else 20):
                    factor = 1 - 0.3 * i / (9 if symmetric else 19)
                    tried = [(high - low) / 15]
                    if symmetric:
                        tried = [max(high / 7, low / -8), -max(high / 8, low / -7)]
                    for scale in (factor * whole for whole in tried):
                        first = -8 * scale if symmetric else (low + high) / 2 - 7.5 * scale
                        q = ((w - first) / scale).round().clamp(0, 15)
                        errors.append(float((first + scale * q - w).square().sum()))
                assert len(errors) == 20
                assert float(found[row, g]) == pytest.approx(min(errors), rel=1e-4)


@pytest.mark.parametrize(("group", "symmetric"), FORMS)
def test_to_cut_off_never_makes_the_squared_error_of_a_group_larger(group, symmetric):
    torch.manual_seed(3)
    weight = torch.cat((torch.randn(16, 256), torch.randn(16, 256) ** 3, torch.rand(16, 256), torch.zeros(1, 256)))
    cut, whole = (squared_error(loaded(weight, group, symmetric, clip), weight, group) for clip in (True, False))
    assert (cut <= whole * (1 + 1e-5)).all()
    assert cut[:16].sum() < 0.95 * whole[:16].sum()


def test_zero_points_serve_weights_that_are_not_around_zero():
    torch.manual_seed(4)
    weight = torch.randn(32, 128) * 0.1 + torch.randn(32, 1)
    with_zero, without = (squared_error(loaded(weight, 32, s), weight, 32).sum() for s in (False, True))
    assert with_zero < 0.05 * without
    flat = torch.full((2, 64), 0.3)
    assert torch.allclose(held(loaded(flat, symmetric=False)), flat.double(), rtol=2e-6)
    assert not held(loaded(0 * flat, symmetric=False)).any()


def test_the_longer_side_of_the_grid_is_where_the_largest_element_is():
    weight = torch.linspace(-7, 8, 32)[None]
    for sign in (1, -1):
        scheme = loaded(sign * weight)
        assert float(scheme.tensors["scale"]) == pytest.approx(-sign)
        assert int(parts_of(scheme)[0][0, -1]) == 0


@pytest.mark.parametrize(("symmetric", "clip"), [(True, False), (False, True)])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_no_number_spoils_its_group_alone(symmetric, clip, bad):
    weight = torch.randn(3, 96)
    weight[1, 40] = bad
    scheme = loaded(weight, symmetric=symmetric, clip=clip)
    got = int4.dequantize(scheme.weight, scheme.scale, scheme.zero, torch.float32)  # a product would spread it
    assert got[1, 32:64].isnan().all()
    got[1, 32:64] = 0
    assert got.isfinite().all()


def test_a_slice_that_groups_fit_into_is_quantized_as_the_whole_is():
    torch.manual_seed(5)
    weight = torch.randn(32, 256)
    whole = loaded(weight)
    for split, inp, rows in (("column", 256, 16), ("row", 128, 32)):
        for rank in (0, 1):
            mine = Int4Weight(info(inp, (rows,), shard=Shard(rank, 2), split=split))
            mine.load("weight", mine.slice("weight", weight, split, Shard(rank, 2)), "a")
            for name, tensor in mine.tensors.items():
                assert torch.equal(tensor, whole.tensors[name].chunk(2, 0 if split == "column" else 1)[rank])


# ---- memory ----------------------------------------------------------------------------------------------------------


class Peak(TorchDispatchMode):
    """The most bytes that new tensors took at once."""

    def __init__(self):
        super().__init__()
        self.alive, self.most = weakref.WeakValueDictionary(), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for t in made if isinstance(made, (tuple, list)) else (made,):
            if isinstance(t, torch.Tensor):
                self.alive[id(t)] = t
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in self.alive.values()}
        self.most = max(self.most, sum(storages.values()) - sum(self.given.values()))
        return made

    def during(self, call, *given):
        self.given = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in given}
        for t in given:
            self.alive[id(t)] = t
        with self:
            call()
        return self.most


@pytest.mark.parametrize("symmetric", [True, False])
def test_few_rows_at_a_time_are_at_full_precision(symmetric):
    # ten float32 tensors with as many elements; the larger weight takes 32 MiB in float32
    room = 40 * tiled.AT_ONCE["cpu"]
    most = {}
    for rows in (2048, 8192):
        weight, x = torch.randn(rows, 1024, dtype=torch.bfloat16), torch.randn(4, 1024)
        scheme = Int4Weight(info(1024, (rows,)), symmetric=symmetric)
        own = list(scheme.tensors.values())
        loading = Peak().during(lambda s=scheme, w=weight: s.load("weight", w, "a"), weight, *own)
        using = Peak().during(lambda s=scheme, x=x: s.apply(x), x, *own) - 4 * 4 * rows  # the product itself
        assert 0 < loading < room and 0 < using < room
        most[rows] = loading, using
    assert most[8192] == most[2048]


def test_a_model_in_int4_resembles_the_original_and_has_the_bytes_of_its_bits(tmp_path):
    path, cfg, hf = tiny_dir(tmp_path, **SIZES)
    with torch.inference_mode():
        want = hf(torch.tensor([PROMPT])).logits[0]
    plain = weight_bytes(Harness(path, ARCHS["llama"](), cfg).parts)
    linear = sum(p.numel() for n, p in hf.named_parameters() if "_proj" in n)
    errors = {}
    for symmetric, bits in ((True, 5), (False, 6)):
        harness = Harness(path, ARCHS["llama"](), cfg, quantizer=Int4(Int4Options(symmetric=symmetric)))
        errors[symmetric] = float((harness.step({0: PROMPT})[0] - want).norm() / want.norm())
        assert plain - weight_bytes(harness.parts) == linear * (32 - bits) // 8
    assert 0.01 < errors[False] < errors[True] < 0.6, errors  # random layers magnify errors of the first


# ---- modules by name -------------------------------------------------------------------------------------------------


def test_bits_are_those_of_the_first_pattern_that_names_a_module_and_skip_goes_before():
    bits = {"*.down": 8, "layers.1.*": 16, "layers.*.o": 4}
    quantizer = Int4(Int4Options(bits=bits, skip=["layers.2.*"]))
    want = {
        "layers.0.mlp.down": Int8Weight, "layers.1.mlp.down": Int8Weight, "layers.1.attn.o": None,
        "layers.2.mlp.down": None, "layers.3.attn.o": Int4Weight, "layers.3.attn.qkv": Int4Weight,
    }  # fmt: skip
    for name, kind in want.items():
        made = quantizer.scheme(info(name=name))
        assert made is None if kind is None else type(made) is kind, name
    quantizer.finish()
    for kind in ("embedding", "router", "lm_head"):
        assert quantizer.scheme(info(kind=kind)) is None


def test_a_pattern_of_bits_that_names_nothing_is_refused(tmp_path):
    tiny_dir(tmp_path, "llama", **SIZES)
    base = dict(model=str(tmp_path), skip_tokenizer_init=True, num_kvcache_blocks=10, dtype="float32", device="cpu")
    for bits, reported in (({"*.o": 8, "layer.*": 8}, "layer"), ({"lm_head": 8}, "lm_head")):
        with pytest.raises(
            PluginError,
            match=rf"bits=\['{reported}.*names no module.*more are with lm_head=true",
        ):
            LLM(**base, quantizer={"name": "int4", "options": {"bits": bits}})
    with pytest.raises(PluginError, match=r"skip=\['layer.*'\] names no module"):
        LLM(**base, quantizer={"name": "int4", "options": {"skip": ["*.o", "layer.*"]}})
    LLM(**base, quantizer={"name": "int4", "options": {"bits": {"*.o": 8, "lm_head": 16}, "lm_head": True}}).close()


@pytest.mark.parametrize(
    ("inp", "group", "wanted"),
    [
        (96, 64, "group_size=32"),
        (192, 128, "group_size=32 or 64"),
        (48, 32, "a multiple of 32"),
        (40, 64, "a multiple"),
    ],
)
def test_inputs_that_a_group_does_not_divide_are_refused_with_what_would(inp, group, wanted):
    options = {"group_size": group}
    with pytest.raises(OptionError) as caught:
        Int4(Int4Options(**options)).scheme(info(inp))
    reported = str(caught.value)
    assert reported.startswith(
        f"int4: layers.3.mlp.down has {inp} inputs here, which group_size={group} does not divide"
    )
    assert f"expected {wanted}" in reported and "skip=['layers.3.mlp.down']" in reported
    for how in ({"skip": ["*.down"]}, {"bits": {"*.down": 8}}, {"bits": {"*.down": 16}}):
        assert type(Int4(Int4Options(**options, **how)).scheme(info(inp))) in (type(None), Int8Weight)


def test_a_model_that_does_not_fit_is_refused_when_it_is_loaded(tmp_path):
    tiny_dir(tmp_path, "llama", **{**SIZES, "intermediate_size": 80})
    base = dict(model=str(tmp_path), skip_tokenizer_init=True, num_kvcache_blocks=10, dtype="float32", device="cpu")
    with pytest.raises(OptionError, match=r"layers\.0\.mlp\.down has 80 inputs here, which group_size=32 does not"):
        LLM(**base, quantizer="int4")


def test_a_checkpoint_that_is_quantized_is_refused():
    with pytest.raises(ModelError, match="quantized with gptq, which quantizer=int4 cannot read"):
        Int4(None, {"quant_method": "gptq"})


@pytest.mark.parametrize("tied", [False, True])
def test_the_head_is_quantized_only_if_asked(tmp_path, tied):
    path, cfg, hf = tiny_dir(tmp_path, tie_word_embeddings=tied, **SIZES)
    with torch.inference_mode():
        want = hf(torch.tensor([PROMPT])).logits[0]
    for requested in (False, True):
        harness = Harness(
            path, ARCHS["llama"](), cfg, quantizer=Int4(Int4Options(lm_head=requested, skip=["layers.*"]))
        )
        head, embedding = harness.parts.modules["lm_head"], harness.parts.modules["embed"]
        assert ("scale" in head.tensors) == requested and embedding.weight.dtype == torch.float32
        error = (harness.step({0: PROMPT})[0] - want).abs().max()
        assert (error > 1e-4) == requested and error < 0.4 * want.abs().max()


@pytest.mark.parametrize("bits", [4, 8])
def test_experts_are_served_near_the_weights_that_were_given(tmp_path, bits):
    path, cfg, _ = tiny_dir(tmp_path, "qwen3_moe", moe_intermediate_size=32)
    options = Int4Options(bits={"*.experts.*": 8} if bits == 8 else {}, symmetric=False)
    experts = Harness(path, Qwen3Moe(), cfg, quantizer=Int4(options)).model.blocks[0].experts
    plain = Harness(path, Qwen3Moe(), cfg).model.blocks[0].experts
    kind = Int8Weight if bits == 8 else Int4Weight
    assert type(experts.gate_up.scheme) is type(experts.down.scheme) is kind
    assert isinstance(experts.router.scheme, Dense)
    x = torch.randn(9, 32, generator=torch.Generator().manual_seed(7))
    for e in range(6):
        want, got = plain.gate_up.expert(x, e), experts.gate_up.expert(x, e)
        error = (got - want).norm() / want.norm()
        assert (0.02 < error < 0.15) if bits == 4 else error < 0.02


# ---- quality ---------------------------------------------------------------------------------------------------------


def test_pocket_does_its_tasks_in_int4():
    from minivllm.pocket.evaluate import Minivllm, evaluate
    from minivllm.pocket.tasks import cases

    requested = [case for task in ("copy", "sums", "json") for case in cases(task, 6)]
    sizes = dict(device="cpu", dtype="float32", num_kvcache_blocks=400, max_num_seqs=16)
    with LLM(model="pocket", quantizer="int4", **sizes) as llm:
        rows = evaluate(Minivllm(llm).generate, requested)
    assert [right for _, _, right in rows] == [1.0] * 4, rows


# ---- the kit ---------------------------------------------------------------------------------------------------------


def by_group(of, weight: torch.Tensor, group: int) -> torch.Tensor:
    """A number of each group at each of its elements."""
    groups = weight.unflatten(1, (-1, group))
    return of(groups).expand_as(groups).flatten(1)


class Group(QuantizerConformance):
    """With many slices when a weight is loaded, and many tiles of a product."""

    __test__ = False
    plugin = "int4"

    @pytest.fixture(autouse=True)
    def few_at_once(self, monkeypatch):
        monkeypatch.setitem(tiled.AT_ONCE, "cpu", 5000)


class TestSteps(Group):
    """An element is held within half a step of its own group, not only of its row."""

    __test__ = True

    def step(self, weight, info):
        return by_group(lambda g: g.abs().amax(2, keepdim=True) / 7, weight, 32)


def test_groups_that_no_tile_divides_are_not_given_to_the_kernels(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(fast, "_served", lambda weight, least: True)
    weight = torch.zeros(8, 96, dtype=torch.uint8)
    for group, taken in ((32, True), (64, True), (48, False), (96, False), (192, False)):
        assert (fast.kernels_of(weight, torch.ones(8, 192 // group), None, group) is not None) == taken
    with pytest.raises(ValueError, match="groups of 48 inputs with 4 bits: expected 32, 64 or 128"):
        import_module("minivllm.device.kernels.quant").Quantized(weight, torch.ones(8, 4), None, 48)


@pytest.mark.slow
class TestClipped(Group):
    __test__ = True
    options = {"clip": True}

    def step(self, weight, info):
        steps = by_group(lambda g: g.abs().amax(2, keepdim=True) / 7, weight, 32)
        return torch.maximum(steps, 2 * 0.3 * weight.abs())  # or it is cut off


@pytest.mark.slow
class TestAsymmetric(Group):
    __test__ = True
    options = {"symmetric": False, "group_size": 64}
    ins = (64, 128, 256, 320)
    model = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}

    def step(self, weight, info):
        eps = torch.finfo(getattr(torch, info.dtype)).eps  # numbers near 0 are stored with a rounding error
        return by_group(lambda g: (g.amax(2, keepdim=True) - g.amin(2, keepdim=True)) / 15, weight, 64) * (1 + 2 * eps)

    def grid(self, info):
        codes = torch.randint(0, 16, (info.out_features, info.in_features)).double()
        codes[:, ::64], codes[:, 1::64] = 0, 15
        return (codes - 5) * 2.0 ** -torch.randint(0, 6, (info.out_features, 1))
