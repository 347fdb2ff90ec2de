"""Log-probabilities of prompts and outputs, of raw and of processed logits, equal transformers'."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch

from minivllm import LLM, RequestError, SamplingParams
from minivllm.core.engine import publisher
from minivllm.core.interfaces.strategy import Branch, DecodingStrategy
from minivllm.device.worker import scoring
from minivllm.errors import ConfigError
from minivllm.frontend.requests import Tracked
from minivllm.plugins.sampler.default import DefaultSampler
from minivllm.testing.sim import logprobs_after, outputs, request, run, sim_engine
from minivllm.testing.tiny import tiny_dir


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    folder, _, model = tiny_dir(tmp_path_factory.mktemp("small"), "qwen3")
    return folder, model


def engine(folder, **options):
    base = dict(skip_tokenizer_init=True, dtype="float32", num_kvcache_blocks=200, max_num_seqs=8)
    return LLM(model=str(folder), **{**base, "max_num_batched_tokens": 128, **options})


@pytest.fixture(scope="module")
def llm(small):
    with engine(small[0], max_logprobs=-1) as made:
        yield made


@pytest.fixture(scope="module")
def processed(small):
    with engine(small[0], logprobs_mode="processed_logprobs") as made:
        yield made


def expected(model, ids):
    """float64 [T, V]: of the token after each."""
    with torch.no_grad():
        return torch.log_softmax(model(torch.tensor([ids])).logits[0].double(), -1)


def prompts(*sizes):
    rng = np.random.default_rng(3)
    return [rng.integers(0, 61, n).tolist() for n in sizes]


def assert_prompt(out, model, k):
    ids, lp = out.prompt_token_ids, expected(model, out.prompt_token_ids)
    assert len(out.prompt_logprobs) == len(ids) and out.prompt_logprobs[0] is None
    for i, entry in enumerate(out.prompt_logprobs[1:]):
        best = lp[i].topk(k).indices.tolist()
        assert next(iter(entry)) == ids[i + 1] and set(entry) == {ids[i + 1], *best}
        for token, value in entry.items():
            assert abs(value.logprob - lp[i, token].item()) < 1e-4
            assert value.rank == 1 + int((lp[i] > lp[i, token]).sum())


def test_a_prompts_log_probabilities_are_those_of_transformers(small, llm):
    items = prompts(1, 2, 16, 17, 40, 40)
    items[5] = items[4]  # it could hit the prefix cache
    requested = [SamplingParams(max_tokens=3, prompt_logprobs=k, n=1 + (k == 2)) for k in (0, 1, 2, 5, 20, 20)]
    for _ in range(2):
        for out, params in zip(llm.generate(items, requested, use_tqdm=False), requested, strict=True):
            assert_prompt(out, small[1], params.prompt_logprobs)
            assert out.num_cached_tokens == 0
    assert llm.generate(items[4], SamplingParams(max_tokens=1), use_tqdm=False)[0].num_cached_tokens > 0


def test_chunks_tiles_and_preemption_do_not_change_them(small, monkeypatch):
    monkeypatch.setattr(scoring, "TILE", 61 * 5)  # five positions at a time
    items = prompts(30, 37, 44)
    params = SamplingParams(max_tokens=30, prompt_logprobs=2, ignore_eos=True)
    with engine(small[0], max_num_batched_tokens=11, max_num_seqs=4, num_kvcache_blocks=7) as llm:
        for out in llm.generate(items, params, use_tqdm=False):
            assert_prompt(out, small[1], 2)
        assert llm.stats()["preemptions"] > 0, "the test has no power: nothing was preempted"


@pytest.mark.parametrize("depth", [0, 2])
def test_each_prompt_token_is_scored_once_however_the_prompt_is_cut(depth):
    sim = sim_engine(depth=depth, budget=9, slots=6, blocks=200)
    made = [
        request(sim, f"r{i}", range(n), prompt_logprobs=3, max_tokens=9, n=1 + i % 2)
        for i, n in enumerate((1, 2, 9, 30))
    ]
    run(sim, check=True)
    assert sim.slots.asking == 0
    for r in made:
        seen = [first + j for first, lp in r.prompt_parts for j in range(len(lp.chosen))]
        assert seen == list(range(1, len(r.prompt)))
        for first, lp in r.prompt_parts:
            for j, value in enumerate(lp.chosen):
                at = first + j
                assert np.isclose(value, logprobs_after(r.prompt[:at])[r.prompt[at]])


def test_they_do_not_depend_on_when_they_are_settled_and_few_steps_results_are_kept(monkeypatch):
    def answers(settle, depth, blocks=200):
        monkeypatch.setattr(publisher, "FLUSH_LOGPROBS", settle)
        sim = sim_engine(depth=depth, slots=6, blocks=blocks)
        made = [
            request(sim, f"r{i}", range(1 + 3 * i), logprobs=i % 3, max_tokens=40, n=1 + i % 2, ignore_eos=True)
            for i in range(5)
        ]
        most = 0
        while sim.busy:
            sim.step()
            most = max(most, *(len(s.pending_logprobs) for r in made for s in r.sequences))
        assert blocks > 100 or sim.planner.preemptions
        return [(list(s.logprobs), s.cumulative_logprob) for r in made for s in r.sequences], most

    want, most = answers(1 << 30, 0)
    assert most >= 39 and all(len(entries) == 40 for entries, _ in want)
    for settle, depth in ((1, 0), (3, 2), (32, 2)):
        assert answers(settle, depth) == (want, settle - 1)
    assert answers(3, 2, blocks=40)[0] == want


def test_they_are_settled_in_time_where_rows_do_not_draw_in_every_step():
    sim = sim_engine(depth=1, slots=6, blocks=400, drafts=3)
    made = [request(sim, f"r{i}", range(1 + i), logprobs=1, max_tokens=200, ignore_eos=True) for i in range(4)]
    most = 0
    while sim.busy:
        sim.step()
        most = max(most, *(len(s.pending_logprobs) for r in made for s in r.sequences))
    assert most < 2 * publisher.FLUSH_LOGPROBS, most


def test_they_leave_the_garbage_collector_no_object_a_token():
    def objects(**requested):
        sim = sim_engine(depth=2, slots=8, blocks=400)
        asking = [
            Tracked(list(range(i)), SamplingParams(max_tokens=100, ignore_eos=True, **requested), None)
            for i in range(4, 12)
        ]
        before = len(gc.get_objects())
        for tracked in asking:
            tracked.add_to(sim)
        run(sim)
        outputs = [tracked.output() for tracked in asking]
        assert all(len(o.outputs[0].token_ids) == 100 for o in outputs)
        return len(gc.get_objects()) - before

    objects(), objects(logprobs=1)  # create objects that are made only once
    gc.collect()
    gc.disable()
    try:
        plain, scored = objects(), objects(logprobs=1)
    finally:
        gc.enable()
    assert scored - plain < 200, (plain, scored)


def test_a_vocabulary_of_log_probabilities_is_given_if_the_engine_allows_it(small, llm):
    prompt = prompts(9)[0]
    out = llm.generate(
        prompt, SamplingParams(temperature=0, max_tokens=2, logprobs=-1, prompt_logprobs=-1), use_tqdm=False
    )[0]
    assert [len(entry) for entry in out.outputs[0].logprobs] == [61, 61]
    assert all(len(entry) == 61 for entry in out.prompt_logprobs[1:])
    with engine(small[0], max_logprobs=5) as few:
        for name in ("logprobs", "prompt_logprobs"):
            for k in (-1, 6):
                with pytest.raises(RequestError, match="max_logprobs") as e:
                    few.generate(prompt, SamplingParams(**{name: k}), use_tqdm=False)
                assert e.value.param == name
            with pytest.raises(RequestError, match=name):
                SamplingParams(**{name: -2})


def test_processed_log_probabilities_are_of_what_is_drawn_from(small, processed):
    prompt = prompts(12)[0]
    params = SamplingParams(
        temperature=0.7, top_k=9, top_p=0.8, repetition_penalty=1.3, seed=1, max_tokens=12, logprobs=20
    )
    out = processed.generate(prompt, params, use_tqdm=False)[0].outputs[0]
    cut = 0
    for i, entry in enumerate(out.logprobs):
        ids = prompt + out.token_ids[:i]
        logits = expected(small[1], ids)[-1]  # up to a constant, which a penalty must not see
        with torch.no_grad():
            logits = small[1](torch.tensor([ids])).logits[0, -1].double()
        there = torch.tensor(sorted(set(ids)))
        logits[there] = torch.where(logits[there] > 0, logits[there] / 1.3, logits[there] * 1.3)
        p = torch.softmax(logits / 0.7, -1)
        values, order = p.sort(descending=True)
        values = values[:9] / values[:9].sum()
        kept = int((values.cumsum(0) - values < 0.8).sum())
        cut += kept < 9
        want = dict(zip(order[:kept].tolist(), (values[:kept] / values[:kept].sum()).log().tolist(), strict=True))
        got = {t: v.logprob for t, v in entry.items()}
        assert got.keys() == want.keys() and all(abs(got[t] - want[t]) < 1e-4 for t in got)
    assert cut, "the test has no power: top_p cut nothing"


def test_raw_log_probabilities_know_nothing_of_what_is_drawn_from(small, llm):
    prompt = prompts(12)[0]
    params = SamplingParams(temperature=0.5, top_k=3, repetition_penalty=1.5, seed=1, max_tokens=6, logprobs=4)
    out = llm.generate(prompt, params, use_tqdm=False)[0].outputs[0]
    lp = expected(small[1], prompt + out.token_ids)[len(prompt) - 1 :]
    for i, entry in enumerate(out.logprobs):
        assert all(abs(v.logprob - lp[i, t].item()) < 1e-4 for t, v in entry.items())


@pytest.mark.parametrize("sampler, requested", [("typical", {"typical_p": 0.4}), ("mirostat", {"mirostat_tau": 1.5})])
def test_samplers_that_leave_tokens_out_say_so_and_score_beams_beside_them_as_any_other(small, sampler, requested):
    prompt = prompts(9)[0]
    beam, plain = SamplingParams(beam_width=3, max_tokens=6, logprobs=3), SamplingParams(temperature=1.0, max_tokens=6)
    with engine(small[0], logprobs_mode="processed_logprobs", sampler=sampler) as llm:
        row = SamplingParams(temperature=1.0, seed=4, max_tokens=12, logprobs=20, **requested)
        mixed, scored, _ = llm.generate([prompt] * 3, [row, beam, plain], use_tqdm=False)
        alone = llm.generate(prompt, beam, use_tqdm=False)[0]
    assert [o.token_ids for o in scored.outputs] == [o.token_ids for o in alone.outputs]
    assert [o.score for o in scored.outputs] == pytest.approx([o.score for o in alone.outputs])
    left = 0
    for i, entry in enumerate(mixed.outputs[0].logprobs):
        lp = expected(small[1], prompt + mixed.outputs[0].token_ids[:i])[-1]
        stay = {t: v.logprob for t, v in entry.items()}
        mass = torch.logsumexp(lp[list(stay)], 0)
        left += len(stay) < 20
        if len(stay) < 20:  # all remaining tokens are reported, and they are a distribution of their own
            assert all(abs(v - (lp[t] - mass)) < 1e-3 for t, v in stay.items()), (i, stay)
        assert mixed.outputs[0].token_ids[i] in stay
    assert left > 3, "the test itself is too weak"


def test_penalties_and_beams_meet_in_processed_log_probabilities_only(llm, processed):
    prompt = prompts(12)[0]
    params = SamplingParams(beam_width=3, repetition_penalty=1.5, max_tokens=8, ignore_eos=True)
    with pytest.raises(RequestError, match="processed_logprobs") as e:
        llm.generate(prompt, params, use_tqdm=False)
    assert e.value.param == "repetition_penalty"
    plain = SamplingParams(beam_width=3, max_tokens=8, ignore_eos=True)
    out, same = (processed.generate(prompt, p, use_tqdm=False)[0].outputs[0] for p in (params, plain))
    assert same.token_ids == llm.generate(prompt, plain, use_tqdm=False)[0].outputs[0].token_ids
    seen = set(prompt)
    assert len(seen & set(out.token_ids)) <= len(seen & set(same.token_ids)) and out.token_ids != same.token_ids


def test_a_sampler_that_does_not_say_what_it_draws_from_serves_raw_only(small, monkeypatch):
    monkeypatch.delattr(DefaultSampler, "drawn_from")
    with pytest.raises(ConfigError, match="processed_logprobs"):
        engine(small[0], logprobs_mode="processed_logprobs")


def test_best_of_gives_the_likeliest_of_all_samples(llm):
    prompt = prompts(12)[0]
    every = SamplingParams(n=6, seed=5, max_tokens=8, ignore_eos=True, logprobs=0)
    drawn = llm.generate(prompt, every, use_tqdm=False)[0].outputs
    best = llm.generate(prompt, SamplingParams(n=2, best_of=6, seed=5, max_tokens=8, ignore_eos=True), use_tqdm=False)[
        0
    ].outputs
    order = sorted(drawn, key=lambda out: -out.cumulative_logprob)
    assert [out.token_ids for out in best] == [out.token_ids for out in order[:2]]
    assert [out.index for out in best] == [0, 1]
    assert [out.cumulative_logprob for out in best] == pytest.approx([out.cumulative_logprob for out in order[:2]])


def test_what_is_ranked_is_streamed_at_its_end(llm):
    for branches in ({"best_of": 3}, {"beam_width": 3, "n": 2}):
        params = SamplingParams(seed=5, max_tokens=8, ignore_eos=True, **branches)
        pieces = list(llm.stream(prompts(12)[0], params))
        out = pieces[-1].output
        assert [(p.index, p.token_ids) for p in pieces[:-1]] == [(o.index, o.token_ids) for o in out.outputs]
        assert len(out.outputs) == params.n


@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("requested", [{"logprobs": 0}, {}], ids=["requested for", "of the strategy"])
def test_a_sum_of_log_probabilities_misses_no_token_of_a_preempted_row(depth, requested):
    class Ranks(DecodingStrategy):
        def topk(self, params):
            return 0

        def start(self, params):
            return [Branch(i) for i in range(params.n)]

        def result(self, params, ends):
            return [e.sample for e in ends]

    engine = sim_engine(slots=6, blocks=16, block=2, depth=depth, strategy=Ranks())
    made = [request(engine, f"r{i}", [i, 3, 5], n=2, max_tokens=9, ignore_eos=True, **requested) for i in range(4)]
    run(engine)
    assert engine.planner.preemptions, "the test has no power: nothing was preempted"
    for r in made:
        for s, (tokens, _) in zip(r.sequences, outputs(r), strict=True):
            before = [np.array([*r.prompt, *tokens[:i]], np.int32) for i in range(len(tokens))]
            want = sum(float(logprobs_after(h)[t]) for h, t in zip(before, tokens, strict=True))
            assert s.cumulative_logprob == pytest.approx(want, abs=1e-4)
