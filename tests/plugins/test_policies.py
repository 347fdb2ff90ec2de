"""The purpose of each built-in scheduling policy.  The conformance kit checks their contract (``test_conformance``)."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest
from policy_helpers import POLICIES, Bench, policy

from minivllm.core.interfaces.scheduler import SchedulerPolicy
from minivllm.errors import RequestError
from minivllm.testing.sim import answer, at_rest, outputs, request, run, sim_engine

ONE = {"slots": 1, "blocks": 200}


def latency(bench):
    return np.array([r.finished - r.arrival for r in bench.made])


# ---- priority ----------------------------------------------------------------------------------------------------


def test_the_urgent_overtake_and_those_who_waited_long_enough_are_not_overtaken():
    b = Bench("priority", sim=ONE, ageing=10.0)
    b.add("busy", [1], max_tokens=200)
    b.turn()
    b.add("low", [2], max_tokens=2, priority=2)
    b.add("usual", [3], max_tokens=2)
    b.add("urgent", [4], max_tokens=2, priority=-1)
    b.clock.now += 19.0
    b.add("late but urgent", [5], max_tokens=2)
    b.clock.now += 2.0  # 21 seconds make up for two levels
    b.add("too late", [6], max_tokens=2)
    b.run()
    assert b.order() == ["busy", "urgent", "usual", "late but urgent", "low", "too late"]


def test_the_least_urgent_is_preempted():
    b = Bench("priority", sim={"slots": 4, "blocks": 22})
    for i, p in enumerate((0, -3, 5, -3)):
        b.add(f"r{i}", [i], max_tokens=40, priority=p)
    gone = []
    b.engine.events.sequence_preempted.subscribe(lambda seq: gone.append(seq.request.id))
    b.run()
    assert gone[0] == "r2" and "r0" not in gone, "the oldest never goes"


# ---- shortest-job ------------------------------------------------------------------------------------------------


def mixed(seed, n=60, **more):
    rng = random.Random(seed)
    lengths = [rng.choice([4, 4, 4, 8, 60]) for _ in range(n)]
    return [(0.02 * i, f"r{i}", [i % 50, 7], {"max_tokens": k, **more}) for i, k in enumerate(lengths)]


def test_shortest_job_first_halves_the_mean_latency_of_a_mixed_load():
    sim = {"slots": 2, "blocks": 200}
    first_come, shortest = (latency(Bench(name, sim=sim).play(mixed(1))).mean() for name in ("fcfs", "shortest-job"))
    assert shortest < 0.5 * first_come


def test_what_the_client_expects_counts_where_max_tokens_says_nothing():
    b = Bench("shortest-job", sim=ONE)
    b.add("busy", [1], max_tokens=20)
    b.turn()
    b.add("any", [2], max_tokens=200)
    b.add("brief", [3], max_tokens=200, expected_tokens=5)
    b.add("long", [4], max_tokens=200, expected_tokens=150)
    b.run()
    assert b.order() == ["busy", "brief", "long", "any"]


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "7"])
def test_an_expectation_that_is_no_number_of_tokens_is_refused(value):
    with pytest.raises(RequestError, match=r"expected_tokens=.*expected a whole number >= 1"):
        Bench("fcfs").add("r", [1], expected_tokens=value)


def test_a_long_job_is_overtaken_for_max_wait_seconds_and_no_longer():
    b = Bench("shortest-job", sim=ONE, max_wait=2.0)
    b.add("busy", [1], max_tokens=20)
    b.turn()
    b.add("long", [2], max_tokens=250)
    start, i = b.clock.now, 0
    while b.made[1].first_token is None:
        if b.engine.planner.n_waiting < 5:
            b.add(f"s{i}", [3, i % 50], max_tokens=3)
            i += 1
        b.turn()
    after = [r.arrival - start for r in b.made[2:] if r.first_token is not None]
    assert i > 20 and max(after) < 2.0 + 0.01


# ---- deadline ----------------------------------------------------------------------------------------------------


def targets(seed, n, gap):
    """Return bursts of requests, some of which must start soon."""
    rng, at, out = random.Random(seed), 0.0, []
    for i in range(n):
        at += rng.expovariate(1 / gap)
        ttft = rng.choice([150.0, 400.0, 3000.0])
        prompt = [rng.randrange(50) for _ in range(rng.randint(5, 60))]
        out.append((at, f"r{i}", prompt, {"max_tokens": rng.randint(2, 12), "ttft_ms": ttft}))
    return out


def missed(bench):
    return sum(r.first_token - r.arrival > r.params.ttft_ms / 1e3 for r in bench.made)


@pytest.mark.parametrize("gap", [0.024, 0.015], ids=["busy", "overload"])
@pytest.mark.parametrize("seed", range(3))
def test_fewer_deadlines_are_missed_than_by_first_come_first_served(seed, gap):
    made = {}
    for name, options in (("fcfs", {}), ("deadline", {"prefill_rate": 2000.0})):
        b = Bench(name, base=0.005, per_token=0.0005, sim={"slots": 4, "blocks": 200}, **options)
        made[name] = missed(b.play(targets(seed, 150, gap)))
    assert made["fcfs"] > 30, "the trace is too easy"
    assert made["deadline"] < 0.5 * made["fcfs"], made


def test_what_is_too_late_waits_for_those_in_time_but_not_for_ever():
    b = Bench("deadline", sim=ONE, max_wait=5.0)
    b.add("busy", [1], max_tokens=30)
    b.turn()
    b.add("late", [2], max_tokens=2, ttft_ms=10.0)
    start, i = b.clock.now, 0
    while b.made[1].first_token is None:
        if b.engine.planner.n_waiting < 4:
            b.add(f"in time {i}", [3, i % 50], max_tokens=2, ttft_ms=1e4)
            i += 1
        b.turn()
    assert i > 20 and 5.0 <= b.made[1].first_token - start < 5.5


def longest_gap(name, **options):
    """Seconds between two tokens of one that decodes while long prompts come."""
    b = Bench(name, base=0.005, per_token=0.0005, sim={"slots": 8, "blocks": 2000, "budget": 256}, **options)
    b.add("stream", [1, 2], max_tokens=120, tpot_ms=40.0)
    for i in range(12):
        for _ in range(6):
            b.turn()
        b.add(f"p{i}", [(i + j) % 50 for j in range(200)], max_tokens=2)
    b.run()
    gaps = np.diff(b.tokens_at["stream"])
    return float(np.mean(gaps > 0.04)), b


def test_a_target_for_each_token_bounds_the_prefill_beside_it():
    first_come, _ = longest_gap("fcfs")
    bounded, b = longest_gap("deadline", min_chunk=16)
    assert first_come > 0.05 and bounded < 0.5 * first_come
    assert all(len(r.sequences[0].tokens) == len(r.prompt) + r.params.max_tokens for r in b.made)


# ---- prefix-aware ------------------------------------------------------------------------------------------------


def families(n=48, kinds=8, length=40):
    rng = random.Random(3)
    heads = [[rng.randrange(50) for _ in range(length)] for _ in range(kinds)]
    turn = [i % kinds for i in range(n)]
    return [(0.0, f"r{i}", heads[k] + [i % 50, i // 50], {"max_tokens": 2}) for i, k in enumerate(turn)]


def test_requests_of_one_prefix_run_together_before_it_is_evicted():
    hits = {}
    for name in ("fcfs", "prefix-aware"):
        b = Bench(name, sim={"slots": 2, "blocks": 34})  # room for three prefixes of ten blocks
        b.play(families())
        hits[name] = sum(r.cached_tokens for r in b.made)
    assert hits["prefix-aware"] > 4 * hits["fcfs"] + 400, hits


def test_a_request_without_a_cached_prefix_waits_for_a_bounded_time():
    b = Bench("prefix-aware", sim=ONE, max_wait=3.0)
    shared = [9] * 40
    b.add("warm", [*shared, 1], max_tokens=4)
    b.run()
    b.add("busy", [1], max_tokens=4)
    b.turn()
    one, i = b.add("other", [2, 3, 4], max_tokens=2), 0
    while one.first_token is None:
        if b.engine.planner.n_waiting < 4:
            b.add(f"s{i}", [*shared, i % 50], max_tokens=2)
            i += 1
        b.turn()
    assert i > 20 and 3.0 <= one.first_token - one.arrival < 3.5


# ---- fair --------------------------------------------------------------------------------------------------------


def service(bench, tenant):
    """Return the service of the tenant as the policy counts it by default, for ended and running requests."""
    slots, total = bench.engine.slots, 0
    for r in bench.made:
        if r.params.tenant == tenant and r.sequences[0].serial >= 0:
            s = r.sequences[0]
            known = s.known if s.slot < 0 else int(slots.known[s.slot])
            total += len(r.prompt) + 2 * (known - len(r.prompt))
    return total


@pytest.mark.parametrize("flood", [40, 600], ids=["a_window", "more_than_the_window"])
def test_a_tenant_that_floods_gets_no_more_than_one_that_keeps_a_few_waiting(flood):
    """Both tenants always have waiting requests; one sends many short requests, the other a few long ones.

    The bound is VTC's theorem 4.4: twice the larger of a prompt's cost and the cost of all rows' tokens.  Here whole
    requests count, because rows are not preempted.
    """
    b = Bench("fair", sim={"slots": 4, "blocks": 400})
    for i in range(flood):
        b.add(f"a{i}", [1, i % 50, 2], max_tokens=6, tenant="flood")
    bound, gap, n = 2 * 4 * (30 + 2 * 40), 0, 0
    for turns in range(450):
        while sum(not r.done for r in b.made if r.params.tenant == "modest") < 6:
            b.add(f"b{n}", [n % 50] * 30, max_tokens=40, tenant="modest")
            n += 1
        if sum(s.request.params.tenant == "flood" for s in b.engine.planner.waiting) < 20:
            b.add(f"c{turns}", [1, turns % 50, 3], max_tokens=6, tenant="flood")
        b.turn()
        gap = max(gap, abs(service(b, "flood") - service(b, "modest")))
    total = service(b, "flood") + service(b, "modest")
    assert total > 3 * bound, "too short a run to tell"
    assert gap <= bound, (gap, bound)


def test_nobody_saves_up_service_by_staying_away():
    """A tenant that comes after another was served for long takes turns with it, it does not catch up first."""
    b = Bench("fair", sim=ONE)
    for i in range(300):
        b.add(f"a{i}", [1, i % 50], max_tokens=4, tenant="old")
    for _ in range(400):
        b.turn()
    before = {t: service(b, t) for t in ("old", "new")}
    for i in range(60):
        b.add(f"b{i}", [2, i % 50], max_tokens=4, tenant="new")
    for _ in range(160):
        b.turn()
    old, new = (service(b, t) - before[t] for t in ("old", "new"))
    assert new > 100 and abs(old - new) <= 2 * 2 * (2 + 8)


def test_each_of_many_tenants_is_served_in_turn_although_few_are_shown_at_once():
    """More tenants than the window: the lanes that were served longest ago come first."""
    b = Bench("fair", sim=ONE)
    b.engine.planner.policy.window = 4
    for i in range(60):
        b.add(f"r{i}", [i % 50, 1], max_tokens=2, tenant=f"t{i % 20}")
    b.run()
    assert set(b.order()[:20]) == {f"r{i}" for i in range(20)}


def test_counters_of_tenants_that_are_gone_do_not_pile_up():
    b = Bench("fair", sim={"slots": 4, "blocks": 200})
    for i in range(2600):
        b.add(f"r{i}", [i % 50], max_tokens=1, tenant=f"t{i}")
        if i % 4 == 3:
            b.run()
    made = b.engine.planner.policy
    assert len(made.counter) < 2100 and len(made.ids) <= 4 and len(made.active) <= 4


def test_who_was_served_most_is_the_victim_among_rows_that_were_never_counted():
    b = Bench("fair", sim={"slots": 4, "blocks": 200})
    for i, tenant in enumerate(("a", "b", "greedy", "greedy")):
        b.add(f"r{i}", [i], max_tokens=40, tenant=tenant)
    for _ in range(5):
        b.turn()
    slots = np.array([r.sequences[0].slot for r in b.made])
    assert b.made[b.engine.planner.policy.victim(b.engine.slots.view(slots), 1)].params.tenant == "greedy"


# ---- prefill-first -----------------------------------------------------------------------------------------------


def test_no_step_has_prompts_and_decodes_and_newcomers_of_a_step_are_of_like_length():
    b = Bench("prefill-first", sim={"slots": 8, "blocks": 400, "budget": 200})
    entered, enter = [], b.engine.slots.enter
    b.engine.slots.enter = lambda seq: entered.append((len(b.steps), len(seq.request.prompt))) or enter(seq)
    rng = random.Random(5)
    for i in range(40):
        b.add(f"r{i}", [rng.randrange(50) for _ in range(rng.choice([3, 5, 50, 70]))], max_tokens=rng.randint(2, 9))
        if i % 3 == 0:
            b.turn()
    b.run()
    assert all(set(q) == {1} or min(q) > 1 for _, _, q in b.steps)
    groups = {}
    for step, length in entered:
        groups.setdefault(step, []).append(length)
    assert all(max(g) < 2 * min(g) for g in groups.values())
    assert max(map(len, groups.values())) >= 3, "no group has formed"


def test_newcomers_are_gathered_for_a_bounded_time():
    b = Bench("prefill-first", sim={"slots": 8, "blocks": 400}, batch=4, max_hold=0.5)
    start = b.clock.now
    b.add("a", [1, 2], max_tokens=2)
    b.run()
    assert 0.5 <= b.steps[0][0] - start < 0.55, "alone it waits until its time is up"
    b.steps.clear()
    for i in range(4):
        b.add(f"r{i}", [3, i], max_tokens=2)
    start = b.clock.now
    b.run()
    assert b.steps[0][0] - start < 0.01 and len(b.steps[0][1]) == 4


# ---- static ------------------------------------------------------------------------------------------------------


def test_a_batch_starts_together_and_the_next_one_when_its_last_has_ended():
    b = Bench("static", sim={"slots": 6, "blocks": 400, "budget": 32}, batch=4)
    lengths = [3, 9, 4, 30, 5, 6, 2, 12, 8]
    for i, n in enumerate(lengths):
        b.add(f"r{i}", [*range(20), i], max_tokens=n, cache_salt=f"s{i}")  # four prompts are more than a budget
    b.run()
    batches = [b.made[i : i + 4] for i in (0, 4, 8)]
    for batch, later in pairwise(batches):
        assert max(r.finished for r in batch) < min(r.first_token for r in later)
    for batch in batches:
        assert max(r.first_token for r in batch) < min(r.finished for r in batch), "they decode together"
    rows = [len(slots) for _, slots, q in b.steps if set(q) == {1}]
    assert max(rows) == 4 and len(rows) >= 29 + 11 + 7, "rows that ended early stay empty"


def test_a_batch_that_does_not_fill_starts_after_max_hold():
    b = Bench("static", sim={"slots": 8, "blocks": 400}, max_hold=0.3)
    b.add("a", [1, 2], max_tokens=2)
    start = b.clock.now
    b.run()
    assert b.steps[0][0] - start == pytest.approx(0.3, abs=0.01)


# ---- all of them -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_gives_the_same_tokens(name):
    engine = sim_engine(policy=policy(name), slots=4, blocks=40, budget=24)
    rng = random.Random(11)
    made = []
    for i in range(24):
        prompt = [rng.randrange(4) for _ in range(rng.randint(1, 30))]
        made.append(request(engine, f"r{i}", prompt, max_tokens=rng.randint(1, 30), tenant=f"t{i % 3}"))
        engine.step()
    for _ in range(20_000):
        if not engine.busy:
            break
        engine.step()
    for r in made:
        assert outputs(r) == [answer(r.prompt, r.params)]
    at_rest(engine)


def test_a_policy_is_told_which_sequences_were_aborted():
    """Include requests that wait, that run, and that end by themselves; for the last the view has 0."""
    received, others = {}, []

    class Listens(SchedulerPolicy):
        def key(self, new):
            others.extend(new.aborted.tolist())
            return new.arrival

        def order(self, head, running, now):
            others.extend([*head.aborted.tolist(), *running.aborted.tolist()])
            return super().order(head, running, now)

        def ended(self, gone):
            received.update(zip(gone.arrival.tolist(), gone.aborted.tolist(), strict=True))
            assert gone.take(np.arange(len(gone))).aborted.tolist() == gone.aborted.tolist()

    engine = sim_engine(slots=2, policy=Listens)
    for i in range(4):
        request(engine, f"r{i}", [1, 2, 3], arrival=float(i), max_tokens=6)
    engine.step()
    engine.step()
    engine.abort("r0")  # it runs
    engine.abort("r3")  # it waits
    run(engine)
    request(engine, "last", [1], arrival=9.0, max_tokens=2)
    run(engine)
    assert {at: received.get(at) for at in (0.0, 1.0, 2.0, 3.0)} == {0.0: 1, 1.0: 0, 2.0: 0, 3.0: 1}
    assert others and not any(others)


def test_a_view_that_is_made_without_the_column_says_that_nobody_was_aborted():
    from minivllm.testing.policy_watch import arrivals

    view = arrivals(np.arange(3.0))
    assert view.aborted.tolist() == [0, 0, 0] and view.take(np.array([2, 0])).aborted.tolist() == [0, 0]
