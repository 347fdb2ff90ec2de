"""The engine on real (tiny) models: every way of running a prompt gives the tokens that transformers gives."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from greedy import GREEDY, hf_greedy, prompts, tokens

from minivllm import LLM, RequestError, SamplingParams
from minivllm.testing.faulty import TARGETS as FAULTY
from minivllm.testing.tiny import tiny_dir


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3"])
def family(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    _, _, model = tiny_dir(folder, request.param, vocab_size=257)
    return folder, model


def engine(folder, **options):
    base = dict(
        skip_tokenizer_init=True, dtype="float32", num_kvcache_blocks=200, max_num_seqs=16, max_num_batched_tokens=256
    )
    return LLM(model=str(folder), **{**base, **options})


def test_every_way_of_running_gives_the_tokens_of_transformers(family):
    folder, model = family
    items = prompts(model.config.vocab_size, (1, 15, 16, 17, 33, 70))
    want = [hf_greedy(model, p) for p in items]
    with engine(folder) as llm:
        assert tokens(llm, items) == want, "in a batch"
        assert tokens(llm, items) == want, "after a prefix hit"
        assert llm.stats()["prefix_hits"] > 0
        assert [tokens(llm, [p])[0] for p in items] == want, "alone"
    with engine(folder, max_num_batched_tokens=16, enable_prefix_caching=False) as llm:
        assert tokens(llm, items) == want, "chunked by 16"
    with engine(folder, max_num_batched_tokens=1, max_num_seqs=1, enable_prefix_caching=False) as llm:
        assert tokens(llm, items[3:5]) == want[3:5], "token by token"
    with engine(folder, num_kvcache_blocks=10) as llm:
        assert tokens(llm, items) == want, "after preemption"
        assert llm.stats()["preemptions"] > 0
    with engine(folder, run_ahead=3) as llm:
        assert tokens(llm, items) == want, "three steps ahead of the host"


def test_branches_are_the_runs_that_each_seed_gives_alone(family):
    folder, model = family
    prompt = prompts(model.config.vocab_size, (37,))[0]
    with engine(folder) as llm:
        both = llm.generate(prompt, SamplingParams(n=4, seed=7, max_tokens=20, ignore_eos=True), use_tqdm=False)[0]
        again = llm.generate([prompt] * 3, SamplingParams(n=4, seed=7, max_tokens=20, ignore_eos=True), use_tqdm=False)[
            2
        ]
    got = [o.token_ids for o in both.outputs]
    assert got == [o.token_ids for o in again.outputs]
    assert len({tuple(t) for t in got}) == 4, "branches draw apart"


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    folder = tmp_path_factory.mktemp("small")
    return folder, tiny_dir(folder, "qwen3", "mqa", vocab_size=257)[2]


@pytest.fixture(scope="module")
def llm(small):
    with engine(small[0]) as made:
        yield made


def test_a_seed_gives_the_same_tokens_in_any_batch_and_chunking(small, llm):
    items = prompts(100, (5, 40, 23, 9))
    params = [SamplingParams(seed=i, max_tokens=16, top_p=0.9, top_k=30, ignore_eos=True) for i in range(4)]
    want = [llm.generate(p, sp, use_tqdm=False)[0].tokens for p, sp in zip(items, params, strict=True)]
    assert [o.tokens for o in llm.generate(items, params, use_tqdm=False)] == want
    with engine(small[0], max_num_batched_tokens=16, num_kvcache_blocks=8) as other:
        assert [o.tokens for o in other.generate(items, params, use_tqdm=False)] == want


def test_logprobs_are_those_of_transformers(small, llm):
    prompt = prompts(100, (12,))[0]
    out = llm.generate(
        prompt, SamplingParams(temperature=0, max_tokens=6, logprobs=3, ignore_eos=True), use_tqdm=False
    )[0]
    with torch.no_grad():
        logits = small[1](torch.tensor([prompt + out.tokens])).logits[0].double()
    lp = torch.log_softmax(logits, -1)[len(prompt) - 1 : -1]
    total = 0.0
    for i, (token, entry) in enumerate(zip(out.tokens, out.outputs[0].logprobs, strict=True)):
        top = lp[i].topk(3)
        assert list(entry)[:3] == top.indices.tolist() and entry[token].rank == 1
        for t, v in entry.items():
            assert abs(v.logprob - lp[i, t].item()) < 1e-4
        total += lp[i, token].item()
    assert out.outputs[0].cumulative_logprob == pytest.approx(total, abs=1e-3)


def test_stop_token_ids_and_min_tokens(llm):
    prompt = prompts(100, (9,))[0]
    free = tokens(llm, [prompt], max_tokens=12)[0]
    stop = free[4]
    first = free.index(stop)
    out = llm.generate(prompt, SamplingParams(**{**GREEDY, "stop_token_ids": [stop]}), use_tqdm=False)[0]
    assert out.tokens == free[: first + 1] and out.finish_reason == "stop" and out.outputs[0].stop_reason == stop
    late = llm.generate(
        prompt, SamplingParams(**{**GREEDY, "stop_token_ids": [stop], "min_tokens": 9}), use_tqdm=False
    )[0]
    assert len(late.tokens) > 9 and stop not in late.tokens[:9]


def test_a_host_row_and_a_late_row_run_beside_free_ones(llm):
    items = prompts(100, (9, 9, 9))
    want = tokens(llm, items)[0]
    params = [
        SamplingParams(**GREEDY),
        SamplingParams(**GREEDY, choose_fn=lambda logits, ids: int(np.argsort(logits)[-2])),
        SamplingParams(**GREEDY, allowed_tokens_fn=lambda ids: [t for t in range(100) if t % 2 == len(ids) % 2]),
    ]
    free, host, late = llm.generate(items, params, use_tqdm=False)
    assert free.tokens == want
    assert all(t % 2 == (9 + i) % 2 for i, t in enumerate(late.tokens)) and len(late.tokens) == 32
    second = llm.generate(
        items[1] + host.tokens[:3],
        SamplingParams(temperature=0, max_tokens=1, logprobs=2, ignore_eos=True),
        use_tqdm=False,
    )
    assert list(second[0].outputs[0].logprobs[0])[1] == host.tokens[3], "it chose the second best each time"


def test_a_failing_processor_ends_only_the_requests_that_use_it(small):
    options = dict(processors=["penalties", f"{FAULTY}:Faulty", f"{FAULTY}:Unbound"], allow_targets=[FAULTY])
    with engine(small[0], **options) as llm:
        items = prompts(100, (9, 12, 20))
        want = tokens(llm, items)
        for when in ("apply", "commit"):
            params = [SamplingParams(**GREEDY, extra={"fault": when if i == 1 else None}) for i in range(3)]
            outs = llm.generate(items, params, use_tqdm=False)
            assert [outs[0].tokens, outs[2].tokens] == [want[0], want[2]]
            assert outs[1].finish_reason == "error" and f"boom in {when}" in outs[1].error and "Faulty" in outs[1].error
        with pytest.raises(RequestError, match="boom in bind"):
            llm.generate(items, SamplingParams(extra={"fault": "bind"}), use_tqdm=False)
        assert tokens(llm, items) == want
        assert llm.stats()["blocks_free"] + llm.stats()["blocks_cached"] == llm.stats()["blocks_total"]


def test_a_second_kv_group_with_a_sliding_window_matches_transformers(tmp_path):
    window = dict(num_hidden_layers=4, use_sliding_window=True, sliding_window=20, max_window_layers=2)
    model = tiny_dir(tmp_path, "qwen2", vocab_size=257, **window)[2]
    items = prompts(model.config.vocab_size, (5, 19, 20, 21, 75))
    want = [hf_greedy(model, p) for p in items]
    for options in ({}, {"max_num_batched_tokens": 16}, {"num_kvcache_blocks": 12}):
        with engine(tmp_path, **options) as llm:
            assert len(llm.resolved.groups) == 2 and llm.resolved.windows == (None, 20)
            assert tokens(llm, items) == want
            assert tokens(llm, items) == want, "after a prefix hit"
            llm.engine.cache.check()


def test_refused_prompts_leave_nothing_behind(llm):
    for bad, words in (
        ([[]], "empty"),
        ([10**6], "out of range"),
        ([[1], [2, -1]], "out of range"),
        ("text", "needs a tokenizer"),
    ):
        with pytest.raises(RequestError, match=words):
            llm.generate(bad, SamplingParams(), use_tqdm=False)
    with pytest.raises(RequestError, match="max_model_len"):
        llm.generate([1] * 5000, SamplingParams(), use_tqdm=False)
    assert not llm.engine.busy and llm.stats()["running"] == 0


def test_outputs_are_objects_and_mappings(llm):
    prompt = prompts(100, (9,))[0]
    out = llm.generate({"prompt_token_ids": prompt}, SamplingParams(**GREEDY), use_tqdm=False)[0]
    assert out["tokens"] == out.outputs[0].token_ids and out["finished"] and out["prompt"] is None
    assert out.prompt_token_ids == prompt and out.metrics.finished_time >= out.metrics.first_token_time


def test_a_stream_that_is_left_early_is_aborted(llm):
    stream = llm.stream(prompts(100, (9,))[0], SamplingParams(**GREEDY))
    got = [next(stream) for _ in range(3)]
    assert [len(p.token_ids) for p in got] == [1, 1, 1]
    stream.close()
    assert not llm.engine.requests and len(llm.engine.slots.running) == 0


def test_a_profile_is_written(llm, tmp_path):
    llm.start_profile()
    tokens(llm, prompts(100, (5,)), max_tokens=2)
    assert llm.stop_profile(tmp_path / "p.json") == str(tmp_path / "p.json")
    assert "aten::" in (tmp_path / "p.json").read_text()
    llm.write_trace(tmp_path / "t.json")
    assert '"plan"' in (tmp_path / "t.json").read_text()


def test_int8_weights_change_little_and_take_less(small):
    with engine(small[0]) as full, engine(small[0], quantizer="int8") as int8:
        assert int8.engine.capacity.weight_bytes < full.engine.capacity.weight_bytes
        prompt = prompts(100, (30,))[0]
        a, b = (
            x.generate(
                prompt, SamplingParams(temperature=0, max_tokens=1, logprobs=20, ignore_eos=True), use_tqdm=False
            )[0]
            for x in (full, int8)
        )
        la, lb = a.outputs[0].logprobs[0], b.outputs[0].logprobs[0]
        assert max(abs(la[t].logprob - lb[t].logprob) for t in la if t in lb) < 0.3


def test_state_that_commit_keeps_survives_preemption(family):
    """A sequence that comes back starts with fresh columns: its accepted tokens are committed again."""
    folder, model = family
    items = prompts(model.config.vocab_size, (1, 15, 16, 17, 33, 70))
    own = dict(processors=["wrong.processors_counting:CountedFrequency"], allow_targets=["wrong.processors_counting"])
    with engine(folder, **own) as llm:
        want = tokens(llm, items, frequency_penalty=1.5)
    assert want != [hf_greedy(model, p) for p in items], "the penalty changes nothing here: the test is too weak"
    with engine(folder, num_kvcache_blocks=10, **own) as llm:
        assert tokens(llm, items, frequency_penalty=1.5) == want
        assert llm.stats()["preemptions"] > 0


WAYS = [{}, {"logprobs": 2, "prompt_logprobs": 1, "n": 2}, {"best_of": 3, "logprobs": 1}, {"beam_width": 3, "n": 2},
        {"stop_token_ids": [5]}]  # fmt: skip


@pytest.mark.parametrize("more", WAYS, ids=str)
def test_a_result_goes_through_json_and_is_a_list_of_outputs_as_before(llm, more):
    params = SamplingParams(max_tokens=4, **more)
    for outs in (llm.generate([5, 6], params, use_tqdm=False), llm.generate([[7], [5, 6]], params, use_tqdm=False)):
        found = json.loads(json.dumps(outs))
        assert isinstance(outs, list) and len(found) == len(outs)
        for out, written in zip(outs, found, strict=True):
            assert written["text"] == out.text == out["text"] == out.outputs[0].text
            assert written["tokens"] == out.tokens and written["finish_reason"] == out.finish_reason
            assert [o["token_ids"] for o in written["outputs"]] == [o.token_ids for o in out.outputs]
            assert written["prompt_token_ids"] == out.prompt_token_ids and written["metrics"] == dict(out.metrics)
    last = list(llm.stream([5, 6], SamplingParams(max_tokens=2)))[-1].output
    assert json.loads(json.dumps(last))["tokens"] == last.tokens
