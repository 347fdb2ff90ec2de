"""The back end under the kit, and in the engine: the tokens are those of the built-in reference."""

from __future__ import annotations

import torch

from minivllm import LLM, SamplingParams
from minivllm.testing import AttentionConformance


class TestFlex(AttentionConformance):
    plugin = "minivllm-flex/flex"


def tokens(**options):
    torch.set_num_threads(1)  # the model is small
    prompts = ["Once upon a time there was a fox", "One day", "There was a hen who"]
    greedy = SamplingParams(temperature=0, max_tokens=32)
    with LLM(model="pocket", dtype="float32", device="cpu", max_num_seqs=8, max_model_len=256, **options) as llm:
        return [out.tokens for out in llm.generate(prompts, greedy, use_tqdm=False)]


def test_the_model_in_the_package_writes_what_it_writes_with_sdpa():
    assert tokens(attention="minivllm-flex/flex") == tokens(attention="sdpa")
