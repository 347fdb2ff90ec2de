"""Models shared by two to eight GPUs give the tokens of one GPU with each kind of sums, and leave nothing behind."""

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
COUNTS = [2, 4, 8]
WIDE = dict(num_attention_heads=8, num_key_value_heads=4, head_dim=16, vocab_size=257)
ITEMS = prompts(257, (1, 15, 16, 17, 33, 70, 5, 9, 40, 64, 2))  # more than there are captured rows of a step's size


@pytest.fixture
def size(request):
    if torch.cuda.device_count() < request.param:
        pytest.skip(f"needs {request.param} GPUs")
    return request.param


def engine(folder, **options):
    base = dict(skip_tokenizer_init=True, dtype="float32", device="cuda", num_kvcache_blocks=200, max_num_seqs=16)
    return LLM(model=str(folder), **{**base, "kvcache_block_size": 16, "max_num_batched_tokens": 256, **options})


def ranks(size, **options):
    return {"tensor_parallel_size": size, "executor": {"name": "multiprocess", "options": {"timeout": 60, **options}}}


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "mixtral"])
@pytest.mark.parametrize("sums", ["auto", "nccl"])
@pytest.mark.parametrize("size", COUNTS, indirect=True)
def test_several_gpus_give_the_tokens_of_one(size, family, sums, tmp_path):
    tiny_dir(tmp_path, family, **WIDE)
    with engine(tmp_path) as llm:
        want = tokens(llm, ITEMS)
    with engine(tmp_path, **ranks(size, sums=sums, checked=True)) as llm:
        assert tokens(llm, ITEMS) == want
        assert tokens(llm, ITEMS) == want, "behind prefixes that the cache has"
        pids = [child.pid for child in llm.engine.executor._ranks()]
    end = time.monotonic() + 10
    while time.monotonic() < end and any(os.path.exists(f"/proc/{pid}") for pid in pids):
        time.sleep(0.05)
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)


@pytest.mark.parametrize("options", [{"run_ahead": 0}, {"num_kvcache_blocks": 10}, {"max_num_batched_tokens": 16}])
@pytest.mark.parametrize("size", COUNTS, indirect=True)
def test_several_gpus_give_the_tokens_of_one_under_pressure(size, options, tmp_path):
    tiny_dir(tmp_path, "llama", **WIDE)
    with engine(tmp_path, **options) as llm:
        want = tokens(llm, ITEMS)
    with engine(tmp_path, **options, **ranks(size)) as llm:
        assert tokens(llm, ITEMS) == want
