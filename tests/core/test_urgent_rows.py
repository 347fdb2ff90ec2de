"""Rows that are preempted for urgent requests.  First tokens come earlier, and no row starves or loses tokens."""

from __future__ import annotations

import random

import numpy as np
import pytest

from minivllm.core.engine.planner import PROTECTED_AFTER
from minivllm.core.interfaces.scheduler import SchedulerContext
from minivllm.plugins.scheduler.deadline import Deadline
from minivllm.plugins.scheduler.options import DeadlineOptions, PriorityOptions
from minivllm.plugins.scheduler.priority import Priority
from minivllm.testing.policy_watch import arrivals
from minivllm.testing.session import run as run_suite
from minivllm.testing.sim import Clock, answer, at_rest, outputs, request, sim_engine

CTX = SchedulerContext(4, 64, 4)
POLICIES = {
    "priority": lambda on: lambda _, ctx: Priority(PriorityOptions(ageing=30, preempt=1 if on else None), ctx),
    "deadline": lambda on: lambda _, ctx: Deadline(DeadlineOptions(preempt=on), ctx),
}
URGENT = {"priority": {"priority": -5}, "deadline": {"ttft_ms": 400.0}}


def expected(made):
    params = made.params
    return [answer(made.prompt, params, max_len=256)]


def times_of_urgent_requests(kind, preempt, depth, seed, blocks=200):
    """Return the seconds to the first token of the urgent requests of a random load.  All answers are checked first."""
    rng = random.Random(seed)
    made, urgent = [], []
    with Clock() as clock:
        engine = sim_engine(policy=POLICIES[kind](preempt), slots=4, depth=depth, blocks=blocks, now=clock.monotonic)
        for turn in range(240):
            now = clock.monotonic()
            if turn < 160 and turn % 5 == 0:  # more work than the slots can do
                prompt = [rng.randrange(50) for _ in range(rng.randrange(1, 30))]
                made.append(request(engine, f"b{turn}", prompt, now, max_tokens=rng.randrange(30, 60)))
            if turn < 160 and turn % 16 == 7:
                prompt = [rng.randrange(50) for _ in range(5)]
                urgent.append(request(engine, f"u{turn}", prompt, now, max_tokens=4, **URGENT[kind]))
            clock.turn(engine)
            engine.cache.check()
        turns = 0
        while engine.busy:
            clock.turn(engine)
            turns += 1
            assert turns < 4000 and engine.dead is None, "a row starves"
        at_rest(engine)
    for one in (*made, *urgent):
        assert outputs(one) == expected(one), "a request lost or changed tokens"
        assert one.sequences[0].preempted <= PROTECTED_AFTER
    preemptions = engine.planner.preemptions
    return [one.first_token - one.arrival for one in urgent], preemptions


@pytest.mark.parametrize("kind", POLICIES)
@pytest.mark.parametrize("depth", [0, 2])
def test_urgent_requests_wait_less_and_all_answers_are_right(kind, depth):
    waited, _ = times_of_urgent_requests(kind, False, depth, 1)
    found, preemptions = times_of_urgent_requests(kind, True, depth, 1)
    assert preemptions > 0
    assert np.mean(found) < 0.5 * np.mean(waited), (found, waited)
    assert max(found) < max(waited)


@pytest.mark.parametrize("kind", POLICIES)
def test_rows_are_preempted_for_blocks_and_for_urgency_together(kind):
    for seed in range(3):
        times_of_urgent_requests(kind, True, seed, seed, blocks=26)


def rows(arrival, **columns):
    return arrivals(np.array(arrival, float), **{name: np.array(values) for name, values in columns.items()})


def test_priority_needs_the_levels_of_the_option():
    policy = Priority(PriorityOptions(ageing=10, preempt=2), CTX)
    assert policy.preemptive and not Priority(None, CTX).preemptive
    head = rows([100.0], priority=[-1])
    assert policy.displaced(head, rows([95.0, 99.0], priority=[0, 0]), 100.0) == -1
    assert policy.displaced(head, rows([95.0, 99.0], priority=[2, 0]), 100.0) == 0
    assert policy.displaced(head, rows([50.0, 99.0], priority=[2, 1]), 100.0) == -1  # the first row has waited long
    # a row that was displaced never precedes the request that displaced it
    assert policy.displaced(rows([95.0], priority=[2]), rows([100.0], priority=[-1]), 200.0) == -1


def test_deadline_preempts_for_requests_that_can_be_in_time():
    policy = Deadline(DeadlineOptions(preempt=True), CTX)
    assert policy.preemptive and not Deadline(None, CTX).preemptive
    inf = np.inf
    running = rows([1.0, 2.0], prompt=[5, 5], known=[9, 5], tpot_due=[12.0, inf], ttft_due=[3.0, 11.5])
    head = {"prompt": [5], "known": [5]}
    assert policy.displaced(rows([10.0], ttft_due=[11.0], **head), running, 10.0) == 0
    assert policy.displaced(rows([10.0], ttft_due=[11.9], **head), running, 10.0) == 0
    assert policy.displaced(rows([10.0], ttft_due=[12.5], **head), running, 10.0) == -1
    assert policy.displaced(rows([10.0], ttft_due=[inf], **head), running, 10.0) == -1
    assert policy.displaced(rows([10.0], ttft_due=[11.0], **head), running, 11.5) == -1  # too late
    again = rows([10.0], ttft_due=[11.0], prompt=[5], known=[7])
    assert policy.displaced(again, running, 10.0) == -1  # the row has its first token


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options"), [("priority", {"preempt": 0.5}), ("deadline", {"preempt": True})])
def test_the_policies_conform_with_the_option(name, options):
    found = run_suite([("scheduler", name)], overrides={"options": options})
    assert [(one.test, one.text) for one in found if one.status == "failed"] == []
