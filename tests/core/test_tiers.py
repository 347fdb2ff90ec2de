"""The tiers behind the KV cache: any order of events, and faults in the engine's tables, the mover and the device."""

from __future__ import annotations

import numpy as np
import pytest
from tier_machine import PATIENCE, EagerStore, TierDevice, WeakStore, drive, part

from minivllm.core.engine.cache import KVCache
from minivllm.core.engine.checkpoints import Checkpoints
from minivllm.core.engine.forks import fork_ready
from minivllm.core.engine.newcomers import enter
from minivllm.core.engine.tier_choice import CopyPace
from minivllm.core.engine.tier_index import TierIndex
from minivllm.core.engine.tiers import Tiers
from minivllm.core.interfaces.kvstore import StoreContext
from minivllm.core.interfaces.strategy import Branch, DecodingStrategy, Guide
from minivllm.core.mover import RELEASE, Mover, TierThread
from minivllm.errors import RequestError
from minivllm.plugins.executor.sim_pages import SimPages
from minivllm.plugins.scheduler.fcfs import Fcfs
from minivllm.plugins.strategy.beam import Beam
from minivllm.testing.sim import answer, outputs, request, sim_engine

FAULTS = {}


def fault(cls):
    """Return a decorator for a method of ``cls``.

    The decorated function replaces the method, and gets it as first argument.
    """

    def plant(fn):
        FAULTS[fn.__name__] = (cls, fn.__doc__.split("``")[1], fn)
        return fn

    return plant


@fault(Tiers)
def the_salt_is_missing(real, self, salt):
    """In ``root``, only the tenant is in the keys."""
    return real(self, (salt[0], ""))


@fault(Tiers)
def the_tenant_is_missing(real, self, salt):
    """In ``root``, only the salt is in the keys."""
    return real(self, ("", *salt[1:]))


@fault(Tiers)
def keys_have_no_parent(real, self, tokens, salt, keys, blocks, images=()):
    """In ``keys_of``, a key depends on the tokens of its own block only."""
    for i in range(len(keys), blocks):
        step = self.cache.block
        keys += real(self, tokens[i * step : (i + 1) * step], salt, [], 1)
    return keys


@fault(Tiers)
def groups_share_a_key(real, self, digest, group):
    """In ``page_key``, the blocks of all groups, and states, have the same keys."""
    return digest


@fault(Tiers)
def one_rank_is_enough(real, self, page, ok, size, seconds):
    """In ``_loaded``, a page counts as loaded when the first rank has it."""
    if not page.done:
        page.acks = self.ranks - 1
        real(self, page, ok, size, seconds)


@fault(Tiers)
def a_page_that_is_not_there_is_used(real, self, seq, n):
    """In ``take``, loads that failed or have not ended count as loaded."""
    for page in () if seq.load is None else seq.load.pages.values():
        page.done, page.failed = True, False
    return real(self, seq, n)


@fault(Tiers)
def a_page_is_released_while_others_wait_for_it(real, self, seq):
    """In ``leave``, the first of several sequences releases its pages."""
    for page in () if seq.load is None else seq.load.pages.values():
        page.users = 1
    real(self, seq)


@fault(Tiers)
def a_page_stays_staged(real, self, page):
    """In ``_release``, the workers get no message."""
    self.staged_bytes -= page.size


@fault(Checkpoints)
def states_of_another_length(real, self, block, index):
    """In ``checkpointed``, a copy of states gets the key of the block before."""


@fault(KVCache)
def blocks_are_filled_in_reverse(real, self, tiers, slot, n):
    """In ``_fill``, the pages of a row are exchanged."""
    before = len(tiers.fills)
    m = real(self, tiers, slot, n)
    mine = [f for f in tiers.fills[before:] if f[0] == 0]
    rest = [f for f in tiers.fills[before:] if f[0] != 0]
    turned = [(0, a[1], b[2]) for a, b in zip(mine, mine[::-1], strict=True)]
    tiers.fills[before:] = [*turned, *rest]
    return m


@fault(SimPages)
def blocks_are_read_late(real, self, group, blocks):
    """In ``read``, the block is read when the store works, and not between the steps."""
    batch = real(self, group, blocks)
    batch.page = lambda i, own: real(self, group, blocks).page(i, own)
    return batch


@fault(Mover)
def a_load_writes_to_the_block_of_an_earlier_one(real, self, rows):
    """In ``fill``, the first page of a delta is also written to the block of the last one."""
    turned = rows[rows[:, 0] != RELEASE]
    if len(turned) > 1:
        extra = np.array([[*turned[-1, :2], turned[0, 2]]])
        real(self, np.concatenate([turned, extra, rows[rows[:, 0] == RELEASE]]))
        return
    real(self, rows)


@fault(TierThread)
def a_page_of_another_size_is_used(real, self, key, size):
    """In ``get``, a short page is filled with other bytes."""
    page = self.store.get(key) if not self.store.next_faults else None
    if page is None and key in self.store.pages:
        self.store.next_faults.clear()
        page = self.store.pages[key].copy()
        page[-4:] = 0
    return page


@fault(TierIndex)
def an_evicted_page_stays_in_the_index(real, self, key):
    """In ``_forget``, the bytes of an evicted page count as free, and it can still be found."""
    real(self, key)
    self.stored.add(key)


def plant(monkeypatch, name):
    cls, method, fn = FAULTS[name]
    if name == "states_of_another_length":
        real_note = Tiers.checkpointed

        def checkpointed(self, block, index):
            parent = int(self.cache.pools[0].parent[block])
            real_note(self, parent if parent in self.named[0] else block, index)

        monkeypatch.setattr(Tiers, "checkpointed", checkpointed)
        return
    real = vars(cls)[method]
    static = isinstance(real, staticmethod)
    call = (lambda self, *args: real.__func__(*args)) if static else real
    monkeypatch.setattr(cls, method, lambda self, *args, **kw: fn(call, self, *args, **kw))


SLOW = {
    "states_of_another_length", "the_tenant_is_missing", "groups_share_a_key", "blocks_are_read_late",
    "the_salt_is_missing", "a_page_of_another_size_is_used",
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in sorted(FAULTS)]
)
def test_a_planted_fault_is_caught(name, monkeypatch):
    plant(monkeypatch, name)
    with pytest.raises(Exception) as caught:
        drive(1000)
    received = f"{type(caught.value).__name__}: {caught.value}"
    print(f"{name}: {received.splitlines()[0][:160]}")
    wrong = ("TypeError", "AttributeError", "NameError")
    assert not any(error in received for error in wrong), f"the fault itself is wrong: {received}"


def test_tiers_change_no_token_and_lose_no_page():
    seen = drive(200)
    wanted = ("loads", "stores", "late", "lost", "tier evictions", "hit plain", "hit window", "hit states", "aborted")
    seen.require(**dict.fromkeys(wanted, 1))


class Bench:
    """An engine of two ranks with one tier or more, whose stores run between the steps."""

    def __init__(self, *stores, **options) -> None:
        parts = tuple(part(store) for store in stores or (WeakStore,))
        self.engine = sim_engine(slots=4, max_len=64, blocks=20, stores=parts, device=TierDevice, **options)
        self.tiers = self.engine.cache.tiers

    def work(self) -> None:
        while sum(thread.work() for thread in self.engine.executor.threads):
            pass

    def run(self, *requests) -> None:
        for _ in range(2000):
            if all(r.done for r in requests):
                return
            self.engine.step()
            self.work()
        raise AssertionError("the requests have not ended")

    def ask(self, name, prompt, **params):
        return request(self.engine, name, prompt, max_tokens=3, ignore_eos=True, **params)

    def evict(self) -> None:
        """Evict all blocks, and let the stores save them."""
        for pool in self.engine.cache.pools:
            pool.release(pool.take(pool.available))
        for _ in range(3):
            self.engine.step()
            self.work()
        self.engine.step()

    def tokens(self, r):
        return [tokens for tokens, _ in outputs(r)]


PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9]  # three blocks, and a token that remains to be computed


def fork_from_a_tier():
    bench = Bench(checkpoints=4)
    first = bench.ask("a", PROMPT)
    bench.run(first)
    bench.evict()
    again = bench.ask("b", PROMPT, n=2)
    bench.run(again)
    assert bench.tiers.tiers[0].loads == 4  # three blocks and the states
    assert again.cached_tokens == 12
    assert bench.tokens(again)[0] == bench.tokens(first)[0]
    assert bench.tokens(again)[1] == answer(PROMPT, again.params, 1)[0]


def test_a_fork_of_a_row_from_a_tier_gets_its_states():
    fork_from_a_tier()


def test_a_fork_that_gets_old_states_is_caught(monkeypatch):
    monkeypatch.setattr(Tiers, "state_of", lambda self, slot: None)
    with pytest.raises(AssertionError):
        fork_from_a_tier()


def test_a_row_that_leaves_before_its_delta_takes_its_writes_with_it():
    """A load into a block is never written after the block has another owner."""
    bench = Bench()
    bench.run(bench.ask("a", PROMPT))
    bench.evict()
    again = bench.ask("b", PROMPT)
    bench.engine.step()
    bench.work()
    bench.engine._turn_loads()
    planner = bench.engine.planner
    assert planner.n_waiting == 1
    assert enter(planner, again.sequences[0], 0)
    assert [f[0] for f in bench.tiers.fills] == [0, 0, 0, RELEASE, RELEASE, RELEASE]
    planner.preempt(again.sequences[0].slot)
    assert [f[0] for f in bench.tiers.fills] == [RELEASE] * 3
    bench.run(again)
    assert bench.tokens(again)[0] == answer(PROMPT, again.params)[0]


def test_blocks_that_a_branch_shares_are_filled_when_its_parent_is_preempted():
    bench = Bench(checkpoints=4)
    bench.run(bench.ask("a", PROMPT))
    bench.evict()
    again = bench.ask("b", PROMPT, n=2)
    bench.engine.step()
    bench.work()
    bench.engine._turn_loads()
    planner = bench.engine.planner
    assert enter(planner, again.sequences[0], 0)
    fork_ready(planner)
    assert again.sequences[1].slot >= 0
    planner.preempt(again.sequences[0].slot)
    assert sum(group == 0 for group, *_ in bench.tiers.fills) == 3
    bench.run(again)
    assert bench.tokens(again) == [answer(PROMPT, again.params, i)[0] for i in range(2)]


@pytest.mark.parametrize("states", [None, 4])
def test_a_plan_that_fails_after_an_admission_sends_no_page_ahead_of_the_row(states, monkeypatch):
    """The pages are written with the delta that has the states, copies and tables of the row."""
    bench = Bench(checkpoints=states)
    bench.run(bench.ask("a", PROMPT))
    bench.evict()
    again = bench.ask("b", PROMPT, n=2)
    bench.engine.step()
    bench.work()
    planner, written = bench.engine.planner, []
    real = planner._make_plan

    def fails(*args):
        monkeypatch.setattr(planner, "_make_plan", real)
        raise RuntimeError("once")

    monkeypatch.setattr(planner, "_make_plan", fails)
    real_fill = Mover.fill
    monkeypatch.setattr(Mover, "fill", lambda self, rows: (written.append(len(rows)), real_fill(self, rows)))
    bench.engine.step()
    assert again.sequences[0].slot >= 0
    assert not written
    assert any(group != RELEASE for group, *_ in bench.tiers.fills)
    bench.engine._turn_loads()
    assert not written
    bench.run(again)
    assert written
    assert bench.tokens(again) == [answer(PROMPT, again.params, i)[0] for i in range(2)]


@pytest.mark.parametrize("store", [WeakStore, EagerStore])
def test_pages_of_beams_have_the_keys_of_their_tokens(store):
    """Beams replace each other in every step.  ``check`` compares the keys with the tokens of the rows."""
    bench = Bench(store, strategy=Beam())
    ask = dict(max_tokens=18, beam_width=3, ignore_eos=True)
    searches = [request(bench.engine, f"r{i}", [i, 3, 5], **ask) for i in range(6)]
    named = 0
    while bench.engine.busy:
        bench.engine.step()
        bench.work()
        bench.engine.check()
        named = max(named, len(bench.tiers.named[0]))
    assert all(r.answer and r.answer[0].error is None for r in searches)
    assert named > 5


@pytest.mark.parametrize("depth", [0, 2])
def test_a_full_tier_has_room_for_the_pages_for_which_it_lost_others(depth):
    """Steps evict blocks of the device, and the tier evicts pages for them.

    Some of these are ordered again at once.
    """
    bench = Bench(depth=depth)
    for i in range(120):
        twins = [bench.ask(f"{name}{i}", [i % 13, i % 7, i % 5, *[i % 3] * 6]) for name in "ab"]
        bench.run(*twins)
    for _ in range(3):
        bench.engine.step()
        bench.work()
    (tier,) = bench.tiers.tiers
    assert tier.evictions > 50
    assert tier.skipped == 0
    for thread in bench.engine.executor.threads:
        assert not thread.store.refused
        assert thread.store.pages.keys() == tier.stored


@pytest.mark.parametrize("store", [WeakStore, EagerStore])
def test_blocks_that_cannot_be_read_are_not_stored_and_nothing_else(store, monkeypatch):
    """Blocks are read on idle turns, and within a step's delta when blocks are evicted."""
    real, calls = SimPages.read, []

    def read(self, *args):
        calls.append(args)
        if len(calls) % 2:
            raise RuntimeError("out of pinned memory")
        return real(self, *args)

    monkeypatch.setattr(SimPages, "read", read)
    bench = Bench(store)
    for i in range(12):
        r = bench.ask(f"r{i}", [i, i, 1, 2, 3, 4, 5] * 2)
        bench.run(r)
        assert bench.tokens(r)[0] == answer(r.prompt, r.params)[0]
    bench.evict()
    assert not bench.engine.dead
    assert len(calls) > 4
    (tier,) = bench.tiers.tiers
    assert not bench.tiers.storing and not tier.queued
    assert tier.skipped > 0
    assert tier.faults > 0
    bench.engine.check()


@pytest.mark.parametrize("room", [2.0, 2.5, 3.9])
def test_blocks_wait_for_room_in_the_queue_of_an_eager_tier(room):
    """A queue need not be a multiple of the size of a page."""
    bench = Bench(EagerStore)
    bench.tiers.tiers[0].queue = int(room * bench.tiers.page_bytes[0])
    for i in range(6):
        bench.run(bench.ask(f"r{i}", [i, 7, i, 1, 2, 3, 4, 5] * 2))
    for _ in range(20):
        bench.engine.step()
        bench.work()
    (tier,) = bench.tiers.tiers
    assert tier.skipped == 0 and not bench.tiers.backlog and tier.stores > 12


class Late:
    """Pages u8 [n, bytes] that come to the host late."""

    def __init__(self, pages):
        self.pages, self.ready = pages, False

    def page(self, i, own):
        assert self.ready, "a thread waits for pages, and loads wait for the thread"
        return self.pages[i]


def test_loads_do_not_wait_for_pages_that_are_on_their_way_to_the_host():
    """The pages come after the steps that were submitted before, which may take long."""
    order: list[str] = []
    thread = TierThread(WeakStore(None, StoreContext("")), lambda *done: order.append("stored"), threaded=False)
    batch = Late(np.zeros((1, 4), np.uint8))
    thread.add(lambda: thread.put(1, bytes(16), batch, 0), batch)
    thread.add(lambda: order.append("dropped"))
    thread.add_load(lambda: order.append("loaded"))
    assert thread.work() and not thread.work()
    batch.ready = True
    assert thread.work() and thread.work() and not thread.work()
    assert order == ["loaded", "stored", "dropped"]


def test_a_slow_tier_takes_no_room_in_the_queue_of_another():
    bench = Bench(WeakStore, EagerStore)
    fast, slow = bench.tiers.tiers
    fast.queue = slow.queue = 2 * bench.tiers.page_bytes[0]
    bench.run(bench.ask("a", PROMPT), bench.ask("b", PROMPT[::-1]))
    for thread in bench.engine.executor.threads[1::2]:
        thread.work = lambda: False
    bench.evict()
    for _ in range(4):
        bench.engine.step()
        bench.work()
    assert fast.stores >= 2 and not fast.queued
    bench.engine.check()


class Fussy(Fcfs):
    """A policy whose call of ``key`` with the number ``fails`` raises."""

    fails = 10**9

    def key(self, view):
        self.fails -= 1
        if self.fails == 0:
            raise RuntimeError("no")
        return super().key(view)


class Guided(DecodingStrategy):
    """A strategy with n samples, each with a guide."""

    reads = frozenset({"guidance_scale"})

    def start(self, params):
        guide = Guide(1.5, (1, 2))
        return [Branch(i, guide=guide) for i in range(params.n)]

    def result(self, params, ends):
        return [e.sample for e in ends]


def test_a_request_that_the_scheduler_refuses_leaves_no_sequence_that_waits_for_pages(monkeypatch):
    bench = Bench(policy=Fussy, strategy=Guided())
    bench.run(bench.ask("a", PROMPT))
    bench.evict()
    real, begun = Tiers.begin, []

    def begin(self, seq):  # only the first sequence gets pages
        begun.append(seq)
        return len(begun) == 1 and real(self, seq)

    monkeypatch.setattr(Tiers, "begin", begin)
    bench.engine.planner.policy.fails = 1
    with pytest.raises(RequestError, match="Fussy failed on this request"):
        bench.ask("b", PROMPT, n=2)
    assert len(begun) == 2
    assert not bench.tiers.waits
    for _ in range(3):
        bench.engine.step()
        bench.work()
    assert not bench.tiers.active
    assert not bench.engine.executor.mover._staged
    bench.engine.check()


def test_a_request_computes_what_comes_too_late():
    now = [0.0]
    bench = Bench(now=lambda: now[0])
    bench.run(bench.ask("a", PROMPT))
    bench.evict()
    again = bench.ask("b", PROMPT)
    other = bench.ask("c", [7] * 9)
    for _ in range(30):  # the stores never answer, and other requests continue
        bench.engine.step()
    assert other.done
    assert not again.done
    assert bench.engine.stats()["waiting"] == 1
    now[0] += PATIENCE + 0.1
    for _ in range(30):
        bench.engine.step()
    assert again.done
    assert again.cached_tokens == 0
    assert bench.tokens(again)[0] == answer(PROMPT, again.params)[0]
    hit = bench.ask("d", [*PROMPT, 1, 2])
    bench.run(hit)
    assert bench.tiers.tiers[0].late == 3
    bench.engine.step()
    assert not bench.engine.executor.mover._staged


def test_a_request_alone_does_not_wait_for_the_end_of_its_copies():
    """Its step waits for them on the device.  Beside a running row it waits outside, so that the row goes on."""
    bench = Bench()
    bench.run(bench.ask("a", PROMPT))
    bench.evict()
    bench.engine.executor.second.memory.arrived = lambda page: None  # the copies do not end
    alone = bench.ask("b", PROMPT)
    bench.run(alone)
    assert alone.cached_tokens == 12
    assert bench.tokens(alone)[0] == answer(PROMPT, alone.params)[0]
    bench.evict()
    other = request(bench.engine, "c", [9, 9], max_tokens=30, ignore_eos=True)
    bench.engine.step()
    beside = bench.ask("d", PROMPT)
    for _ in range(12):
        bench.engine.step()
        bench.work()
    assert bench.tiers.waits and not other.done
    bench.run(other, beside)
    assert beside.cached_tokens == 12  # once the other row has ended


def test_requests_that_wait_for_the_same_pages_load_them_once():
    bench = Bench()
    bench.run(bench.ask("a", PROMPT))
    bench.evict()
    twins = [bench.ask(name, PROMPT) for name in "bcd"]
    bench.run(*twins)
    assert bench.tiers.tiers[0].loads == 3
    assert [r.cached_tokens for r in twins] == [12, 12, 12]
    assert all(bench.tokens(r)[0] == answer(PROMPT, r.params)[0] for r in twins)


def test_an_abort_while_pages_are_loaded_leaves_nothing():
    bench = Bench()
    bench.run(bench.ask("a", PROMPT))
    bench.evict()
    bench.ask("b", PROMPT)
    bench.engine.step()
    assert bench.engine.abort("b")
    bench.work()
    for _ in range(3):
        bench.engine.step()
    assert not bench.engine.busy
    assert not bench.tiers.active
    assert not bench.engine.executor.mover._staged


def test_reset_empties_the_tiers():
    bench = Bench(EagerStore)
    bench.run(bench.ask("a", PROMPT))
    bench.engine.reset_prefix_cache()
    for _ in range(3):
        bench.engine.step()
        bench.work()
    assert [len(thread.store.pages) for thread in bench.engine.executor.threads] == [0, 0]
    again = bench.ask("b", PROMPT)
    bench.run(again)
    assert again.cached_tokens == 0


@pytest.mark.parametrize("seconds", [1e-6, 10.0])
def test_a_request_computes_what_a_slow_tier_has(seconds):
    bench = Bench()
    bench.run(bench.ask("a", PROMPT))
    bench.evict()
    bench.tiers.choice.always = [False]
    bench.tiers.choice.steps.add(100, 0.1)
    bench.tiers.choice.loading = [CopyPace(seconds)]
    again = bench.ask("b", PROMPT)
    bench.run(again)
    assert again.cached_tokens == (12 if seconds < 1 else 0)
    assert bench.tokens(again)[0] == answer(PROMPT, again.params)[0]
    figures = bench.engine.stats()["tier_choice"]
    assert (figures["loaded"], figures["computed"]) == ((1, 0) if seconds < 1 else (0, 1))
    assert figures["waited"] == (seconds < 1)
