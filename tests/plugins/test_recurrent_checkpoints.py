"""Quantized checkpoints of models with recurrent layers against transformers with the same weights in float32."""

from __future__ import annotations

import pytest
import torch
from packed_checkpoints import LLM_SIZES, PROMPT, Eight, Four, awq, change, coded, compressed, gptq, packed_dir, scaled

from minivllm import LLM, SamplingParams
from minivllm.errors import ModelError
from minivllm.plugins.model.lfm2 import Lfm2, Lfm2Moe
from minivllm.plugins.model.qwen3_5 import Qwen3Next, Qwen35
from minivllm.plugins.quantizer.awq import Awq
from minivllm.plugins.quantizer.bitsandbytes import BitsAndBytes
from minivllm.plugins.quantizer.compressed import CompressedTensors
from minivllm.plugins.quantizer.fp8_checkpoint import Fp8Checkpoint
from minivllm.plugins.quantizer.gptq import Gptq
from minivllm.plugins.quantizer.packed import PackedWeight
from minivllm.testing.harness import Harness

ARCHS = {"qwen3_5": Qwen35, "qwen3_next": Qwen3Next, "lfm2": Lfm2, "lfm2_moe": Lfm2Moe}
DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 8, "linear_key_head_dim": 16, "linear_value_head_dim": 8,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
}  # fmt: skip
SIZES = {
    "qwen3_5": DELTA, "qwen3_next": DELTA, "lfm2": {"head_dim": 16},
    "lfm2_moe": {"head_dim": 16, "moe_intermediate_size": 32, "num_hidden_layers": 3},
}  # fmt: skip
GROUPS = {
    "linear": {
        "targets": ["Linear"],
        "weights": {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": 32},
    }
}


class Float8:
    """A weight of float8 in which blocks of 16 by 32 share a scale, so a block has rows of several heads and parts."""

    def __init__(self, n, k):
        made, self.weight = scaled(torch.float8_e4m3fn, 16, 32, n, k)
        self.tensors = {"weight": made["weight"], "weight_scale_inv": made["weight_scale"].view(-(-n // 16), -1)}


def _tensors(one, name):
    return one.tensors


WAYS = {
    "fp8": (
        Fp8Checkpoint,
        {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [16, 32]},
        Float8,
        _tensors,
    ),
    "gptq": (
        Gptq,
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False},
        lambda n, k: coded(n, k, 4, 32, symmetric=False),
        lambda one, name: gptq(one, 4),
    ),
    "gptq, act-order": (
        Gptq,
        {"quant_method": "gptq", "bits": 8, "group_size": 32, "desc_act": True, "sym": False},
        lambda n, k: coded(n, k, 8, 32, symmetric=False, order=True),
        lambda one, name: gptq(one, 8),
    ),
    "awq": (
        Awq,
        {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True},
        lambda n, k: coded(n, k, 4, 32, symmetric=False),
        lambda one, name: awq(one),
    ),
    "nf4": (
        BitsAndBytes,
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        lambda n, k: Four(n, k, block=32),
        _tensors,
    ),
    "int8 of bitsandbytes": (BitsAndBytes, {"quant_method": "bitsandbytes", "load_in_8bit": True}, Eight, _tensors),
    "compressed-tensors": (
        CompressedTensors,
        {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": GROUPS, "ignore": []},
        lambda n, k: coded(n, k, 4, 32, symmetric=False),
        lambda one, name: compressed(one, 4, False),
    ),
}


def checkpoint(folder, family, way):
    """Write a model whose matrices are packed, except the head and the routers.

    Return (quantizer, config, reference).
    """
    quantizer, config, code, write = WAYS[way]
    torch.manual_seed(3)
    cfg, hf = packed_dir(
        folder,
        config,
        lambda name, n, k: None if name == "lm_head" or k % 32 else code(n, k),
        write,
        family,
        **SIZES[family],
    )
    return quantizer(None, config), cfg, hf


def logits(hf, prompt):
    with torch.inference_mode():
        return hf(torch.tensor([prompt])).logits[0]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", ARCHS)
def test_logits_are_those_of_the_unpacked_weights_whole_and_in_chunks(family, way, tmp_path):
    quantizer, cfg, hf = checkpoint(tmp_path, family, way)
    harness = Harness(tmp_path, ARCHS[family](), cfg, quantizer=quantizer)
    want = logits(hf, PROMPT)
    assert want.std() > 0.05, "the test has no power"
    limit = 2e-4 * float(want.abs().max())
    assert (harness.step({0: PROMPT})[0] - want).abs().max() <= limit
    assert (harness.chunked(1, PROMPT, (3, 4)) - want).abs().max() <= limit
    packed = [
        name for name, module in harness.parts.modules.items() if type(getattr(module, "scheme", None)) is PackedWeight
    ]
    for part in (".in", ".o", ".qkv"):
        assert any(name.endswith("attn" + part) for name in packed), packed


def greedy(hf, prompt, tokens):
    ids = list(prompt)
    for _ in range(tokens):
        ids.append(int(logits(hf, ids)[-1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize(("family", "way"), [("qwen3_5", "awq"), ("qwen3_next", "gptq"), ("qwen3_next", "fp8")])
def test_processes_take_their_share_of_rows_that_lie_by_heads(family, way, tmp_path):
    _, _, hf = checkpoint(tmp_path, family, way)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    options = {"tensor_parallel_size": 2, "executor": "multiprocess", **LLM_SIZES}
    with LLM(str(tmp_path), **options) as llm:
        for _ in range(2):
            found = llm.generate({"prompt_token_ids": PROMPT}, params, use_tqdm=False)[0].outputs[0]
            assert list(found.token_ids) == greedy(hf, PROMPT, 8)


def test_a_convolution_that_comes_packed_is_refused_by_name(tmp_path):
    checkpoint(tmp_path, "qwen3_5", "awq")
    name = "model.layers.0.linear_attn.conv1d"

    def pack(tensors):
        tensors[f"{name}.qweight"] = tensors.pop(f"{name}.weight").int()

    change(tmp_path, pack)
    message = r"has model.layers.0.linear_attn.conv1d.qweight but lacks .*conv1d.weight, which cannot be quantized"
    with pytest.raises(ModelError, match=message):
        LLM(str(tmp_path), **LLM_SIZES)


def test_value_heads_that_fill_no_words_are_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(DELTA, "linear_num_value_heads", 4)
    quantizer, cfg, _ = _with_gates_of_four(tmp_path)
    with pytest.raises(ModelError, match="4 outputs of 4 bits do not fill whole words: expected a multiple of 8"):
        Harness(tmp_path, Qwen35(), cfg, quantizer=quantizer)


def _with_gates_of_four(folder):
    """Write a checkpoint with a packed ``in_proj_b`` of 4 outputs, whose words have made-up places behind them."""
    quantizer, config, _, write = WAYS["awq"]
    made = {}

    def packed(name, n, k):
        made[name] = coded(max(n, 8), k, 4, 32)
        return None if n % 8 or name == "lm_head" else made[name]

    cfg, hf = packed_dir(folder, config, packed, write, "qwen3_5", **SIZES["qwen3_5"])
    name = "model.layers.0.linear_attn.in_proj_b"

    def pack(tensors):
        del tensors[f"{name}.weight"]
        tensors |= {f"{name}.{param}": tensor for param, tensor in awq(made[name]).items()}

    change(folder, pack)
    return quantizer(None, config), cfg, hf
