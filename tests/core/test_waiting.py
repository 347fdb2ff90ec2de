"""The queue of waiting sequences compared with a sorted list, and the view of it that the planner gives a policy."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm.core.engine import waiting
from minivllm.core.engine.waiting import WaitingQueue
from minivllm.plugins.scheduler.fcfs import Fcfs
from minivllm.testing.sim import Clock, at_rest, request, run, sim_engine


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 6), st.integers(2, 12))
def test_the_queue_is_its_lanes_sorted_whatever_comes_and_goes(seed, lanes, front):
    rng, queue, model, n = random.Random(seed), WaitingQueue(), [], 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(waiting, "FRONT", front)
        for _ in range(rng.randint(1, 120)):
            if model and rng.random() < 0.4:
                _, _, seq = model.pop(rng.randrange(len(model)))
                queue.remove(seq, served=rng.random() < 0.5)
            elif model and rng.random() < 0.3:
                entries = queue.first(rng.randint(1, 10))
                shown = [s for _, _, s, _ in entries]
                assert all(row == b"%d" % s.id for _, _, s, row in entries), "a row is another's"
                assert len({id(s) for s in shown}) == len(shown) > 0
                for lane in {s.lane for s in shown}:
                    mine = [s for s in shown if s.lane == lane]
                    assert mine == [s for _, _, s in sorted(model, key=lambda e: e[:2]) if s.lane == lane][: len(mine)]
            else:
                seq = SimpleNamespace(id=n, key=0.0, lane=0, queued=False)
                key = rng.choice([float(rng.randint(0, 9)), float("inf"), n / 3])
                queue.push(seq, key, rng.randrange(lanes), b"%d" % n)
                model.append((key, n, seq))
                n += 1
            assert len(queue) == len(model) and {s.id for s in queue} == {i for _, i, _ in model}
            assert (queue.head() is None) if not model else (queue.head() is min(model, key=lambda e: e[:2])[2])
    assert set(queue.lanes) == {s.lane for _, _, s in model}


def test_every_lane_is_shown_and_beyond_the_window_those_served_longest_ago():
    queue = WaitingQueue()
    for i in range(1000):
        queue.push(SimpleNamespace(id=i, key=0.0, lane=0, queued=False), float(i), 0)
    for lane in range(1, 20):
        queue.push(SimpleNamespace(id=1000 + lane, key=0.0, lane=0, queued=False), 5000.0, lane)
    assert {s.lane for _, _, s, _ in queue.first(40)} == set(range(20))
    first = [s for _, _, s, _ in queue.first(4)]
    assert [s.lane for s in first] == [0, 1, 2, 3]
    queue.remove(first[0], served=True)
    assert [s.lane for _, _, s, _ in queue.first(4)] == [1, 2, 3, 4]


class Received(Fcfs):
    def __init__(self, options, ctx):
        super().__init__(options, ctx)
        self.gone, self.requested = [], 0

    def order(self, head, running, now):
        self.requested += 1
        return super().order(head, running, now)

    def ended(self, gone):
        self.gone += list(zip(gone.id.tolist(), gone.known.tolist(), strict=True))


def test_a_policy_is_told_once_of_each_sequence_that_ends_however_it_ends():
    engine = sim_engine(policy=Received, slots=4, blocks=18, depth=2)
    rng, made = random.Random(2), []
    for i in range(30):
        prompt = [rng.randrange(50) for _ in range(rng.randint(1, 8))]
        made.append(request(engine, f"r{i}", prompt, max_tokens=rng.randint(1, 24), n=1 + i % 2, ignore_eos=True))
        engine.step()
        if i % 4 == 3:
            engine.abort(f"r{i - rng.randrange(4)}")
    engine.executor.fail_at.add(engine.planner.step_id + 2)
    run(engine)
    engine.planner.next(0.0)
    received = engine.planner.policy.gone
    assert engine.planner.preemptions and len(received) == len(dict(received))
    branches = {s.id: s for r in made for s in r.sequences}
    assert set(dict(received)) <= set(branches)
    assert {s.id for r in made for s in r.sequences if s.serial >= 0} <= set(dict(received))
    assert all(branches[i].known == known for i, known in received)
    at_rest(engine)


def test_the_order_is_not_asked_for_while_nobody_can_enter():
    engine = sim_engine(policy=Received, slots=2)
    for i in range(6):
        request(engine, f"r{i}", [i], max_tokens=50, ignore_eos=True)
    for _ in range(20):
        engine.step()
    assert engine.planner.policy.requested == 1
    run(engine)


@pytest.mark.parametrize("windows", [(None,), (None, 6)])
def test_the_cached_tokens_that_a_policy_is_shown_are_those_of_a_hit(windows):
    seen = []

    class Looks(Fcfs):
        def order(self, head, running, now):
            seqs = {s.id: s for s in engine.planner.waiting}
            real = [len(engine.cache.lookup(seqs[i], seqs[i].known)[0]) * 4 for i in head.id.tolist()]
            assert head.cached.tolist() == real
            seen.extend(real)
            return super().order(head, running, now)

    engine = sim_engine(policy=Looks, slots=2, blocks=[26] * len(windows), windows=windows)
    rng = random.Random(4)
    for i in range(80):
        prompt = [7] * rng.randint(0, 12) + [rng.randrange(3) for _ in range(rng.randint(1, 9))]
        request(engine, f"r{i}", prompt, max_tokens=rng.randint(1, 6), cache_salt=rng.choice([None, "x"]))
        if i % 2:
            engine.step()
    run(engine)
    assert engine.dead is None and engine.cache.pools[0].evictions and len(set(seen)) > 3


def test_a_policy_that_fails_on_what_has_ended_costs_a_turn():
    class Stumbles(Fcfs):
        def ended(self, gone):
            raise RuntimeError("boom")

    engine, clock = sim_engine(policy=Stumbles), Clock()
    for i in range(4):
        r = request(engine, f"r{i}", [i], max_tokens=3)
        for _ in range(20):
            if engine.busy:
                clock.turn(engine)
        assert r.done and engine.dead is None


def test_the_slack_of_targets_is_that_of_the_row_that_is_due_first():
    loads = []

    class Looks(Fcfs):
        def shape(self, load, now):
            loads.append((load.tpot_slack, load.running))
            return super().shape(load, now)

    engine, clock = sim_engine(policy=Looks), Clock()
    request(engine, "none", [1], max_tokens=40, ignore_eos=True)
    clock.turn(engine)
    clock.turn(engine)
    assert loads[-1][0] == np.inf
    request(engine, "slow", [2], max_tokens=40, ignore_eos=True, tpot_ms=500.0)
    request(engine, "fast", [3], max_tokens=40, ignore_eos=True, tpot_ms=100.0)
    for _ in range(3):
        clock.turn(engine)
    assert loads[-1] == (pytest.approx(0.08), 3)
