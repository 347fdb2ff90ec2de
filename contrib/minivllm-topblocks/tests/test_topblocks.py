"""The back end under the kit, and in the engine."""

from __future__ import annotations

import pytest
import torch

from minivllm import LLM, SamplingParams
from minivllm.testing import AttentionConformance

NAME = "minivllm-topblocks/topblocks"


class TestTopBlocks(AttentionConformance):
    plugin = NAME


class TestFewBlocks(AttentionConformance):
    plugin = NAME
    options = {"blocks": 2}


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)  # the model is small


def tokens(**attention):
    prompts = ["Once upon a time there was a fox", "One day", "There was a hen who"]
    greedy = SamplingParams(temperature=0, max_tokens=40)
    small = {"dtype": "float32", "device": "cpu", "max_num_seqs": 4, "max_model_len": 256}
    with LLM(model="pocket", attention=attention, **small) as llm:
        return [out.tokens for out in llm.generate(prompts, greedy, use_tqdm=False)]


def test_contexts_that_fit_are_exact():
    assert tokens(name=NAME, options={"blocks": 16}) == tokens(name="sdpa")


def test_contexts_that_do_not_fit_are_answered_too():
    assert all(len(ids) == 40 for ids in tokens(name=NAME, options={"blocks": 2}))
