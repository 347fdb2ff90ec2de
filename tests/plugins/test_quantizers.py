"""Tests of int8 alone: its scales, its options and the saved memory.  The conformance kit tests the rest."""

from __future__ import annotations

import pytest
import torch

from minivllm.core.interfaces.quantizer import ModuleInfo
from minivllm.device.loading.weights import weight_bytes
from minivllm.errors import PluginError
from minivllm.plugins.quantizer.int4 import Int4
from minivllm.plugins.quantizer.int8 import Int8, Int8Weight
from minivllm.plugins.quantizer.none import Unquantized
from minivllm.plugins.quantizer.options import Int4Options, Int8Options
from minivllm.testing import QuantizerConformance
from minivllm.testing.harness import Harness
from minivllm.testing.tiny import ARCHS, tiny_dir

PROMPT = [5, 17, 3, 44, 60, 21, 9, 33]


def info(kind="linear", name="layers.3.mlp.down") -> ModuleInfo:
    return ModuleInfo(name, kind, 64, (("a", 24), ("b", 8)), "float32", "cpu")


def test_the_scale_of_a_channel_is_its_largest_element_over_127():
    scheme = Int8Weight(info())
    weights = {"a": torch.randn(24, 64) * torch.logspace(-3, 1, 24)[:, None], "b": torch.randn(8, 64)}
    weights["b"][3] = 0
    for part, w in weights.items():
        scheme.load("weight", w, part)
    scheme.finish()
    w = torch.cat(list(weights.values()))
    q, scale = scheme.tensors["weight"], scheme.tensors["scale"]
    assert q.dtype == torch.int8 and q.abs().amax() == 127
    assert torch.allclose(scale[:24], w[:24].abs().amax(1) / 127) and (q[27] == 0).all()


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
    for requested in (False, True):
        options = Int8Options(lm_head=requested, skip=["layers.*"])
        harness = Harness(path, ARCHS["llama"](), cfg, quantizer=Int8(options))
        assert ("scale" in harness.parts.modules["lm_head"].tensors) == requested
        error = (harness.step({0: PROMPT})[0] - want).abs().max()
        assert (error > 1e-4) == requested and error < 0.1 * want.abs().max()


def test_skip_is_a_list_of_shell_patterns_over_module_names():
    quantizer = Int8(Int8Options(skip=["layers.0.*", "*.down"]))
    for name, want in {"layers.0.attn.o": False, "layers.10.attn.o": True, "layers.3.mlp.down": False}.items():
        assert (quantizer.scheme(info(name=name)) is not None) == want
    assert Int8().scheme(info(kind="embedding")) is None
    assert Unquantized().scheme(info()) is None


def test_a_pattern_behind_re_is_a_regular_expression_for_a_whole_name():
    quantizer = Int8(Int8Options(skip=[r"re:layers\.[0-3]\..*", "re:.*down"]))
    names = {"layers.2.attn.o": False, "layers.12.attn.o": True, "layers.9.mlp.down": False, "layers.9.mlp.downs": True}
    for name, want in names.items():
        assert (quantizer.scheme(info(name=name)) is not None) == want, name
    int4 = Int4(Int4Options(bits={r"re:.*\.(down|o)": 8, "*.o": 16}))
    assert isinstance(int4.scheme(info(name="layers.1.attn.o")), Int8Weight)
    with pytest.raises(PluginError, match=r"skip: 're:\(': .* expected a regular expression behind 're:'"):
        Int8(Int8Options(skip=["re:("]))


def test_a_skip_pattern_that_names_no_module_is_refused(tmp_path):
    from minivllm import LLM

    tiny_dir(tmp_path, "llama")
    base = dict(model=str(tmp_path), skip_tokenizer_init=True, num_kvcache_blocks=10, dtype="float32")
    with pytest.raises(PluginError, match=r"skip=\['layer.*'\] names no module"):
        LLM(**base, quantizer={"name": "int8", "options": {"skip": ["*.o", "layer.*"]}})
    LLM(**base, quantizer={"name": "int8", "options": {"skip": ["*.o"]}}).close()


class TestPrepacked(QuantizerConformance):
    """The kit runs for a quantizer of quantized checkpoints, whose tensors one hook of the suite describes."""

    plugin = "wrong.quantizers_packed:Prepacked"

    def checkpoint_tensors(self, info, part, weight):
        scale = (weight.float().abs().amax(1, keepdim=True) / 127).clamp(min=torch.finfo(torch.float32).tiny)
        return {"qweight": (weight.float() / scale).round().to(torch.int8), "scales": scale}
