"""Failures of the planner, the cache and their plug-ins that happen together."""

from __future__ import annotations

import random

import numpy as np
import pytest
from trouble import Trouble

from minivllm.core.engine import blocks
from minivllm.core.interfaces.scheduler import StepShape
from minivllm.errors import EngineDeadError
from minivllm.plugins.evictor.lru import Lru
from minivllm.plugins.scheduler.fcfs import Fcfs
from minivllm.testing.sim import answer, at_rest, outputs, request, run, sim_engine


def right(made, max_len=256):
    for r in made:
        for s, got in zip(r.sequences, outputs(r), strict=True):
            assert got == answer(r.prompt, r.params, s.sample, max_len)


@pytest.mark.parametrize("seeds", [range(60), pytest.param(range(60, 2000), marks=pytest.mark.slow)])
def test_whatever_policies_answer_and_clients_do_no_block_is_lost_and_no_token_is_wrong(seeds):
    preempted = hits = copied = evicted = 0
    for seed in seeds:
        with pytest.MonkeyPatch.context() as patch:
            engine = Trouble(seed).play(patch)
        preempted += engine.planner.preemptions
        hits += engine.cache.pools[0].hits
        copied += engine.cache.copied
        evicted += engine.cache.pools[0].evictions
    assert preempted > 30 and hits > 200 and copied > 3 and evicted > 300, "the test has no power"


def test_branches_that_fork_and_lose_their_rows_before_a_plan_do_not_keep_the_rows():
    """The older row has its last token in flight and holds the blocks that the branches need."""
    engine = sim_engine(slots=3, max_len=40, blocks=14, block=1, depth=2, budget=16)
    made = [request(engine, "old", range(4), max_tokens=7, ignore_eos=True)]
    for _ in range(4):
        engine.step()
    made.append(request(engine, "wide", range(20, 24), max_tokens=1, n=2, ignore_eos=True))
    run(engine, 200)
    assert engine.planner.preemptions, "the test has no power: nothing was preempted"
    right(made)
    at_rest(engine)


@pytest.mark.parametrize("seed", range(16))
def test_a_block_whose_key_collides_stays_private_in_every_group(seed):
    """Tenants have the same prompt and the same keys.

    A block that stays private in the leading group has no number, so no block of another group can have it as parent.
    """
    rng, made = random.Random(seed), []
    engine = sim_engine(
        slots=4, max_len=60, blocks=[rng.randint(20, 60), rng.randint(16, 40)], block=2, windows=(None, 5)
    )
    for pool in engine.cache.pools:
        pool.hash_fn = lambda parent, tokens: 1 + tokens[0] % 5
    for i in range(12):
        prompt = [5, 12, 40, 20, 8, 46, 17, 6, 48, 0, 3][: rng.randint(4, 11)]
        out = dict(max_tokens=rng.randint(1, 12), ignore_eos=True)
        made.append(request(engine, f"r{i}", prompt, tenant=rng.choice("abc"), **out))
        for _ in range(rng.randint(0, 4)):
            engine.step()
    run(engine, check=True)
    assert engine.dead is None
    right(made)


def test_a_salt_that_cached_blocks_hang_on_is_never_forgotten(monkeypatch):
    monkeypatch.setattr(blocks, "MAX_ROOTS", 2)
    engine = sim_engine(slots=4, blocks=64)
    made = []
    for i in range(40):
        made.append(request(engine, f"r{i}", [1, 2, 3, 4, 5, 6, 7, 8, i % 5], cache_salt=f"s{i % 12}", max_tokens=9))
        engine.step()
        engine.cache.check()
        roots = {number for number, _ in engine.cache.pools[0].roots.values()}
        assert {parent for parent in engine.cache.pools[0].children if parent < 0} <= roots
    run(engine, check=True)
    right(made)
    assert engine.cache.pools[0].hits > 50, "the test has no power"
    engine.reset_prefix_cache()
    for i in range(300):
        engine.cache.pools[0].root(("", f"new{i}"))
        assert len(engine.cache.pools[0].roots) <= 2 * 12, "salts that nothing hangs on are forgotten"


def test_a_cap_that_is_no_whole_number_is_cut_to_one():
    class Halves(Fcfs):
        def shape(self, load, now):
            return StepShape(prefill_cap=2.5)

    engine = sim_engine(policy=Halves, depth=1)
    made = [request(engine, f"r{i}", range(9 + i), max_tokens=5) for i in range(4)]
    run(engine, check=True)
    right(made)


def test_what_the_cache_holds_is_looked_up_only_for_a_policy_that_reads_it(monkeypatch):
    class Looks(Fcfs):
        def order(self, head, running, now):
            assert head.take(np.array([0])).prompt.tolist() == head.prompt[:1].tolist()
            assert running.known.shape == (len(running),)
            return super().order(head, running, now)

    class Reads(Looks):
        def order(self, head, running, now):
            assert len(head.cached) == len(head.blocks)
            return super().order(head, running, now)

    for policy, requested in ((Looks, False), (Reads, True)):
        engine, calls = sim_engine(policy=policy, slots=2), []
        hints = engine.cache.hints
        monkeypatch.setattr(
            engine.cache, "hints", lambda seqs, hints=hints, calls=calls: calls.append(1) or hints(seqs)
        )
        right_ones = [request(engine, f"r{i}", [1, 2, i], max_tokens=4) for i in range(6)]
        run(engine)
        right(right_ones)
        assert bool(calls) == requested


WRONG_VICTIMS = {
    "nothing": lambda real, held: None,
    "text": lambda real, held: ["a"] * len(real),
    "a negative key": lambda real, held: [-1] * len(real),
    "one key again and again": lambda real, held: np.array([real[0]] * len(real)),
    "a held key": lambda real, held: np.array([held] * len(real), np.uint64),
    "one too few": lambda real, held: real[:-1],
    "one too many": lambda real, held: np.append(real, held),
    "keys as floats": lambda real, held: real.astype(float),
    "parents before children": lambda real, held: real[::-1],
}


def trouble_with(evictor, prompts=40):
    """Run an engine with this evictor and more prompts than fit, until it ends."""
    engine, rng, made = sim_engine(slots=3, blocks=20, depth=1, evictor=evictor), random.Random(0), []
    for i in range(prompts):
        made.append(request(engine, f"r{i}", [rng.randrange(50) for _ in range(12)], max_tokens=6, ignore_eos=True))
        engine.step()
        if not engine.dead:
            engine.step()
        if engine.dead:
            break
    return engine, made


@pytest.mark.parametrize("wrong", WRONG_VICTIMS)
def test_an_evictor_that_gives_up_what_it_must_not_ends_the_engine_by_its_name(wrong):
    class Errs(Lru):
        def add(self, keys, info):
            self.last = keys[-1]
            super().add(keys, info)

        def victims(self, n):
            return WRONG_VICTIMS[wrong](super().victims(n), self.last)

    engine, made = trouble_with(Errs)
    assert engine.dead is not None and engine.dead.startswith("evictor Errs ")
    assert all(r.done and s.finish_reason in ("length", "error") for r in made for s in r.sequences)


def test_keys_in_a_list_are_as_good_as_in_an_array():
    class Lists(Lru):
        def victims(self, n):
            return super().victims(n).tolist()

    engine, made = trouble_with(Lists)
    run(engine)
    right(made)
    assert engine.dead is None and engine.cache.pools[0].evictions > 50


def test_an_evictor_that_fails_in_a_reset_ends_the_engine():
    class Errs(Lru):
        def drop(self, keys):
            raise RuntimeError("boom")

    engine, made = trouble_with(Errs, 4)
    with pytest.raises(EngineDeadError, match="evictor Errs failed in drop: RuntimeError: boom"):
        engine.reset_prefix_cache()
    assert engine.dead and all(r.done for r in made)
