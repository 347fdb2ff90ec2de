"""Guidance with a model: transformers' tokens, with processors that act once, on the combined logits of both rows."""

from __future__ import annotations

import random
import re

import pytest
import torch

from minivllm import LLM, SamplingParams
from minivllm.testing.sim import at_rest
from minivllm.testing.tiny import quiet, tiny_dir

torch.set_num_threads(1)  # with tiny tensors, threads only wait for each other
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
    """Return (folder, transformers' model) by seed."""
    made = {}
    for seed in (0, 1):
        folder = tmp_path_factory.mktemp(f"tiny{seed}")
        _, _, model = tiny_dir(folder, "qwen2", seed=seed)
        made[seed] = str(folder), model
    return made


def requested(seed, n=8, longest=18, vocab=96):
    """Return (prompt, negative prompt or None, scale)."""
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
    """Return f32 [V], the logits from which the next token is drawn."""
    with torch.inference_mode():
        p, q = (model(torch.tensor([ids])).logits[0, -1].log_softmax(-1) for ids in (own, other))
    return scale * (p - q) + q


def tokens(llm, items, params):
    return [out.outputs[0].token_ids for out in llm.generate(items, params, use_tqdm=False)]


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
        items = requested(seed, vocab=model.config.vocab_size)
        with LLM(folder, **{**SMALL, **options}) as llm:
            for _ in range(2):  # in the second round both prompts are in the prefix cache
                got = tokens(llm, [p for p, _, _ in items], [params_of(q, s) for _, q, s in items])
                for (prompt, negative, scale), ids in zip(items, got, strict=True):
                    assert ids == transformers_tokens(model, prompt, negative, scale)
            assert llm.stats()["prefix_hits"] > 0
            assert (llm.stats()["preemptions"] > 0) == ("num_kvcache_blocks" in options)
            assert llm.stats()["generated_tokens"] == 2 * 10 * len(items)


def test_what_shapes_a_draw_acts_once_on_what_both_rows_say(models):
    """Penalties, a minimum of tokens and forbidden words act as in transformers, which applies them after guidance."""
    folder, model = models[0]
    eos = 7
    with LLM(folder, **SMALL) as llm:
        for prompt, negative, scale in requested(5, 5, vocab=model.config.vocab_size):
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
    (prompt, negative, scale), *_ = requested(9, 3, vocab=model.config.vocab_size)[1:]
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
    """Check draws of the guided request beside guided neighbours and neighbours without a guide."""
    folder, model = models[0]
    items = requested(3, 7, vocab=model.config.vocab_size)
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


def test_samples_have_a_guide_each_and_best_of_gives_the_likeliest(models):
    folder, model = models[1]
    (prompt, negative, scale), *_ = requested(19, 2, vocab=model.config.vocab_size)[1:]
    more = dict(temperature=1.0, seed=5, logprobs=0, max_tokens=8, ignore_eos=True)
    ask = {**more, "guidance_scale": scale or 2.0, "negative_prompt_token_ids": negative}
    found = []
    for blocks in (200, 20):
        options = {"strategies": ["guidance"], "num_kvcache_blocks": blocks, "kvcache_block_size": 4}
        with LLM(folder, **{**SMALL, **options}, batch_invariant=True) as llm:
            four = llm.generate(prompt, SamplingParams.make(**ask, n=4), use_tqdm=False)[0].outputs
            best = llm.generate(prompt, SamplingParams.make(**ask, n=2, best_of=4), use_tqdm=False)[0].outputs
        found.append([out.token_ids for out in four])
        assert len({tuple(ids) for ids in found[-1]}) == 4
        likeliest = sorted(four, key=lambda out: -out.cumulative_logprob)[:2]
        assert [out.token_ids for out in best] == [out.token_ids for out in likeliest]
        for out in four:
            own, other = list(prompt), list(negative)
            for token, scores in zip(out.token_ids, out.logprobs, strict=True):
                want = combined(model, own, other, ask["guidance_scale"]).log_softmax(-1)
                assert scores[token].logprob == pytest.approx(float(want[token]), abs=1e-4)
                own.append(token)
                other.append(token)
    assert found[0] == found[1]


def test_a_guided_request_has_no_drafts_and_its_neighbours_keep_theirs(models):
    folder, model = models[0]
    loop = [1, 2] * 10
    (prompt, negative, scale), *_ = requested(11, 2, vocab=model.config.vocab_size)[1:]
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
    items = requested(13, 6, vocab=model.config.vocab_size)
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
    items = requested(17, 8, vocab=model.config.vocab_size)
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
