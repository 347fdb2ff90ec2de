"""A simulated engine under a policy, on the clock of a test, in which the time of a step depends on its tokens."""

from __future__ import annotations

from minivllm.registration.spec import PluginQuery
from minivllm.registry import Catalog
from minivllm.testing.session import builtins
from minivllm.testing.sim import Clock, request, sim_engine

POLICIES = sorted(label.partition("/")[2] for kind, label in builtins() if kind == "scheduler")


def policy(name, **options):
    """Return the argument of ``sim_engine`` for a built-in policy by name, with options."""
    registry = Catalog.discover()["scheduler"]
    chosen = registry.select(PluginQuery(), f"minivllm/{name}").require()
    made = registry.load(chosen)
    set_to = registry.options_model(chosen.entry, chosen.spec)(**options) if options else None
    return lambda none, ctx: made(set_to, ctx)


class Bench:
    """The engine and its clock.

    A step takes ``base`` seconds, plus ``per_token`` for each of its tokens, plus ``per_prefill`` if it computes
    prompts.  ``steps`` has (start, slots, q_len) of each step.
    """

    def __init__(self, name, base=0.01, per_token=0.0, per_prefill=0.0, sim=None, **options):
        self.clock, self.base, self.per_token = Clock(), base, per_token
        self.engine = sim_engine(policy=policy(name, **options), **(sim or {}))
        self.steps, self.made, self.tokens_at = [], [], {}
        submit = self.engine.executor.submit

        def timed(plan):
            self.steps.append((self.clock.now, plan.slots.tolist(), plan.q_len.tolist()))
            self.clock.now += base + per_token * int(plan.q_len.sum()) + per_prefill * bool((plan.q_len > 1).any())
            submit(plan)

        self.engine.executor.submit = timed

    def add(self, rid, prompt, **params):
        params = {"ignore_eos": True, **params}
        r = request(self.engine, rid, prompt, arrival=self.clock.now, **params)
        r.sink = lambda seq, ids, ended: self.tokens_at.setdefault(rid, []).extend([self.clock.now] * len(ids))
        r.watch = True
        self.made.append(r)
        return r

    def turn(self):
        with self.clock:
            worked = self.engine.step()
        if not worked:
            held = self.engine.planner.wake_at - self.clock.now if self.engine.planner.wake_at else 0.0
            self.clock.now += max(held, 0.001)
        return worked

    def run(self, until=None, limit=50_000):
        """Run until everything has ended, or until the clock reaches ``until``."""
        for _ in range(limit):
            if not self.engine.busy or (until is not None and self.clock.now >= until):
                return self
            self.turn()
        raise AssertionError("the engine does not come to rest")

    def play(self, trace):
        """Play a ``trace`` of (seconds from now, id, prompt, params), sorted by time."""
        start = self.clock.now
        for at, rid, prompt, params in trace:
            self.run(until=start + at)
            self.clock.now = max(self.clock.now, start + at)
            self.add(rid, prompt, **params)
        return self.run()

    def order(self):
        """Return the ids in the order of their first tokens."""
        return [r.id for r in sorted(self.made, key=lambda r: r.first_token)]
