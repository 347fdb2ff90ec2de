"""Tensors of GPTQ and AWQ with another shape, dtype or content than config.json describes.

Each is refused by name, from the headers and during loading, and none gives other numbers.
"""

from __future__ import annotations

import pytest
import torch
from packed_checkpoints import awq, change, coded, gptq, held, info, loaded, say

from minivllm.config import EngineConfig
from minivllm.config.resolve import resolve
from minivllm.core.interfaces.quantizer import PartSource
from minivllm.errors import ModelError
from minivllm.plugins.model.llama import Llama
from minivllm.plugins.model.qwen3_moe import Qwen3Moe
from minivllm.plugins.quantizer.awq import Awq
from minivllm.plugins.quantizer.compressed import CompressedTensors
from minivllm.plugins.quantizer.gptq import Gptq
from minivllm.plugins.quantizer.packed import NAMES
from minivllm.registry import Catalog
from minivllm.testing.harness import Harness
from minivllm.testing.tiny import tiny_dir

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": "gptq_v2"}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}
WAYS = {"gptq": (Gptq, GPTQ), "act-order": (Gptq, {**GPTQ, "desc_act": True}), "awq": (Awq, AWQ)}
SHAPES = {
    "turned": lambda x: x.t() if x.dim() > 1 else x[None],
    "flat": lambda x: x.flatten() if x.dim() > 1 else x[:, None],
    "another axis": lambda x: x[None],
    "one row more": lambda x: torch.cat([x, x[:1]]),
    "one row less": lambda x: x[:-1],
    "one column more": lambda x: torch.cat([x, x[..., :1]], -1),
    "one column less": lambda x: x[..., :-1],
    "twice as long": lambda x: torch.cat([x, x]),
    "half": lambda x: x[: len(x) // 2],
    "empty": lambda x: x[:0],
    "one number": lambda x: x.flatten()[0],
}
DTYPES = (torch.int8, torch.uint8, torch.int16, torch.int64, torch.float32, torch.float16, torch.bool, torch.float64)


def tensors_of(way):
    torch.manual_seed(0)
    one = coded(64, 160, 4, 32, symmetric=False, order=way == "act-order")
    return one, {"a": awq(one) if way == "awq" else gptq(one, 4, v1=False)}


def sources(tensors):
    reported = {name: (tuple(x.shape), NAMES.get(x.dtype, "BOOL")) for name, x in tensors["a"].items()}
    return {"a": PartSource("model.layers.0.mlp.up_proj", reported)}


def outcomes(way, tensors, where):
    """Return (weight, None) or (None, error) of a module whose headers were checked, or not."""
    quantizer, reported = WAYS[way]
    m = info((64,), 160, **({"sources": sources(tensors)} if where == "headers" else {}))
    try:
        return held(loaded(quantizer(None, reported), m, tensors)), None
    except ModelError as exc:
        return None, str(exc)


@pytest.mark.parametrize("where", ["headers", "load"])
@pytest.mark.parametrize("way", WAYS)
def test_a_tensor_of_another_shape_or_dtype_is_refused(way, where):
    one, whole = tensors_of(way)
    assert torch.allclose(outcomes(way, whole, where)[0].float(), one.weight, atol=1e-6), "the test has no power"
    met = 0
    for name, tensor in whole["a"].items():
        changes = {kind: change(tensor).contiguous() for kind, change in SHAPES.items()}
        changes |= {str(dtype): tensor.to(dtype) for dtype in DTYPES if dtype != tensor.dtype}
        for kind, changed in changes.items():
            found, error = outcomes(way, {"a": {**whole["a"], name: changed}}, where)
            if error is None:  # the same numbers in another dtype
                assert tuple(changed.shape) == tuple(tensor.shape), (name, kind)
                assert torch.allclose(found.float(), one.weight, atol=1e-6), (name, kind)
            else:
                assert "\n" not in error and "expected" in error and "Traceback" not in error, (name, kind, error)
                met += 1
    assert met >= 15 * len(whole["a"]), met


@pytest.mark.parametrize("way", ["gptq", "act-order"])
def test_groups_that_no_quantizer_writes_are_refused(way):
    _, whole = tensors_of(way)
    index = whole["a"]["g_idx"]
    wrong = {
        "beyond": index + 1,
        "negative": index - 1,
        "largest": torch.full_like(index, 2**31 - 1),
        "one group has another's input": torch.where(torch.arange(160) == 0, (index[0] + 1) % 5, index),
        "one group for all": torch.full_like(index, 3),
    }
    if way == "act-order":
        wrong["zeros"] = torch.zeros_like(index)
    for kind, changed in wrong.items():
        found, error = outcomes(way, {"a": {**whole["a"], "g_idx": changed.int()}}, "headers")
        assert found is None and "g_idx" in error and "expected" in error, (kind, error)


def test_zeros_for_groups_in_order_are_read_as_older_tools_meant_them():
    one, whole = tensors_of("gptq")
    found, error = outcomes("gptq", {"a": {**whole["a"], "g_idx": torch.zeros(160, dtype=torch.int32)}}, "headers")
    assert error is None and torch.allclose(found.float(), one.weight, atol=1e-6)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("way", WAYS)
def test_scales_that_are_no_numbers_are_refused(way, value):
    _, whole = tensors_of(way)
    scales = whole["a"]["scales"].clone()
    scales[1, 3] = value
    found, error = outcomes(way, {"a": {**whole["a"], "scales": scales}}, "headers")
    assert found is None and "scales that are inf or NaN" in error


@pytest.mark.parametrize("way", WAYS)
def test_a_tensor_that_is_missing_is_named(way):
    _, whole = tensors_of(way)
    for name in whole["a"]:
        left = {"a": {param: x for param, x in whole["a"].items() if param != name}}
        found, error = outcomes(way, left, "headers")
        if name == "g_idx" and way == "gptq":
            continue  # groups in their order
        assert found is None and f"lacks model.layers.0.mlp.up_proj.{name}" in error, name


FLOAT8 = ["model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight", "model.norm.weight", "lm_head.weight"]


@pytest.mark.parametrize("name", FLOAT8)
def test_float8_without_scales_is_refused_and_not_cast(tmp_path, name):
    path, cfg, _ = tiny_dir(tmp_path)
    change(path, lambda tensors: tensors.update({name: tensors[name].to(torch.float8_e4m3fn)}))
    with pytest.raises(ModelError, match=f"tensor '{name}': dtype float8_e4m3fn without scales"):
        Harness(path, Llama(), cfg)


@pytest.mark.parametrize("which", ["gate_up_proj", "down_proj"])
def test_float8_experts_without_scales_are_refused(tmp_path, which):
    path, cfg, _ = tiny_dir(tmp_path, "qwen3_moe")

    def cast(tensors):
        names = [name for name in tensors if ".experts." in name and which.split("_")[0] in name]
        assert names, "the test has no power"
        tensors.update({name: tensors[name].to(torch.float8_e4m3fn) for name in names})

    change(path, cast)
    with pytest.raises(ModelError, match="dtype float8_e4m3fn without scales"):
        Harness(path, Qwen3Moe(), cfg)


@pytest.mark.parametrize("groups", [{}, None])
def test_a_checkpoint_of_which_only_the_cache_is_quantized_is_read(tmp_path, groups):
    path, cfg, _ = tiny_dir(tmp_path)
    want = Harness(path, Llama(), cfg).step({0: [5, 17, 3, 44]})[0]
    reported = {"quant_method": "compressed-tensors", "config_groups": groups, "kv_cache_scheme": {"num_bits": 8}}
    scales = {f"model.layers.{i}.self_attn.{x}_scale": torch.ones(1) for i in (0, 1) for x in "kv"}
    change(path, lambda tensors: tensors.update(scales))
    cfg.quantization_config = reported
    quantizer = CompressedTensors(None, reported)
    assert torch.equal(Harness(path, Llama(), cfg, quantizer=quantizer).step({0: [5, 17, 3, 44]})[0], want)
    assert any("scales of keys and values are not used" in note for note in quantizer.notes)


@pytest.mark.parametrize(
    ("method", "says"),
    [
        ("marlin", "order of the kernel Marlin, which is not supported; use the same model as GPTQ with"),
        ("gptq_marlin", "set quant_method=gptq"),
        ("awq_marlin", "set quant_method=awq"),
    ],
)
def test_a_method_that_is_a_kernels_order_is_refused_with_what_to_do(tmp_path, method, says):
    path, _, _ = tiny_dir(tmp_path)
    say(path, {"quant_method": method, "bits": 4, "group_size": 32})
    config = EngineConfig(model=str(path), device="cpu", skip_tokenizer_init=True)
    with pytest.raises(ModelError, match=f"quant_method={method!r}: .*{says}"):
        resolve(config, Catalog.discover())


def test_words_in_marlins_order_are_known_by_their_names(tmp_path):
    source = {
        "a": PartSource("m.up_proj", {"B": ((10, 128), "I32"), "s": ((5, 64), "F16"), "workspace": ((8,), "I32")})
    }
    with pytest.raises(
        ModelError, match=r"m\.up_proj\.B, which is Marlin's order: use the same model as checkpoint_format"
    ):
        Gptq(None, GPTQ).scheme(info((64,), 160, sources=source))


@pytest.mark.parametrize("flag", [{"checkpoint_format": "marlin"}, {"is_marlin_format": True}])
def test_gptq_in_marlins_order_is_refused_with_what_to_do(flag):
    with pytest.raises(ModelError, match="checkpoint_format='marlin': use the same model as checkpoint_format=gptq"):
        Gptq(None, {**GPTQ, **flag})


@pytest.mark.parametrize("version", ["gemv", "gemv_fast", "llm-awq", "marlin"])
def test_awq_in_another_order_is_refused_with_what_to_do(version):
    with pytest.raises(
        ModelError, match=f"version='{version}': its words lie in another order; use the same .* version=gemm"
    ):
        Awq(None, {**AWQ, "version": version})
