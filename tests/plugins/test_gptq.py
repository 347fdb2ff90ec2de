"""Checkpoints of GPTQ: products use exactly the weights that the tensors describe, in their packed form."""

from __future__ import annotations

import json

import pytest
import torch
from packed_checkpoints import (
    LLM_SIZES,
    PROMPT,
    change,
    coded,
    forms,
    gptq,
    held,
    info,
    loaded,
    logits_of,
    packed_dir,
    say,
)

from minivllm import LLM, SamplingParams
from minivllm.core.interfaces.quantizer import ModuleInfo, PartSource, Shard
from minivllm.device.layers.linear import joined_by
from minivllm.device.native import library
from minivllm.errors import ModelError
from minivllm.plugins.model.phi3 import Phi3
from minivllm.plugins.model.qwen3_moe import Qwen3Moe
from minivllm.plugins.quantizer.forms import GroupedBytes, PlainRows
from minivllm.plugins.quantizer.fp8_checkpoint import Fp8Checkpoint
from minivllm.plugins.quantizer.gptq import Gptq
from minivllm.plugins.quantizer.int4 import Int4Rows
from minivllm.plugins.quantizer.int8 import ByteRows
from minivllm.plugins.quantizer.packed import PackedWeight
from minivllm.testing.harness import Harness

FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}


def config(bits=4, group_size=32, **more):
    return {"quant_method": "gptq", "bits": bits, "group_size": group_size, **more}


@pytest.mark.parametrize("v1", [True, False])
@pytest.mark.parametrize(
    ("bits", "group", "symmetric", "order", "form"),
    [
        (4, 32, True, False, Int4Rows), (4, 32, False, False, Int4Rows), (4, -1, True, False, Int4Rows),
        (4, 128, False, False, Int4Rows), (4, 32, True, True, Int4Rows), (4, 64, False, True, Int4Rows),
        (2, 32, True, False, Int4Rows), (2, 64, False, True, Int4Rows), (3, 32, False, False, Int4Rows),
        (4, 16, False, False, GroupedBytes), (4, 5, True, True, PlainRows), (4, 48, False, False, GroupedBytes),
        (8, 32, True, False, GroupedBytes), (8, 64, False, True, GroupedBytes), (8, -1, True, False, ByteRows),
        (8, -1, False, False, GroupedBytes),
    ],
)  # fmt: skip
def test_what_is_held_is_what_the_tensors_say(bits, group, symmetric, order, form, v1):
    torch.manual_seed(bits * 100 + group)
    parts = {"a": coded(32, 160, bits, group, symmetric, order), "b": coded(64, 160, bits, group, symmetric)}
    if v1:  # which has no zero point of 0
        for one in parts.values():
            one.zero.clamp_(min=1)
    reported = config(bits, group, desc_act=order, checkpoint_format="gptq" if v1 else "gptq_v2")
    m = info((32, 64), 160)
    scheme = loaded(Gptq(None, reported), m, {part: gptq(one, bits, v1) for part, one in parts.items()})
    want = torch.cat([one.weight for one in parts.values()]).double()
    torch.testing.assert_close(held(scheme), want, rtol=1e-6, atol=1e-7)
    assert forms(scheme)[0] is form
    # parts that differ in their order are multiplied by themselves
    assert len(forms(scheme)) == (2 if order and form is not PlainRows else 1)
    x = torch.randn(3, 160)
    torch.testing.assert_close(scheme.apply(x), x @ want.T.float(), rtol=1e-4, atol=1e-4)


def test_a_weight_that_is_not_loaded_has_no_stored_form_and_no_kernel():
    scheme = Gptq(None, config()).scheme(info((32, 64), 160))
    assert isinstance(scheme, PackedWeight)
    assert scheme.stored() is None
    assert scheme.joined(None, 0, "") is None


def test_a_merged_layer_may_have_three_sizes_of_groups_and_stays_one_product():
    torch.manual_seed(1)
    dynamic = {"+:.*k_proj": {"group_size": 32}, r".*v_proj$": {"group_size": 64, "sym": False}}
    reported = config(4, 128, checkpoint_format="gptq_v2", dynamic=dynamic)
    parts = {"a": coded(32, 256, 4, 128), "b": coded(32, 256, 4, 32), "c": coded(32, 256, 4, 64, False)}
    names = dict(zip(parts, ("q_proj", "k_proj", "v_proj"), strict=True))
    tensors = {part: gptq(one, 4, v1=False) for part, one in parts.items()}
    scheme = loaded(Gptq(None, reported), info((32, 32, 32), 256, sources=sources(tensors, names)), tensors)
    want = torch.cat([one.weight for one in parts.values()]).double()
    torch.testing.assert_close(held(scheme), want, rtol=1e-6, atol=1e-7)
    assert forms(scheme) == [Int4Rows] and scheme.tensors["scale"].shape == (96, 8)
    assert scheme.stored().group == 32


def sources(tensors, names=None):
    """Return the sources of tensors by part, as the loader gives them."""
    from minivllm.plugins.quantizer.packed import NAMES

    names = names or {part: f"{part}_proj" for part in tensors}
    return {
        part: PartSource(
            f"model.layers.0.self_attn.{names[part]}", {k: (tuple(t.shape), NAMES[t.dtype]) for k, t in given.items()}
        )
        for part, given in tensors.items()
    }


def test_zero_points_of_0_and_15_are_held_by_v2_and_v1_warns():
    one = coded(32, 64, 4, 32, symmetric=False)
    one.zero[:, 0], one.zero[:, 1] = 0, 15
    for v1 in (False, True):
        reported = config(checkpoint_format="gptq" if v1 else "gptq_v2")
        quantizer = Gptq(None, reported)
        scheme = quantizer.scheme(info((32,)))
        for param, tensor in gptq(one, 4, v1).items():
            scheme.load(param, tensor, "a")
        torch.testing.assert_close(held(scheme), one.weight.double(), rtol=1e-6, atol=1e-7)
        assert len(quantizer.notes) == v1
        assert all(n.startswith("v1 zero points are at their largest, as of a 0") for n in quantizer.notes)


def test_the_format_is_read_where_tools_write_no_checkpoint_format():
    one = coded(32, 64, 4, 32, symmetric=False)
    reported = config(format="gptq_v2")
    reported.pop("checkpoint_format", None)
    scheme = loaded(Gptq(None, reported), info((32,)), {"a": gptq(one, 4, v1=False)})
    torch.testing.assert_close(held(scheme), one.weight.double(), rtol=1e-6, atol=1e-7)
    with pytest.raises(ModelError, match="checkpoint_format='marlin'"):
        Gptq(None, {**reported, "format": "marlin"})


def test_symmetric_zero_points_say_which_version_they_are_of_where_config_is_wrong():
    one = coded(32, 64, 4, 32)
    for v1, notes in ((True, 0), (False, 1)):
        quantizer = Gptq(None, config(checkpoint_format="gptq", sym=True))
        scheme = loaded(quantizer, info((32,)), {"a": gptq(one, 4, v1)})
        torch.testing.assert_close(held(scheme), one.weight.double(), rtol=1e-6, atol=1e-7)
        assert len(quantizer.notes) == notes and all("read as gptq_v2" in note for note in quantizer.notes)


@pytest.mark.parametrize(("order", "different"), [(False, False), (True, False), (False, True)])
def test_a_packed_weight_that_is_one_product_has_the_kernel_that_takes_what_surrounds_it_along(
    monkeypatch, order, different
):
    """Weights that are quantized during loading have the same kernel.

    It is not used if x is sorted before the product, or if parts are separate.
    """
    monkeypatch.setattr("minivllm.plugins.quantizer.int4.joined", lambda *given: given)
    parts = {"a": coded(32, 64, 4, 32, order=order), "b": coded(32, 64, 8 if different else 4, 32)}
    if order:
        parts["b"] = parts["a"]
    dynamic = {"+:.*b_proj": {"bits": 8}} if different else {}
    tensors = {part: gptq(one, 8 if different and part == "b" else 4, False) for part, one in parts.items()}
    reported = config(checkpoint_format="gptq_v2", desc_act=order, dynamic=dynamic)
    scheme = loaded(Gptq(None, reported), info((32, 32), 64, sources=sources(tensors)), tensors)
    bias = torch.zeros(64)
    got = joined_by(scheme, bias, 1, "gelu")
    assert got == (None if order or different else (None, bias, 1, "gelu")), "kernels, bias, mode, activation"


def test_an_index_of_zeros_means_inputs_in_their_order():
    one = coded(32, 64, 4, 32, symmetric=False)
    tensors = gptq(one, 4, v1=False)
    tensors["g_idx"] = torch.zeros_like(tensors["g_idx"])
    scheme = loaded(Gptq(None, config(checkpoint_format="gptq_v2")), info((32,)), {"a": tensors})
    torch.testing.assert_close(held(scheme), one.weight.double(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("order", [False, True])
@pytest.mark.parametrize(("bits", "group"), [(4, 32), (4, 48), (8, 32), (2, -1)])
@pytest.mark.parametrize("split", ["column", "row"])
def test_each_process_holds_its_slice_also_where_it_cuts_through_words_and_groups(split, bits, group, order):
    torch.manual_seed(2)
    one = coded(96, 192, bits, group, symmetric=False, order=order)
    for size in (2, 3):
        for rank in range(size):
            shape = (96 // size, 192) if split == "column" else (96, 192 // size)
            m = info(shape[:1], shape[1], split=split, shard=Shard(rank, size))
            quantizer = Gptq(None, config(bits, group, checkpoint_format="gptq_v2"))
            scheme = loaded(quantizer, m, {"a": gptq(one, bits, v1=False)})
            want = one.weight.double().chunk(size, 0 if split == "column" else 1)[rank]
            torch.testing.assert_close(held(scheme), want, rtol=1e-6, atol=1e-7)


def test_inputs_whose_groups_cannot_be_sorted_into_blocks_are_unpacked_and_told():
    one = coded(32, 64, 4, 7, order=True)
    quantizer = Gptq(None, config(4, 7, desc_act=True))
    scheme = quantizer.scheme(info((32,)))
    for param, tensor in gptq(one, 4).items():
        scheme.load(param, tensor, "a")
    assert forms(scheme) == [PlainRows]
    what = "inputs that share a scale do not fill blocks of 8: unpacked to float32"
    assert quantizer.notes == [f"{what}: layers.3.attn.qkv"]


# ---- in a model ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "order"), [("llama", False), ("qwen2", True)])
def test_logits_are_those_of_the_weights_in_floating_numbers(tmp_path, kind, order):
    torch.manual_seed(3)
    reported = config(
        desc_act=order, sym=False, lm_head=True, dynamic={"-:.*layers.1.mlp": {}, r".*o_proj": {"bits": 8}}
    )

    def code(name, n, k):
        bits = 8 if "o_proj" in name else 4
        one = coded(n, k, bits, 32, symmetric=False, order=order)
        one.zero.clamp_(min=1)
        return None if "layers.1.mlp" in name else one

    cfg, hf = packed_dir(tmp_path, reported, code, lambda c, name: gptq(c, 8 if "o_proj" in name else 4), kind)
    harness, got, want = logits_of(tmp_path, cfg, hf, Gptq, kind)
    assert (got - want).abs().max() <= 1e-4
    modules = harness.parts.modules
    assert isinstance(modules["lm_head"].scheme, PackedWeight)
    assert not isinstance(modules["layers.1.mlp.down"].scheme, PackedWeight)
    assert harness.parts.quantizer.notes == []


@pytest.mark.parametrize("order", [False, True])
def test_experts_are_read_one_by_one_and_held_together_unless_their_orders_differ(tmp_path, order):
    torch.manual_seed(6)

    def code(name, n, k):
        return coded(n, k, 4, 32, order=order) if "experts" in name else None

    cfg, hf = packed_dir(
        tmp_path, config(desc_act=order), code, lambda c, name: gptq(c, 4), "qwen3_moe", moe_intermediate_size=64
    )
    harness = Harness(tmp_path, Qwen3Moe(), cfg, quantizer=Gptq(None, cfg.quantization_config))
    with torch.inference_mode():
        got, want = harness.step({0: PROMPT})[0], hf(torch.tensor([PROMPT])).logits[0]
    assert (got - want).abs().max() <= 1e-4
    experts = harness.model.blocks[0].experts
    assert len(forms(experts.gate_up.scheme)) == (12 if order else 1)
    assert not isinstance(experts.router.scheme, PackedWeight)


def test_auto_takes_it_and_the_head_that_is_tied_stays_plain(tmp_path):
    torch.manual_seed(4)

    def code(name, n, k):
        return None if name == "lm_head" else coded(n, k, 4, 32)

    def write(c, name):  # AutoGPTQ gives modules a bias of zeros
        return {**gptq(c, 4), "bias": torch.zeros(len(c.codes), dtype=torch.float16)}

    _, hf = packed_dir(tmp_path, config(desc_act=False), code, write, tie_word_embeddings=True)
    with LLM(model=str(tmp_path), **LLM_SIZES) as llm:
        assert "minivllm/gptq" in llm.explain("quantizer")
        reported = [note for note in llm.engine.capacity.notes if "not captured" in note]
        assert not reported or library.load() is None
        ids = llm.generate({"prompt_token_ids": PROMPT}, SamplingParams(max_tokens=8, temperature=0))[0].outputs[0]
    with torch.inference_mode():
        want = hf.generate(torch.tensor([PROMPT]), max_new_tokens=8, do_sample=False, eos_token_id=None)[0]
    assert list(ids.token_ids) == want[len(PROMPT) :].tolist()


@pytest.mark.parametrize(("method", "reported"), [(Gptq, config(checkpoint_format="gptq_v2")), (Fp8Checkpoint, FP8)])
def test_parts_that_lie_in_one_tensor_are_cut_where_they_end(tmp_path, method, reported):
    torch.manual_seed(8)

    def code(name, n, k):
        one = coded(n, k, 4, -1 if method is Fp8Checkpoint else 32)
        one.scale[:] = one.scale[0] if method is Fp8Checkpoint else one.scale
        return None if name == "lm_head" else one

    def write(c, name):
        if method is Gptq:
            return gptq(c, 4, v1=False)
        return {"weight": (c.codes - 8).float().to(torch.float8_e4m3fn), "weight_scale": c.scale[:1, 0]}

    cfg, hf = packed_dir(tmp_path, reported, code, write, "phi3")
    harness = Harness(tmp_path, Phi3(), cfg, quantizer=method(None, reported))
    with torch.inference_mode():
        got, want = harness.step({0: PROMPT})[0], hf(torch.tensor([PROMPT])).logits[0]
    assert (got - want).abs().max() <= 1e-4
    for name in ("layers.0.attn.qkv", "layers.1.mlp.gate_up"):
        assert len(forms(harness.parts.modules[name].scheme)) == 1


@pytest.mark.parametrize("rank", [0, 1])
def test_each_process_cuts_its_share_of_each_part_out_of_one_tensor(rank):
    torch.manual_seed(9)
    one = coded(64, 64, 4, 32)
    tensors = gptq(one, 4)
    source = sources({"q": tensors}, {"q": "qkv_proj"})["q"]
    m = ModuleInfo(
        "layers.0.attn.qkv",
        "linear",
        64,
        (("q", 16), ("k", 8), ("v", 8)),
        "float32",
        "cpu",
        split="column",
        shard=Shard(rank, 2),
        sources=dict.fromkeys("qkv", source),
    )
    scheme = loaded(Gptq(None, config()), m, dict.fromkeys("qkv", tensors))
    want = torch.cat([part.chunk(2)[rank] for part in one.weight.double().split([32, 16, 16])])
    torch.testing.assert_close(held(scheme), want, rtol=1e-6, atol=1e-7)


def test_what_autogptq_says_in_a_file_of_its_own_is_read(tmp_path):
    torch.manual_seed(7)
    _, hf = packed_dir(
        tmp_path, {}, lambda name, n, k: None if name == "lm_head" else coded(n, k, 4, 32), lambda c, name: gptq(c, 4)
    )
    (tmp_path / "quantize_config.json").write_text(json.dumps({"bits": 4, "group_size": 32, "desc_act": False}))
    want = None
    for impl in ("auto", "transformers"):  # the names of transformers' own modules
        with LLM(model=str(tmp_path), model_impl=impl, **LLM_SIZES) as llm:
            assert "minivllm/gptq" in llm.explain("quantizer")
            out = llm.generate({"prompt_token_ids": PROMPT}, SamplingParams(max_tokens=8, temperature=0))[0].outputs[0]
        want = want or list(out.token_ids)
        assert list(out.token_ids) == want
    with torch.inference_mode():
        ids = hf.generate(torch.tensor([PROMPT]), max_new_tokens=8, do_sample=False, eos_token_id=None)[0]
    assert want == ids[len(PROMPT) :].tolist()


def test_a_packed_head_of_a_model_that_says_it_is_tied_is_its_own(tmp_path):
    torch.manual_seed(5)
    one = coded(64, 64, 4, 32)
    cfg, hf = packed_dir(
        tmp_path, config(), lambda name, n, k: coded(n, k, 4, 32), lambda c, name: gptq(c, 4), tie_word_embeddings=True
    )
    change(tmp_path, lambda t: t.update({f"lm_head.{k}": v for k, v in gptq(one, 4).items()}))
    _, got, _ = logits_of(tmp_path, cfg, hf, Gptq)
    hf.lm_head.weight = torch.nn.Parameter(one.weight)
    with torch.inference_mode():
        want = hf(torch.tensor([PROMPT])).logits[0]
    assert (got - want).abs().max() <= 1e-4


# ---- what does not fit -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("gptq")
    packed_dir(
        path, config(), lambda name, n, k: coded(n, k, 4, 32) if "proj" in name else None, lambda c, name: gptq(c, 4)
    )
    return path


NAME = "model.layers.1.self_attn.k_proj"


@pytest.mark.parametrize(
    ("reported", "wanted"),
    [
        ({"bits": 5}, r"bits=5: expected 2 or 3 or 4 or 8"),
        ({"bits": "4"}, r"bits='4': expected 2 or 3 or 4 or 8"),
        (
            {"bits": 8},
            r"'model.*qweight'.*shape \[8, 64\] of I32, expected \[16, 64\] of I32 with bits=8, group_size=32",
        ),
        ({"group_size": 64}, r"'model.*q_proj.qzeros'.*expected \[1, 8\] of I32 with bits=4, group_size=64"),
        ({"group_size": 0}, r"group_size=0: expected a number of inputs, or -1"),
        ({"checkpoint_format": "gptq_p"}, r"checkpoint_format='gptq_p': expected gptq or gptq_v2"),
        ({"is_marlin_format": True}, r"checkpoint_format='marlin': use the same model as checkpoint_format=gptq"),
        ({"dynamic": {"-:.*k_proj": {}}}, r"has model.*k_proj.qweight, but a pattern of dynamic excludes"),
        ({"dynamic": {"+:(": {"bits": 8}}}, r"expected a regular expression"),
        ({"dynamic": {"x": {"bits": 9}}}, r"dynamic.x.bits=9: expected"),
        ({"sym": 3}, r"sym=3: expected True or False"),
    ],
)
def test_settings_that_do_not_fit_are_refused_before_anything_is_loaded(checkpoint, reported, wanted, monkeypatch):
    monkeypatch.setattr(PackedWeight, "load", lambda *args: pytest.fail("something is loaded"))
    say(
        checkpoint,
        config(**reported) if "bits" not in reported and "group_size" not in reported else {**config(), **reported},
    )
    with pytest.raises(ModelError, match=wanted):
        LLM(model=str(checkpoint), **LLM_SIZES)
    say(checkpoint, config())


@pytest.mark.parametrize(
    ("param", "made", "wanted"),
    [
        ("scales", None, rf"the checkpoint lacks {NAME}.scales; download it again"),
        (
            "qzeros",
            lambda t: t[:1].clone(),
            rf"tensor '{NAME}.qzeros': shape \[1, 4\] of I32, expected \[2, 4\] of I32",
        ),
        ("qweight", lambda t: t.long(), rf"tensor '{NAME}.qweight': shape \[8, 32\] of I64, expected"),
        ("g_idx", lambda t: t + 1, rf"tensor '{NAME}.*: g_idx has groups beyond 0 to 1"),
        ("bias", lambda t: torch.ones(32), rf"tensor '{NAME}.bias': a bias that is not 0"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(checkpoint, tmp_path, param, made, wanted):
    for file in checkpoint.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())

    def edit(tensors):
        found = tensors.pop(f"{NAME}.{param}", None)
        if made is not None:
            tensors[f"{NAME}.{param}"] = made(found)

    change(tmp_path, edit)
    with pytest.raises(ModelError, match=wanted):
        LLM(model=str(tmp_path), **LLM_SIZES)


def test_a_file_that_ends_early_is_refused_before_anything_is_loaded(checkpoint, tmp_path, capfd):
    from minivllm.cli import main

    for file in checkpoint.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes()[: -100 if file.suffix == ".safetensors" else None])
    assert (
        main(
            [
                "generate",
                "x",
                "--model",
                str(tmp_path),
                "--set",
                "device=cpu",
                "--set",
                "dtype=float32",
                "--set",
                "skip_tokenizer_init=true",
            ]
        )
        == 3
    )
    reported = capfd.readouterr().err.strip().splitlines()
    assert len(reported) == 1 and "not a whole safetensors file" in reported[0]


def test_a_method_that_no_quantizer_reads_is_refused_by_name_with_those_that_are_read(checkpoint, capfd):
    from minivllm.cli import main

    say(checkpoint, config(quant_method="hqq"))
    assert main(["generate", "x", "--model", str(checkpoint), "--set", "device=cpu"]) == 3
    reported = capfd.readouterr().err.strip().splitlines()
    assert len(reported) == 1 and "quant_method='hqq': no quantizer reads it; use awq, " in reported[0]
    say(checkpoint, config())


def test_a_checkpoint_that_is_not_packed_though_config_says_so_is_refused(tmp_path):
    packed_dir(tmp_path, config(), lambda *args: None, None)
    with pytest.raises(ModelError, match="no module of the checkpoint has this format: expected tensors named qweight"):
        LLM(model=str(tmp_path), **LLM_SIZES)
