"""A state machine of the engine without a model, with tiers behind its KV cache and every order of events.

Stores do their work when a rule runs it, one piece at a time, so that a load ends early, late, or never while its
request waits.  A store may lose pages, raise, return pages of a wrong size, or refuse new ones.
"""

from __future__ import annotations

import numpy as np
from cache_machine import CacheMachine
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule, run_state_machine_as_test

from minivllm.core.interfaces.executor import Part
from minivllm.core.interfaces.kvstore import KVStore, StoreContext
from minivllm.core.mover import Mover
from minivllm.plugins.executor.sim_pages import SimPages
from minivllm.plugins.scheduler.fcfs import Fcfs
from minivllm.testing.base import Seen
from minivllm.testing.policy_watch import PolicyWatch
from minivllm.testing.sim import Clock, SimExecutor, sim_engine

PATIENCE = 0.5  # seconds


class WeakStore(KVStore):
    """A store that keeps pages in a dict, and refuses a page that exceeds its part of the limit.  ``next_faults`` has
    the kinds of the next faults."""

    patience = PATIENCE
    always = True

    def __init__(self, options, ctx) -> None:
        super().__init__(options, ctx)
        self.pages: dict[bytes, np.ndarray] = {}
        self.next_faults: list[str] = []
        self.refused = 0  # pages refused for lack of room

    @property
    def limit(self) -> int:
        return 1500

    def keys(self):
        return {}

    def fault(self) -> str:
        return self.next_faults.pop() if self.next_faults else ""

    def put(self, key, page):
        fault = self.fault()
        if fault == "raises":
            raise OSError("no space left on the device")
        if fault == "lost":
            return False
        if sum(page.nbytes for page in (*self.pages.values(), page)) > self.limit // self.ctx.ranks:
            self.refused += 1
            return False
        self.pages[key] = page.copy()
        return True

    def get(self, key):
        fault = self.fault()
        if fault == "raises":
            raise OSError("input/output error")
        page = self.pages.get(key)
        if page is None or fault == "lost":
            return None
        return page[:-1] if fault == "short" else page

    def drop(self, keys):
        for key in keys:
            self.pages.pop(key, None)


class EagerStore(WeakStore):
    """A store that receives blocks as soon as they are published."""

    eager = True


class SlowPages(SimPages):
    """Pages whose copies to the device end at the third look."""

    def __init__(self, kv, states) -> None:
        super().__init__(kv, states)
        self.looks: dict[int, int] = {}

    def stage(self, group, pages):
        self.looks |= {id(page): 0 for page in pages}
        return pages

    def arrived(self, page):
        self.looks[id(page)] += 1
        return None if self.looks[id(page)] < 3 else 0.0


class TierDevice(SimExecutor):
    """A simulated device of two ranks, which have the same blocks; only the first is computed."""

    threaded = False
    second_pages: type[SimPages] = SimPages  # the pages of the second rank

    def start(self, wiring):
        capacity = super().start(wiring)
        assert self.mover is not None
        self.others = []
        for tier, thread in enumerate(self.mover.tiers):
            self.others.append(type(thread.store)(None, StoreContext("", 1, 2)))
            assert tier == len(self.others) - 1
        pages = self.second_pages([kv.copy() for kv in self.kv], None)
        if self.states is not None:
            pages.groups.append([self.states.covered.copy(), self.states.hashes.copy()])
            pages.page_bytes.append(16)
        self.second = Mover(self.others, pages, self.mover.identity, threaded=False)
        return capacity

    def _delta(self, d):
        if len(d.store):
            self.second.store(d.store)
        super()._delta(d)
        if len(d.fill):
            self.second.fill(d.fill)

    def call(self, verb, args=None):
        return [*super().call(verb, args), self.second.answer(args)]

    @property
    def threads(self):
        assert self.mover is not None
        return [*self.mover.tiers, *self.second.tiers]


class SlowTierDevice(TierDevice):
    """The same, whose second rank copies slowly."""

    second_pages = SlowPages


def part(cls) -> Part:
    return Part(f"test/{cls.__name__}", f"tier_machine:{cls.__name__}")


class TierMachine(CacheMachine):
    """Add events to those of ``CacheMachine``: stores that work, hang and fail."""

    @initialize(
        depth=st.integers(0, 2),
        kind=st.sampled_from(["plain", "plain", "window", "states"]),
        blocks=st.integers(14, 30),
        budget=st.integers(5, 40),
        stores=st.sampled_from([(WeakStore,), (EagerStore,), (WeakStore, EagerStore)]),
        device=st.sampled_from([TierDevice, SlowTierDevice]),
    )
    def start(self, depth, kind, blocks, budget, stores, device):
        self.clock, self.budget = Clock(), budget
        self.engine = sim_engine(
            slots=5,
            max_len=40,
            blocks=blocks,
            windows=(None, 5) if kind == "window" else (None,),
            depth=depth,
            budget=budget,
            checkpoints=4 if kind == "states" else None,
            stores=tuple(part(cls) for cls in stores),
            device=device,
            now=lambda: self.clock.now,
        )
        self.tiers = self.engine.cache.tiers
        self.watch = PolicyWatch(self.engine.planner.policy)
        self.made, self.gone = [], set()
        self.n = self.failed = 0
        self.kind = kind
        self.stores_work_at_once = False

    @rule(times=st.integers(1, 12), seconds=st.sampled_from([0.001, 0.02, 0.5]))
    def step(self, times, seconds):
        for _ in range(times):
            self.clock.turn(self.engine, seconds)
            if self.stores_work_at_once:
                self.finish_store_work()

    def finish_store_work(self):
        while sum(thread.work() for thread in self.engine.executor.threads):
            pass

    @rule(on=st.booleans())
    def let_the_stores_work_at_once(self, on):
        self.stores_work_at_once = on

    @rule(thread=st.integers(0, 3), n=st.integers(1, 8))
    def a_store_works(self, thread, n):
        threads = self.engine.executor.threads
        for _ in range(n):
            threads[thread % len(threads)].work()

    @rule()
    def all_stores_work(self):
        self.finish_store_work()

    @rule(thread=st.integers(0, 3), fault=st.sampled_from(["raises", "lost", "short"]))
    def a_store_will_fail(self, thread, fault):
        threads = self.engine.executor.threads
        threads[thread % len(threads)].store.next_faults.append(fault)
        self.seen["fault"] += 1

    @precondition(lambda self: self.made)
    @rule(data=st.data(), n=st.integers(1, 3), branches=st.integers(1, 2))
    def again_after_eviction(self, data, n, branches):
        """Add a prompt again whose blocks the device has lost, so that it is loaded from a tier, perhaps several times
        at once.
        """
        for _ in range(300):
            if self.engine.busy:
                self.clock.turn(self.engine)
                self.finish_store_work()
        earlier = data.draw(st.sampled_from(self.made))
        for pool in self.engine.cache.pools:
            pool.release(pool.take(pool.available))
        self.step(2, 0.001)
        self.finish_store_work()
        endings = [[], [3], [5, 5, 5, 5, 5]]
        salt = earlier.params.tenant, earlier.params.cache_salt
        for ending in endings[:n]:
            self.ask([earlier.prompt.tolist(), ending], branches, 3, salt)
        for _ in range(n):
            self.clock.turn(self.engine, 0.001)

    def teardown(self):
        if not hasattr(self, "engine") or self.watch.faults or self.engine.dead:
            return
        super().teardown()
        self.finish_store_work()
        steps = 4 + 3 * len(self.tiers.loading)  # the copy of a slow page ends at the third look
        for _ in range(steps):
            self.engine.step()
            self.finish_store_work()
        self.engine.cache.check()
        assert not self.tiers.waits and not self.tiers.staged and not self.tiers.loading
        for mover in (self.engine.executor.mover, self.engine.executor.second):
            assert not mover._staged, "a page stays staged"
        stores = [thread.store for thread in self.engine.executor.threads]
        n = len(self.tiers.tiers)
        for i, tier in enumerate(self.tiers.tiers):
            for store in stores[i::n]:
                assert store.pages.keys() == tier.stored, "the index and a store have other pages"
                assert not store.refused, "a page of the index had no room in a store"
            self.seen["loads"] += tier.loads
            self.seen["stores"] += tier.stores
            self.seen["late"] += tier.late
            self.seen["lost"] += tier.lost
            self.seen["tier evictions"] += tier.evictions
        self.seen[f"hit {self.kind}"] += any(tier.loads for tier in self.tiers.tiers)


def drive(examples: int, steps: int = 30, shrink: bool = False) -> Seen:
    """Run the machine on the same examples every time, and return the counts of what happened."""
    seen = Seen()
    machine = type("Machine", (TierMachine,), {"policies": [Fcfs], "seen": seen})
    profile = settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink] if shrink else [Phase.generate],
        derandomize=True,
        database=None,
        print_blob=False,
        report_multiple_bugs=False,
    )
    run_state_machine_as_test(machine, settings=profile)
    return seen


__all__ = ["PATIENCE", "EagerStore", "TierDevice", "TierMachine", "WeakStore", "drive", "part"]
