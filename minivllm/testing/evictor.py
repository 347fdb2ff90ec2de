"""Evictors against a model (``evictor_tree``), over long lives (``evictor_lives``), and in the engine itself."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from minivllm.core.interfaces.evictor import BlockInfo, Evictor, EvictorContext

from .base import Seen, same_figures, since
from .evictor_lives import HITS, EvictorLife, lives
from .evictor_tree import Tree, key_of, keys
from .kept import Lasting
from .sim import VOCAB, answer, at_rest, outputs, request, run, sim_engine
from .spec import SpecConformance

CAPACITY = 8192
BRANCHES = 3  # children of a block: so few that paths which were given up are soon computed again
DEEPEST = 5  # of the blocks without a parent
FEW, MANY, AT_ONCE = 512, 1 << 18, 5000  # keys of a pool whose calls are timed, and given up in one call
SLOWER, NOISE = 3, 3e-5  # a call among many keys may take so many times as long as among few, and so many seconds more
TRIES = 3  # of which one must hold: another process may have the core or the memory in the others
BRANCH = st.integers(0, BRANCHES - 1)


class _Machine(RuleBasedStateMachine):
    """Drives an evictor and the tree together; ``suite`` and ``seen`` are set by the test."""

    suite: EvictorConformance
    seen: Seen

    def __init__(self) -> None:
        super().__init__()
        self.tree, self.evictor = Tree(), self.suite.build(self.suite.context()[0])
        self.running: list[list[int]] = []  # paths in use
        self.orphans: list[list[int]] = []  # the same without parents

    def _publish(self, path: list[int], key: int, parent: int, depth: int = 0) -> None:
        """A block is full.  If another sequence has cached the same content, its block is shared instead, and nobody
        has looked it up."""
        if key not in self.tree.refs:
            self.seen["came back"] += key in self.tree.gone
            self.evictor.add(keys([key]), self.tree.add(key, parent, depth))
        elif woken := self.tree.take([key]):
            self.evictor.hold(keys(woken))
        path.append(key)

    def _extend(self, path: list[int], branches: Sequence[int]) -> None:
        for branch in branches:
            parent = path[-1] if path else 0
            self._publish(path, key_of(parent, branch), parent)

    @rule(branches=st.lists(BRANCH, min_size=1, max_size=5))
    def start(self, branches: list[int]) -> None:
        path: list[int] = []
        self._extend(path, branches)
        self.running.append(path)

    @rule(depths=st.lists(st.integers(1, DEEPEST), min_size=1, max_size=3, unique=True), branch=BRANCH)
    def start_without_parents(self, depths: list[int], branch: int) -> None:
        """Blocks of a sliding window's group hang on those of another group: none has a parent here, at any depth."""
        path: list[int] = []
        for depth in sorted(depths):
            self._publish(path, key_of(0, BRANCHES * (depth + 1) + branch), 0, depth)
        self.seen["without a parent"] += 1
        self.orphans.append(path)

    @precondition(lambda self: self.tree.refs)
    @rule(data=st.data(), branches=st.lists(BRANCH, max_size=3))
    def start_on_a_cached_prefix(self, data: Any, branches: list[int]) -> None:
        path = self.tree.path(data.draw(st.sampled_from(sorted(self.tree.refs))))
        self.evictor.hit(keys(path))
        for k in path:
            self.tree.hits[k] += 1
        self.seen["shared"] += any(self.tree.refs[k] for k in path)
        woken = self.tree.take(path)
        if woken:
            self.seen["held again"] += 1
            self.evictor.hold(keys(woken))
        if self.tree.depth[path[0]]:
            self.orphans.append(path)
        else:
            self._extend(path, branches)
            self.running.append(path)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), branches=st.lists(BRANCH, min_size=1, max_size=2))
    def grow(self, data: Any, branches: list[int]) -> None:
        self._extend(data.draw(st.sampled_from(self.running)), branches)

    @precondition(lambda self: self.running or self.orphans)
    @rule(data=st.data())
    def finish(self, data: Any) -> None:
        lists = data.draw(st.sampled_from([paths for paths in (self.running, self.orphans) if paths]))
        path = lists.pop(data.draw(st.integers(0, len(lists) - 1)))
        if gone := self.tree.give(path):
            self.evictor.free(keys(gone))

    @rule(data=st.data())
    def evict(self, data: Any) -> None:
        free = self.tree.free
        n = data.draw(st.integers(0, len(free) + 2))
        want = self.tree.expected(self.suite.order, min(n, len(free))) if self.suite.order else None
        got = [int(k) for k in self.evictor.victims(n)]
        self.suite.check_victims(self.tree, got, n)
        assert want is None or got == want, f"order={self.suite.order!r}: gave {got}, the reference gives {want}"
        self.seen["evicted"] += len(got)
        self.seen["evicted beside held ones"] += bool(got) and any(self.tree.refs.values())
        self.seen["parents left"] += any(self.tree.parent[k] for k in got)
        for key in got:
            self.tree.remove(key)

    @precondition(lambda self: self.tree.free)
    @rule(data=st.data())
    def drop(self, data: Any) -> None:
        """As the engine does: everything that is free, or one ripe key whose place another block takes."""
        free = self.tree.free
        if not data.draw(st.booleans()):
            free = [k for k in free if not self.tree.children[k]][:1]
        self.evictor.drop(keys(free))
        self.seen["dropped"] += 1
        for key in sorted(free, key=lambda k: -self.tree.depth[k]):
            self.tree.remove(key)

    def teardown(self) -> None:
        for path in self.running + self.orphans:
            if gone := self.tree.give(path):
                self.evictor.free(keys(gone))
        n = len(self.tree.free)
        got = [int(k) for k in self.evictor.victims(n + 5)]
        self.suite.check_victims(self.tree, got, n + 5)
        assert len(self.evictor.victims(1)) == 0, "gives a key although every key is gone"


def _given_up(evictor: Evictor, between: Callable[[], None] = lambda: None) -> list[int]:
    """The victims of a fixed life: blocks come, some are hit and held again, some come back after they went."""
    rng, gone, cached = random.Random(5), list[int](), set[int]()
    for number in range(60):
        back = {k for k in gone[-3 * (number % 3) :] if k not in cached} if number % 3 else set()
        new = [key_of(0, 10_000 + 4 * number + i) for i in range(4)]
        cached.update(new, back)
        path = keys([*new, *sorted(back)])
        evictor.add(path, _roots(len(path)))
        between()
        evictor.free(path)
        between()
        evictor.hit(path[:2])
        evictor.hold(path[:2])
        between()
        evictor.free(path[:2])
        victims = evictor.victims(rng.randrange(2, 7)).tolist()
        between()
        cached.difference_update(victims)
        gone += victims
    assert len(set(gone)) > 100, f"it gave up {len(set(gone))} keys, each of which had been freed"
    return gone


class EvictorConformance(Lasting, SpecConformance):
    """``order`` is the trait of that name: which reference the victims must equal, if any."""

    kind = "evictor"

    @property
    def order(self) -> str:
        return self.spec.traits.get("order", "")

    def context(self) -> tuple[Any, ...]:
        return (EvictorContext(CAPACITY, 16, "device"),)

    def exercise(self, instance: Evictor) -> Any:
        tree, path = Tree(), self.chain(6)
        for parent, key in zip([0, *path], path, strict=False):
            instance.add(keys([key]), tree.add(key, parent))
        instance.free(keys(tree.give(path)))
        return instance.victims(4).tolist()

    def chain(self, n: int) -> list[int]:
        """The keys of one sequence."""
        path: list[int] = []
        for _ in range(n):
            path.append(key_of(path[-1] if path else 0, 0))
        return path

    def make(self, options: Any, ctx: EvictorContext) -> Evictor:
        """The evictor under test, as ``sim_engine`` asks for it."""
        return self.build(ctx)

    def check_victims(self, tree: Tree, got: list[int], n: int) -> None:
        """Exactly min(n, free) distinct keys, all known, none held, children before parents."""
        free = set(tree.free)
        assert len(set(got)) == len(got), f"a key twice among the victims {got}"
        unknown = [k for k in got if k not in tree.refs]
        assert not unknown, f"gave up {unknown}, which it was never given, or which was evicted or dropped before"
        held = [k for k in got if tree.refs[k]]
        assert not held, f"gave up {held}, which a running sequence holds"
        assert len(got) == min(n, len(free)), f"victims({n}) gave {len(got)} keys while {len(free)} are free"
        at = {k: i for i, k in enumerate(got)}
        for k, parent in tree.parent.items():
            if parent in at:
                assert at.get(k, len(got)) < at[parent], f"gave up {parent} while its child {k} is cached"

    @since(1, 1)
    def test_its_figures_are_numbers_by_name_and_asking_changes_nothing(self) -> None:
        """Before anything has happened, after every call and at the end; asked twice it says the same, and gives up the
        same keys as if nobody had asked."""
        asked = self.build(*self.context())
        same_figures(asked.figures)
        found = _given_up(asked, lambda: same_figures(asked.figures))
        assert found == _given_up(self.build(*self.context())), "it gives up other keys where its figures are asked for"

    @since(1, 0)
    def test_victims_are_free_keys_in_order_whatever_happened_before(self) -> None:
        """Never a held or unknown key, never twice, exactly min(n, free), children before parents, in the order that
        the spec declares; a dropped key is forgotten, and whatever went comes back as new under the same key."""
        seen = Seen()
        machine = type("Machine", (_Machine,), {"suite": self, "seen": seen})
        self.run_machine(machine, 150, steps=40)
        seen.require(
            **{
                "held again": 5,
                "shared": 50,
                "evicted": 30,
                "dropped": 10,
                "parents left": 8,
                "evicted beside held ones": 10,
                "came back": 8,
                "without a parent": 50,
            }
        )

    @since(1, 0)
    def test_the_engine_runs_on_it(self) -> None:
        """In pools so small that blocks are evicted all the time, with windows beside full attention, forks, failing
        steps and resets, prompts come again: the engine ends when an evictor loses a key or gives up a wrong one."""
        seen = Seen()

        @self.for_all(12, st.integers(0, 2**32))
        def serve(seed: int) -> None:
            rng = random.Random(seed)
            windows = rng.choice([(None, 5), (None, 5), (None, 3, 9), (None,), (4,)])
            engine = sim_engine(
                slots=4,
                max_len=40,
                blocks=[rng.randint(15, 20) for _ in windows],
                windows=windows,
                depth=rng.randint(0, 2),
                budget=rng.randint(6, 40),
                evictor=self.make,
            )
            made = []
            for i in range(25):
                prompt = [7 * j % VOCAB for j in range(rng.randint(0, 20))] + [rng.randrange(3)] * rng.randint(1, 9)
                n = 2 if rng.random() < 0.2 else 1
                made.append(request(engine, f"r{i}", prompt[:16], n=n, max_tokens=rng.randint(1, 12), ignore_eos=True))
                if rng.random() < 0.05:
                    engine.executor.fail_at.add(engine.planner.step_id + 1)
                for _ in range(rng.randint(0, 9)):
                    engine.step()
                    assert engine.dead is None, engine.dead
                    engine.cache.check()
                if rng.random() < 0.05:
                    engine.reset_prefix_cache()
            run(engine, check=True)
            assert engine.dead is None, engine.dead
            at_rest(engine)
            for r in made:
                for s, (got, why) in zip(r.sequences, outputs(r), strict=True):
                    assert why == "error" or (got, why) == answer(r.prompt, r.params, s.sample, 40), f"{r.id}: {got}"
            seen["hit"] += sum(p.hits for p in engine.cache.pools)
            seen["evicted"] += sum(p.evictions for p in engine.cache.pools)

        seen.require(evicted=200, hit=500)

    @since(1, 0)
    def test_every_key_is_there_after_any_number_of_rounds(self) -> None:
        """Prompts that come again and again, resets, newcomers in the place of others, hundreds of times and with no
        victim in between: all that is free is then given up, in the order that the spec declares.  What is tidied up
        now and then, after 21 rounds or after 1,000, loses nothing."""
        for what, turn, n in lives():
            life = EvictorLife(Tree(), self.build(*self.context()), self.order, self.check_victims)
            try:
                for _ in range(n):
                    turn(life)
                life.give_up_all()
            except AssertionError as e:
                pytest.fail(f"{n} times {what}: {e}", pytrace=False)

    @since(1, 0)
    def test_lookups_are_counted_beyond_16_bits(self) -> None:
        """A key that everybody's prompts begin with is looked up for weeks; it is there afterwards, and with ``order:
        lfu`` goes behind one that was looked up half as often."""
        for hits in (150, 300, *([HITS // 2, HITS] if self.order == "lfu" else [])):
            life = EvictorLife(Tree(), self.build(*self.context()), self.order, self.check_victims)
            life.look_up_often([(0, hits), (1, 2 * hits)])
            life.give_up_all()

    @since(1, 0)
    def test_a_key_that_is_held_again_is_not_given_up(self) -> None:
        """The prefix that a new request hit must survive until it is freed."""
        evictor, tree, path = self.build(*self.context()), Tree(), self.chain(8)
        for parent, key in zip([0, *path], path, strict=False):
            evictor.add(keys([key]), tree.add(key, parent))
        evictor.free(keys(tree.give(path)))
        evictor.hit(keys(path[:5]))
        evictor.hold(keys(tree.take(path[:5])))
        got = evictor.victims(8).tolist()
        assert got == path[:4:-1], f"gave {got}: want the three keys that are not held, deepest first"
        evictor.free(keys(tree.give(path[:5])))
        assert evictor.victims(8).tolist() == path[4::-1]

    @since(1, 0)
    def test_the_order_is_the_declared_one(self) -> None:
        if not self.order:
            pytest.skip("not claimed: order")
        assert self.order in Tree.ORDERS, f"traits order={self.order!r}: want one of {', '.join(Tree.ORDERS)}"

    @since(1, 0)
    def test_a_call_costs_log_n_at_most(self) -> None:
        """Counted in executed lines and calls, not in seconds: with 16 times as many keys a call may cost 4 times as
        much."""
        few, many = self._steps(256), self._steps(4096)
        for call, n in few.items():
            assert many[call] <= 4 * n + 20, f"{call} of one key: {n} steps with 256 keys, {many[call]} with 4096"

    @since(1, 0)
    def test_a_large_pool_makes_no_call_slow_and_loses_no_key(self) -> None:
        """262,144 blocks: calls of one key take about as long as among 512, scans inside one call of C code (of a list,
        of an array) too; of one ``free`` all are free, and one ``victims`` gives up 5,000."""
        for _ in range(TRIES):
            few, many = self._seconds(FEW), self._seconds(MANY)
            slow = [call for call, n in few.items() if many[call] > SLOWER * n + NOISE]
            if not slow:
                return
        raise AssertionError(
            f"{slow[0]} of one key takes {1e6 * few[slow[0]]:.0f} us with {FEW} keys, "
            f"{1e6 * many[slow[0]]:.0f} us with {MANY}"
        )

    def _seconds(self, n: int) -> dict[str, float]:
        """Seconds that each call needs at best for one key, beside n others, some of which are then given up."""
        evictor = self.build(EvictorContext(n + 64, 16, "device"))
        every = np.random.default_rng(n).permutation(np.arange(1, n + 33, dtype=np.uint64)) << np.uint64(40)
        old, new = every[:n], every[n:]
        evictor.add(old, _roots(n))
        evictor.free(old)
        middle = [old[i : i + 1] for i in range(n // 2 - 4, n // 2 + 4)]
        calls: dict[str, tuple[Callable[..., Any], list]] = {
            "hit": (evictor.hit, middle), "hold": (evictor.hold, middle), "free": (evictor.free, middle),
            "add": (lambda key: evictor.add(key, _roots(1)), [new[i : i + 1] for i in range(8)]),
            "drop": (evictor.drop, middle), "victims": (evictor.victims, [1] * 8),
        }  # fmt: skip
        best = {name: min(_timed(call, one) for one in given) for name, (call, given) in calls.items()}
        evictor.free(new[:8])
        wanted = min(n - 8, AT_ONCE)
        gone = set(evictor.victims(wanted).tolist())
        assert len(gone) == wanted and gone <= set(every.tolist()), (
            f"victims({wanted}) gave {len(gone)} keys while {n - 8} are free"
        )
        return best

    def lasting(self) -> Evictor:
        return self.build(EvictorContext(64, 16, "device"))

    def once_more(self, instance: Evictor, number: int) -> None:
        """Let a sequence of a new tenant come, be hit and end, and be given up or dropped."""
        path = keys([key_of(0, 4 * number + i) for i in range(4)])
        tenant = np.full(4, number, np.int32)
        instance.add(path, replace(_roots(4), tenant=tenant, cost=16.0 + tenant))
        instance.free(path)
        instance.hit(path[:2])
        instance.hold(path[:2])
        instance.free(path[:2])
        if number % 2:
            instance.drop(path)
        else:
            instance.victims(4)

    def _steps(self, n: int) -> dict[str, int]:
        """Steps that each call needs for one key, beside n others."""
        evictor, tree = self.build(*self.context()), Tree()
        *roots, new = (key_of(0, i) for i in range(n + 1))
        for root in roots:
            evictor.add(keys([root]), tree.add(root, 0))
        evictor.free(keys(tree.give(roots)))
        info = tree.add(new, 0)
        middle = roots[n // 2]
        return {
            "add": _count(lambda: evictor.add(keys([new]), info)),
            "hit": _count(lambda: evictor.hit(keys([middle]))),
            "hold": _count(lambda: evictor.hold(keys([middle]))),
            "free": _count(lambda: evictor.free(keys([middle]))),
            "drop": _count(lambda: evictor.drop(keys([middle]))),
            "victims": min(_count(lambda: evictor.victims(1)) for _ in range(5)),
        }


def _roots(n: int) -> BlockInfo:
    """Of n blocks without a parent."""
    zeros = np.zeros(n, np.int32)
    return BlockInfo(zeros.astype(np.uint64), zeros, np.full(n, 4096, np.int64), np.full(n, 16.0), zeros)


def _timed(call: Callable[[Any], Any], one: Any) -> float:
    start = time.perf_counter()
    call(one)
    return time.perf_counter() - start


def _count(call: Callable[[], Any]) -> int:
    """Lines executed and functions called, those of C included."""
    steps = 0

    def trace(frame: Any, event: str, arg: Any) -> Any:
        nonlocal steps
        steps += 1
        return trace

    old = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(old)
    return steps
