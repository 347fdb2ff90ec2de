"""Keys and values of one byte for each element: the stored bytes of a token, and requests that use them."""

from __future__ import annotations

import pytest
import torch

from minivllm import LLM, SamplingParams
from minivllm.config import EngineConfig
from minivllm.config.resolve import resolve
from minivllm.core.interfaces.attention import AttnSpec
from minivllm.plugins.kvformat.scaled import Fp8KV, Int8KV
from minivllm.registry import Catalog
from minivllm.testing.tiny import tiny_dir

SPEC = AttnSpec(4, 2, 8, 6)


def cache_of(fmt, blocks=3, block=4):
    layout = fmt.layout(SPEC, block)
    return {n: torch.zeros((blocks, *t.shape), dtype=getattr(torch, t.dtype)) for n, t in layout.tensors.items()}


@pytest.mark.parametrize("fmt", [Int8KV(), Fp8KV()], ids=["int8", "fp8"])
def test_what_is_stored_of_a_token_does_not_depend_on_what_is_stored_with_it(fmt):
    generator = torch.Generator().manual_seed(0)
    k, v = torch.randn(9, 2, 8, generator=generator), 1e4 * torch.randn(9, 2, 6, generator=generator)
    slots, together, alone = torch.randperm(12, generator=generator)[:9], cache_of(fmt), cache_of(fmt)
    fmt.store(together, k, v, slots)
    for i in range(9):
        fmt.store(alone, k[i : i + 1], v[i : i + 1], slots[i : i + 1])
    for name, x in together.items():
        assert torch.equal(x.view(torch.uint8), alone[name].view(torch.uint8)), name
    assert fmt.layout(SPEC, 4).bytes == 4 * 2 * (8 + 6 + 2 * 4)


@pytest.mark.parametrize("fmt", [Int8KV(), Fp8KV()], ids=["int8", "fp8"])
def test_a_head_with_nan_is_nan_and_one_of_zeros_is_zeros(fmt):
    k, v = torch.ones(2, 2, 8), torch.zeros(2, 2, 6)
    k[1, 0, 3] = torch.nan
    cache = cache_of(fmt)
    fmt.store(cache, k, v, torch.tensor([5, 6]))
    k, v = fmt.load(cache, torch.tensor([1]), torch.float32)
    assert k[2, 0].isnan().all() and torch.equal(k[1], torch.ones(2, 8)) and torch.equal(k[2, 1], torch.ones(8))
    assert not v.any()


def test_they_are_taken_by_name_alone(tmp_path):
    path = str(tiny_dir(tmp_path, "llama")[0])
    for requested, want in (({}, "fp32"), ({"kv_format": "int8"}, "int8"), ({"kv_cache_dtype": "fp8"}, "fp8")):
        found = resolve(EngineConfig(model=path, device="cpu", **requested), Catalog.discover(environ={}))
        assert found.parts["kvformat"].name == f"minivllm/{want}"


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_chunks_neighbours_prefix_hits_and_preemptions_change_no_token(name, tmp_path):
    path = str(tiny_dir(tmp_path, "qwen3")[0])
    sizes = dict(max_num_seqs=4, max_model_len=96, kvcache_block_size=4, skip_tokenizer_init=True, dtype="float32")
    prompts = [[(7 * i * i + 3 * i + n) % 61 for i in range(n)] for n in (30, 30, 17, 33)]
    prompts += [[*prompts[0][:20], 3, 1, 4], prompts[0]]
    params, found = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True), []
    for ways in ({"num_kvcache_blocks": 200}, {"num_kvcache_blocks": 26, "max_num_batched_tokens": 7}):
        with LLM(model=path, kv_format=name, batch_invariant=True, **sizes, **ways) as llm:
            outs = [llm.generate({"prompt_token_ids": p}, params, False)[0].tokens for p in prompts[:1]]
            outs += [out.tokens for out in llm.generate([{"prompt_token_ids": p} for p in prompts], params, False)]
            found.append(outs)
            stats = llm.engine.stats()
    assert stats["preemptions"] > 0 and stats["prefix_hits"] > 0, "the test has no power"
    assert found[0] == found[1] and found[0][0] == found[0][1] == found[0][-1]
