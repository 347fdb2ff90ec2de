"""Checkpoints of compressed-tensors: products use exactly the weights that the tensors describe, for each group of the
configuration.
"""

from __future__ import annotations

import pytest
import torch
from packed_checkpoints import (
    LLM_SIZES,
    PROMPT,
    change,
    coded,
    compressed,
    forms,
    held,
    info,
    loaded,
    logits_of,
    packed,
    packed_dir,
    say,
    scaled,
)

from minivllm import LLM, SamplingParams
from minivllm.core.interfaces.quantizer import PartSource, Shard
from minivllm.errors import ModelError
from minivllm.plugins.quantizer.compressed import CompressedTensors
from minivllm.plugins.quantizer.forms import GroupedBytes, PlainRows
from minivllm.plugins.quantizer.int4 import Int4Rows
from minivllm.plugins.quantizer.int8 import ByteRows
from minivllm.plugins.quantizer.packed import NAMES

FP8 = torch.float8_e4m3fn


def weights(bits=4, kind="int", strategy="group", group_size=32, symmetric=True, **more):
    return {"num_bits": bits, "type": kind, "strategy": strategy, "group_size": group_size, "symmetric": symmetric,
            "dynamic": False, **more}  # fmt: skip


def config(*groups, form="pack-quantized", ignore=("lm_head",), **more):
    """Return a configuration.  ``groups`` are (targets, weights, further fields)."""
    made = {
        f"group_{i}": {"targets": list(g[0]), "weights": g[1], **(g[2] if len(g) > 2 else {})}
        for i, g in enumerate(groups)
    }
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": made,
        "ignore": list(ignore),
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        **more,
    }


@pytest.mark.parametrize(
    ("bits", "group", "symmetric", "form"),
    [
        (4, 32, True, Int4Rows), (4, 128, False, Int4Rows), (4, -1, True, Int4Rows), (2, 64, False, Int4Rows),
        (3, 32, True, Int4Rows), (4, 48, False, GroupedBytes), (5, 32, True, GroupedBytes), (6, -1, True, ByteRows),
        (7, 16, False, GroupedBytes), (8, 32, True, GroupedBytes), (8, -1, True, ByteRows),
        (8, -1, False, GroupedBytes), (4, 5, True, PlainRows),
    ],
)  # fmt: skip
def test_what_is_held_is_what_the_packed_tensors_say(bits, group, symmetric, form):
    torch.manual_seed(bits + group)
    strategy = "channel" if group == -1 else "group"
    reported = config((["Linear"], weights(bits, "int", strategy, group if group > 0 else None, symmetric)))
    parts = {"a": coded(32, 160, bits, group, symmetric), "b": coded(64, 160, bits, group, symmetric)}
    given = {part: compressed(one, bits, symmetric) for part, one in parts.items()}
    scheme = loaded(CompressedTensors(None, reported), info((32, 64), 160), given)
    want = torch.cat([one.weight for one in parts.values()]).double()
    torch.testing.assert_close(held(scheme), want, rtol=1e-6, atol=1e-7)
    assert forms(scheme) == [form]


def within(codes, bits):
    """Words of codes u8 [rows, n] as compressed-tensors 0.9.4 packs them: 32 // bits in each, low first, and a rest."""
    each = 32 // bits
    padded = torch.nn.functional.pad(codes.long(), (0, -codes.shape[1] % each)).unflatten(1, (-1, each))
    words = (padded << torch.arange(each) * bits).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8])
def test_words_of_older_libraries_that_no_field_crosses_are_read(bits, symmetric):
    torch.manual_seed(bits)
    one = coded(64, 160, bits, 32, symmetric)
    given = compressed(one, bits, symmetric)
    old = {**given, "weight_packed": within(one.codes, bits)}
    if not symmetric:
        old["weight_zero_point"] = within(one.zero.t(), bits).t().contiguous()
    assert (old["weight_packed"].shape == given["weight_packed"].shape) is (32 % bits == 0), "the test has no power"
    reported = config((["Linear"], weights(bits, "int", "group", 32, symmetric)))
    for shard in (None, Shard(1, 2)):
        more = {} if shard is None else {"shard": shard, "split": "column"}
        m = info((64 if shard is None else 32,), 160, **more)
        want = one.weight if shard is None else one.weight[32:]
        found = [held(loaded(CompressedTensors(None, reported), m, {"a": made})) for made in (given, old)]
        assert torch.equal(found[0], found[1])
        torch.testing.assert_close(found[1], want.double(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("dtype", "reported", "rows", "columns", "zero", "form"),
    [
        (torch.int8, weights(8, "int", "channel", None), 1, 192, False, ByteRows),
        (torch.int8, weights(8, "int", "channel", None, False), 1, 192, True, GroupedBytes),
        (torch.int8, weights(8, "int", "group", 48), 1, 48, False, GroupedBytes),
        (torch.int8, weights(8, "int", "tensor", None), 96, 192, False, ByteRows),
        (FP8, weights(8, "float", "tensor", None), 96, 192, False, ByteRows),
        (FP8, weights(8, "float", "channel", None), 1, 192, False, ByteRows),
        (FP8, weights(8, "float", "block", None, block_structure=[32, 64]), 32, 64, False, GroupedBytes),
        (FP8, weights(8, "float", "block", None, block_structure=[40, 128]), 40, 128, False, GroupedBytes),
    ],
)  # fmt: skip
@pytest.mark.parametrize("split", ["column", "row"])
def test_weights_in_bytes_are_held_as_they_are_and_each_process_holds_its_slice(
    dtype, reported, rows, columns, zero, form, split
):
    torch.manual_seed(rows + columns)
    tensors, weight = scaled(dtype, rows, columns, zero=zero)
    quantizer = CompressedTensors(None, config((["Linear"], reported), form="naive-quantized"))
    for size in (1, 2, 3):
        for rank in range(size):
            shape = (96 // size, 192) if split == "column" else (96, 192 // size)
            m = info(shape[:1], shape[1], split=split, shard=Shard(rank, size))
            scheme = loaded(quantizer, m, {"a": tensors})
            want = weight.double().chunk(size, 0 if split == "column" else 1)[rank]
            torch.testing.assert_close(held(scheme), want, rtol=1e-6, atol=1e-7)
            assert size > 1 or forms(scheme) == [form]  # a slice may have less to hold


def test_inputs_that_were_sorted_by_activations_are_sorted_again():
    one = coded(32, 128, 4, 32, symmetric=False, order=True)
    reported = config((["Linear"], weights(symmetric=False, actorder="group")))
    sources = {"a": source_of(compressed(one, 4, False, act_order=True))}
    scheme = loaded(
        CompressedTensors(None, reported),
        info((32,), 128, sources=sources),
        {"a": compressed(one, 4, False, act_order=True)},
    )
    torch.testing.assert_close(held(scheme), one.weight.double(), rtol=1e-6, atol=1e-7)
    assert forms(scheme) == [Int4Rows] and "order" in scheme.tensors


@pytest.mark.parametrize(("dtype", "kind"), [(torch.int8, "int"), (torch.float8_e4m3fn, "float")])
def test_inputs_of_bytes_that_were_sorted_by_activations_are_sorted_again(dtype, kind):
    torch.manual_seed(0)
    tensors, _ = scaled(dtype, 1, 32, 32, 128)
    order = torch.arange(128)[torch.randperm(128)] // 32
    tensors["weight_g_idx"] = order.int()
    want = tensors["weight"].double() * tensors["weight_scale"].double()[:, order]
    reported = config((["Linear"], weights(8, kind, actorder="group"), {"format": f"{kind}-quantized"}))
    m = info((32,), 128, sources={"a": source_of(tensors)})
    torch.testing.assert_close(
        held(loaded(CompressedTensors(None, reported), m, {"a": tensors})), want, rtol=1e-6, atol=1e-7
    )


def source_of(tensors, name="model.layers.0.self_attn.q_proj"):
    from minivllm.core.interfaces.quantizer import PartSource
    from minivllm.plugins.quantizer.packed import NAMES

    return PartSource(name, {k: (tuple(t.shape), NAMES[t.dtype]) for k, t in tensors.items()})


def test_logits_of_groups_of_several_kinds_are_those_of_the_weights_in_floating_numbers(tmp_path):
    torch.manual_seed(3)
    groups = [
        (["Linear"], weights(4, symmetric=False)),
        (["re:.*k_proj$"], weights(4, group_size=16)),
        (["re:.*v_proj$"], weights(8, "int", "channel", None), {"format": "int-quantized"}),
        (["model.layers.1.mlp.gate_proj"], weights(4, group_size=64)),
        (["re:.*down_proj"], weights(8, "float", "tensor", None), {"format": "float-quantized"}),
    ]
    reported = config(*groups, form="mixed-precision", ignore=["lm_head", "re:.*layers.0.self_attn.o"])
    symmetric = ("k_proj", "layers.1.mlp.gate_proj")

    def code(name, n, k):
        if name == "lm_head" or name.endswith("layers.0.self_attn.o_proj"):
            return None
        if "v_proj" in name or "down_proj" in name:
            one = coded(n, k, 4, -1)
            one.scale[:] = one.scale[0] if "down_proj" in name else one.scale
            return one
        size = 16 if "k_proj" in name else 64 if "1.mlp.gate" in name else 32
        return coded(n, k, 4, size, name.endswith(symmetric))

    def write(c, name):
        around = c.codes - 8
        if "v_proj" in name:
            return {"weight": around.to(torch.int8), "weight_scale": c.scale.half()}
        if "down_proj" in name:
            return {"weight": around.float().to(FP8), "weight_scale": c.scale[:1, 0], "input_scale": torch.ones(1)}
        return compressed(c, 4, name.endswith(symmetric))

    cfg, hf = packed_dir(tmp_path, reported, code, write)
    harness, got, want = logits_of(tmp_path, cfg, hf, CompressedTensors)
    assert (got - want).abs().max() <= 1e-4
    modules = harness.parts.modules
    assert forms(modules["layers.1.attn.qkv"].scheme) == [Int4Rows, GroupedBytes, ByteRows]
    assert forms(modules["layers.1.mlp.gate_up"].scheme) == [Int4Rows]  # groups of 64 and 32


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("compressed")
    torch.manual_seed(1)
    return path, *packed_dir(
        path,
        config((["Linear"], weights())),
        lambda name, n, k: None if name == "lm_head" else coded(n, k, 4, 32),
        lambda c, name: compressed(c, 4, True),
    )


def test_auto_takes_it_and_leaves_scales_of_keys_and_values(checkpoint):
    path, _, hf = checkpoint
    change(path, lambda tensors: tensors.update({"model.layers.0.self_attn.k_scale": torch.ones(1)}))
    say(path, config((["Linear"], weights()), kv_cache_scheme=weights(8, "float", "tensor", None)))
    with LLM(model=str(path), **LLM_SIZES) as llm:
        ids = llm.generate({"prompt_token_ids": PROMPT}, SamplingParams(max_tokens=8, temperature=0))[0].outputs[0]
    with torch.inference_mode():
        want = hf.generate(torch.tensor([PROMPT]), max_new_tokens=8, do_sample=False, eos_token_id=None)[0]
    assert list(ids.token_ids) == want[len(PROMPT) :].tolist()


@pytest.mark.parametrize("bits", [0, 3, 4, 8], ids=["bytes", "3 bits", "4 bits", "8 bits"])
def test_zero_points_beside_symmetric_are_taken_where_they_are_0_and_refused_elsewhere(bits):
    torch.manual_seed(bits)
    if bits:
        one = coded(32, 96, bits, 32)
        given, want, reported = compressed(one, bits, True), one.weight, weights(bits)
        middle = torch.full((32, 3), 1 << (bits - 1), dtype=torch.uint8)
        zeros = [torch.zeros(32, 3, dtype=torch.int8), packed(middle.t(), bits).t().contiguous()]
        wrong = packed((middle - (torch.arange(96).view(32, 3) == 95).byte()).t(), bits).t().contiguous()
    else:
        given, want = scaled(torch.int8, 1, 192)
        given, reported = dict(given), weights(8, strategy="channel", group_size=None)
        zeros, wrong = [torch.zeros(96, 1, dtype=torch.int8)], torch.ones(96, 1, dtype=torch.int8)
    for zero in (*zeros, wrong):
        tensors = {**given, "weight_zero_point": zero}
        seen = {name: (tuple(t.shape), NAMES[t.dtype]) for name, t in tensors.items()}
        m = info(want.shape[:1], want.shape[1], sources={"a": PartSource("model.layers.3.o_proj", seen)})
        quantizer = CompressedTensors(None, config((["Linear"], reported)))
        if zero is wrong:
            with pytest.raises(ModelError, match=r"weight_zero_point is not 0.*expected symmetric=false"):
                loaded(quantizer, m, {"a": tensors})
        else:
            torch.testing.assert_close(held(loaded(quantizer, m, {"a": tensors})), want.double(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_scales_that_are_no_numbers_are_refused_by_the_name_of_the_layer(number):
    given = compressed(coded(32, 96, 4, 32), 4, True)
    given["weight_scale"][31, 2] = number
    with pytest.raises(ModelError, match=r"layers.3.attn.qkv: scales that are inf or NaN.*damaged"):
        loaded(CompressedTensors(None, config((["Linear"], weights()))), info((32,), 96), {"a": given})


LINEAR = (["Linear"], weights())


@pytest.mark.parametrize(
    ("reported", "wanted"),
    [
        (config(LINEAR, form="nvfp4-pack-quantized"),
         r"format='nvfp4-pack-quantized': expected null or 'pack-quantized'"),
        (config((["Linear"], weights(), {"format": "marlin-24"})),
         r"config_groups.group_0.format='marlin-24': expected"),
        (config(LINEAR, sparsity_config={"format": "sparse-24-bitmask"}), r"sparsity_config=.*expected no entry"),
        (config(LINEAR, transform_config={"config_groups": {"u": {}}}), r"transform_config=.*expected no entry"),
        (config(), r"config_groups={}: expected an object of groups"),
        (config((["Linear"], weights(9))), r"config_groups.group_0.weights.num_bits=9: expected 2 or 3"),
        (config((["Linear"], weights(8))),
         r"weight_packed'.*expected \[64, 16\] of I32 with num_bits=8, strategy=group"),
        (config((["Linear"], weights(group_size=64))), r"weight_scale'.*expected \[64, 1\] of .* group_size=64"),
        (config((["Linear"], weights(symmetric=False))), r"lacks model.*proj.weight_zero_point"),
        (config((["re:.*mlp.*"], weights())), r"has scales of model.*q_proj, but config_groups and ignore exclude"),
        (config((["re:("], weights())), r"target 're:\('.*expected a regular expression after re:"),
        (config((["Linear"], weights(strategy="token"))), r"strategy='token': expected 'tensor'"),
        (config((["Linear"], weights(strategy="block", group_size=None))),
         r"block_structure=None: expected two numbers"),
    ],
)  # fmt: skip
def test_settings_that_do_not_fit_are_refused(checkpoint, reported, wanted):
    say(checkpoint[0], reported)
    with pytest.raises(ModelError, match=wanted):
        LLM(model=str(checkpoint[0]), **LLM_SIZES)


def test_files_of_the_library_itself_are_read_as_it_reads_them():
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    packed = [("pack-quantized", weights(b, "int", "group", 32, s)) for b in (2, 3, 4, 5, 8) for s in (True, False)]
    others = [("int-quantized", weights(8, "int", "channel", None))]
    others += [("float-quantized", weights(8, "float", strategy, None)) for strategy in ("channel", "tensor")]
    for form, reported in (*packed, *others):
        scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**reported))
        columns = {"group": 3, "channel": 1, "tensor": 0}[reported["strategy"]]
        half = 2 ** (reported["num_bits"] - 1)
        top = 448 if reported["type"] == "float" else half
        scale = torch.rand(64, columns) * 3 / top + 0.001 if columns else torch.tensor([3 / top])
        zero = torch.zeros(scale.shape, dtype=torch.int8)
        if not reported["symmetric"]:
            zero = torch.randint(-half, half, scale.shape).to(torch.int8)
        state = {"weight": torch.randn(64, 96), "weight_scale": scale, "weight_zero_point": zero}
        compressor = BaseCompressor.get_value_from_registry(form)
        given = compressor.compress(state, scheme)
        want = compressor.decompress(dict(given), scheme)["weight"].double()
        if reported["symmetric"]:
            given.pop("weight_zero_point", None)
        scheme = loaded(
            CompressedTensors(None, config((["Linear"], reported), form=form)), info((64,), 96), {"a": given}
        )
        torch.testing.assert_close(held(scheme), want, rtol=1e-5, atol=1e-6)
