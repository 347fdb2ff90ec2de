"""``nf4`` and ``llm-int8`` quantize a weight as bitsandbytes does.  The conformance kit tests the rest."""

from __future__ import annotations

import pytest
import torch

from minivllm import LLM
from minivllm.core.interfaces.quantizer import ModuleInfo
from minivllm.errors import ModelError, OptionError, PluginError
from minivllm.plugins.quantizer.eight import LlmInt8, LlmInt8Weight
from minivllm.plugins.quantizer.nf4 import Nf4, Nf4Weight
from minivllm.plugins.quantizer.options import LlmInt8Options, Nf4Options


def info(inp: int, rows: int, dtype: str = "float32", name: str = "layers.3.mlp.down") -> ModuleInfo:
    return ModuleInfo(name, "linear", inp, (("", rows),), dtype, "cpu")


def loaded(scheme, weight):
    scheme.load("weight", weight, "")
    scheme.finish()
    return scheme


def weight_with_outliers(rows: int, inp: int) -> torch.Tensor:
    torch.manual_seed(rows)
    weight = torch.randn(rows, inp) * torch.logspace(-4, 2, rows)[:, None]
    weight[1] = 0
    weight[2, ::7] *= 100
    return weight


@pytest.mark.parametrize("group", [32, 64, 128])
def test_nf4_is_what_bitsandbytes_makes_of_a_weight(group):
    library = pytest.importorskip("bitsandbytes").functional
    weight = weight_with_outliers(24, 384)
    scheme = loaded(Nf4Weight(info(384, 24), group), weight)
    packed, state = library.quantize_4bit(weight, blocksize=group, quant_type="nf4")
    assert torch.equal(scheme.tensors["scale"].flatten(), state.absmax)
    torch.testing.assert_close(scheme.tensors["table"], state.code.cpu(), rtol=0, atol=1e-7)
    want = library.dequantize_4bit(packed, state)
    got = scheme.apply(torch.eye(384)).T
    apart = (got - want).abs() > 1e-6 * want.abs().amax(1, keepdim=True)
    assert apart.float().mean() < 1e-3, "more than a few elements that lie between two numbers"


def test_llm_int8_is_what_bitsandbytes_makes_of_a_row():
    library = pytest.importorskip("bitsandbytes").functional
    weight, torch_dtype = weight_with_outliers(32, 128), torch.bfloat16
    scheme = loaded(LlmInt8Weight(info(128, 32, "bfloat16"), 6.0), weight)
    codes, largest, _ = library.int8_vectorwise_quant(weight.half())
    torch.testing.assert_close(scheme.tensors["scale"], largest / 127, rtol=1e-3, atol=1e-9)  # of float16
    apart = (scheme.tensors["weight"].int() - codes.int()).abs()
    assert apart.amax() <= 1 and apart.float().mean() < 2e-2, "where float16 rounds to the other side"
    held = scheme.tensors["weight"].float() * scheme.tensors["scale"][:, None]
    x = torch.randn(1, 128, dtype=torch_dtype)
    x[0, 5], x[0, 77] = 20, -40
    small = x.float().masked_fill(x.abs() >= 6, 0)
    step = small.abs().amax() / 127
    want = ((small / step).round() * step + (x.float() - small)) @ held.T
    torch.testing.assert_close(scheme.apply(x).float(), want, rtol=2e-2, atol=2e-2 * float(want.abs().max()))


def test_large_activations_of_llm_int8_are_kept_and_others_keep_their_digits_beside_them():
    torch.manual_seed(0)
    weight, x = torch.randn(16, 64), torch.randn(3, 64)
    x[:, 9] = 1000
    off = {}
    for threshold in (6.0, 1e9):
        scheme = loaded(LlmInt8Weight(info(64, 16), threshold), weight)
        held = scheme.tensors["weight"].double() * scheme.tensors["scale"].double()[:, None]
        off[threshold] = float((scheme.apply(x).double() - x.double() @ held.T).abs().max())
        torch.testing.assert_close(scheme.apply(x[1:2]), scheme.apply(x)[1:2], rtol=1e-5, atol=1e-3)
    assert 0 < off[6.0] < 0.2 and off[1e9] > 50 * off[6.0]


@pytest.mark.parametrize("name", ["nf4", "llm-int8"])
def test_pocket_does_its_tasks_in_them(name):
    from minivllm.pocket.evaluate import Minivllm, evaluate
    from minivllm.pocket.tasks import cases

    requested = [case for task in ("copy", "json") for case in cases(task, 4)]
    sizes = dict(device="cpu", dtype="float32", num_kvcache_blocks=400, max_num_seqs=16)
    with LLM(model="pocket", quantizer=name, **sizes) as llm:
        rows = evaluate(Minivllm(llm).generate, requested)
    assert [right for _, _, right in rows] == [1.0] * 3, rows


def test_blocks_that_do_not_divide_the_inputs_are_refused_with_what_would():
    with pytest.raises(OptionError, match=r"nf4: layers.3.mlp.down has 96 inputs .* expected group_size=32, or leave"):
        Nf4().scheme(info(96, 8))
    assert Nf4(Nf4Options(group_size=32)).scheme(info(96, 8)) is not None


@pytest.mark.parametrize("kind", [Nf4, LlmInt8])
def test_a_checkpoint_that_is_quantized_is_refused(kind):
    with pytest.raises(ModelError, match="quantized with awq"):
        kind(None, {"quant_method": "awq"})


def test_a_threshold_that_is_no_number_above_zero_is_refused():
    with pytest.raises(Exception, match="threshold"):
        LlmInt8Options(threshold=0)
    with pytest.raises(PluginError, match="threshold"):
        LLM(model="pocket", quantizer={"name": "llm-int8", "options": {"threshold": -1}})
