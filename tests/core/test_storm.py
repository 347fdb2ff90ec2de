"""Preemption under every built-in policy, in a pool with a tenth of the needed blocks.

All streams end, each is preempted at most 8 times and the oldest running one never, and no token changes.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from policy_helpers import POLICIES, policy

from minivllm.core.engine.planner import PROTECTED_AFTER
from minivllm.testing.sim import Clock, answer, at_rest, outputs, request, sim_engine

BLOCK = 4


class Storm(RuleBasedStateMachine):
    """A load of ``streams`` requests of ``out`` tokens each, in any order with steps and aborts.

    Subclasses set both numbers.
    """

    policies, streams, out, preempted = POLICIES, 16, 24, None

    @initialize(name=st.data(), depth=st.integers(0, 2), prefix=st.booleans())
    def start(self, name, depth, prefix):
        need = self.streams * -(-(3 + self.out) // BLOCK)
        pool = max(need // 10, -(-(3 + self.out) // BLOCK)) + 1
        self.clock, self.made, self.gone = Clock(), [], set()
        self.engine = sim_engine(
            slots=self.streams,
            max_len=self.out + 8,
            blocks=pool,
            block=BLOCK,
            depth=depth,
            prefix=prefix,
            policy=policy(name.draw(st.sampled_from(self.policies))),
            budget=2 * self.streams,
        )
        leave = self.engine.planner.preempt

        def preempt(slot):
            s = self.engine.slots
            assert s.id[slot] > s.id[s.running].min(), "the oldest was preempted"
            leave(slot)

        self.engine.planner.preempt = preempt

    def more(self):
        return len(self.made) < self.streams

    @precondition(more)
    @rule(
        n=st.integers(1, 8), seed=st.integers(0, 5), service=st.sampled_from([{}, {"priority": -1}, {"ttft_ms": 9.0}])
    )
    def add(self, n, seed, service):
        for _ in range(min(n, self.streams - len(self.made))):
            i = len(self.made)
            params = dict(max_tokens=self.out, ignore_eos=True, tenant=f"t{seed}", **service)
            self.made.append(request(self.engine, f"r{i}", [i % 50, seed, 1], arrival=self.clock.now, **params))

    @rule(times=st.integers(1, 30), seconds=st.sampled_from([0.001, 0.1, 20.0]))
    def step(self, times, seconds):
        for _ in range(times):
            self.clock.turn(self.engine, seconds)

    @precondition(lambda self: len(self.made) > 3)
    @rule(data=st.data())
    def abort(self, data):
        r = data.draw(st.sampled_from(self.made))
        if len(self.gone) < 3 and self.engine.abort(r.id):
            self.gone.add(r.id)

    @invariant()
    def nobody_is_preempted_more_than_eight_times(self):
        if hasattr(self, "engine"):
            assert self.engine.dead is None
            assert all(s.preempted <= PROTECTED_AFTER for r in self.made for s in r.sequences)
            self.engine.cache.check()

    def teardown(self):
        if not hasattr(self, "engine") or self.engine.dead:
            return
        while self.more():
            self.add(8, 0, {})
        limit, turns = 400 + 12 * self.streams * self.out, 0
        while self.engine.busy:
            self.clock.turn(self.engine)
            turns += 1
            assert turns < limit, "the streams do not end"
        self.nobody_is_preempted_more_than_eight_times()
        at_rest(self.engine)
        for r in self.made:
            if r.id not in self.gone:
                assert outputs(r) == [answer(r.prompt, r.params, max_len=self.out + 8)]
        self.preempted.append(max(s.preempted for r in self.made for s in r.sequences))


def run(examples, steps, **fields):
    machine = type("Machine", (Storm,), {"preempted": [], **fields})
    how = dict(max_examples=examples, stateful_step_count=steps, deadline=None, derandomize=True)
    run_state_machine_as_test(machine, settings=settings(**how, suppress_health_check=list(HealthCheck), database=None))
    return machine.preempted


def test_all_streams_end_in_a_pool_of_a_tenth_under_every_policy():
    most = [max(run(2, 6, policies=[name])) for name in POLICIES]
    assert min(most) >= 1, f"no storm: {dict(zip(POLICIES, most, strict=True))}"


@pytest.mark.slow
@pytest.mark.parametrize("name", POLICIES)
def test_sixty_four_long_streams_end_in_a_pool_of_a_tenth(name):
    most = max(run(6, 12, policies=[name], streams=64, out=120))
    print(f"{name}: at most {most} preemptions of one stream")
    assert 1 <= most <= PROTECTED_AFTER
