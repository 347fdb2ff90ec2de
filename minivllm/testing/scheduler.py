"""The conformance suite of scheduling policies, under the real planner and engine, on a simulated device and clock.

Each result of the policy is checked at its call (``policy_watch``), and the tokens of each request at its end.  A
policy may delay requests, and may change nothing else.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from minivllm.core.engine.engine import Engine
from minivllm.core.engine.planner import PROTECTED_AFTER
from minivllm.core.engine.request import Request
from minivllm.core.interfaces.scheduler import Load, SchedulerContext, SchedulerPolicy
from minivllm.errors import RequestError

from .base import Seen, same_figures, since
from .drawing import one_of
from .kept import Lasting
from .policy_keys import PolicyKeys
from .policy_watch import PolicyWatch, arrivals, frozen
from .sim import VOCAB, Clock, answer, at_rest, outputs, request, sim_engine
from .spec import SpecConformance

IDLE_LIMIT = 60.0  # longest time in seconds without a step while requests wait and none runs
SLOTS = 4
BUDGET = 32
BLOCK = 4
MAX_LEN = 64
# tokens of a long prompt: 19 steps of the whole budget, and more than any limit in tokens that a policy may have
LONG_PROMPT = 600


def drain(engine: Engine, clock: Clock, watch: PolicyWatch | None = None) -> None:
    """Run the engine until every request has ended.

    AssertionError if that takes too many turns, if nothing runs for a minute, or if a call of the policy violated the
    contract.
    """
    requests = engine.requests.values()
    work = sum(r.end * len(r.sequences) for r in requests)
    limit = 200 + 12 * work  # a row is preempted at most 8 times, the oldest row never
    turns = 0
    worked_at = clock.now
    while engine.busy:
        assert engine.dead is None, engine.dead
        if clock.turn(engine):
            worked_at = clock.now
        if watch is not None:
            watch.check()
        assert clock.now - worked_at < IDLE_LIMIT, (
            f"nothing has run for {clock.now - worked_at:.0f} s while {engine.planner.n_waiting} requests wait and "
            f"{len(engine.slots.running)} of {engine.slots.size} slots are taken: shape() holds or caps new requests "
            "for ever, or order() leaves them out for ever"
        )
        turns += 1
        assert turns < limit, f"{len(engine.requests)} requests have not ended after {turns} turns, the limit"
    assert engine.dead is None, engine.dead


def _choose(logits: np.ndarray, ids: Any) -> int:
    return int(np.argmax(logits))


def _allow(ids: Any) -> Sequence[int]:
    return range(VOCAB)


FNS: Mapping[str | None, dict[str, Any]] = {
    None: {},
    "host": {"choose_fn": _choose},
    "late": {"allowed_tokens_fn": _allow},
}
HARD = ("failed", "preempted", "hit", "copied", "forked", "aborted", "evicted", "host", "late", "refused")


class EngineMachine(RuleBasedStateMachine):
    """A hypothesis state machine that adds, runs, aborts, resets and fails requests and steps in any order.

    The simulated device checks every KV slot that is read.  All block pools are checked after each rule, and all
    tokens at the end.  A subclass sets ``policies``, each called with (options, context), and ``seen``.
    """

    policies: Sequence[Callable[..., SchedulerPolicy]]
    seen: Seen

    @initialize(
        data=st.data(),
        depth=st.integers(0, 2),
        windows=st.sampled_from([(None,), (None, 5), (None, 3, 9), (4,)]),
        blocks=st.integers(12, 40),
        shrink=st.integers(0, 20),
        budget=st.integers(5, 40),
        prefix=st.booleans(),
    )
    def start(self, data, depth, windows, blocks, shrink, budget, prefix):
        policy = one_of(data, *self.policies)
        fewer = max(8, blocks - shrink)
        others = [fewer] * (len(windows) - 1)
        self.clock = Clock()
        self.budget = budget
        self.engine = sim_engine(
            slots=5,
            max_len=40,
            blocks=[blocks, *others],
            windows=windows,
            depth=depth,
            budget=budget,
            prefix=prefix,
            policy=policy,
        )
        self.watch = PolicyWatch(self.engine.planner.policy)
        self.made: list[Request] = []
        self.gone: set[str] = set()
        self.n = 0
        self.failed = 0

    @rule(
        shared=st.integers(0, 20),
        own=st.lists(st.integers(0, VOCAB - 1), max_size=8),
        n=st.integers(1, 4),
        out=st.integers(1, 20),
        salt=st.sampled_from([None, None, None, "x"]),
        ignore=st.booleans(),
        fn=st.sampled_from([None, None, "host", "late"]),
        service=st.fixed_dictionaries(
            {
                "priority": st.integers(-2, 2),
                "tenant": st.sampled_from(["", "a", "b"]),
                "ttft_ms": st.sampled_from([None, 1.0, 100.0, 1e6]),
                "tpot_ms": st.sampled_from([None, 1.0, 50.0]),
            }
        ),
    )
    def add(self, shared, own, n, out, salt, ignore, fn, service):
        common = [7 * i % VOCAB for i in range(shared)]
        prompt = common + own
        self.admit(prompt, fn, n=n, max_tokens=out, cache_salt=salt, ignore_eos=ignore, **service)

    def admit(self, prompt, fn=None, **params):
        """Add a request, with a function that chooses its tokens (``fn`` "host") or masks them ("late").

        Fail if the engine refuses it although it fits and the policy does not refuse it.
        """
        self.n += 1
        n = params.get("n", 1)
        try:
            params |= FNS[fn]
            r = request(self.engine, f"r{self.n}", prompt, arrival=self.clock.now, **params)
        except RequestError as e:
            self.watch.check()
            need = n * -(-(len(prompt) + params["max_tokens"]) // BLOCK)  # without shared blocks
            small = need >= min(p.total for p in self.engine.cache.pools)
            assert not prompt or small or "scheduler" in str(e), f"refused although it fits: {e}"
            self.seen["refused"] += 1
            return
        self.made.append(r)
        self.seen["forked"] += n > 1
        if fn:
            self.seen[fn] += 1

    @precondition(lambda self: self.made)
    @rule(data=st.data(), own=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=5), out=st.integers(1, 8))
    def go_on(self, data, own, out):
        """Add a request that continues the prompt of an earlier one, whose blocks may be cached."""
        r = one_of(data, *self.made)
        prompt = r.prompt.tolist() + own
        self.admit(prompt[:30], max_tokens=out, cache_salt=r.params.cache_salt)

    @precondition(lambda self: self.n < 5)  # lets the crowd come only once per example
    @rule(first=st.integers(0, VOCAB - 1))
    def a_crowd(self, first):
        """Add so many long answers at once that most caches are too small for them, so that rows are preempted."""
        for i in range(5):
            prompt = [(first + i) % VOCAB] * 4
            self.admit(prompt, n=1, max_tokens=20, cache_salt=None, ignore_eos=True)

    @rule(times=st.integers(1, 12), seconds=st.sampled_from([0.001, 0.02, 0.5]))
    def step(self, times, seconds):
        for _ in range(times):
            self.clock.turn(self.engine, seconds)

    @precondition(lambda self: self.made)
    @rule(data=st.data())
    def abort(self, data):
        r = data.draw(st.sampled_from(self.made))
        if self.engine.abort(r.id):
            self.gone.add(r.id)
            self.seen["aborted"] += 1

    @rule()
    def fail_the_next_step(self):
        if self.engine.planner.step_id >= self.failed + 6:  # three failed steps in a row would end the engine
            self.failed = self.engine.planner.step_id + 1
            self.engine.executor.fail_at.add(self.failed)
            self.seen["failed"] += 1

    @rule()
    def reset(self):
        self.engine.reset_prefix_cache()

    @invariant()
    def every_plan_keeps_the_limits_and_every_block_is_accounted_for(self):
        if hasattr(self, "engine"):
            self.watch.check()
            assert self.engine.dead is None, self.engine.dead
            device = self.engine.executor
            most = self.budget
            assert device.max_tokens <= most, f"a step of {device.max_tokens} tokens: expected {most} at most"
            assert device.max_rows <= self.engine.slots.size, f"a step of {device.max_rows} rows"
            self.engine.cache.check()

    def teardown(self):
        failed = not hasattr(self, "engine") or self.watch.faults or self.engine.dead
        if failed:
            return  # a rule of the state machine has failed already
        drain(self.engine, self.clock, self.watch)
        at_rest(self.engine)
        for r in self.made:
            for s, got in zip(r.sequences, outputs(r), strict=True):
                self.check_answer(r, s, *got)
        pool = self.engine.cache.pools[0]
        calls = [name for name, _ in self.watch.log]
        self.seen["preempted"] += self.engine.planner.preemptions
        self.seen["victim"] += calls.count("victim")
        self.seen["hit"] += pool.hits
        self.seen["evicted"] += pool.evictions
        self.seen["copied"] += self.engine.cache.copied

    def check_answer(self, r, s, got, reason):
        """Fail unless a sequence has the expected tokens and finish reason.

        ``r`` is its request and ``s`` the sequence.
        """
        want, why = answer(r.prompt, r.params, s.sample, 40)
        if reason == "error":
            assert "planned failure" in s.error, s.error
            assert got == want[: len(got)], s.error
        elif r.id in self.gone:
            assert reason in ("abort", why)
            assert got == want[: len(got)]
        else:
            assert (got, reason) == (want, why)
            self.seen["finished"] += 1
        # forks, and sliding windows, whose blocks cannot be reserved, may be preempted more often
        may_repeat = r.params.n > 1 or len(self.engine.cache.pools) > 1
        assert may_repeat or s.preempted <= PROTECTED_AFTER
        cached = r.cached_tokens
        assert not cached or cached < len(r.prompt)


# (results of the policy's calls, slots and numbers of tokens of the steps)
Decisions = tuple[list[tuple[str, Any]], list[Any]]
MakePolicy = Callable[..., SchedulerPolicy]


def trace(policy: MakePolicy, between: Callable[[], None] = lambda: None) -> Decisions:
    """Return the decisions of a policy, and the resulting steps, for a fixed series of arrivals and aborts.

    ``between`` is called between steps.
    """
    rng = random.Random(7)
    clock = Clock()
    engine = sim_engine(slots=SLOTS, max_len=MAX_LEN, blocks=22, budget=BUDGET, depth=1, policy=policy)
    watch = PolicyWatch(engine.planner.policy)
    for i in range(40):
        priority = rng.randint(-2, 2)
        service = dict(priority=priority, tenant=rng.choice("abc"), tpot_ms=20.0)
        service["ttft_ms"] = rng.choice([None, 5.0, 5e3])
        length = rng.randint(1, 30)
        prompt = [rng.randrange(VOCAB) for _ in range(length)]
        n = 3 if i % 11 == 10 else 1
        most = 30 if n == 1 else 8
        out = rng.randint(1, most)
        request(engine, f"r{i}", prompt, arrival=clock.now, max_tokens=out, n=n, **service)
        turns = rng.randint(0, 6)
        for _ in range(turns):
            clock.turn(engine)
            watch.check()
            between()
        if i % 7 == 6:
            engine.abort(f"r{i - 2}")
    drain(engine, clock, watch)
    at_rest(engine)
    between()
    return watch.log, engine.executor.trail


SAME = {"prompt": 6, "out": 4}
STREAMS: Mapping[
    str, tuple[dict[str, Any], Callable[[int], dict[str, Any]]]
] = {  # how the other requests relate to the tested one -> (the tested request, a function i -> the i-th other request)
    "shorter ones": ({"prompt": 40, "out": 20}, lambda i: {"prompt": 1 + i % 2, "out": 1 + i % 3}),
    "longer ones": ({"prompt": 1, "out": 1}, lambda i: {"prompt": 40, "out": 16 + i % 4}),
    "more urgent ones": ({**SAME, "priority": 3}, lambda i: {**SAME, "priority": -3}),
    "ones that are due": (SAME, lambda i: {**SAME, "ttft_ms": 50.0, "tpot_ms": 50.0}),
    "ones that are not yet overdue": ({**SAME, "ttft_ms": 1.0}, lambda i: {**SAME, "ttft_ms": 1e7}),
    "ones with a cached prefix": (SAME, lambda i: {**SAME, "prefix": 16}),
    "new tenants": ({**SAME, "tenant": "served"}, lambda i: {**SAME, "tenant": "served" if i < 9 else f"t{i}"}),
    "narrow ones": ({**SAME, "n": SLOTS}, lambda i: {"prompt": 3, "out": 3 + i % 5}),
    "ones that leave no room": ({"prompt": 50, "out": 10}, lambda i: {"prompt": 3, "out": 3 + i % 7}),
    "short prompts": ({"prompt": LONG_PROMPT, "out": 4}, lambda i: {"prompt": 1 + i % 9, "out": 2 + i % 5}),
    "ones that take its blocks": ({"prompt": 4, "out": 30}, lambda i: {"prompt": 4, "out": 26 + i % 9}),
}


# names of the streams that run with a small cache
TIGHT = ("ones that leave no room", "ones that take its blocks")


class SchedulerConformance(PolicyKeys, Lasting, SpecConformance):
    """The conformance suite of scheduling policies.

    ``patience`` is the longest allowed time in seconds from arrival to end of a request under a steady stream of other
    requests, where a step takes a second.  Raise it for a policy that documents slow aging.
    """

    kind = "scheduler"
    patience: float = 2000.0  # seconds

    def context(self) -> tuple[Any, ...]:
        return (SchedulerContext(SLOTS, BUDGET, BLOCK),)

    def exercise(self, instance: SchedulerPolicy) -> Any:
        return trace(lambda options, ctx: instance)

    def make(self, options: Any, ctx: SchedulerContext) -> SchedulerPolicy:
        """Create a policy, for ``sim_engine``, which passes these arguments."""
        return self.build(ctx)

    def once_more(self, instance: SchedulerPolicy, number: int) -> None:
        """Serve four requests that arrive, wait, run and end.

        Their ids, tenants, priorities, lengths and targets are new in each call, so that a policy that never deletes
        them grows.
        """
        now = 10.0 * number
        new = 4 * number + np.arange(4)
        counts = (7 + new).astype(np.int32)
        columns = dict.fromkeys(("prompt", "known", "predicted_out", "max_out"), counts)
        columns["tenant"] = new.astype(np.int32)
        priorities = new % 2**20
        columns["priority"] = priorities.astype(np.int32)
        columns["ttft_due"] = now + 1.0 + new
        columns["tpot_due"] = now + 2.0 + new
        columns["id"] = new
        arrival = now + np.arange(4.0)
        view = frozen(arrivals(arrival, **columns))
        none = view.take(np.arange(0))
        three = view.take(np.arange(3))
        last = view.take(np.array([3]))
        instance.key(view)
        instance.lane(view)
        fresh = Load(4, 0, 0, 90, 100, BUDGET, 5.0)
        instance.shape(fresh, now + 5)
        instance.order(view, none, now + 5)
        filled = Load(1, 3, 0, 90, 100, BUDGET, 6.0)
        instance.shape(filled, now + 6)
        instance.order(last, three, now + 6)
        instance.victim(view, 1)
        columns["aborted"] = (new % 2).astype(np.int32)
        instance.ended(frozen(arrivals(arrival, **columns)))

    @since(1, 1)
    def test_its_figures_are_numbers_by_name_and_asking_changes_nothing(self) -> None:
        """Check the metrics (``figures``) of a new policy, after every step and at the end.

        Two calls return the same, and the calls change no decision.
        """
        policy = self.build(*self.context())
        same_figures(policy.figures)
        found = trace(lambda options, ctx: policy, lambda: same_figures(policy.figures))
        assert found == trace(self.make), "it decides differently if its figures are read after every step"

    @since(1, 0)
    def test_whatever_happens_every_answer_is_lawful_and_every_token_right(self) -> None:
        """Check a policy under any order of arrivals, steps, aborts and failures, with rows that are preempted.

        ``key`` returns a number per sequence, ``order`` distinct indices, ``victim`` an index, ``shape`` a StepShape;
        none raises an error or writes to its view.  All requests end in a bounded number of turns, with the right
        tokens.
        """
        seen = Seen()
        attributes = {"policies": [self.make], "seen": seen}
        machine = type("Machine", (EngineMachine,), attributes)
        self.run_machine(machine, 200, steps=30)
        self.meet(seen, finished=100, victim=5)
        self.meet(seen, **dict.fromkeys(HARD, 5))

    @since(1, 0)
    def test_a_backlog_longer_than_the_window_is_worked_off(self) -> None:
        """Check that every request of a long queue is served, although ``order`` gets only some of them at once.

        No more requests arrive meanwhile.
        """
        policy = self.build(*self.context())
        window = policy.window
        assert isinstance(window, int) and window >= 1, f"window={window!r}: expected a whole number >= 1"
        clock = Clock()
        engine = sim_engine(slots=16, blocks=100, budget=64, max_len=MAX_LEN, policy=self.make)
        watch = PolicyWatch(engine.planner.policy)
        n = min(window, 1000) + 40
        requests = []
        for i in range(n):
            prompt = [i % VOCAB, i // VOCAB]
            arrival = clock.now - n + i
            r = request(engine, f"r{i}", prompt, arrival=arrival, max_tokens=1 + i % 3)
            requests.append(r)
        drain(engine, clock, watch)
        for r in requests:
            expected = [answer(r.prompt, r.params)]
            assert outputs(r) == expected, f"{r.id} of {n}"

    @since(1, 0)
    def test_the_same_trace_gives_the_same_decisions(self) -> None:
        """Check that a policy decides by its arguments alone, without random numbers or a clock besides ``now``.

        The same requests are served twice, the second time with a clock at another time of day.
        """
        first, steps = trace(self.make)
        clocks = {name: _later(name) for name in ("time", "monotonic", "perf_counter")}
        with mock.patch.multiple(time, **clocks):
            second, again = trace(self.make)
        for i, (a, b) in enumerate(zip(first, second, strict=False)):
            assert a == b, f"decision {i} of {len(first)}: {a[0]} returned {a[1]} in one run and {b[1]} in the next"
        found = (len(first), steps)
        expected = (len(second), again)
        assert found == expected, "the same decisions, and other steps"

    @since(1, 0)
    @pytest.mark.parametrize("window", [None, 3], ids=["all", "window"])
    @pytest.mark.parametrize("stream", STREAMS)
    def test_nobody_starves(self, stream: str, window: int | None) -> None:
        """Check that a request ends within ``patience`` seconds, for a policy that claims ``starvation_free``.

        Other requests, which the policy may prefer, keep arriving, so that some always wait.  The limit holds also if
        the request is preempted again and again, and if more requests wait than ``order`` gets at once.
        """
        self.need("starvation_free")
        params, other = STREAMS[stream]
        max_len = LONG_PROMPT + 40 if params["prompt"] == LONG_PROMPT else MAX_LEN
        clock = Clock(1000.0 if window is None else 1e7)
        engine = self._small_engine(stream in TIGHT, max_len, window)
        watch = PolicyWatch(engine.planner.policy)
        added = 0

        def turn() -> None:
            nonlocal added
            queued = [s for s in engine.planner.waiting if s.queued and not s.preempted]
            fresh = sum(s.request.id != "one" for s in queued)
            for _ in range(6 - fresh):
                arrival = clock.now - 0.5 + 1e-6 * added
                _add(engine, f"o{added}", arrival, seed=added, **other(added))
                added += 1
            clock.turn(engine, 1.0)
            watch.check()
            assert engine.dead is None, engine.dead

        for _ in range(12):
            turn()
        r = _add(engine, "one", clock.now, seed=-1, **params)
        start = clock.now
        before = added
        while not r.done:
            turn()
            waited = clock.now - start
            s = r.sequences[0]
            if s.slot < 0:
                known = s.known
            else:
                known = int(engine.slots.known[s.slot])
            assert waited <= self.patience, (
                f"beside {stream} a request has not ended after {waited:.0f} s and {added - before} later ones: it "
                f"{'waits' if s.slot < 0 else 'runs'} with {known - len(r.prompt)} tokens, preempted {s.preempted}x "
                f"(patience = {self.patience:.0f} s; a test class may raise it if the policy ages slowly)"
            )
        expected = [answer(r.prompt, r.params, s.sample, max_len) for s in r.sequences]
        assert outputs(r) == expected
        # the test is too weak if few other requests have arrived before this one ended
        assert added >= 8, "the test itself is too weak: hardly any other request arrived"

    def _small_engine(self, tight: bool, max_len: int, window: int | None) -> Engine:
        """Return an engine with few slots.

        It has few blocks if ``tight``.  ``window`` is the most requests that ``order`` gets.
        """

        def policy_of(options: Any, ctx: SchedulerContext) -> SchedulerPolicy:
            policy = self.build(ctx)
            if window is not None:
                policy.window = min(policy.window, window)
            return policy

        blocks = 17 if tight else 60
        if max_len != MAX_LEN:
            blocks += max_len // BLOCK
        return sim_engine(slots=SLOTS, blocks=blocks, budget=BUDGET, max_len=max_len, depth=1, policy=policy_of)


def _add(
    engine: Engine, rid: str, arrival: float, seed: int, prompt: int, out: int, prefix: int = 0, **more: Any
) -> Request:
    """Add a request with a random prompt of ``prompt`` tokens after ``prefix`` tokens that all requests share."""
    rng = random.Random(seed)
    drawn = [rng.randrange(VOCAB) for _ in range(prompt)]
    ids = [3] * prefix + drawn
    return request(engine, rid, ids, arrival=arrival, max_tokens=out, ignore_eos=True, **more)


def _later(name: str) -> Callable[[], float]:
    """Return a replacement for the function ``name`` of the module ``time``, whose clock is a day ahead."""
    real = getattr(time, name)
    return lambda: real() + 86399.37
