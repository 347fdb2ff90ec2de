"""Several owners on one engine.  No owner waits for all requests of another, with any policy and any lack of memory."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from policy_helpers import POLICIES, policy

from minivllm.core.engine.owners import OwnerShares, in_turn
from minivllm.core.engine.request import RUNNING, Request
from minivllm.core.interfaces.params import SamplingParams
from minivllm.plugins.scheduler.fair import Fair
from minivllm.testing.sim import answer, at_rest, outputs, run, sim_engine

BUILT_IN = [name for name in POLICIES if name != "static"]  # this policy admits no request while others run


def made_by(name, **sim):
    return sim_engine(policy=policy(name), now=itertools.count(1.0, 1e-3).__next__, **sim)


def add(engine, name, owner, prompt, arrival, **params):
    made = SamplingParams.make(ignore_eos=True, **params)
    request = Request(name, np.array(prompt, np.int32), made, arrival, owner=owner)
    engine.add(request)
    return request


def steps_until(engine, request, limit=2000):
    """Return the number of steps until the request has its first token."""
    for n in range(1, limit):
        engine.step()
        if request.done or int(max(s.known - len(request.prompt) for s in request.sequences)) > 0:
            return n
    raise AssertionError("it never had its turn")


def first_token_of_another(engine, n, prompt, tokens, owner="a", **more):
    """Return the steps of a request for one token by "b" that comes after ``n`` requests of another owner."""
    rng = random.Random(1)
    flood = [
        add(engine, f"a{i}", owner, [rng.randrange(50) for _ in range(prompt)], 0.0, max_tokens=tokens, **more)
        for i in range(n)
    ]
    for _ in range(6):
        engine.step()
    mine = add(engine, "b", "b", [1, 2, 3], 1.0, max_tokens=1)
    took = steps_until(engine, mine)
    assert outputs(mine) == [answer(mine.prompt, mine.params)]
    return took, flood


@pytest.mark.parametrize("name", BUILT_IN)
@pytest.mark.parametrize(
    ("n", "prompt", "tokens", "sim"),
    [
        (300, 40, 3, {"slots": 4, "budget": 16}),  # many requests with long prompts, so that the budget is short
        # requests that run for a long time, so that rows are short
        (60, 4, 100, {"slots": 4, "budget": 32, "blocks": 300}),
        # contexts that fill the cache, so that blocks are short
        (60, 30, 60, {"slots": 16, "budget": 64, "blocks": 40}),
        (12, 240, 10, {"slots": 8, "budget": 64, "blocks": 600}),  # few prompts, each of several steps
    ],
    ids=["queue", "rows", "blocks", "prompts"],
)
def test_one_owners_flood_delays_another_by_a_few_steps(name, n, prompt, tokens, sim):
    """Alone, these requests take hundreds of steps until the last one has a token."""
    engine = made_by(name, **sim)
    took, flood = first_token_of_another(engine, n, prompt, tokens)
    # "fair" orders owners by their served tokens, and a new owner begins at the count of the waiting owner
    bound = {"fair": 40, "prefill-first": 40, "prefix-aware": 12}.get(name, 8)
    assert took <= bound
    for request in flood[8:]:
        engine.abort(request.id)
    run(engine)
    assert all(outputs(r) == [answer(r.prompt, r.params)] for r in flood[:8]), "who gave way lost tokens"
    at_rest(engine)


def test_the_same_flood_without_owners_delays_by_all_of_it():
    """The requests of the other test need owners.  With one owner for all, they are served first come, first served."""
    took, _ = first_token_of_another(made_by("fcfs", slots=4, budget=16), 100, 40, 3, owner="b")
    assert took > 150


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("name", ["fcfs", "priority", "prefix-aware"])
def test_one_owner_alone_is_served_step_by_step_as_without_owners(name, depth):
    def trail(owner):
        engine = made_by(name, slots=5, blocks=48, budget=24, depth=depth)
        rng = random.Random(7)
        for i in range(60):
            prompt = [rng.randrange(50) for _ in range(rng.randint(1, 30))]
            add(engine, f"r{i}", owner, prompt, float(i), max_tokens=rng.randint(1, 30), n=1 + i % 3)
            engine.step()
        run(engine)
        return engine.executor.trail

    assert trail("key-0") == trail("")


@pytest.mark.parametrize("seed", range(12))
def test_answers_are_right_and_all_is_given_back_whatever_owners_come_and_go(seed):
    rng = random.Random(seed)
    engine = made_by(
        rng.choice(POLICIES),
        slots=rng.choice([2, 5, 8]),
        blocks=rng.choice([70, 120]),
        budget=rng.choice([4, 16, 64]),
        depth=rng.choice([0, 2]),
        windows=rng.choice([(None,), (None, 8)]),
    )
    made, gone = [], set()
    for i in range(80):
        owner = rng.choice(["a", "a", "a", "b", "c", ""])
        prompt = [rng.randrange(3) for _ in range(rng.randint(1, 60))]
        n = rng.choice([1, 1, 2]) if engine.slots.size > 2 else 1
        made.append(add(engine, f"r{i}", owner, prompt, engine.now(), max_tokens=rng.randint(1, 40), n=n))
        for _ in range(rng.choice([0, 0, 1, 4])):
            engine.step()
            engine.cache.check()
        if rng.random() < 0.2:
            left = rng.choice(made)
            gone.add(left.id)
            engine.abort(left.id)
    run(engine)
    for r in made:
        if r.id not in gone:
            assert outputs(r) == [answer(r.prompt, r.params, s.sample) for s in r.sequences]
    at_rest(engine)


def test_the_parts_of_a_step_are_even_and_what_one_leaves_the_others_get():
    engine = sim_engine(slots=8, budget=128, blocks=400)
    add(engine, "a", "a", range(40), 0.0, max_tokens=2)
    long = add(engine, "a2", "a", [3] * 200, 0.0, max_tokens=2)
    add(engine, "b", "b", [4] * 200, 0.5, max_tokens=2)
    short = add(engine, "c", "c", [5, 6], 0.6, max_tokens=2)
    engine.step()
    computed = {s.request.id: int(engine.slots.computed[s.slot]) for s in engine.slots.seq if s is not None}
    assert sum(computed.values()) == 128, "tokens of the budget were left although somebody wanted them"
    assert short.sequences[0].known == 3 or computed["c"] == 2
    assert computed["b"] >= 128 // 3 and computed["a"] + computed.get("a2", 0) >= 128 // 3
    assert long.sequences[0].status == RUNNING
    run(engine)
    at_rest(engine)


def test_parts_count_what_was_spent_and_are_anybodys_once_joined():
    parts = OwnerShares(300, 3)
    assert parts.most(1) == parts.most(2) == 100
    parts.spend(1, 100)
    assert (parts.most(1), parts.most(2), parts.left) == (0, 100, 200)
    parts.spend(2, 30)
    parts.spend(2, -30)  # this row was preempted
    assert parts.join() and parts.most(1) == 200 and not parts.join()
    alone = OwnerShares(10, 1)
    assert alone.most(5) == 10 and not alone.join()
    assert OwnerShares(100, 1000).most(1) == 32, "prompts of many owners are not computed in crumbs"


def test_whoever_has_the_fewest_rows_is_next_and_each_ones_own_order_stays():
    engine = sim_engine(slots=8, budget=64, blocks=400)
    running = [add(engine, f"x{i}", "a", [i, 1], 0.0, max_tokens=50) for i in range(3)]
    running.append(add(engine, "y", "b", [9, 9], 0.0, max_tokens=50))
    engine.step()
    lines = [[add(engine, f"{o}{i}", o, [1], 1.0 + i, max_tokens=2).sequences[0] for i in range(3)] for o in "abc"]
    found = [seq.request.id for seq in in_turn(engine.slots, lines, None)]
    assert found == ["c0", "b0", "c1", "b1", "c2", "a0", "b2", "a1", "a2"]
    assert len(running) == 4


def test_an_owner_who_sends_one_request_after_another_does_not_push_out_more_than_a_row():
    """One row of the other owner is preempted for each request that finds no row, but never the oldest."""
    engine = made_by("fcfs", slots=4, budget=64, blocks=400)
    flood = [add(engine, f"a{i}", "a", [i, 7], 0.0, max_tokens=120) for i in range(20)]
    for _ in range(5):
        engine.step()
    before = engine.planner.preemptions
    oldest = flood[0].sequences[0]
    for i in range(10):
        mine = add(engine, f"b{i}", "b", [1, i], 1.0 + i, max_tokens=1)
        assert steps_until(engine, mine) <= 3
        assert oldest.preempted == 0 and len(engine.slots.running) >= 3
    assert engine.planner.preemptions - before <= 10
    run(engine)
    assert all(outputs(r) == [answer(r.prompt, r.params)] for r in flood)
    at_rest(engine)


def test_addresses_are_tenants_to_a_policy_that_shares_by_tenant():
    """Without keys all tenants are "", so the policy "fair" uses owners."""
    engine = sim_engine(policy=Fair)
    first, second = (add(engine, o, f"address {o}", [1, 2], 0.0, max_tokens=2) for o in ("10.0.0.1", "10.0.0.2"))
    third = add(engine, "c", "address 10.0.0.1", [1, 2], 0.0, max_tokens=2)
    assert first.tenant == third.tenant != second.tenant
    assert first.salt == second.salt, "who shares the prefix cache is another question"
    run(engine)
    at_rest(engine)
