"""Embeddings and the steps that compute them: preemption, the prefix cache, the size of the cache, and NaN."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from minivllm import LLM, RequestError, SamplingParams
from minivllm.frontend.embedding import EmbedOptions, embed_requests
from minivllm.testing.tiny import tiny_dir

NEAR = 1e-5
BLOCK = 4
SMALL = {"dtype": "float32", "max_model_len": 64, "max_num_seqs": 8, "max_num_batched_tokens": 16}
SMALL |= {"kvcache_block_size": BLOCK, "load_format": "auto", "skip_tokenizer_init": True}
KINDS = ("mean", "last", "cls")
FAMILIES = ("llama", "gemma3", "lfm2")


@pytest.fixture(scope="module", params=FAMILIES)
def tiny(request, tmp_path_factory):
    """Return (folder, prompts of 40 and 63 tokens, last hidden states of transformers of each prompt)."""
    path, cfg, model = tiny_dir(tmp_path_factory.mktemp(request.param), request.param)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(5, cfg.vocab_size, n).tolist() for n in (40, 63)]
    with torch.inference_mode():
        outputs = [model(torch.tensor([ids]), output_hidden_states=True) for ids in prompts]
    return str(path), prompts, [out.hidden_states[-1][0].float().numpy() for out in outputs]


def check(outputs, states, kind):
    for output, rows in zip(outputs, states, strict=True):
        assert output.error is None
        expected = {"mean": rows.mean(axis=0), "last": rows[-1], "cls": rows[0]}[kind]
        expected = expected / np.linalg.norm(expected)
        assert np.abs(np.array(output.outputs.embedding, np.float32) - expected).max() < NEAR


def waiting(llm, ids, pooling):
    """Return the sequence of a request for an embedding that waits."""
    options = EmbedOptions(pooling)
    request = embed_requests(llm, [ids], options)[0].request
    llm.engine.add(request)
    return request.sequences[0]


@pytest.mark.parametrize("run_ahead", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_embeddings_that_are_preempted_between_chunks(tiny, kind, run_ahead):
    """Requests that decode take the blocks of a prompt which is computed four tokens at a time."""
    path, prompts, states = tiny
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    options = {**SMALL, "max_num_batched_tokens": 10, "num_kvcache_blocks": 30, "run_ahead": run_ahead}
    with LLM(model=path, **options) as llm:
        streams = [llm.stream(prompts[0][i : i + 3], params) for i in range(6)]
        for stream in streams:
            next(stream)
        slots, planner = llm.engine.slots, llm.engine.planner
        preempt = planner.preempt
        midway: list[int] = []

        def noted(slot):
            if slots.pooled[slot] and 0 < slots.computed[slot] < slots.prompt[slot]:
                midway.append(int(slots.computed[slot]))
            preempt(slot)

        planner.preempt = noted
        check(llm.embed(prompts, kind, use_tqdm=False), states, kind)
        assert midway, "no request for an embedding was preempted between two chunks"
        for stream in streams:
            assert len(list(stream)[-1].output.tokens) == 40
        llm.check()


def test_a_prompt_that_fills_the_cache(tiny):
    """A prompt of n tokens needs the KV cache of n tokens, also after the preemptions that protect a request."""
    path, prompts, states = tiny
    ids, expected = prompts[1][:60], states[1][:60]
    total = 60 // BLOCK
    with LLM(model=path, **SMALL, num_kvcache_blocks=total) as llm:
        for kind in KINDS:
            check(llm.embed([ids], kind, use_tqdm=False), [expected], kind)
            seq = waiting(llm, ids, kind)
            seq.preempted = 100
            while seq.finish_reason is None:
                assert llm.engine.step()
            assert seq.finish_reason == "stop"
        with pytest.raises(RequestError, match=r"up to 61 tokens .* shorten it or raise num_kvcache_blocks") as refused:
            llm.embed(prompts[1][:61], use_tqdm=False)
        assert refused.value.param == "prompt"
        with pytest.raises(RequestError, match="lower max_tokens, or raise"):
            llm.generate(ids, SamplingParams(max_tokens=1), use_tqdm=False)
    whole = (prompts[1] + prompts[0])[:64]
    with LLM(model=path, **SMALL, num_kvcache_blocks=64 // BLOCK) as llm:
        assert llm.embed(whole, "mean", use_tqdm=False)[0].error is None


def test_hints_of_the_prefix_cache_keep_to_the_bound_of_a_request(tiny):
    path, prompts, _ = tiny
    ids = prompts[0]
    with LLM(model=path, **SMALL) as llm:
        llm.embed(ids, use_tqdm=False)
        hits = {}
        for kind in KINDS:
            seq = waiting(llm, ids, kind)
            hinted = llm.engine.cache.hints([seq]).tolist()
            assert hinted == llm.engine.cache.hints([seq]).tolist()
            while seq.finish_reason is None:
                llm.engine.step()
            hits[kind] = seq.request.cached_tokens
            assert hinted == [hits[kind] // BLOCK * BLOCK]
        assert hits["mean"] == hits["cls"] == 0 < hits["last"]
        scored = llm.generate(ids, SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
        assert scored[0].num_cached_tokens == 0


@pytest.mark.parametrize("budget", [16, 8])
@pytest.mark.parametrize("kind", ["mean", "last"])
def test_blocks_with_values_that_are_not_finite_are_not_cached(tmp_path, kind, budget):
    """A token whose embedding is NaN makes the hidden states of its chunk NaN.  The request then ends at once."""
    path, cfg, model = tiny_dir(tmp_path, "llama")
    bad = cfg.vocab_size - 1
    with torch.no_grad():
        model.model.embed_tokens.weight[bad] = torch.nan
    model.save_pretrained(path)
    ids = [*range(5, 13), bad, *range(20, 27), *range(30, 46)]
    if kind == "last":
        ids = ids[:16]
    with LLM(model=str(path), **{**SMALL, "max_num_batched_tokens": budget}) as llm:
        (failed,) = llm.embed(ids, kind, use_tqdm=False)
        assert failed.error == "the model gave values that are not finite numbers, so there is no embedding"
        assert llm.stats()["steps"] == 16 // budget
        (seen,) = llm.embed([*ids[:16], 50], "last", use_tqdm=False)
        assert seen.num_cached_tokens == (8 if budget == 8 else 0), "the first chunk alone is finite"
        llm.check()


@pytest.mark.parametrize("strategies", [["beam"], ["parallel"], ["beam", "guidance"]])
def test_an_embedding_needs_no_strategy(tiny, strategies):
    path, prompts, states = tiny
    with LLM(model=path, **SMALL, strategies=strategies) as llm:
        check(llm.embed(prompts, "mean", use_tqdm=False), states, "mean")
        llm.check()
