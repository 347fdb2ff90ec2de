"""Hypothesis drives the engine through any order of add, step, abort and reset on the simulated device, which checks
every KV slot that is read; after each rule the pools are walked in full."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from sim import VOCAB, answer, at_rest, request, sim_engine

from minivllm.errors import RequestError

seen = {"preempted": 0, "hit": 0, "forked": 0, "aborted": 0, "trimmed": 0, "evicted": 0}


class EngineMachine(RuleBasedStateMachine):
    @initialize(
        depth=st.integers(0, 2),
        windows=st.sampled_from([(None,), (None, 5), (None, 3, 9), (4,)]),
        blocks=st.integers(12, 40),
        budget=st.integers(5, 40),
        prefix=st.booleans(),
    )
    def start(self, depth, windows, blocks, budget, prefix):
        self.max_len = 40
        self.engine = sim_engine(
            slots=5,
            max_len=self.max_len,
            blocks=blocks,
            block=4,
            windows=windows,
            depth=depth,
            budget=budget,
            prefix=prefix,
        )
        self.made, self.gone, self.n = [], set(), 0

    @rule(
        shared=st.integers(0, 20), own=st.lists(st.integers(0, VOCAB - 1), max_size=8),
        n=st.integers(1, 4), out=st.integers(1, 20),
        salt=st.sampled_from([None, None, None, "x"]), ignore=st.booleans(),
    )  # fmt: skip
    def add(self, shared, own, n, out, salt, ignore):
        prompt = [7 * i % VOCAB for i in range(shared)] + own
        self.n += 1
        try:
            r = request(self.engine, f"r{self.n}", prompt, n=n, max_tokens=out, cache_salt=salt, ignore_eos=ignore)
        except RequestError:
            assert not prompt or len(prompt) + n * out > 30
            return
        self.made.append(r)
        seen["forked"] += n > 1

    @rule(times=st.integers(1, 12))
    def step(self, times):
        for _ in range(times):
            self.engine.step()

    @precondition(lambda self: self.made)
    @rule(data=st.data())
    def abort(self, data):
        r = data.draw(st.sampled_from(self.made))
        if self.engine.abort(r.id):
            self.gone.add(r.id)
            seen["aborted"] += 1

    @rule()
    def reset(self):
        self.engine.reset_prefix_cache()

    @invariant()
    def every_block_is_accounted_for(self):
        if hasattr(self, "engine"):
            self.engine.cache.check()

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        steps = 0
        while self.engine.busy:
            self.engine.step()
            steps += 1
            assert steps < 3000, "the engine does not come to rest"
        assert self.engine.dead is None
        at_rest(self.engine)
        for r in self.made:
            for s in r.sequences:
                got = s.tokens[len(r.prompt) : s.known].tolist()
                want, reason = answer(r.prompt, r.params, s.sample, self.max_len)
                if r.id in self.gone:
                    assert s.finish_reason in ("abort", reason) and got == want[: len(got)]
                else:
                    assert (got, s.finish_reason) == (want, reason)
        seen["preempted"] += self.engine.planner.preemptions
        seen["hit"] += self.engine.cache.pools[0].hits
        seen["evicted"] += self.engine.cache.pools[0].evictions
        seen["trimmed"] += len(self.engine.cache.windows) > 1


EngineMachine.TestCase.settings = settings(
    max_examples=120, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
TestEngineMachine = EngineMachine.TestCase


def test_the_machine_above_met_every_hard_case():
    """Runs after it: a property that never saw a preemption proves nothing about preemption."""
    assert all(seen.values()), seen
