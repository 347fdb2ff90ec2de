"""Hypothesis drives the engine through any order of add, step, abort, reset and failing steps, under any policy, on the
simulated device, which checks every KV slot that is read; after each rule the pools are walked in full."""

from __future__ import annotations

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from minivllm.testing.sim import VOCAB, answer, at_rest, request, sim_engine

from minivllm.core.interfaces.scheduler import StepShape
from minivllm.errors import RequestError
from minivllm.plugins.scheduler.fcfs import Fcfs


class AnyVictim(Fcfs):
    """Preempts whom nobody expects."""

    def victim(self, candidates, need):
        return int(candidates.id.sum() * 7919 % len(candidates))


class Reversed(AnyVictim):
    """Serves the latest first."""

    def order(self, head, running, now):
        return np.argsort(-head.id)


class PrefillFirst(AnyVictim):
    def shape(self, load, now):
        return StepShape("prefill_first")


FNS = {
    None: {},
    "host": {"choose_fn": lambda logits, ids: int(np.argmax(logits))},
    "late": {"allowed_tokens_fn": lambda ids: range(VOCAB)},
}
seen = dict.fromkeys(("failed", "preempted", "hit", "forked", "aborted", "evicted", "host", "late", "refused"), 0)


class EngineMachine(RuleBasedStateMachine):
    @initialize(
        depth=st.integers(0, 2),
        windows=st.sampled_from([(None,), (None, 5), (None, 3, 9), (4,)]),
        blocks=st.integers(12, 40),
        shrink=st.integers(0, 20),
        budget=st.integers(5, 40),
        prefix=st.booleans(),
        policy=st.sampled_from([Fcfs, AnyVictim, Reversed, PrefillFirst]),
    )
    def start(self, depth, windows, blocks, shrink, budget, prefix, policy):
        self.max_len = 40
        pools = [blocks, *[max(8, blocks - shrink)] * (len(windows) - 1)]
        self.engine = sim_engine(
            slots=5,
            max_len=self.max_len,
            blocks=pools,
            windows=windows,
            depth=depth,
            budget=budget,
            prefix=prefix,
            policy=policy,
        )
        self.made, self.gone, self.n, self.failed = [], set(), 0, 0

    @rule(
        shared=st.integers(0, 20),
        own=st.lists(st.integers(0, VOCAB - 1), max_size=8),
        n=st.integers(1, 4),
        out=st.integers(1, 20),
        salt=st.sampled_from([None, None, None, "x"]),
        ignore=st.booleans(),
        fn=st.sampled_from([None, None, "host", "late"]),
    )
    def add(self, shared, own, n, out, salt, ignore, fn):
        prompt = [7 * i % VOCAB for i in range(shared)] + own
        self.n += 1
        params = dict(n=n, max_tokens=out, cache_salt=salt, ignore_eos=ignore, **FNS[fn])
        try:
            r = request(self.engine, f"r{self.n}", prompt, **params)
        except RequestError:
            need = n * -(-(len(prompt) + out) // 4)  # if nothing were shared
            assert not prompt or need >= min(p.total for p in self.engine.cache.pools), "refused although it fits"
            seen["refused"] += 1
            return
        self.made.append(r)
        seen["forked"] += n > 1
        if fn:
            seen[fn] += 1

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
    def fail_the_next_step(self):
        if self.engine.planner.step_id >= self.failed + 6:  # three in a row would end the engine
            self.failed = self.engine.planner.step_id + 1
            self.engine.executor.fail_at.add(self.failed)
            seen["failed"] += 1

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
                self.check_answer(r, s)
        seen["preempted"] += self.engine.planner.preemptions
        seen["hit"] += self.engine.cache.pools[0].hits
        seen["evicted"] += self.engine.cache.pools[0].evictions

    def check_answer(self, r, s):
        got = s.tokens[len(r.prompt) : s.known].tolist()
        want, reason = answer(r.prompt, r.params, s.sample, self.max_len)
        if s.finish_reason == "error":
            assert "planned failure" in s.error and got == want[: len(got)]
        elif r.id in self.gone:
            assert s.finish_reason in ("abort", reason) and got == want[: len(got)]
        else:
            assert (got, s.finish_reason) == (want, reason)
        assert r.cached_tokens < len(r.prompt) or not r.cached_tokens


EngineMachine.TestCase.settings = settings(
    max_examples=150, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
TestEngineMachine = EngineMachine.TestCase


def test_the_machine_above_met_every_hard_case():
    """Runs after it: a property that never saw a preemption proves nothing about preemption."""
    assert all(seen.values()), seen
