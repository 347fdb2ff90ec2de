"""int8: elements within half a step, products as of the dequantized weight, a model that resembles its original."""

from __future__ import annotations

import pytest
import torch
from minivllm.testing.harness import Harness
from pydantic import ValidationError
from minivllm.testing.tiny import ARCHS, tiny_dir

from minivllm.core.interfaces.quantizer import ModuleInfo
from minivllm.core.weights import weight_bytes
from minivllm.errors import ModelError, PluginError
from minivllm.plugins.quantizer.int8 import Int8, Int8Weight
from minivllm.plugins.quantizer.none import Unquantized
from minivllm.plugins.quantizer.options import Int8Options

PROMPT = [5, 17, 3, 44, 60, 21, 9, 33]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def info(dtype="float32", device="cpu", kind="linear", name="layers.3.mlp.down") -> ModuleInfo:
    return ModuleInfo(name, kind, 64, (("a", 24), ("b", 8)), dtype, device)


def loaded(dtype="float32", device="cpu"):
    scheme = Int8Weight(info(dtype, device))
    weights = {"a": torch.randn(24, 64) * torch.logspace(-3, 1, 24)[:, None], "b": torch.randn(8, 64)}
    weights["b"][3] = 0
    for part, w in weights.items():
        scheme.load("weight", w, part)
    scheme.finish()
    return scheme, torch.cat(list(weights.values()))


def test_each_element_is_within_half_a_step_of_its_own_channel():
    scheme, w = loaded()
    q, scale = scheme.tensors["weight"], scheme.tensors["scale"]
    assert q.dtype == torch.int8 and q.abs().amax() == 127
    error = (q.double() * scale.double()[:, None] - w.double()).abs()
    assert (error <= scale.double()[:, None] / 2 * (1 + 1e-5)).all()
    assert torch.allclose(scale[:24], w[:24].abs().amax(1) / 127) and (q[27] == 0).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 0.02), ("float16", 0.003)])
def test_product_is_that_of_the_dequantized_weight(dtype, tolerance, device):
    scheme, _ = loaded(dtype, device)
    x = torch.randn(5, 64).to(device, getattr(torch, dtype))
    dense = scheme.tensors["weight"].double() * scheme.tensors["scale"].double()[:, None]
    want = x.double() @ dense.T
    room = tolerance * (x.double().abs() @ dense.abs().T) + 1e-12
    got = scheme.apply(x)
    assert got.dtype == x.dtype and ((got.double() - want).abs() <= room).all()
    out = torch.empty_like(got)
    assert scheme.apply(x, out) is out and torch.equal(out, got)


def test_float16_products_do_not_overflow_before_they_are_scaled():
    scheme = Int8Weight(info("float16"))
    for part, rows in scheme.info.parts:
        scheme.load("weight", torch.full((rows, 64), 0.01), part)
    assert scheme.apply(torch.full((1, 64), 100.0, dtype=torch.float16)).isfinite().all()


def test_a_model_in_int8_resembles_the_original_and_is_smaller(tmp_path):
    path, cfg, hf = tiny_dir(tmp_path)
    harness = Harness(path, ARCHS["llama"](), cfg, quantizer=Int8())
    with torch.inference_mode():
        want = hf(torch.tensor([PROMPT])).logits[0]
    got = harness.step({0: PROMPT})[0]
    assert 0 < (got - want).abs().max() < 0.15 * want.abs().max()
    linear = sum(p.numel() for n, p in hf.named_parameters() if "_proj" in n)
    plain = weight_bytes(Harness(path, ARCHS["llama"](), cfg).parts)
    rows = sum(p.shape[0] for n, p in hf.named_parameters() if "_proj" in n)
    assert plain - weight_bytes(harness.parts) == 3 * linear - 4 * rows


@pytest.mark.parametrize("tied", [False, True])
def test_the_head_is_quantized_only_if_asked(tmp_path, tied):
    path, cfg, hf = tiny_dir(tmp_path, tie_word_embeddings=tied)
    with torch.inference_mode():
        want = hf(torch.tensor([PROMPT])).logits[0]
    for asked in (False, True):
        options = Int8Options(lm_head=asked, skip=["layers.*"])
        harness = Harness(path, ARCHS["llama"](), cfg, quantizer=Int8(options))
        assert ("scale" in harness.parts.modules["lm_head"].tensors) == asked
        error = (harness.step({0: PROMPT})[0] - want).abs().max()
        assert (error > 1e-4) == asked and error < 0.1 * want.abs().max()


def test_skip_is_a_list_of_shell_patterns_over_module_names():
    quantizer = Int8(Int8Options(skip=["layers.0.*", "*.down"]))
    for name, want in {"layers.0.attn.o": False, "layers.10.attn.o": True, "layers.3.mlp.down": False}.items():
        assert (quantizer.scheme(info(name=name)) is not None) == want
    assert Int8().scheme(info(kind="embedding")) is None
    assert Unquantized().scheme(info()) is None


def test_what_a_quantizer_cannot_do_is_refused():
    for quantizer in (Unquantized, Int8):
        with pytest.raises(ModelError, match="quantized with gptq"):
            quantizer(None, {"quant_method": "gptq", "bits": 4})
        assert quantizer(None, None).checkpoint is None
    with pytest.raises(ValidationError):
        Int8Options(bits=4)
    scheme, w = loaded()
    with pytest.raises(ModelError, match=r"shape \[8, 64\], want \[24, 64\]"):
        scheme.load("weight", w[24:], "a")
    with pytest.raises(PluginError, match="adapter"):
        scheme.apply(w, adapter=object())


def test_every_option_says_what_it_does():
    assert all(f.description for f in Int8Options.model_fields.values())


def test_a_skip_pattern_that_names_no_module_is_refused(tmp_path):
    from minivllm import LLM

    tiny_dir(tmp_path, "llama")
    base = dict(model=str(tmp_path), skip_tokenizer_init=True, num_kvcache_blocks=10, dtype="float32")
    with pytest.raises(PluginError, match=r"skip=\['layer.*'\] names no module"):
        LLM(**base, quantizer={"name": "int8", "options": {"skip": ["*.o", "layer.*"]}})
    LLM(**base, quantizer={"name": "int8", "options": {"skip": ["*.o"]}}).close()
