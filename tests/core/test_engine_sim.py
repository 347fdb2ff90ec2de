"""The engine on the simulated device.  A sequence has the same tokens as alone, whatever happens to it."""

from __future__ import annotations

import random

import numpy as np
import pytest

from minivllm.errors import EngineDeadError, RequestError
from minivllm.testing.sim import EOS_ID, VOCAB, answer, at_rest, outputs, request, run, sim_engine


def expected(r, max_len=256):
    return [answer(r.prompt, r.params, s.sample, max_len) for s in r.sequences]


def crowd(engine, n, rng, lo=1, hi=60, out=40, **params):
    shared = [rng.randrange(VOCAB) for _ in range(30)]
    made = []
    for i in range(n):
        k = rng.randint(lo, hi)
        prompt = (shared[: rng.randint(0, 30)] + [rng.randrange(VOCAB) for _ in range(hi)])[:k]
        made.append(request(engine, f"r{i}", prompt, max_tokens=rng.randint(1, out), **params))
    return made


@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("windows", [(None,), (None, 6), (5,)])
@pytest.mark.parametrize("blocks", [200, 34])
def test_tokens_do_not_depend_on_batching_chunking_prefix_hits_or_preemption(depth, windows, blocks):
    engine = sim_engine(depth=depth, windows=windows, blocks=blocks, budget=24, max_len=128)
    made = crowd(engine, 40, random.Random(blocks + depth))
    run(engine, check=True)
    for r in made:
        assert outputs(r) == expected(r, 128)
    at_rest(engine)
    if blocks == 34:
        assert engine.planner.preemptions > 0, "the test has no power: nothing was preempted"
    assert engine.cache.pools[0].hits > 0, "the test has no power: no prefix was hit"


@pytest.mark.parametrize("depth", [2, 4])
def test_every_prompt_token_has_its_log_probability_whenever_its_row_is_preempted(depth):
    """Include a prompt whose last token is drawn by a step that was in flight when its row was preempted."""
    in_flight = []
    for seed in range(4):
        engine = sim_engine(depth=depth, blocks=34, budget=24, max_len=128)
        engine.events.sequence_preempted.subscribe(
            lambda seq: in_flight.append(seq.in_flight * (seq.request.prompt_topk >= 0))
        )
        made = crowd(engine, 120, random.Random(seed), out=12, prompt_logprobs=2)
        run(engine, check=True)
        for r in made:
            scored = [p for first, part in r.prompt_parts for p in range(first, first + len(part.chosen))]
            assert set(scored) == set(range(1, len(r.prompt))), r.id
        at_rest(engine)
    assert max(in_flight) > 0, "the test has no power"


@pytest.mark.parametrize("depth", [0, 2])
def test_branches_share_the_prompt_and_draw_apart(depth):
    engine = sim_engine(depth=depth, blocks=60)
    made = [
        request(engine, f"r{i}", range(1, 1 + n), n=3, max_tokens=9, ignore_eos=True)
        for i, n in enumerate((1, 4, 5, 18))
    ]
    engine.step()
    run(engine, check=True)
    for r in made:
        assert outputs(r) == expected(r)
        assert len({tuple(t) for t, _ in outputs(r)}) == 3
    at_rest(engine)


def test_branches_hold_the_full_prompt_blocks_once():
    engine = sim_engine(blocks=64, block=4)
    request(engine, "r", range(33), n=6, max_tokens=8, ignore_eos=True)
    for _ in range(4):
        engine.step()
    used = engine.cache.pools[0].total - 1 - engine.cache.pools[0].available
    assert len(engine.slots.running) == 6 and used == 8 + 6  # 32 // 4 shared blocks, and one tail for each row
    run(engine)
    at_rest(engine)


@pytest.mark.parametrize("depth", [0, 2])
def test_long_streams_in_a_tenth_of_the_memory_all_complete(depth):
    engine = sim_engine(slots=64, blocks=90, block=4, depth=depth, budget=128, max_len=64)
    made = [request(engine, f"r{i}", [i % 7, i % 5, 3], max_tokens=50, ignore_eos=True) for i in range(64)]
    run(engine)
    for r in made:
        assert outputs(r) == expected(r, 64)
        assert all(s.preempted <= 8 for s in r.sequences)
    at_rest(engine)


def test_a_stop_id_counts_only_after_min_tokens():
    engine = sim_engine()
    made = [
        request(engine, f"r{i}", [i], max_tokens=30, min_tokens=m, stop_token_ids=[7, 8])
        for i, m in enumerate((0, 10, 30))
    ]
    run(engine)
    for r in made:
        assert outputs(r) == expected(r)


@pytest.mark.parametrize("depth", [0, 2])
def test_abort_gives_the_blocks_back_before_the_next_step(depth):
    engine = sim_engine(depth=depth, prefix=False)
    request(engine, "gone", range(20), max_tokens=100, ignore_eos=True, n=2)
    other = request(engine, "stays", range(5), max_tokens=30, ignore_eos=True)
    for _ in range(6):
        engine.step()
    assert engine.abort("gone") and not engine.abort("gone") and not engine.abort("never was")
    held = int(engine.slots.blocks[0, other.sequences[0].slot])
    assert held > 0 and engine.cache.available == engine.cache.pools[0].total - 1 - held
    run(engine, check=True)
    assert outputs(other) == expected(other)
    at_rest(engine)


def test_a_failed_step_ends_its_requests_and_the_queue_goes_on():
    engine = sim_engine(slots=2, budget=16)
    made = [request(engine, f"r{i}", [i, 1, 2], max_tokens=6, ignore_eos=True) for i in range(6)]
    engine.executor.fail_at = {3}
    run(engine)
    failed = [r for r in made if r.sequences[0].finish_reason == "error"]
    assert len(failed) == 2 and all("planned failure" in r.sequences[0].error for r in failed)
    for r in made:
        if r not in failed:
            assert outputs(r) == expected(r)
    at_rest(engine)


def test_three_failed_steps_in_a_row_end_the_engine_and_tell_everyone():
    engine = sim_engine(slots=1)
    made = [request(engine, f"r{i}", [i], max_tokens=6) for i in range(9)]
    engine.executor.fail_at = set(range(2, 50))
    run(engine)
    assert all(r.done and r.sequences[0].finish_reason == "error" for r in made)
    assert "3 steps failed in a row" in made[-1].sequences[0].error
    with pytest.raises(EngineDeadError):
        request(engine, "late", [1])


@pytest.mark.parametrize("depth", [0, 2])
def test_a_host_row_sits_out_until_its_token_is_chosen_and_slows_nobody(depth):
    engine = sim_engine(depth=depth)
    seen = []

    def choose(logits, ids):
        seen.append(len(ids))
        return int(np.argmax(logits))

    host = request(engine, "host", [1, 2, 3], max_tokens=10, choose_fn=choose)
    free = request(engine, "free", [4, 5], max_tokens=30, ignore_eos=True)
    steps = run(engine, check=True)
    assert outputs(host) == expected(host) and outputs(free) == expected(free)
    assert seen == list(range(3, 3 + len(seen))) and steps <= 30 + depth + 3
    at_rest(engine)


@pytest.mark.parametrize("depth", [0, 2])
def test_a_late_row_draws_only_what_its_mask_allows(depth):
    engine = sim_engine(depth=depth)
    late = request(
        engine, "late", [1, 2, 3], max_tokens=10, ignore_eos=True, allowed_tokens_fn=lambda ids: [len(ids) % 5, 30]
    )
    free = request(engine, "free", [4, 5], max_tokens=30, ignore_eos=True)
    run(engine, check=True)
    tokens = outputs(late)[0][0]
    assert len(tokens) == 10 and all(t in ((3 + i) % 5, 30) for i, t in enumerate(tokens))
    assert outputs(free) == expected(free)
    at_rest(engine)


def test_a_request_may_leave_or_come_while_a_step_with_its_mask_is_in_flight():
    engine = sim_engine(depth=1, slots=3, blocks=40, block=4)
    only = {"allowed_tokens_fn": lambda ids: [len(ids) % 5, 30], "max_tokens": 20, "ignore_eos": True}
    stays, goes = request(engine, "stays", [1, 2, 3], **only), request(engine, "goes", range(9), **only)
    while not engine.in_flight or len(engine.in_flight[-1].plan.late) < 2:
        engine.step()
    assert goes.sequences[0].slot in engine.in_flight[-1].plan.slots and engine.abort("goes")
    comes = request(engine, "comes", [7, 8], max_tokens=30, ignore_eos=True)
    run(engine, check=True)
    tokens = outputs(stays)[0][0]
    assert len(tokens) == 20 and all(t in ((3 + i) % 5, 30) for i, t in enumerate(tokens))
    assert outputs(comes) == expected(comes) and goes.sequences[0].finish_reason == "abort"
    at_rest(engine)
    request(engine, "last", [1, 2], **only)
    while not engine.in_flight:
        engine.step()
    assert engine.abort("last") and engine.busy, "the step is still to be collected"
    run(engine, check=True)
    at_rest(engine)


def broken(*_):
    raise RuntimeError("boom")


@pytest.mark.parametrize("field", ["choose_fn", "allowed_tokens_fn"])
@pytest.mark.parametrize("fn", [broken, lambda *_: VOCAB, lambda *_: [-1], lambda *_: []])
def test_a_failing_callable_ends_only_its_own_request(field, fn):
    engine = sim_engine(depth=1)
    bad = request(engine, "bad", [1, 2, 3], max_tokens=10, **{field: fn})
    good = request(engine, "good", [4, 5], max_tokens=20, ignore_eos=True)
    run(engine, check=True)
    assert bad.sequences[0].finish_reason == "error" and field in bad.sequences[0].error
    assert outputs(good) == expected(good)
    at_rest(engine)


def test_a_policy_that_raises_once_costs_a_turn_and_nothing_else():
    from minivllm.plugins.scheduler.fcfs import Fcfs

    class Stumbles(Fcfs):
        calls = 0

        def order(self, head, running, now):
            Stumbles.calls += 1
            if Stumbles.calls == 2:
                raise RuntimeError("boom")
            return super().order(head, running, now)

    engine = sim_engine(policy=Stumbles, slots=2)
    made = [request(engine, f"r{i}", [i, 2], max_tokens=5) for i in range(6)]
    run(engine, check=True)
    assert Stumbles.calls > 2
    for r in made:
        assert outputs(r) == expected(r)


def test_an_order_is_followed_within_the_window():
    from minivllm.plugins.scheduler.fcfs import Fcfs

    class Backwards(Fcfs):
        def order(self, head, running, now):
            return np.argsort(-head.arrival)

    engine = sim_engine(policy=Backwards, slots=1)
    made = [request(engine, f"r{i}", [i, 2], max_tokens=3) for i in range(5)]
    ended = []
    for r in made:
        r.on_done = lambda r: ended.append(r.id)
    run(engine)
    assert ended == ["r4", "r3", "r2", "r1", "r0"]


@pytest.mark.parametrize("kind", ["prefill_first", "static"])
def test_every_shape_of_step_gives_the_same_tokens(kind):
    from minivllm.core.interfaces.scheduler import StepShape
    from minivllm.plugins.scheduler.fcfs import Fcfs

    class Shaped(Fcfs):
        def shape(self, load, now):
            return StepShape(kind=kind, prefill_cap=13)

    engine = sim_engine(policy=Shaped, slots=4, budget=32)
    made = crowd(engine, 20, random.Random(4))
    run(engine, check=True)
    for r in made:
        assert outputs(r) == expected(r)
    at_rest(engine)


@pytest.mark.parametrize("field", ["cache_salt", "tenant"])
def test_a_salt_and_a_tenant_keep_prefixes_apart(field):
    engine = sim_engine()
    for i, owner in enumerate(("a", "b", None, "a")):
        r = request(engine, f"r{i}", range(20), max_tokens=2, **({} if owner is None else {field: owner}))
        run(engine)
        assert r.cached_tokens == (19 if i == 3 else 0)
        assert outputs(r) == expected(r)


@pytest.mark.parametrize("windows", [(None,), (None, 6)])
def test_colliding_hashes_cost_hits_and_never_a_token(windows):
    engine = sim_engine(windows=windows, blocks=48, budget=16)
    for pool in engine.cache.pools:
        pool.hash_fn = lambda parent, tokens: 1 + (tokens[0] + parent) % 3
    made = crowd(engine, 30, random.Random(1))
    run(engine, check=True)
    for r in made:
        assert outputs(r) == expected(r)
    at_rest(engine)


def test_reset_forgets_what_is_idle_and_keeps_what_runs():
    engine = sim_engine()
    request(engine, "a", range(20), max_tokens=2)
    run(engine)
    assert engine.cache.pools[0].idle
    b = request(engine, "b", range(30, 49), max_tokens=30, ignore_eos=True)
    for _ in range(8):
        engine.step()
    engine.reset_prefix_cache()
    engine.cache.check()
    assert engine.cache.pools[0].idle == 0
    run(engine, check=True)
    assert outputs(b) == expected(b)
    c = request(engine, "c", range(20), max_tokens=2)
    run(engine)
    assert c.cached_tokens == 0


@pytest.mark.parametrize(
    ("prompt", "params", "words"),
    [
        ([], {}, "the prompt is empty"),
        ([VOCAB], {}, "prompt token id 50 is out of range; expected 0 to 49"),
        ([-1], {}, "prompt token id -1 is out of range"),
        ([1] * 256, {}, "the prompt has 256 tokens; expected at most 255"),
        ([1], {"n": 9}, "n=9 is more than max_num_seqs=8"),
        ([1], {"stop_token_ids": [77]}, "stop_token_ids: 77 is out of range"),
        ([1] * 100, {"max_tokens": 155, "n": 2}, "but the whole cache holds"),
    ],
)
def test_what_cannot_be_served_is_refused_at_once(prompt, params, words):
    engine = sim_engine(blocks=65)
    with pytest.raises(RequestError, match=words):
        request(engine, "r", prompt, **params)
    ok = request(engine, "r", [1], max_tokens=3)
    run(engine)
    assert outputs(ok) == expected(ok)


def test_eos_ids_end_a_sequence_and_ignore_eos_does_not_see_them():
    engine = sim_engine(slots=16)
    made = [request(engine, f"r{i}", [i], max_tokens=200, ignore_eos=i % 2 == 1) for i in range(16)]
    run(engine)
    for i, r in enumerate(made):
        tokens, reason = outputs(r)[0]
        assert (tokens, reason) == answer(r.prompt, r.params)
        assert (EOS_ID in tokens[:-1]) <= (i % 2 == 1)
    assert any(r.sequences[0].finish_reason == "stop" for r in made)
