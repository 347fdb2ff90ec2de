"""Packed checkpoints on a CUDA device in captured steps have the tokens of the weights in floating point."""

from __future__ import annotations

import pytest
import test_awq
import test_bitsandbytes
import test_compressed_tensors
import test_fp8_checkpoint
import test_gptq
import torch
from packed_checkpoints import LLM_SIZES, awq, coded, compressed, gptq, packed_dir

from minivllm import LLM, SamplingParams

pytestmark = pytest.mark.gpu
PROMPTS = [[(7 * i * i + 3 * i + n) % 61 for i in range(n)] for n in (24, 7, 40)]
GREEDY = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)


def four_bits(symmetric=True, order=False):
    return lambda name, n, k: None if name == "lm_head" else coded(n, k, 4, 32, symmetric, order)


def of_bitsandbytes(name, n, k):
    if name == "lm_head":
        return None
    eight = "v_proj" in name
    return test_bitsandbytes.Eight(n, k) if eight else test_bitsandbytes.Four(n, k, nested="mlp" in name)


def of_fp8(name, n, k):
    return None if name == "lm_head" else test_fp8_checkpoint.Weight(n, k)


def as_gptq(c, name):
    return gptq(c, 4)


MADE = {
    "gptq": (test_gptq.config(), four_bits(), as_gptq, "llama"),
    "gptq act-order": (test_gptq.config(desc_act=True), four_bits(order=True), as_gptq, "llama"),
    "gptq experts": (test_gptq.config(), four_bits(), as_gptq, "qwen3_moe"),
    "awq": (test_awq.config(), four_bits(False), lambda c, name: awq(c), "llama"),
    "compressed-tensors": (
        test_compressed_tensors.config((["Linear"], test_compressed_tensors.weights())),
        four_bits(),
        lambda c, name: compressed(c, 4, True),
        "llama",
    ),
    "fp8": (test_fp8_checkpoint.config((32, 48)), of_fp8, lambda c, name: c.tensors, "llama"),
    "bitsandbytes": (test_bitsandbytes.config(), of_bitsandbytes, lambda c, name: c.tensors, "llama"),
}


def greedy(hf, prompt):
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        found = hf.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False, eos_token_id=None
        )
    return found[0, len(prompt) :].tolist()


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("name", list(MADE))
def test_tokens_are_those_of_the_weights_in_floating_numbers(tmp_path, name, eager):
    reported, code, write, kind = MADE[name]
    torch.manual_seed(4)
    more = {"moe_intermediate_size": 64} if kind == "qwen3_moe" else {"hidden_size": 64, "intermediate_size": 192}
    _, hf = packed_dir(tmp_path, reported, code, write, kind, **more)
    wanted = [greedy(hf, prompt) for prompt in PROMPTS]
    with LLM(model=str(tmp_path), **{**LLM_SIZES, "device": "cuda"}, enforce_eager=eager) as llm:
        found = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], GREEDY)
    assert [list(one.outputs[0].token_ids) for one in found] == wanted


@pytest.mark.parametrize("name", ["gptq", "gptq experts", "awq", "compressed-tensors", "fp8", "bitsandbytes"])
def test_bfloat16_runs_captured_near_the_weights_in_floating_numbers(tmp_path, name):
    reported, code, write, kind = MADE[name]
    torch.manual_seed(4)
    more = {"moe_intermediate_size": 64} if kind == "qwen3_moe" else {"hidden_size": 64, "intermediate_size": 192}
    _, hf = packed_dir(tmp_path, reported, code, write, kind, **more)
    requested = SamplingParams(max_tokens=1, temperature=0, logprobs=5)
    with LLM(model=str(tmp_path), **{**LLM_SIZES, "device": "cuda", "dtype": "bfloat16"}) as llm:
        for prompt in PROMPTS:
            (found,) = llm.generate([{"prompt_token_ids": prompt}], requested)
            with torch.inference_mode():
                want = hf(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
            near = 0.06 * float(want.max() - want.min())  # bfloat16 rounds logits of any size
            for token, said_of in found.outputs[0].logprobs[0].items():
                assert abs(said_of.logprob - want[token].item()) <= near
