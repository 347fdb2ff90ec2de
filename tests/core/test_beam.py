"""Beam search: transformers' sequences and scores, shared blocks, and no token computed twice, whatever happens."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from beam_rules import beam_search

from minivllm import LLM, RequestError, SamplingParams
from minivllm.core.interfaces.plan import LogProbs
from minivllm.core.interfaces.strategy import Moves, Pick
from minivllm.plugins.executor.made_up import MadeUpModel
from minivllm.plugins.strategy.beam import Beam
from minivllm.plugins.strategy.parallel import Parallel
from minivllm.testing.sim import EOS_ID, answer, at_rest, logprobs_after, outputs, request, run, sim_engine
from minivllm.testing.tiny import quiet, tiny_dir

EARLY = (False, True, "never")


def found(engine, r):
    return [(s.score, s.tokens[len(r.prompt) : s.known].tolist()) for s in engine.answer(r)]


def wanted(r, max_len=256):
    p = r.params
    most = min(p.max_tokens, max_len - len(r.prompt))
    eos = {*p.stop_token_ids} | (set() if p.ignore_eos else {EOS_ID})
    return beam_search(
        logprobs_after,
        r.prompt.tolist(),
        p.beam_width,
        most,
        n=p.n,
        penalty=p.length_penalty,
        early=p.early_stopping,
        eos=eos,
        min_tokens=p.min_tokens,
    )


def assert_equal(got, want):
    assert [tokens for _, tokens in got] == [tokens for _, tokens in want]
    assert np.allclose([score for score, _ in got], [score for score, _ in want], rtol=1e-5, atol=1e-5)


# ---- on the simulated device -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("width", [1, 2, 5, 8])
def test_outputs_and_scores_are_those_of_the_rules(depth, width):
    for early in EARLY:
        engine = sim_engine(depth=depth, strategy=Beam(), slots=20, blocks=300)
        made = [
            request(
                engine,
                f"r{i}",
                [i, 3, 5] * (1 + i),
                beam_width=width,
                n=max(1, width - 1),
                max_tokens=12,
                early_stopping=early,
                length_penalty=penalty,
                min_tokens=i,
                stop_token_ids=[7] * (i % 2),
            )
            for i, penalty in enumerate((1.0, 0.0, 2.0, -0.5))
        ]
        run(engine, check=True)
        for r in made:
            assert_equal(found(engine, r), wanted(r))
        at_rest(engine)


@pytest.mark.parametrize("width", [1, 3, 8])
def test_of_equal_sums_the_earlier_beam_goes_on_and_in_it_the_lower_id(width, monkeypatch):
    few = lambda logits: np.round(logits / 8) * 8  # noqa: E731  few values, so most sums tie
    rough = lambda ids: few(logprobs_after(ids))  # noqa: E731

    def scores(self, h, tokens, k):
        values = few(self.logits(h))
        ids = np.argsort(-values, axis=1, kind="stable")[:, :k].astype(np.int32)
        chosen = values[np.arange(len(h)), tokens]
        rank = (values > chosen[:, None]).sum(axis=1).astype(np.int32) + 1
        return LogProbs(chosen, rank, ids, np.take_along_axis(values, ids, 1))

    monkeypatch.setattr(MadeUpModel, "scores", scores)
    engine = sim_engine(strategy=Beam(), slots=30, blocks=400)
    ask = dict(beam_width=width, n=width, max_tokens=6)
    made = [request(engine, f"r{i}", [i, 3, 5 + i], logprobs=16, **ask) for i in range(3)]
    request(engine, "neighbour", [4, 4], logprobs=20, max_tokens=9, beam_width=2)
    run(engine, check=True)
    for r in made:
        want = beam_search(rough, r.prompt.tolist(), width, 6, n=width, eos={EOS_ID})
        assert [tokens for _, tokens in found(engine, r)] == [tokens for _, tokens in want]
        for entry in [entry for s in engine.answer(r) for entry in s.logprobs]:
            assert entry.rank == 1 + sum(value > entry.chosen for value in entry.top)


def test_a_prefix_is_computed_once_and_its_blocks_are_held_once():
    engine = sim_engine(strategy=Beam(), blocks=100, block=4, prefix=False)
    request(engine, "r", range(33), beam_width=6, max_tokens=9, ignore_eos=True)
    held = 0
    while engine.busy:
        engine.step()
        pool = engine.cache.pools[0]
        held = max(held, pool.total - 1 - pool.available)
    steps = [sum(q_len) for _, q_len in engine.executor.trail]
    assert sum(steps) == 33 + 6 * 8, "a token was computed twice"
    assert held <= 33 // 4 + 6 * 3, "beams share the prompt's full blocks"
    at_rest(engine)


@pytest.mark.parametrize("seed", range(6))
def test_memory_chunks_neighbours_and_aborts_change_nothing(seed):
    rng = random.Random(seed)
    engine = sim_engine(
        depth=seed % 3,
        windows=((None,), (None, 6), (5,))[seed % 3],
        # a model with only sliding windows keeps only the windows without a prefix cache, so it is preempted with less
        # memory
        blocks=16 if seed == 5 else 24,
        slots=10,
        budget=12,
        max_len=64,
        prefix=seed != 5,
    )
    engine.strategies = [("parallel", Parallel()), ("beam", Beam())]
    made = []
    for i in range(24):
        prompt, width = [rng.randrange(3) for _ in range(rng.randint(1, 16))], rng.randint(1, 4)
        branches = {"n": rng.randint(1, width), **({"beam_width": width} if rng.random() < 0.7 else {})}
        early = rng.choice(EARLY) if "beam_width" in branches else False
        made.append(request(engine, f"r{i}", prompt, max_tokens=rng.randint(1, 14), early_stopping=early, **branches))
    for _ in range(rng.randint(5, 30)):
        engine.step()
        engine.cache.check()
    gone = rng.choice(made)
    engine.abort(gone.id)
    run(engine, check=True)
    at_rest(engine)
    assert engine.planner.preemptions > 0, "the test has no power: nothing was preempted"
    for r in made:
        if r is not gone and r.params.beam_width:
            assert_equal(found(engine, r), wanted(r, 64))
        elif r is not gone:
            assert outputs(r) == [answer(r.prompt, r.params, s.sample, 64) for s in r.sequences]


@pytest.mark.parametrize("depth", [0, 2])
def test_an_abort_gives_what_there_is_and_all_blocks_back(depth):
    engine = sim_engine(strategy=Beam(), depth=depth)
    r = request(engine, "r", range(9), beam_width=3, n=3, max_tokens=50, ignore_eos=True)
    early = request(engine, "early", range(9), beam_width=3, max_tokens=50, ignore_eos=True)
    engine.abort("early")
    for _ in range(12):
        engine.step()
    engine.abort("r")
    engine.step()
    run(engine)
    at_rest(engine)
    assert {s.finish_reason for s in r.sequences} == {"abort"} and len(engine.answer(early)) == 1
    assert all(len(tokens) > 2 for _, tokens in found(engine, r)) and len(found(engine, r)) == 3


@pytest.mark.parametrize("depth", [0, 1])
def test_a_failed_step_ends_the_search_and_nobody_else(depth):
    engine = sim_engine(depth=depth)
    engine.strategies = [("parallel", Parallel()), ("beam", Beam())]
    r = request(engine, "r", range(9), beam_width=3, max_tokens=20, ignore_eos=True)
    engine.executor.fail_at = {4}
    for _ in range(8):
        engine.step()
    other = request(engine, "other", range(5), max_tokens=6)
    run(engine, check=True)
    at_rest(engine)
    assert r.sequences[0].finish_reason == "error" and "planned failure" in r.sequences[0].error
    assert outputs(other) == [answer(other.prompt, other.params)]


class _Broken(Beam):
    def __init__(self, moves):
        super().__init__()
        self.moves = moves

    def search(self, params, most):
        made = super().search(params, most)
        made.advance = lambda grown, ends: self.moves(grown)
        return made


@pytest.mark.parametrize(
    ("moves", "says"),
    [
        (lambda grown: Moves([Pick(0, int(t)) for t in [*grown[0].tokens, grown[0].tokens[0]]]), "expected at most 3"),
        (lambda grown: Moves([Pick(5, 0)]), "there is no branch 5"),
        (lambda grown: Moves([Pick(0, 10**6)]), "no candidate of branch 0"),
        (lambda grown: Moves([], done=True), "without an output"),
        (lambda grown: 1 / 0, "ZeroDivisionError"),
    ],
)
def test_a_strategy_that_breaks_its_contract_ends_its_own_request(moves, says):
    engine = sim_engine(blocks=100)
    engine.strategies = [("beam", _Broken(moves)), ("parallel", Parallel())]
    r = request(engine, "r", range(9), beam_width=3, max_tokens=20, ignore_eos=True)
    other = request(engine, "other", range(5), max_tokens=6)
    run(engine, check=True)
    at_rest(engine)
    assert says in r.sequences[0].error and outputs(other) == [answer(other.prompt, other.params)]


def test_a_pool_that_could_not_hold_the_beams_refuses_them():
    engine = sim_engine(strategy=Beam(), blocks=12)
    with pytest.raises(RequestError, match="beam_width=6"):
        request(engine, "r", range(9), beam_width=6, max_tokens=20)
    with pytest.raises(RequestError, match="max_num_seqs"):
        request(engine, "r", range(9), beam_width=9, max_tokens=2)


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"beam_width": 0}, "beam_width"), ({"beam_width": 1.5}, "beam_width"),
        ({"beam_width": 2, "n": 3}, "beam_width"),
        ({"beam_width": 2, "length_penalty": float("nan")}, "length_penalty"),
        ({"beam_width": 2, "length_penalty": 11}, "length_penalty"),
        ({"beam_width": 2, "early_stopping": "always"}, "early_stopping"), ({"length_penalty": 2.0}, "length_penalty"),
        ({"early_stopping": True}, "early_stopping"), ({"best_of": 2, "n": 3}, "best_of"),
        ({"best_of": 2, "beam_width": 2}, "best_of"), ({"beam_width": 2, "choose_fn": max}, "choose_fn"),
    ],
)  # fmt: skip
def test_parameters_that_make_no_search_are_refused_by_name(values, field):
    with pytest.raises(RequestError) as e:
        SamplingParams(**values)
    assert e.value.param == field and field in str(e.value)


# ---- on real (tiny) models -------------------------------------------------------------------------------------------


def generate(model, prompt, width, **params):
    """Return (score, tokens) of transformers, without the tokens that pad shorter sequences."""
    eos = params.get("eos_token_id") or []
    ids = torch.tensor([prompt])
    with torch.no_grad(), quiet():
        got = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            num_beams=width,
            num_return_sequences=params.pop("n"),
            do_sample=False,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
            **params,
        )
    rows = [row[: [*(t in eos for t in row), True].index(True) + 1] for row in got.sequences[:, len(prompt) :].tolist()]
    return list(zip(got.sequences_scores.tolist(), rows, strict=True))


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def family(request, tmp_path_factory):
    folder, _, model = tiny_dir(tmp_path_factory.mktemp(request.param), request.param)
    options = dict(skip_tokenizer_init=True, dtype="float32", num_kvcache_blocks=400, max_num_seqs=40)
    with LLM(model=str(folder), max_num_batched_tokens=64, **options) as llm:
        yield llm, model


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3))])
def test_sequences_and_scores_are_those_of_transformers(family, seed):
    llm, model = family
    rng = np.random.default_rng(seed)
    items = [rng.integers(3, 61, size).tolist() for size in (1, 7, 33)]
    penalty, early, width = (1.0, 0.0, 2.0, -1.0)[seed], EARLY[seed % 3], (2, 3, 5, 8)[seed]
    ended = 0
    for reachable in (True, False):
        stop = list(range(3, 61, 9)) if reachable else []
        params = SamplingParams(
            beam_width=width,
            n=width - seed % 2,
            length_penalty=penalty,
            early_stopping=early,
            max_tokens=10,
            ignore_eos=True,
            stop_token_ids=stop,
        )
        together = llm.generate(items, params, use_tqdm=False)
        for prompt, out in zip(items, together, strict=True):
            want = generate(
                model,
                prompt,
                width,
                n=params.n,
                length_penalty=penalty,
                early_stopping=early,
                max_new_tokens=10,
                eos_token_id=stop or None,
            )
            got = [(o.score, o.token_ids) for o in out.outputs]
            assert_equal(got, want)
            ended += sum(o.finish_reason == "stop" for o in out.outputs)
            for o in out.outputs:
                assert o.cumulative_logprob == pytest.approx(o.score * len(o.token_ids) ** penalty, rel=1e-6)
    assert ended, "the test has no power: nothing ended before its length"


def test_stop_strings_end_beams_as_they_end_samples():
    with LLM("pocket", max_num_seqs=8, max_num_batched_tokens=256, dtype="float32") as llm:
        stop = "who"  # every story contains it after a few words
        for include in (False, True):
            requested = dict(stop=[stop], include_stop_str_in_output=include, ignore_eos=True, max_tokens=24)
            out = llm.generate(
                "Once upon a time", SamplingParams(beam_width=3, n=3, early_stopping=True, **requested), use_tqdm=False
            )[0]
            ended = [o for o in out.outputs if o.finish_reason == "stop"]
            assert ended, "the test has no power: no beam met the stop string"
            for o in ended:
                assert o.stop_reason == stop and o.text.endswith(stop) == include
                assert (stop in o.text) == include
            assert all(o.finish_reason == "length" and stop not in o.text for o in out.outputs if o not in ended)
            greedy = SamplingParams(beam_width=1, **requested)
            sample = SamplingParams(temperature=0, **requested)
            a, b = (llm.generate("Once upon a time", p, use_tqdm=False)[0].outputs[0] for p in (greedy, sample))
            assert (a.text, a.finish_reason, a.stop_reason) == (b.text, b.finish_reason, b.stop_reason)
