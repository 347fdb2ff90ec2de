"""The policy ``adaptive``: the times of steps that it learns, and when new requests wait for it."""

from __future__ import annotations

import random

import numpy as np
import pytest
from policy_helpers import Bench

SIM = {"slots": 64, "blocks": 8000, "budget": 512, "max_len": 256}


def served(name, per_prefill, rate=40.0, seconds=12.0, ttft_ms=None, lengths=(10, 60), **options):
    """Return the engine after some seconds of arrivals of requests for 40 tokens each."""
    b = Bench(name, base=0.01, per_token=2e-5, per_prefill=per_prefill, sim=SIM, **options)
    rng, at, n = random.Random(3), b.clock.now, 0
    end = at + seconds
    while at < end:
        at += rng.expovariate(rate)
        while b.clock.now < at:
            if b.engine.busy:
                b.turn()
            else:
                b.clock.now = at
        prompt = [rng.randrange(50) for _ in range(rng.randint(*lengths))]
        b.add(f"r{n}", prompt, max_tokens=40, cache_salt=f"s{n}", ttft_ms=ttft_ms)
        n += 1
    return b.run()


def latency(b):
    """Mean seconds from arrival to the last token."""
    return np.mean([r.finished - r.arrival for r in b.made])


def prefills(b):
    return sum(max(q) > 1 for _, _, q in b.steps)


def test_the_fixed_time_of_a_step_with_prompts_is_learned():
    b = served("adaptive", per_prefill=0.03)
    found = b.engine.planner.policy.figures()
    assert found["prompts_ms"] == pytest.approx(30, rel=0.2)
    assert found["step_ms"] == pytest.approx(10, rel=0.15)  # and the time of a step's decode rows


def test_where_that_time_is_long_newcomers_enter_together_and_all_are_served_sooner():
    waits, goes = served("adaptive", per_prefill=0.03), served("fcfs", per_prefill=0.03)
    assert prefills(waits) < 0.6 * prefills(goes)
    assert latency(waits) < 0.9 * latency(goes)


def test_where_there_is_no_such_time_nobody_waits():
    waits, goes = served("adaptive", per_prefill=0.0), served("fcfs", per_prefill=0.0)
    assert waits.engine.planner.policy.figures()["batch_wanted"] < 2
    assert latency(waits) < 1.02 * latency(goes)


def test_prompts_that_are_all_alike_and_come_alone_are_no_reason_to_wait():
    b = served("adaptive", per_prefill=0.0, rate=5.0, lengths=(30, 30))
    assert b.engine.planner.policy.figures()["held"] == 0


def test_a_target_for_the_first_token_bounds_the_wait():
    free, bound = (served("adaptive", per_prefill=0.03, ttft_ms=ttft, max_hold=5.0) for ttft in (None, 40.0))
    assert free.engine.planner.policy.figures()["held"] > 0
    assert prefills(bound) > prefills(free)
    first = [np.mean([r.first_token - r.arrival for r in b.made]) for b in (free, bound)]
    assert first[1] < 0.8 * first[0], first


def test_nobody_waits_while_no_row_decodes():
    b = Bench("adaptive", per_prefill=0.03, sim=SIM, max_hold=5.0)
    start = b.clock.now
    b.add("a", [1, 2, 3], max_tokens=2)
    b.turn()
    assert b.steps and b.steps[0][0] == start
