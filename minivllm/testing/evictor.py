"""The conformance suite of evictors, which choose the cached blocks to evict.

An evictor is compared with a reference model (``evictor_tree``), in short random runs and in long ones
(``evictor_lives``), and it serves an engine.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from minivllm.core.interfaces.evictor import BlockInfo, Evictor, EvictorContext
from minivllm.core.interfaces.session import SessionTurn

from .base import Seen, same_figures, since
from .evictor_lives import HITS, EvictorLife, check_order, lives
from .evictor_tree import Tree, block_info, key_of, keys
from .kept import Lasting
from .sim import VOCAB, answer, at_rest, outputs, request, run, sim_engine
from .spec import SpecConformance

CAPACITY = 8192
BRANCHES = 3  # children of a block; a small number, so that evicted sequences are soon computed again
DEEPEST = 5  # largest depth of a block without a parent
FEW = 512  # number of keys of the small pool in the timed calls
MANY = 1 << 18  # number of keys of the large pool in the timed calls
AT_ONCE = 5000  # number of keys that one call evicts
# allowed time of a call with many keys: this multiple of its time with few keys, plus some seconds
SLOWER = 3
NOISE = 3e-5
TRIES = 3  # number of attempts, one of which must be fast enough, because another process may slow down the others
BRANCH = st.integers(0, BRANCHES - 1)
# strategy of turns of four sessions, and of None for a request without a session
TURNS = st.none() | st.builds(
    SessionTurn,
    st.integers(1, 4),
    tokens=st.integers(1, 200),
    next_s=st.sampled_from([1e-9, 5.0, 1e9, np.inf]),
    budget=st.integers(-1, 100),
)


class _EvictorMachine(RuleBasedStateMachine):
    """A hypothesis state machine that uses an evictor and the reference tree together.

    The test sets ``suite`` and ``seen``.
    """

    suite: EvictorConformance
    seen: Seen

    def __init__(self) -> None:
        super().__init__()
        self.tree = Tree()
        (ctx,) = self.suite.context()
        self.evictor = self.suite.build(ctx)
        self.running: list[list[int]] = []  # keys of the blocks of each running sequence
        self.orphans: list[list[int]] = []  # keys of the blocks of each running sequence whose blocks have no parents

    def _publish(self, path: list[int], key: int, parent: int, depth: int = 0) -> None:
        """Cache a full block of a sequence, and append its key to the keys ``path`` of the sequence.

        If another sequence has cached a block with the same content, that block is shared, without a lookup.
        """
        if key not in self.tree.refs:
            back = key in self.tree.gone
            self.seen["came back"] += back
            info = self.tree.add(key, parent, depth)
            session = np.array([key % 5])
            kind = np.array([key % 6], np.int8)
            evicted = np.array([back])
            info = replace(info, session=session, kind=kind, evicted=evicted)
            self.evictor.add(keys([key]), info)
        elif woken := self.tree.take([key]):
            self.evictor.hold(keys(woken))
        path.append(key)

    def _extend(self, path: list[int], branches: Sequence[int]) -> None:
        """Append a block to a sequence for each number in ``branches``, which chooses the content of the block."""
        for branch in branches:
            parent = path[-1] if path else 0
            key = key_of(parent, branch)
            self._publish(path, key, parent)

    @rule(branches=st.lists(BRANCH, min_size=1, max_size=5))
    def start(self, branches: list[int]) -> None:
        """Start a sequence that looks up no cached prefix."""
        path: list[int] = []
        self._extend(path, branches)
        self.running.append(path)

    @rule(depths=st.lists(st.integers(1, DEEPEST), min_size=1, max_size=3, unique=True), branch=BRANCH)
    def start_without_parents(self, depths: list[int], branch: int) -> None:
        """Start a sequence whose blocks have no parents, at any depth.

        This happens in the KV group of a sliding window: the parents of its blocks belong to another group with
        another evictor.
        """
        path: list[int] = []
        for depth in sorted(depths):
            key = key_of(0, BRANCHES * (depth + 1) + branch)
            self._publish(path, key, 0, depth)
        self.seen["without a parent"] += 1
        self.orphans.append(path)

    @precondition(lambda self: self.tree.refs)
    @rule(data=st.data(), branches=st.lists(BRANCH, max_size=3))
    def start_on_a_cached_prefix(self, data: Any, branches: list[int]) -> None:
        """Start a sequence that looks up a cached prefix."""
        key = data.draw(st.sampled_from(sorted(self.tree.refs)))
        path = self.tree.path(key)
        self.evictor.hit(keys(path))
        for key in path:
            self.tree.hits[key] += 1
        self.seen["shared"] += any(self.tree.refs[key] for key in path)
        woken = self.tree.take(path)
        if woken:
            self.seen["held again"] += 1
            self.evictor.hold(keys(woken))
        turn = data.draw(TURNS)
        if turn is not None:
            self.evictor.began(keys(path), turn)
        if self.tree.depth[path[0]]:
            self.orphans.append(path)
        else:
            self._extend(path, branches)
            self.running.append(path)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), branches=st.lists(BRANCH, min_size=1, max_size=2))
    def grow(self, data: Any, branches: list[int]) -> None:
        """Add blocks to a running sequence."""
        path = data.draw(st.sampled_from(self.running))
        self._extend(path, branches)

    @precondition(lambda self: self.running or self.orphans)
    @rule(data=st.data())
    def finish(self, data: Any) -> None:
        """End a running sequence."""
        used = [paths for paths in (self.running, self.orphans) if paths]
        lists = data.draw(st.sampled_from(used))
        index = data.draw(st.integers(0, len(lists) - 1))
        path = lists.pop(index)
        turn = data.draw(TURNS)
        if turn is not None:
            self.seen["turns"] += 1
            self.evictor.ended(keys(path), turn)
        self._free(path)

    @precondition(lambda self: self.tree.free)
    @rule(data=st.data(), turn=TURNS)
    def end_in_a_tier(self, data: Any, turn: SessionTurn | None) -> None:
        """End a session's turn whose blocks are free, as on a lower tier."""
        last = data.draw(st.sampled_from(sorted(self.tree.free)))
        free = [key for key in self.tree.path(last) if not self.tree.refs[key]]
        self._end_turn(free, turn)
        self.seen["turns of free keys"] += turn is not None

    @rule(turn=TURNS)
    def end_without_blocks(self, turn: SessionTurn | None) -> None:
        """End a session's turn whose request waits without blocks."""
        self._end_turn([], turn)

    def _end_turn(self, path: list[int], turn: SessionTurn | None) -> None:
        """Begin and end a session's turn with the keys of ``path``, which no running sequence uses."""
        if turn is not None:
            self.evictor.began(keys([]), turn)
            self.evictor.ended(keys(path), turn)

    def _free(self, path: list[int]) -> None:
        """Remove a sequence from the users of some keys, and free the keys that no other running sequence uses."""
        if freed := self.tree.give(path):
            self.evictor.free(keys(freed))

    @precondition(lambda self: self.tree.free)
    @rule(data=st.data())
    def evict(self, data: Any) -> None:
        """Evict some keys, sometimes more than are free, and check which keys the evictor chose."""
        free = self.tree.free
        order = self.suite.order
        n = data.draw(st.integers(0, len(free) + 2))
        if order:
            expected = self.tree.expected(order, min(n, len(free)))
        else:
            expected = None
        victims = [int(key) for key in self.evictor.victims(n)]
        self.suite.check_victims(self.tree, victims, n)
        if expected is not None:
            check_order(order, victims, expected)
        self.seen["evicted"] += len(victims)
        self.seen["evicted beside held ones"] += bool(victims) and any(self.tree.refs.values())
        self.seen["parents left"] += any(self.tree.parent[key] for key in victims)
        for key in victims:
            self.tree.remove(key)

    @precondition(lambda self: self.tree.free)
    @rule(data=st.data())
    def drop(self, data: Any) -> None:
        """Drop all free keys, or one free key without cached children whose block is replaced, as the engine does."""
        dropped = self.tree.free
        if not data.draw(st.booleans()):
            dropped = [key for key in dropped if not self.tree.children[key]][:1]
        self.evictor.drop(keys(dropped))
        self.seen["dropped"] += 1
        for key in sorted(dropped, key=lambda key: -self.tree.depth[key]):
            self.tree.remove(key)

    def teardown(self) -> None:
        """End all sequences, evict all keys and check the order of the evicted keys."""
        for path in self.running + self.orphans:
            self._free(path)
        n = len(self.tree.free)
        victims = [int(key) for key in self.evictor.victims(n + 5)]
        self.suite.check_victims(self.tree, victims, n + 5)
        assert len(self.evictor.victims(1)) == 0, "victims(1) returns a key although no key is cached"


def _evicted_keys(evictor: Evictor, between: Callable[[], None] = lambda: None) -> list[int]:
    """Return the keys that an evictor evicts in a fixed series of calls.

    Keys are added, hit, held again, freed, evicted and sometimes added again.  ``between`` is called between the calls
    of the evictor.
    """
    rng = random.Random(5)
    evicted: list[int] = []
    cached: set[int] = set()
    for number in range(60):
        if number % 3:
            recent = evicted[-3 * (number % 3) :]
        else:
            recent = []
        again = {key for key in recent if key not in cached}
        new = [key_of(0, 10_000 + 4 * number + i) for i in range(4)]
        cached.update(new, again)
        path = keys([*new, *sorted(again)])
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
        evicted += victims
    n = len(set(evicted))
    assert n > 100, f"it evicted {n} different keys: expected more than 100, because all keys were freed"
    return evicted


class EvictorConformance(Lasting, SpecConformance):
    """The conformance suite of evictors.

    ``order`` is the trait of this name in the spec.  It names the reference order (such as lru) in which keys must be
    evicted; an empty text means any order.
    """

    kind = "evictor"

    @property
    def order(self) -> str:
        return self.spec.traits.get("order", "")

    def context(self) -> tuple[Any, ...]:
        """Return the arguments of the plug-in's constructor after its options."""
        return (EvictorContext(CAPACITY, 16, "device"),)

    def exercise(self, instance: Evictor) -> Any:
        """Cache and free a sequence, and return the keys that the evictor chooses first."""
        tree = Tree()
        path = self.chain(6)
        self._cache_and_free(instance, tree, path)
        return instance.victims(4).tolist()

    def _cache_and_free(self, evictor: Evictor, tree: Tree, path: list[int]) -> None:
        """Add the keys of a path to an evictor and a tree, and free them."""
        parents = [0, *path]
        for parent, key in zip(parents, path, strict=False):
            info = tree.add(key, parent)
            evictor.add(keys([key]), info)
        freed = tree.give(path)
        evictor.free(keys(freed))

    def chain(self, n: int) -> list[int]:
        """Return the n keys of one sequence."""
        path: list[int] = []
        parent = 0
        for _ in range(n):
            parent = key_of(parent, 0)
            path.append(parent)
        return path

    def make(self, options: Any, ctx: EvictorContext) -> Evictor:
        """Create the evictor under test; ``sim_engine`` calls this with its own options and context."""
        return self.build(ctx)

    def check_victims(self, tree: Tree, victims: list[int], n: int) -> None:
        """Fail unless ``victims``, the result of ``victims(n)``, are keys that may be evicted.

        ``tree`` still has these keys.  There must be exactly min(n, free) different keys, all cached, none held, and
        children before their parents.
        """
        free = tree.free
        assert len(set(victims)) == len(victims), f"a key is twice among the victims {victims}"
        unknown = [key for key in victims if key not in tree.refs]
        assert not unknown, f"evicted {unknown}, which were never added, or were evicted or dropped before"
        held = [key for key in victims if tree.refs[key]]
        assert not held, f"evicted {held}, which a running sequence holds"
        expected = min(n, len(free))
        assert len(victims) == expected, f"victims({n}) returned {len(victims)} keys while {len(free)} are free"
        index = {key: i for i, key in enumerate(victims)}
        for key, parent in tree.parent.items():
            if parent in index:
                first = index.get(key, len(victims)) < index[parent]
                assert first, f"evicted {parent} while its child {key} is cached"

    @since(1, 1)
    def test_its_figures_are_numbers_by_name_and_asking_changes_nothing(self) -> None:
        """Check the metrics (``figures``) of an evictor before, between and after its calls.

        Two reads in a row return the same metrics, and reading them does not change which keys are evicted.
        """
        evictor = self.build(*self.context())
        same_figures(evictor.figures)
        evicted = _evicted_keys(evictor, lambda: same_figures(evictor.figures))
        expected = _evicted_keys(self.build(*self.context()))
        assert evicted == expected, "it evicts other keys if its figures are read"

    @since(1, 0)
    def test_victims_are_free_keys_in_order_whatever_happened_before(self) -> None:
        """Check the keys that an evictor evicts after random calls.

        ``victims(n)`` returns exactly min(n, free) different keys, never a held or unknown key, children before
        parents, in the order that the spec declares.  A dropped key is never returned.  An evicted or dropped key may
        be added again.
        """
        seen = Seen()
        machine = type("Machine", (_EvictorMachine,), {"suite": self, "seen": seen})
        self.run_machine(machine, 150, steps=40)
        least = {
            "held again": 5,
            "shared": 50,
            "evicted": 30,
            "dropped": 10,
            "parents left": 8,
            "evicted beside held ones": 10,
            "came back": 8,
            "without a parent": 50,
            "turns": 30,
            "turns of free keys": 15,
        }
        self.meet(seen, **least)

    @since(1, 0)
    def test_the_engine_runs_on_it(self) -> None:
        """Check that an engine with small pools, which always evicts, gives the right tokens.

        The workload has sliding windows beside full attention, forks, failing steps, resets and repeated prompts.  The
        engine dies if an evictor loses a key or evicts a wrong key.
        """
        seen = Seen()

        @self.for_all(12, st.integers(0, 2**32))
        def serve(seed: int) -> None:
            self._serve(seed, seen)

        self.meet(seen, evicted=200, hit=500)

    def _serve(self, seed: int, seen: Seen) -> None:
        """Serve random requests, check their tokens, and count the cache hits and evictions."""
        rng = random.Random(seed)
        windows = rng.choice([(None, 5), (None, 5), (None, 3, 9), (None,), (4,)])
        blocks = [rng.randint(15, 20) for _ in windows]
        depth = rng.randint(0, 2)
        budget = rng.randint(6, 40)
        engine = sim_engine(
            slots=4, max_len=40, blocks=blocks, windows=windows, depth=depth, budget=budget, evictor=self.make
        )
        requests = []
        for i in range(25):
            shared = [7 * j % VOCAB for j in range(rng.randint(0, 20))]
            own = [rng.randrange(3)] * rng.randint(1, 9)
            prompt = shared + own
            n = 2 if rng.random() < 0.2 else 1
            max_tokens = rng.randint(1, 12)
            added = request(engine, f"r{i}", prompt[:16], n=n, max_tokens=max_tokens, ignore_eos=True)
            requests.append(added)
            if rng.random() < 0.05:
                next_step = engine.planner.step_id + 1
                engine.executor.fail_at.add(next_step)
            for _ in range(rng.randint(0, 9)):
                engine.step()
                assert engine.dead is None, engine.dead
                engine.cache.check()
            if rng.random() < 0.05:
                engine.reset_prefix_cache()
        run(engine, check=True)
        assert engine.dead is None, engine.dead
        at_rest(engine)
        for r in requests:
            for sequence, (tokens, reason) in zip(r.sequences, outputs(r), strict=True):
                if reason != "error":
                    expected = answer(r.prompt, r.params, sequence.sample, 40)
                    assert (tokens, reason) == expected, f"{r.id}: {tokens}"
        for pool in engine.cache.pools:
            seen["hit"] += pool.hits
            seen["evicted"] += pool.evictions

    @since(1, 0)
    def test_every_key_is_there_after_any_number_of_rounds(self) -> None:
        """Check that no key is lost after 1 to 5,000 rounds of the same calls.

        The rounds repeat prompts, drop sequences, or evict keys for new sequences.  Then all free keys are evicted, in
        the order that the spec declares.  An evictor that cleans up its data from time to time must not lose a key in
        doing so.
        """
        for name, run_round, n in lives():
            life = self._life()
            try:
                for _ in range(n):
                    run_round(life)
                life.give_up_all()
            except AssertionError as error:
                pytest.fail(f"{n} times {name}: {error}", pytrace=False)

    def _life(self) -> EvictorLife:
        """Return a new evictor with its reference model, for a long run."""
        evictor = self.build(*self.context())
        return EvictorLife(Tree(), evictor, self.order, self.check_victims)

    @since(1, 0)
    def test_lookups_are_counted_beyond_16_bits(self) -> None:
        """Check that a key that is looked up very often is not lost, such as a common start of all prompts.

        With ``order: lfu``, it is evicted after a key with half as many lookups.
        """
        if self.order == "lfu":
            many = (HITS // 2, HITS)
        else:
            many = ()
        for hits in (150, 300, *many):
            life = self._life()
            times = [(0, hits), (1, 2 * hits)]
            life.look_up_often(times)
            life.give_up_all()

    @since(1, 0)
    def test_a_key_that_is_held_again_is_not_given_up(self) -> None:
        """Check that the keys of a prefix that a new request uses are not evicted before the request frees them."""
        evictor = self.build(*self.context())
        tree = Tree()
        path = self.chain(8)
        self._cache_and_free(evictor, tree, path)
        prefix = path[:5]
        evictor.hit(keys(prefix))
        evictor.hold(keys(tree.take(prefix)))
        victims = evictor.victims(8).tolist()
        assert victims == path[:4:-1], (
            f"victims(8) returned {victims}: expected the three keys that are not held, deepest first"
        )
        evictor.free(keys(tree.give(prefix)))
        found = evictor.victims(8).tolist()
        assert found == prefix[::-1]

    @since(1, 0)
    def test_the_order_is_the_declared_one(self) -> None:
        """Check that the trait ``order`` names a reference order that the kit can compute."""
        if not self.order:
            pytest.skip("not claimed: order")
        orders = ", ".join(Tree.ORDERS)
        assert self.order in Tree.ORDERS, f"traits order={self.order!r}: expected one of {orders}"

    @since(1, 0)
    def test_a_call_costs_log_n_at_most(self) -> None:
        """Check that a call executes at most 4 times as many lines and function calls with 16 times as many keys."""
        few = self._steps(256)
        many = self._steps(4096)
        for call, n in few.items():
            assert many[call] <= 4 * n + 20, f"{call} of one key: {n} steps with 256 keys, {many[call]} with 4096"

    @since(1, 0)
    def test_a_large_pool_makes_no_call_slow_and_loses_no_key(self) -> None:
        """Check that calls for one key take about as long among 262,144 keys as among 512 keys.

        This also finds scans of a list or an array inside one call of C code.  One ``free`` frees all keys, and one
        ``victims`` evicts 5,000.
        """
        for _ in range(TRIES):
            few = self._seconds(FEW)
            many = self._seconds(MANY)
            slow = [call for call, n in few.items() if many[call] > SLOWER * n + NOISE]
            if not slow:
                return
        call = slow[0]
        raise AssertionError(
            f"{call} of one key takes {1e6 * few[call]:.0f} us with {FEW} keys, {1e6 * many[call]:.0f} us with {MANY}"
        )

    def _seconds(self, n: int) -> dict[str, float]:
        """Return the shortest time in seconds of each call for one key, in an evictor with n other keys.

        Afterwards evict many keys in one call and check their number.
        """
        evictor = self.build(EvictorContext(n + 64, 16, "device"))
        numbers = np.arange(1, n + 33, dtype=np.uint64)
        shuffled = np.random.default_rng(n).permutation(numbers)
        every = shuffled << np.uint64(40)
        old = every[:n]
        evictor.add(old, _roots(n))
        evictor.free(old)
        half = n // 2
        middle = np.split(old[half - 4 : half + 4], 8)
        new = every[n : n + 8]
        seconds = {}
        for call in ("hit", "hold", "free"):
            seconds[call] = _shortest(getattr(evictor, call), middle)
        seconds["add"] = _shortest(lambda key: evictor.add(key, _roots(1)), np.split(new, 8))
        seconds["drop"] = _shortest(evictor.drop, middle)
        seconds["victims"] = _shortest(evictor.victims, [1] * 8)
        evictor.free(new)
        expected = min(n - 8, AT_ONCE)
        victims = set(evictor.victims(expected).tolist())
        unknown = victims - set(every.tolist())
        assert len(victims) == expected and not unknown, (
            f"victims({expected}) returned {len(victims)} keys while {n - 8} are free"
        )
        return seconds

    def lasting(self) -> Evictor:
        """Create the evictor of the leak test."""
        return self.build(EvictorContext(64, 16, "device"))

    def once_more(self, instance: Evictor, number: int) -> None:
        """Cache, hit and free a sequence of a new tenant and session, and evict or drop its keys."""
        path = keys([key_of(0, 4 * number + i) for i in range(4)])
        tenant = np.full(4, number, np.int32)
        session = np.full(4, number + 1)
        info = replace(_roots(4), tenant=tenant, cost=16.0 + tenant, session=session)
        instance.add(path, info)
        turn = SessionTurn(number + 1, tokens=64, next_s=1e6, budget=32)
        instance.began(path, turn)
        instance.ended(path, turn)
        instance.free(path)
        instance.hit(path[:2])
        instance.hold(path[:2])
        instance.free(path[:2])
        if number % 2:
            instance.drop(path)
        else:
            instance.victims(4)

    def _steps(self, n: int) -> dict[str, int]:
        """Return the executed lines of each call for one key, in an evictor with n other keys."""
        evictor = self.build(*self.context())
        tree = Tree()
        *roots, new = (key_of(0, i) for i in range(n + 1))
        for root in roots:
            evictor.add(keys([root]), tree.add(root, 0))
        evictor.free(keys(tree.give(roots)))
        info = tree.add(new, 0)
        middle = keys([roots[n // 2]])
        steps = {"add": _count(lambda: evictor.add(keys([new]), info))}
        for name in ("hit", "hold", "free", "drop"):
            call = getattr(evictor, name)
            steps[name] = _count(partial(call, middle))
        of_victims = [_count(lambda: evictor.victims(1)) for _ in range(5)]
        steps["victims"] = min(of_victims)
        return steps


def _roots(n: int) -> BlockInfo:
    """Return the information about n blocks without a parent."""
    zeros = np.zeros(n, np.int32)
    return block_info(zeros, zeros, zeros)


def _shortest(call: Callable[[Any], Any], arguments: Sequence[Any]) -> float:
    """Return the shortest time in seconds of a call with each of the arguments."""
    seconds = []
    for argument in arguments:
        start = time.perf_counter()
        call(argument)
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def _count(call: Callable[[], Any]) -> int:
    """Return how many lines a call executes and how many functions it calls, C functions included."""
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
