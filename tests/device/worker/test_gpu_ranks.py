"""A model that two GPUs share: the tokens of one GPU, whichever way the ranks add, and nothing left behind."""

from __future__ import annotations

import os
import time

import pytest
import torch
from greedy import prompts, tokens

from minivllm import LLM
from minivllm.testing.tiny import tiny_dir

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
ITEMS = prompts(257, (1, 15, 16, 17, 33, 70, 5, 9, 40, 64, 2))  # more than there are captured rows of a step's size


def engine(folder, **options):
    base = dict(skip_tokenizer_init=True, dtype="float32", device="cuda", num_kvcache_blocks=200, max_num_seqs=16)
    return LLM(model=str(folder), **{**base, "kvcache_block_size": 16, "max_num_batched_tokens": 256, **options})


def ranks(**options):
    return {"tensor_parallel_size": 2, "executor": {"name": "multiprocess", "options": {"timeout": 60, **options}}}


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "mixtral"])
@pytest.mark.parametrize("sums", ["auto", "nccl"])
def test_two_gpus_give_the_tokens_of_one(family, sums, tmp_path):
    tiny_dir(tmp_path, family, vocab_size=257)
    with engine(tmp_path) as llm:
        want = tokens(llm, ITEMS)
    with engine(tmp_path, **ranks(sums=sums, checked=True)) as llm:
        assert tokens(llm, ITEMS) == want
        assert tokens(llm, ITEMS) == want, "behind prefixes that the cache has"
        pids = [child.pid for child in llm.engine.executor._ranks()]
    end = time.monotonic() + 10
    while time.monotonic() < end and any(os.path.exists(f"/proc/{pid}") for pid in pids):
        time.sleep(0.05)
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)


@pytest.mark.parametrize("options", [{"run_ahead": 0}, {"num_kvcache_blocks": 10}, {"max_num_batched_tokens": 16}])
def test_two_gpus_give_the_tokens_of_one_under_pressure(options, tmp_path):
    tiny_dir(tmp_path, "llama", vocab_size=257)
    with engine(tmp_path, **options) as llm:
        want = tokens(llm, ITEMS)
    with engine(tmp_path, **options, **ranks()) as llm:
        assert tokens(llm, ITEMS) == want
