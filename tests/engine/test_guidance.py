"""Guidance: transformers' tokens, both rows in step whatever happens to them, and nobody else notices."""

from __future__ import annotations

import random
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from minivllm import LLM, RequestError, SamplingParams
from minivllm.core.engine import planner
from minivllm.core.engine.guides import NO_GUIDES
from minivllm.core.interfaces.strategy import Branch, Guide
from minivllm.plugins.scheduler.fcfs import Fcfs
from minivllm.plugins.strategy.guidance import Guidance
from minivllm.testing.sim import answer, at_rest, guided_answer, outputs, request, run, sim_engine
from minivllm.testing.tiny import quiet, tiny_dir

torch.set_num_threads(1)  # on tiny tensors threads only wait for each other
SMALL = dict(
    skip_tokenizer_init=True,
    dtype="float32",
    device="cpu",
    max_model_len=64,
    max_num_seqs=8,
    strategies=["single", "guidance"],
)
SCALES = (1.5, 0.0, 3.0, 0.5)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """(folder, transformers' model) by seed."""
    made = {}
    for seed in (0, 1):
        folder = tmp_path_factory.mktemp(f"tiny{seed}")
        _, _, model = tiny_dir(folder, "qwen2", seed=seed)
        made[seed] = str(folder), model
    return made


def asked(seed, n=8, longest=18, vocab=96):
    """(prompt, negative prompt or None, scale)"""
    r = random.Random(seed)
    ids = lambda: [r.randrange(1, vocab) for _ in range(r.randint(1, longest))]  # noqa: E731
    return [(ids(), None if i % 3 == 0 else ids(), SCALES[i % 4]) for i in range(n)]


def params_of(negative, scale, **more):
    values = dict(temperature=0, max_tokens=10, ignore_eos=True, **more)
    return SamplingParams.make(**values, guidance_scale=scale, negative_prompt_token_ids=negative)


def transformers_tokens(model, prompt, negative, scale, n=10, **more):
    with quiet(), torch.inference_mode():
        ids = torch.tensor([prompt])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=n,
            guidance_scale=scale,
            negative_prompt_ids=None if negative is None else torch.tensor([negative]),
            eos_token_id=None,
            pad_token_id=0,
            **more,
        )
    return out[0, len(prompt) :].tolist()


def combined(model, own, other, scale):
    """f32 [V], what the next token is drawn from."""
    with torch.inference_mode():
        p, q = (model(torch.tensor([ids])).logits[0, -1].log_softmax(-1) for ids in (own, other))
    return scale * (p - q) + q


def tokens(llm, items, params):
    return [out.outputs[0].token_ids for out in llm.generate(items, params, use_tqdm=False)]


# ---- with a model ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 8, "kvcache_block_size": 4},
        {"num_kvcache_blocks": 16, "kvcache_block_size": 4},
        {"executor": "process"},
        {"batch_invariant": True, "run_ahead": 1},
    ],
    ids=["plain", "chunks", "preempted", "process", "invariant"],
)
def test_tokens_are_those_of_transformers(models, options):
    for seed, (folder, model) in models.items():
        items = asked(seed, vocab=model.config.vocab_size)
        with LLM(folder, **{**SMALL, **options}) as llm:
            for _ in range(2):  # the second time both prompts are in the prefix cache
                got = tokens(llm, [p for p, _, _ in items], [params_of(q, s) for _, q, s in items])
                for (prompt, negative, scale), ids in zip(items, got, strict=True):
                    assert ids == transformers_tokens(model, prompt, negative, scale)
            assert llm.stats()["prefix_hits"] > 0
            assert (llm.stats()["preemptions"] > 0) == ("num_kvcache_blocks" in options)
            assert llm.stats()["generated_tokens"] == 2 * 10 * len(items)


def test_what_shapes_a_draw_acts_once_on_what_both_rows_say(models):
    """Penalties, a minimum of tokens and forbidden words, as transformers applies them after guidance."""
    folder, model = models[0]
    eos = 7
    with LLM(folder, **SMALL) as llm:
        for prompt, negative, scale in asked(5, 5, vocab=model.config.vocab_size):
            plain = transformers_tokens(model, prompt, negative, scale)
            word = plain[2]
            more = dict(repetition_penalty=1.4, bad_words=[[word]], stop_token_ids=[eos], min_tokens=9)
            (got,) = tokens(llm, prompt, params_of(negative, scale, **more))
            own, other = list(prompt), list(negative or prompt[-1:])
            for n in range(10):
                x = combined(model, own, other, scale)
                seen = torch.tensor(sorted(set(own)))
                x[seen] = torch.where(x[seen] < 0, x[seen] * 1.4, x[seen] / 1.4)
                x[[word, *([eos] if n < 9 else [])]] = -torch.inf
                own.append(int(x.argmax()))
                other.append(own[-1])
            assert got == own[len(prompt) :] and got != plain
            hf = dict(repetition_penalty=1.4, bad_words_ids=[[word], [eos]])
            assert got[:9] == transformers_tokens(model, prompt, negative, scale, 9, **hf)


def test_a_mask_and_log_probabilities_are_of_what_both_rows_say(models):
    folder, model = models[1]
    (prompt, negative, scale), *_ = asked(9, 3, vocab=model.config.vocab_size)[1:]
    vocab = model.config.vocab_size
    even = params_of(negative, scale, logprobs=3, allowed_tokens_fn=lambda ids: range(0, vocab, 2))
    with LLM(folder, **SMALL) as llm:
        out = llm.generate(prompt, even, use_tqdm=False)[0].outputs[0]
    own, other = list(prompt), list(negative)
    for token, scores in zip(out.token_ids, out.logprobs, strict=True):
        x = combined(model, own, other, scale)
        assert token == 2 * int(x[::2].argmax())
        want = x.log_softmax(-1)
        for best in want.topk(3).indices.tolist():
            assert scores[best].logprob == pytest.approx(float(want[best]), abs=1e-4)
        assert scores[token].logprob == pytest.approx(float(want[token]), abs=1e-4)
        own.append(token)
        other.append(token)


def test_draws_do_not_depend_on_neighbours_with_and_without_guides(models):
    """Of the guided request, of guided neighbours, and of those that have no guide."""
    folder, model = models[0]
    items = asked(3, 7, vocab=model.config.vocab_size)
    with LLM(folder, **SMALL, batch_invariant=True) as llm:
        drawn = [
            SamplingParams.make(
                temperature=1.0,
                top_p=0.95 if i % 2 else 1.0,
                seed=i,
                max_tokens=12,
                ignore_eos=True,
                **({"guidance_scale": s or 2.0, "negative_prompt_token_ids": q} if i % 3 else {}),
            )
            for i, (_, q, s) in enumerate(items)
        ]
        alone = [tokens(llm, [p], [d])[0] for (p, _, _), d in zip(items, drawn, strict=True)]
        assert tokens(llm, [p for p, _, _ in items], drawn) == alone
        assert len({tuple(ids) for ids in alone}) == len(alone)


def test_a_guided_request_has_no_drafts_and_its_neighbours_keep_theirs(models):
    folder, model = models[0]
    loop = [1, 2] * 10
    (prompt, negative, scale), *_ = asked(11, 2, vocab=model.config.vocab_size)[1:]
    more = dict(drafter="ngram", num_speculative_tokens=3, speculate="always")
    plain = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    with LLM(folder, **SMALL) as llm:
        alone = tokens(llm, [loop], [plain])[0]
    with LLM(folder, **SMALL, **more) as llm:
        outs = llm.generate([prompt, loop], [params_of(negative, scale), plain], use_tqdm=False)
        assert outs[0].outputs[0].token_ids == transformers_tokens(model, prompt, negative, scale)
        assert outs[1].outputs[0].token_ids == alone
        assert (outs[0].metrics.drafted_tokens, outs[1].metrics.drafted_tokens > 0) == (0, True)


@pytest.mark.parametrize("where", ["apply", "commit"])
@pytest.mark.parametrize("ahead", [0, 2])
def test_a_processor_that_fails_on_a_guided_row_ends_its_request_alone(models, where, ahead):
    folder, model = models[0]
    items = asked(13, 6, vocab=model.config.vocab_size)
    faulty = dict(processors=["minivllm.testing.faulty:Faulty"], allow_targets=["minivllm.testing.faulty"])
    params = [
        params_of(q, s, **({"extra": {"fault": where}} if i in (1, 4) else {})) for i, (_, q, s) in enumerate(items)
    ]
    with LLM(folder, **SMALL, **faulty, run_ahead=ahead) as llm:
        outs = llm.generate([p for p, _, _ in items], params, use_tqdm=False)
        for i, (out, (prompt, negative, scale)) in enumerate(zip(outs, items, strict=True)):
            if i in (1, 4):
                assert out.outputs[0].finish_reason == "error" and f"boom in {where}" in out.error
            else:
                assert out.outputs[0].token_ids == transformers_tokens(model, prompt, negative, scale)
        llm.check()
        at_rest(llm.engine)


def test_what_a_sampler_keeps_of_a_guided_row_comes_back_after_a_preemption(models):
    folder, model = models[1]
    items = asked(17, 8, vocab=model.config.vocab_size)
    params = [
        SamplingParams.make(seed=i, max_tokens=14, ignore_eos=True, mirostat_tau=3.0, mirostat_eta=0.4, **more)
        for i, more in enumerate({"guidance_scale": s, "negative_prompt_token_ids": q} for _, q, s in items)
    ]
    found = []
    for blocks in (200, 18):
        options = dict(sampler="mirostat", num_kvcache_blocks=blocks, kvcache_block_size=4, batch_invariant=True)
        with LLM(folder, **SMALL, **options) as llm:
            found.append(tokens(llm, [p for p, _, _ in items], params))
            assert (llm.stats()["preemptions"] > 0) == (blocks == 18)
    assert found[0] == found[1]


def test_a_form_and_scores_of_the_prompt_go_with_guidance():
    form = {"regex": "(the|a) [a-z]{3,5} (ran|sat)"}
    with LLM("pocket", strategies=["single", "guidance"], batch_invariant=True, run_ahead=1) as llm:
        plain = SamplingParams(temperature=0, max_tokens=20, structured_outputs=form, prompt_logprobs=1)
        other = SamplingParams.make(**{**vars(plain), "extra": {}}, guidance_scale=4.0, negative_prompt="The king")
        outs = llm.generate(["Once upon a time"] * 2, [plain, other], use_tqdm=False)
    texts = [out.outputs[0].text for out in outs]
    assert all(re.fullmatch(form["regex"], text) for text in texts) and texts[0] != texts[1]
    for row, same in zip(outs[0].prompt_logprobs[1:], outs[1].prompt_logprobs[1:], strict=True):
        assert {t: s.rank for t, s in row.items()} == {t: s.rank for t, s in same.items()}
        assert [s.logprob for s in row.values()] == pytest.approx([s.logprob for s in same.values()], abs=1e-4)


# ---- on the simulated device -----------------------------------------------------------------------------------------


class Either(Guidance):
    """Serves all requests: those that set a scale with a guide."""

    def takes(self, params):
        return True

    def start(self, params):
        return super().start(params) if params.guidance_scale != 1 else (Branch(0),)


class AnyVictim(Fcfs):
    def __init__(self, options, ctx):
        super().__init__(options, ctx)
        self.random = random.Random(0)

    def victim(self, view, need):
        return self.random.randrange(len(view))


def wanted(r, max_len=40):
    guide = Either().start(r.params)[0].guide
    if guide is None:
        return answer(r.prompt.tolist(), r.params, 0, max_len)
    return guided_answer(r.prompt.tolist(), guide, r.params, max_len)


def add_some(engine, r, n):
    ids = lambda: [r.randrange(6) for _ in range(r.randint(1, 9))]  # noqa: E731
    made = []
    for i in range(n):
        most = r.randint(1, 22)
        values = dict(max_tokens=most, min_tokens=min(r.choice([0, 3]), most), stop_token_ids=r.choice([[], [3, 4]]))
        if r.random() < 0.6:
            values["guidance_scale"] = r.choice([0, 0.5, 1.5, 4])
            values["negative_prompt_token_ids"] = r.choice([None, ids()])
        made.append(request(engine, f"r{i}", ids(), **values))
        for _ in range(r.choice([0, 0, 2])):
            engine.step()
        if r.random() < 0.1:
            engine.abort(made[-1].id)
    return made


@pytest.mark.parametrize("protected_after", [1, 8, 10**9])
@pytest.mark.parametrize("depth", [0, 2])
def test_tokens_stay_the_same_when_rows_are_preempted_aborted_and_fail(monkeypatch, depth, protected_after):
    """In pools that are too small for all, with windows and drafts; the device checks every slot that is read."""
    monkeypatch.setattr(planner, "PROTECTED_AFTER", protected_after)
    preempted = aborted = failed = 0
    for seed in range(10):
        r = random.Random(f"{depth} {protected_after} {seed}")
        engine = sim_engine(
            depth=depth,
            policy=AnyVictim,
            strategy=Either(),
            slots=r.choice([2, 3, 8, 12]),
            blocks=r.choice([18, 19, 20]),
            budget=r.choice([16, 64]),
            max_len=40,
            windows=r.choice([(None,), (None, 8)]),
            prefix=seed % 4 > 0,
            drafts=2 * (seed % 3 == 0),
        )
        if seed % 5 == 0:
            engine.executor.fail_at = {r.randint(5, 20)}
        made = add_some(engine, r, 14)
        run(engine, check=True)
        at_rest(engine)
        assert engine.slots.paired == 0
        preempted += engine.planner.preemptions
        for one in made:
            ids, reason = outputs(one)[0]
            due = wanted(one)
            aborted, failed = aborted + (reason == "abort"), failed + (reason == "error")
            assert (ids, reason) == due or (reason in ("abort", "error") and ids == due[0][: len(ids)]), one.id
            assert reason != "error" or engine.executor.fail_at
    assert preempted > 10 and aborted > 3 and failed > 0


def test_both_draw_in_a_step_or_neither_does():
    """The plans name each pair once, and a row with a guide draws in no other step."""
    engine = sim_engine(strategy=Either(), blocks=22, slots=6, budget=8, max_len=40)
    submit, pairs = engine.executor.submit, 0

    def checked(plan):
        nonlocal pairs
        pairs += len(plan.guided)
        drawn = plan.slots[plan.samples].tolist()
        leads = [slot for slot in drawn if engine.slots.leads[slot] and engine.slots.seq[slot] is not None]
        assert leads == [drawn[row] for row in plan.guided[:, 0].tolist()]
        for row, guide in plan.guided.tolist():
            assert engine.slots.mate[drawn[row]] == drawn[guide]
        submit(plan)

    engine.executor.submit = checked
    made = add_some(engine, random.Random(2), 20)
    run(engine)
    assert pairs == sum(len(outputs(r)[0][0]) for r in made if r.params.guidance_scale != 1) > 30


def test_a_step_without_guides_plans_nothing_for_them():
    engine = sim_engine(strategy=Either())
    plans, submit = [], engine.executor.submit
    engine.executor.submit = lambda plan: (plans.append(plan), submit(plan))
    request(engine, "plain", [1, 2, 3], max_tokens=5)
    run(engine)
    assert plans and all(plan.guided is NO_GUIDES[0] and plan.scale is NO_GUIDES[1] for plan in plans)


def test_an_abort_gives_both_rows_back_at_once():
    engine = sim_engine(strategy=Either(), depth=1)
    made = request(engine, "a", [1, 2, 3], max_tokens=30, guidance_scale=2.0, negative_prompt_token_ids=[4] * 9)
    beside = request(engine, "b", [5, 6], max_tokens=12)
    for _ in range(5):
        engine.step()
    assert len(engine.slots.running) == 3
    engine.abort("a")
    assert len(engine.slots.running) == 1 and made.done
    run(engine, check=True)
    at_rest(engine)
    assert outputs(beside) == [wanted(beside, 256)]


def test_the_answer_ends_where_either_context_is_full():
    engine = sim_engine(strategy=Either(), max_len=40)
    short = request(
        engine, "a", [1, 2], max_tokens=None, ignore_eos=True, guidance_scale=2.0, negative_prompt_token_ids=[4] * 33
    )
    long = request(engine, "b", [1] * 35, max_tokens=30, ignore_eos=True, guidance_scale=2.0)
    run(engine, check=True)
    assert [len(outputs(r)[0][0]) for r in (short, long)] == [7, 5]
    assert [outputs(r)[0][1] for r in (short, long)] == ["length", "length"]


def test_each_of_a_pair_shares_prefixes_with_requests_of_its_own_length():
    """Where the rotary embedding goes by how long a request may become: a guide of another length may change that."""
    engine = sim_engine(strategy=Either(), blocks=200)
    engine.wiring = replace(engine.wiring, rope_switch=100)
    made = request(engine, "a", [1] * 5, max_tokens=200, guidance_scale=2.0, negative_prompt_token_ids=[4] * 240)
    (lead,) = made.sequences
    assert (made.salt, lead.guide.request.salt) == (("", ""), ("", "", "longer"))
    plain = request(engine, "b", [1] * 5, max_tokens=200)
    assert plain.salt == ("", "", "longer")


def test_both_prompts_are_found_in_the_prefix_cache():
    engine = sim_engine(strategy=Either(), depth=0)
    computed = []
    for i in range(2):
        engine.executor.trail.clear()
        asks = dict(guidance_scale=2.0, negative_prompt_token_ids=[4, 5] * 12, max_tokens=3)
        made = request(engine, f"r{i}", [7, 8, 9] * 9, **asks)
        run(engine, check=True)
        assert outputs(made) == [wanted(made, 256)]
        computed.append(sum(sum(q) for _, q in engine.executor.trail))
    assert computed == [27 + 24 + 2 * 2, 2 * 3]


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "values, param, said",
    [
        (dict(n=2, guidance_scale=2.0), "n", "n=2: want n=1 beside guidance_scale=2"),
        (dict(best_of=3, guidance_scale=2.0), "best_of", "best_of=3: want no best_of"),
        (dict(beam_width=2, guidance_scale=2.0), "beam_width", "beam_width=2: want no beam_width"),
        (dict(guidance_scale=200.0), "guidance_scale", "want a number from 0 to 100"),
        (dict(negative_prompt_token_ids=[3]), "negative_prompt_token_ids", "without guidance_scale"),
        (dict(negative_prompt="no"), "negative_prompt", "without guidance_scale"),
        (dict(guidance_scale=2.0, negative_prompt="no"), "negative_prompt", "a text needs a tokenizer"),
        (dict(guidance_scale=2.0, negative_prompt_token_ids=[]), "negative_prompt_token_ids", "at least one"),
        (dict(guidance_scale=2.0, negative_prompt_token_ids=["a"]), "negative_prompt_token_ids", "token ids"),
        (dict(guidance_scale=2.0, negative_prompt_token_ids=[50]), "negative_prompt_token_ids", "want 0 to 49"),
        (dict(guidance_scale=2.0, negative_prompt_token_ids=[1] * 256), "negative_prompt_token_ids", "at most 255"),
        (dict(guidance_scale=2.0, choose_fn=lambda x, ids: 0), "choose_fn", "without guidance_scale"),
        (dict(guidance_scale=2.0, negative_prompt_token_ids=[1], negative_prompt="a"), "negative_prompt", "one of"),
    ],
)
def test_what_it_cannot_serve_is_refused_by_name(values, param, said):
    engine = sim_engine(strategy=Guidance(), slots=4)
    with pytest.raises(RequestError, match=said) as e:
        request(engine, "a", [1, 2, 3], max_tokens=5, **values)
    assert e.value.param == param
    at_rest(engine)


def test_a_pool_a_batch_and_an_executor_that_cannot_hold_a_pair_refuse_it():
    asks = dict(guidance_scale=2.0, negative_prompt_token_ids=[4] * 20, max_tokens=20)
    with pytest.raises(RequestError, match="need 21 blocks of the KV cache, which has 19; shorten them"):
        request(sim_engine(strategy=Guidance(), blocks=20), "a", [1] * 21, **asks)
    with pytest.raises(RequestError, match="takes two rows; want max_num_seqs of at least 2, and it is 1"):
        request(sim_engine(strategy=Guidance(), slots=1), "a", [1], guidance_scale=2.0, max_tokens=2)
    engine = sim_engine(strategy=Guidance())
    engine.capacity = type(engine.capacity)(*[getattr(engine.capacity, f) for f in ("blocks", "block_bytes")], 50, 0, 0)
    with pytest.raises(RequestError, match="the executor SimExecutor serves no guides"):
        request(engine, "a", [1], guidance_scale=2.0, max_tokens=2)


@pytest.mark.parametrize(
    "guide, n, said",
    [
        ("x", 1, "want a Guide"),
        (Guide(float("nan")), 1, "want a finite number"),
        (Guide(1.5, [2**40]), 1, "the prompt of a guide has the token id"),
        (Guide(1.5), 2, "none for more than one branch"),
    ],
)
def test_a_guide_that_is_none_ends_the_request_with_its_strategy_named(guide, n, said):
    strategy = Either()
    strategy.start = lambda params: [Branch(i, guide) for i in range(n)]
    engine = sim_engine(strategy=strategy)
    with pytest.raises(RequestError, match=f"Either failed on this request: .*{said}"):
        request(engine, "a", [1, 2], n=n, max_tokens=2)
    assert not engine.requests and np.all(engine.slots.serial == -1)
