"""Guides on the simulated device.

Both rows of a pair are in the same steps whatever happens to them, and other requests do not change.
"""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from minivllm import RequestError
from minivllm.core.engine import planner
from minivllm.core.interfaces.strategy import Branch, Guide
from minivllm.plugins.scheduler.fcfs import Fcfs
from minivllm.plugins.strategy.guidance import Guidance
from minivllm.testing.sim import answer, at_rest, guided_answer, outputs, request, run, sim_engine


class Either(Guidance):
    """A strategy for all requests; requests with a scale get a guide."""

    def takes(self, params):
        return True

    def start(self, params):
        return super().start(params) if params.guidance_scale != 1 else [Branch(i) for i in range(params.n)]


class AnyVictim(Fcfs):
    def __init__(self, options, ctx):
        super().__init__(options, ctx)
        self.random = random.Random(0)

    def victim(self, view, need):
        return self.random.randrange(len(view))


def wanted(r, max_len=40):
    """Return the expected tokens of each sample."""
    guide, prompt, samples = Either().start(r.params)[0].guide, r.prompt.tolist(), range(r.params.n)
    if guide is None:
        return [answer(prompt, r.params, i, max_len) for i in samples]
    return [guided_answer(prompt, guide, r.params, max_len) for _ in samples]


def add_some(engine, r, n):
    ids = lambda: [r.randrange(6) for _ in range(r.randint(1, 9))]  # noqa: E731
    made = []
    for i in range(n):
        most = r.randint(1, 22)
        values = dict(max_tokens=most, min_tokens=min(r.choice([0, 3]), most), stop_token_ids=r.choice([[], [3, 4]]))
        if r.random() < 0.6:
            values["guidance_scale"] = r.choice([0, 0.5, 1.5, 4])
            values["negative_prompt_token_ids"] = r.choice([None, ids()])
        if most < 9 and r.random() < 0.3:
            values["n"] = 2
        made.append(request(engine, f"r{i}", ids(), **values))
        for _ in range(r.choice([0, 0, 2])):
            engine.step()
        if r.random() < 0.1:
            engine.abort(made[-1].id)
    return made


@pytest.mark.parametrize("protected_after", [1, 8, 10**9])
@pytest.mark.parametrize("depth", [0, 2])
def test_tokens_stay_the_same_when_rows_are_preempted_aborted_and_fail(monkeypatch, depth, protected_after):
    """The pools are too small for all rows, with windows and drafts.  The device checks every slot that is read."""
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
            for (ids, reason), due in zip(outputs(one), wanted(one), strict=True):
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
            assert engine.slots.partner[drawn[row]] == drawn[guide]
        submit(plan)

    engine.executor.submit = checked
    made = add_some(engine, random.Random(2), 20)
    run(engine)
    assert pairs == sum(len(ids) for r in made if r.params.guidance_scale != 1 for ids, _ in outputs(r)) > 30


def test_a_step_without_guides_plans_nothing_for_them():
    engine = sim_engine(strategy=Either())
    plans, submit = [], engine.executor.submit
    engine.executor.submit = lambda plan: (plans.append(plan), submit(plan))
    request(engine, "plain", [1, 2, 3], max_tokens=5)
    run(engine)
    assert plans and not any(len(plan.guided) or len(plan.scale) for plan in plans)


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
    assert outputs(beside) == wanted(beside, 256)


def test_what_runs_is_counted_without_guides():
    """A guide is not a sequence of the user, who reads ``stats`` and its metrics."""
    engine, seen = sim_engine(strategy=Either(), slots=16), set()
    for i in range(3):
        request(engine, f"g{i}", [1, 2, 3], max_tokens=4 + i, n=1 + i, guidance_scale=2.0)
    request(engine, "plain", [5, 6], max_tokens=20)
    while engine.busy:
        engine.step()
        own = [slot for slot in engine.slots.running.tolist() if engine.slots.at(slot).lead is None]
        assert engine.stats()["running"] == len(own)
        seen.add((len(own), len(engine.slots.running)))
    assert (7, 13) in seen and (1, 1) in seen, "guided and plain ones beside each other, and a plain one alone"


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
    """The rotary embedding depends here on the longest possible length of a request, which a guide may change."""
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
        ids = list(np.array([4, 5] * 12))  # numpy's integers are accepted too
        asks = dict(guidance_scale=2.0, negative_prompt_token_ids=ids, max_tokens=3)
        made = request(engine, f"r{i}", [7, 8, 9] * 9, **asks)
        run(engine, check=True)
        assert outputs(made) == wanted(made, 256)
        computed.append(sum(sum(q) for _, q in engine.executor.trail))
    assert computed == [27 + 24 + 2 * 2, 2 * 3]


# ---- refusals --------------------------------------------------------------------------------------------------------


class FailsOnTheSecond(Fcfs):
    requested = 0

    def key(self, view):
        self.requested += 1
        if self.requested == 2:
            raise RuntimeError("no")
        return super().key(view)


def test_a_policy_that_fails_on_the_second_pair_leaves_nothing_of_the_first():
    engine = sim_engine(strategy=Guidance(), policy=FailsOnTheSecond)
    with pytest.raises(RequestError, match=r"scheduler FailsOnTheSecond failed on this request: .*no"):
        request(engine, "a", [1, 2, 3], n=3, max_tokens=5, guidance_scale=2.0)
    at_rest(engine)
    made = request(engine, "a", [1, 2, 3], n=3, max_tokens=5, guidance_scale=2.0)
    run(engine)
    assert outputs(made) == wanted(made, 256)


@pytest.mark.parametrize(
    "values, param, reported",
    [
        (dict(beam_width=2, guidance_scale=2.0), "beam_width", "beam_width=2: expected no beam_width"),
        (dict(guidance_scale=200.0), "guidance_scale", "expected a number from 0 to 100"),
        (dict(negative_prompt_token_ids=[3]), "negative_prompt_token_ids", "without guidance_scale"),
        (dict(negative_prompt="no"), "negative_prompt", "without guidance_scale"),
        (dict(guidance_scale=2.0, negative_prompt="no"), "negative_prompt", "a text needs a tokenizer"),
        (dict(guidance_scale=2.0, negative_prompt_token_ids=[]), "negative_prompt_token_ids", "at least one"),
        (dict(guidance_scale=2.0, negative_prompt_token_ids=["a"]), "negative_prompt_token_ids", "token ids"),
        (dict(guidance_scale=2.0, negative_prompt_token_ids=[True]), "negative_prompt_token_ids", "token ids"),
        (dict(guidance_scale=2.0, negative_prompt_token_ids=[50]), "negative_prompt_token_ids", "expected 0 to 49"),
        (dict(guidance_scale=2.0, negative_prompt_token_ids=[1] * 256), "negative_prompt_token_ids", "at most 255"),
        (dict(guidance_scale=2.0, choose_fn=lambda x, ids: 0), "choose_fn", "without guidance_scale"),
        (dict(guidance_scale=2.0, negative_prompt_token_ids=[1], negative_prompt="a"), "negative_prompt", "one of"),
    ],
)
def test_what_it_cannot_serve_is_refused_by_name(values, param, reported):
    engine = sim_engine(strategy=Guidance(), slots=4)
    with pytest.raises(RequestError, match=reported) as e:
        request(engine, "a", [1, 2, 3], max_tokens=5, **values)
    assert e.value.param == param
    at_rest(engine)


def test_a_pool_a_batch_and_an_executor_that_cannot_hold_a_pair_refuse_it():
    asks = dict(guidance_scale=2.0, negative_prompt_token_ids=[4] * 20, max_tokens=20)
    with pytest.raises(RequestError, match="need 21 blocks of the KV cache, which has 19; shorten them"):
        request(sim_engine(strategy=Guidance(), blocks=20), "a", [1] * 21, **asks)
    with pytest.raises(RequestError, match="takes two rows; expected max_num_seqs of at least 2, and it is 1"):
        request(sim_engine(strategy=Guidance(), slots=1), "a", [1], guidance_scale=2.0, max_tokens=2)
    engine = sim_engine(strategy=Guidance())
    engine.capacity = type(engine.capacity)(*[getattr(engine.capacity, f) for f in ("blocks", "block_bytes")], 50, 0, 0)
    with pytest.raises(RequestError, match="the executor SimExecutor does not support guides"):
        request(engine, "a", [1], guidance_scale=2.0, max_tokens=2)


@pytest.mark.parametrize(
    "guide, n, reported",
    [
        ("x", 1, "expected a Guide"),
        (Guide(float("nan")), 1, "expected a finite number"),
        (Guide(1.5, [2**40]), 1, "the prompt of a guide has the token id"),
        ([Guide(1.5), None], 2, "a Guide for each branch, or for none"),
    ],
)
def test_a_guide_that_is_none_ends_the_request_with_its_strategy_named(guide, n, reported):
    strategy = Either()
    strategy.start = lambda params: [Branch(i, guide[i] if n > 1 else guide) for i in range(n)]
    engine = sim_engine(strategy=strategy)
    with pytest.raises(RequestError, match=f"Either failed on this request: .*{reported}"):
        request(engine, "a", [1, 2], n=n, max_tokens=2)
    assert not engine.requests and np.all(engine.slots.serial == -1)
