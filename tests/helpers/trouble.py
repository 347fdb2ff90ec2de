"""A simulated engine with every kind of trouble at once.

It has tiny pools and windows, policies with arbitrary results, forks, preemption and eviction at any time, aborts in
any state, failing steps, colliding keys, and few remembered salts.
"""

from __future__ import annotations

import contextlib
import random
from dataclasses import dataclass

import numpy as np

from minivllm.core.engine import blocks, engine, waiting
from minivllm.core.interfaces.scheduler import SchedulerPolicy, StepShape
from minivllm.errors import RequestError
from minivllm.registration.spec import PluginQuery
from minivllm.registry import Catalog
from minivllm.testing.session import builtins
from minivllm.testing.sim import VOCAB, Clock, answer, at_rest, outputs, request, sim_engine

MAX_LEN = 40


def all_of(seam):
    """Return every built-in plug-in of a seam with its default options, called with (None, context)."""
    registry = Catalog.discover()[seam]
    for kind, label in builtins():
        if kind == seam:
            chosen = registry.select(PluginQuery(), label).require()
            options = registry.options_model(chosen.entry, chosen.spec)() if chosen.spec.options else None
            made = registry.load(chosen)
            yield lambda none, ctx, made=made, options=options: made(options, ctx)


def anything(rng):
    """Return a policy with arbitrary allowed results, and two results that are not allowed, each of which costs a turn.

    Three such turns in a row would end the engine.
    """

    class Anything(SchedulerPolicy):
        window = rng.choice([1, 2, 3, 256])
        slips = 2
        failed_in_a_row = staticmethod(int)

        def slip(self, right, wrong):
            if self.slips and rng.random() < 0.05 and not self.failed_in_a_row():
                self.slips -= 1
                return rng.choice(wrong)
            return right

        def key(self, new):
            key = rng.choice([0.0, np.inf, -np.inf, 1e308, float(new.arrival[0]), -float(new.arrival[0])])
            return np.array([np.nan if rng.random() < 0.01 else key])

        def lane(self, new):
            return np.array([rng.choice([0, 1, -7, 2**62, int(new.tenant[0])])])

        def order(self, head, running, now):
            n = len(head)
            order = [rng.randrange(n) for _ in range(rng.randint(0, n))] if rng.random() < 0.5 else list(range(n))
            wrong = [[n], [-1], [0.0], [None], [0] * (n + 1), None, 5, np.full((n, 2), 0), [True], ["0"]]
            return self.slip(np.array(order, rng.choice([np.int64, np.int8])), wrong)

        def shape(self, load, now):
            kind = rng.choice(["mix", "mix", "mix", "prefill_first", "static"])
            cap = rng.choice([None, None, None, 0, 1, 3, 100, 2.5])
            right = StepShape(kind, cap, rng.choice([0.0, 0.0, now + 0.01, -1.0, now + 1]))
            wrong = [None, "mix", StepShape("mixed"), StepShape(hold_until=np.nan), StepShape(hold_until=np.inf)]
            wrong += [StepShape(kind, cap) for cap in (-5, np.nan, np.inf, "3", True)]
            return self.slip(right, wrong)

        def victim(self, candidates, need):
            n, wrong = len(candidates), [-1, len(candidates), 10**9, 0.0, None, True, "0"]
            return self.slip(rng.choice([0, n - 1, np.int64(0), np.array(n // 2)]), wrong)

    return lambda none, ctx: Anything(none, ctx)


@dataclass
class Trouble:
    """One seed of the trouble.

    Each pool is checked after every event, and at the end every request that was not aborted has its answer.
    """

    seed: int

    def __post_init__(self):
        rng = self.rng = random.Random(self.seed)
        windows = rng.choice([(None,), (None,), (None,), (None, 5), (None, 3, 9), (None, 1), (None, 17)])
        policy = anything(rng) if rng.random() < 0.6 else rng.choice(list(all_of("scheduler")))
        self.slots, self.clock = rng.randint(1, 6), Clock()
        self.engine = sim_engine(
            slots=self.slots,
            max_len=MAX_LEN,
            blocks=[rng.randint(4, 30) for _ in windows],
            block=rng.choice([1, 2, 4]),
            windows=windows,
            depth=rng.randint(0, 3),
            budget=rng.randint(1, 40),
            prefix=rng.random() < 0.9,
            partial=rng.random() < 0.8,
            policy=policy,
            evictor=rng.choice(list(all_of("evictor"))),
        )
        # A step that is planned to fail may come in between.
        self.engine.planner.policy.failed_in_a_row = lambda: self.engine.failed_steps
        for pool in self.engine.cache.pools if rng.random() < 0.2 else ():
            pool.hash_fn = lambda parent, tokens: 1 + tokens[0] % 5
        self.families = [[rng.randrange(VOCAB) for _ in range(24)] for _ in range(2)]
        self.made, self.gone, self.failed = [], set(), 0

    def play(self, patch):
        rng = self.rng
        patch.setattr(waiting, "FRONT", rng.choice([3, 512]))
        patch.setattr(blocks, "MAX_ROOTS", rng.choice([2, 65536]))
        patch.setattr(engine, "MAX_TENANTS", rng.choice([2, 65536]))
        for pool in self.engine.cache.pools:
            pool.most_roots = blocks.MAX_ROOTS
        events = (self.add, self.step, self.abort, self.reset, self.preempt, self.evict, self.fail)
        for event in rng.choices(events, (30, 45, 8, 3, 6, 4, 4), k=rng.randint(5, 120)):
            event()
            self.check()
        for turn in range(6000):
            if not self.engine.busy:
                break
            self.clock.turn(self.engine)
            if turn % 16 == 0:
                self.check()
        assert not self.engine.busy, f"seed {self.seed}: the engine does not come to rest"
        at_rest(self.engine)
        for r in self.made:
            self.compare(r)
        return self.engine

    def check(self):
        assert self.engine.dead is None, self.engine.dead
        self.engine.cache.check()

    def compare(self, r):
        for s, (got, reason) in zip(r.sequences, outputs(r), strict=True):
            want, why = answer(r.prompt, r.params, s.sample, MAX_LEN)
            if reason == "error":
                assert "planned failure" in s.error or "NaN" in s.error, s.error
            elif r.id in self.gone:
                assert reason in ("abort", why) and got == want[: len(got)]
            else:
                assert (got, reason) == (want, why), f"seed {self.seed}, {r.id}"

    # ---- events --------------------------------------------------------------------------------------------------

    def add(self):
        rng = self.rng
        prompt = rng.choice(self.families)[: rng.randint(0, 24)] + [rng.randrange(3) for _ in range(rng.randint(0, 4))]
        before = [r for r in self.made if r.done]
        if before and rng.random() < 0.3:  # the next turn of a conversation
            r = rng.choice(before)
            prompt = [*r.prompt.tolist(), *outputs(r)[0][0], rng.randrange(3)]
        params = dict(
            n=rng.choice([1, 1, 1, 2, 3, self.slots]),
            max_tokens=rng.randint(1, 20),
            ignore_eos=rng.random() < 0.7,
            tenant=rng.choice(["", "", "a", "b", "c"]),
            cache_salt=rng.choice([None, None, "x", "y"]),
            priority=rng.randint(-2, 2),
            ttft_ms=rng.choice([None, 1.0, 1e6]),
            tpot_ms=rng.choice([None, 1.0, 50.0]),
            expected_tokens=rng.choice([None, 1, 5]),
        )
        if rng.random() < 0.2:
            params["allowed_tokens_fn"] = lambda ids: range(VOCAB)
        elif rng.random() < 0.2:
            params |= {"n": 1, "choose_fn": lambda logits, ids: int(np.argmax(logits))}
        with contextlib.suppress(RequestError):  # the request is too long or too wide, or its key is NaN
            self.made.append(request(self.engine, f"r{len(self.made)}", prompt, arrival=self.clock.now, **params))

    def step(self):
        for _ in range(self.rng.randint(1, 6)):
            self.clock.turn(self.engine, self.rng.choice([0.001, 0.02, 0.5]))

    def abort(self):
        if self.made:
            r = self.rng.choice(self.made)
            if self.engine.abort(r.id):
                self.gone.add(r.id)

    def reset(self):
        self.engine.reset_prefix_cache()

    def preempt(self):
        slots = self.engine.slots
        if len(slots.running):
            slot = self.rng.choice(slots.running.tolist())
            if slots.preempted[slot] < 8:
                self.engine.planner.preempt(slot)

    def evict(self):
        for pool in self.engine.cache.pools:
            pool.release(pool.take(min(self.rng.randint(1, 8), pool.available)))

    def fail(self):
        if self.engine.planner.step_id >= self.failed + 6:  # three failed steps in a row would end the engine
            self.failed = self.engine.planner.step_id + 1
            self.engine.executor.fail_at.add(self.failed)


__all__ = ["Trouble"]
