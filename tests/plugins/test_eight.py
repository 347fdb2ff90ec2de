"""8 bits beside int8's: float8 weights, and activations that are quantized row by row.  The rest is in the kit."""

from __future__ import annotations

import pytest
import torch

from minivllm import LLM
from minivllm.core.interfaces.quantizer import ModuleInfo
from minivllm.errors import ModelError
from minivllm.plugins.quantizer import int8
from minivllm.plugins.quantizer.eight import (
    Fp8,
    Fp8Both,
    Fp8Weight,
    Fp8WeightOnly,
    Int8Both,
    LlmInt8Weight,
    quantized_rows,
)
from minivllm.plugins.quantizer.int8 import Int8Weight
from minivllm.plugins.quantizer.spec import FP8, FP8_WEIGHT
from minivllm.registration.spec import KINDS, PluginQuery

BOTH = [(Int8Both, 127), (Fp8Both, 448)]


def info(inp=64, rows=32, dtype="float32", **more) -> ModuleInfo:
    return ModuleInfo("layers.3.mlp.down", more.pop("kind", "linear"), inp, (("", rows),), dtype, "cpu", **more)


def loaded(kind, weight):
    scheme = kind(info(weight.shape[1], len(weight)))
    scheme.load("weight", weight, "")
    scheme.finish()
    return scheme


def test_a_float8_weight_is_held_within_a_sixteenth_and_its_largest_is_the_largest_of_the_format():
    torch.manual_seed(0)
    weight = torch.randn(40, 64) * torch.logspace(-20, 20, 40)[:, None]
    weight[3] = 0
    scheme = loaded(Fp8Weight, weight)
    held = scheme.tensors["weight"].float() * scheme.tensors["scale"][:, None]
    least = scheme.tensors["scale"][:, None] * 2.0**-10  # half the distance of the smallest numbers
    assert ((held - weight).abs() <= torch.maximum(weight.abs() / 16, least) * (1 + 1e-5)).all()
    largest = scheme.tensors["weight"].float().abs().amax(1)
    assert (largest.index_select(0, torch.tensor([i for i in range(40) if i != 3])) == 448).all() and largest[3] == 0


@pytest.mark.parametrize(("kind", "top"), BOTH)
def test_rows_are_rounded_by_their_own_largest_whatever_is_beside_them(kind, top):
    torch.manual_seed(1)
    scheme = loaded(kind, torch.randn(32, 64))
    held = scheme.tensors["weight"].double() * scheme.tensors["scale"].double()[:, None]
    x = torch.randn(12, 64) * torch.logspace(-3, 3, 12)[:, None]
    x[2] = 0
    scale = x.double().abs().amax(1, keepdim=True) / top
    steps = (x.double() / torch.where(scale > 0, scale, 1)).float()
    steps = steps.round() if kind is Int8Both else steps.to(torch.float8_e4m3fn).float()
    want = (steps.double() * scale) @ held.T
    got = scheme.apply(x)
    torch.testing.assert_close(got.double(), want, rtol=2e-2, atol=1e-3)  # a step apart where rounding decides
    torch.testing.assert_close(scheme.apply(x[3:5]), got[3:5], rtol=1e-4, atol=1e-6)
    error = (got[3] - x[3] @ held.float().T).norm() / got[3].norm()
    assert 1e-3 < error < 0.08 and not got[2].any()


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_what_is_no_number_spoils_its_own_row(dtype):
    x = torch.randn(4, 32)
    x[1, 5] = float("nan")
    got = quantized_rows(x, dtype, 127.0 if dtype == torch.int8 else 448.0)
    assert got[1].isnan().any() and got[[0, 2, 3]].isfinite().all()


@pytest.mark.parametrize("spec", [FP8, FP8_WEIGHT])
def test_a_gpu_without_float8_is_refused_before_anything_is_read(spec):
    facts = {"device": "cuda", "dtype": "bfloat16", "checkpoint": "none"}
    query = lambda sm: PluginQuery(facts={**facts, "sm": sm}, features=frozenset())  # noqa: E731
    assert [str(r) for r in spec.refuse(query(80), KINDS["quantizer"])] == ["sm: expected 80, supports at least 89"]
    assert not spec.refuse(query(90), KINDS["quantizer"])


def test_a_checkpoint_that_is_quantized_is_refused():
    for kind in (Fp8, Fp8WeightOnly):
        with pytest.raises(ModelError, match=f"quantized with gptq, which quantizer={kind.name} cannot read"):
            kind(None, {"quant_method": "gptq"})


@pytest.mark.slow
def test_pocket_does_its_tasks_in_8_bits():
    from minivllm.pocket.evaluate import Minivllm, evaluate
    from minivllm.pocket.tasks import cases

    requested = [case for task in ("copy", "sums", "json") for case in cases(task, 4)]
    sizes = dict(device="cpu", dtype="float32", num_kvcache_blocks=400, max_num_seqs=16)
    for name in ("fp8", "int8-w8a8"):
        with LLM(model="pocket", quantizer=name, **sizes) as llm:
            rows = evaluate(Minivllm(llm).generate, requested)
        assert [right for _, _, right in rows] == [1.0] * 4, (name, rows)


@pytest.mark.parametrize("scheme, kernel", [(Int8Weight(info()), "int8"), (LlmInt8Weight(info(), 6.0), "")])
def test_rows_with_large_elements_are_not_rounded_again_by_the_kernel_of_many_rows(scheme, kernel, monkeypatch):
    """``LlmInt8Weight`` rounds small elements itself, and large ones keep their 16 bits."""
    quant = pytest.importorskip("minivllm.device.kernels.quant")
    monkeypatch.setattr(quant, "capability", lambda device: 9)
    monkeypatch.setattr(int8, "kernels_of", quant.Quantized)
    scheme.load("weight", torch.randn(32, 64), "")
    scheme.finish()
    assert scheme.kernels._hopper(torch.zeros(64, 64, dtype=torch.bfloat16)) == kernel
    assert any("two numbers of 8 bits" in text for text in scheme.served("cuda", 90).values()) == bool(kernel)
