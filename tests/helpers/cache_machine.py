"""A state machine of the engine without a model, with every order of events that affects the block manager."""

from __future__ import annotations

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule, run_state_machine_as_test

from minivllm.plugins.scheduler.fcfs import Fcfs
from minivllm.testing.base import Seen
from minivllm.testing.policy_watch import PolicyWatch
from minivllm.testing.scheduler import EngineMachine
from minivllm.testing.sim import Clock, outputs, request, sim_engine


class CacheMachine(EngineMachine):
    """Add events to ``EngineMachine``: prompts that differ inside a block, forks, and preemption and eviction at any
    time.

    After every rule each pool is compared with the block tables: free + held + idle = all, references = tables, no
    block twice in the free list, and an index that agrees with its keys.  At the end nothing waits, runs or is held.
    The device compares every KV slot that it reads with the tokens, tenant and salt of the row.
    """

    @initialize(
        depth=st.integers(0, 2),
        windows=st.sampled_from([(None,), (None,), (None, 5)]),
        blocks=st.integers(14, 40),
        budget=st.integers(5, 40),
        weak=st.integers(0, 3),
    )
    def start(self, depth, windows, blocks, budget, weak):
        self.clock, self.budget = Clock(), budget
        self.engine = sim_engine(slots=5, max_len=40, blocks=blocks, windows=windows, depth=depth, budget=budget)
        if weak == 0:  # all keys collide
            for pool in self.engine.cache.pools:
                pool.hash_fn = lambda parent, tokens: 1 + tokens[0] % 5
        self.watch = PolicyWatch(self.engine.planner.policy)
        self.made, self.gone = [], set()
        self.n = self.failed = 0

    go_on = None  # replaced by ``next_turn`` and ``again_when_nothing_runs``

    @rule(
        parts=st.lists(st.sampled_from([(1, 2, 3, 4, 5, 6), (1, 2, 7), (8,), (9, 1, 2, 3)]), min_size=1, max_size=4),
        n=st.sampled_from([1, 1, 1, 2, 3]),
        out=st.integers(1, 12),
        owner=st.sampled_from([("", None), ("", None), ("", "x"), ("a", None)]),
    )
    def prompt_of_parts(self, parts, n, out, owner):
        self.ask(parts, n, out, owner)

    def ask(self, parts, n, out, owner):
        self.n += 1
        prompt = [t for part in parts for t in part]
        params = dict(n=n, max_tokens=out, ignore_eos=True, tenant=owner[0], cache_salt=owner[1])
        if n * (len(prompt) + out) <= 40:
            self.made.append(request(self.engine, f"r{self.n}", prompt, arrival=self.clock.now, **params))
            self.seen["forked"] += n > 1

    @precondition(lambda self: any(r.done for r in self.made))
    @rule(data=st.data(), more=st.lists(st.integers(0, 2), min_size=1, max_size=3))
    def next_turn(self, data, more):
        """Add a request whose prompt is the prompt and answer of an ended request, and more tokens."""
        r = data.draw(st.sampled_from([r for r in self.made if r.done]))
        parts = [outputs(r)[0][0], more]
        owner = r.params.tenant, r.params.cache_salt
        self.ask([r.prompt.tolist(), *parts], 1, 3, owner)

    @precondition(lambda self: self.made)
    @rule(data=st.data(), n=st.integers(1, 3))
    def again_when_nothing_runs(self, data, n):
        """Add the same prompt again, which is cached except for its last token, so that it may fork before anything is
        computed.
        """
        for _ in range(300):
            if self.engine.busy:
                self.clock.turn(self.engine)
        r = data.draw(st.sampled_from(self.made))
        self.ask([r.prompt.tolist()], n, 2, (r.params.tenant, r.params.cache_salt))

    @precondition(lambda self: len(self.engine.slots.running))
    @rule(data=st.data())
    def preempt(self, data):
        slot = data.draw(st.sampled_from(self.engine.slots.running.tolist()))
        if self.engine.slots.preempted[slot] < 8:
            self.engine.planner.preempt(slot)

    @rule(n=st.integers(1, 12))
    def evict(self, n):
        """Evict blocks as a row does that takes n blocks and ends."""
        for pool in self.engine.cache.pools:
            blocks = pool.take(min(n, pool.available))
            pool.release(blocks)


def drive(examples: int, steps: int = 30, shrink: bool = True, machine_of: type = CacheMachine) -> Seen:
    """Run a machine on the same examples every time, and return what it saw."""
    seen = Seen()
    machine = type("Machine", (machine_of,), {"policies": [Fcfs], "seen": seen})
    phases = [Phase.generate, Phase.shrink] if shrink else [Phase.generate]
    how = settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=phases,
        derandomize=True,
        database=None,
        print_blob=False,
        report_multiple_bugs=False,
    )
    run_state_machine_as_test(machine, settings=how)
    return seen


__all__ = ["CacheMachine", "drive"]
