"""Recurrent states in the engine without a model.  Its device checks the state of every row that it computes."""

from __future__ import annotations

import random

import pytest

from minivllm.core.engine.checkpoints import Checkpoints
from minivllm.errors import EngineDeadError
from minivllm.testing.sim import at_rest, outputs, request, run, sim_engine

PROMPT = [i % 50 for i in range(40)]


def served(engine, rid, prompt, **params):
    found = request(engine, rid, prompt, **{"max_tokens": 3, "ignore_eos": True, **params})
    run(engine)
    return found


@pytest.mark.parametrize("seed", range(16))
def test_each_row_has_its_own_state_whatever_is_shared_forked_preempted_or_rejected(seed):
    rng = random.Random(seed)
    drafts = rng.choice([0, 0, 1, 3])
    engine = sim_engine(
        slots=rng.choice([2, 4, 8]),
        blocks=rng.choice([40, 64]),
        block=rng.choice([2, 4]),
        windows=rng.choice([(None,), (None, 8)]),
        depth=rng.choice([0, 1, 2]),
        budget=rng.choice([8, 16, 64]),
        drafts=drafts,
        checkpoints=rng.choice([1, 3, 12]),
    )
    engine.executor.options.drafts_accepted = rng.choice([0.3, 0.9])
    begins = [[rng.randrange(50) for _ in range(24)] for _ in range(2)]
    made = []
    for i in range(30):
        begin = rng.choice(begins)[: rng.choice([0, 8, 16, 24])]
        prompt = begin + [rng.randrange(50) for _ in range(rng.randint(1, 12))]
        n = rng.choice([1, 1, 2])
        made.append((request(engine, f"r{i}", prompt, n=n, max_tokens=rng.randint(1, 12), ignore_eos=True), prompt, n))
        for _ in range(rng.randint(0, 4)):
            engine.step()
            engine.cache.check()
        if rng.random() < 0.1:
            engine.abort(rng.choice(made)[0].id)
    run(engine)
    engine.cache.check()
    at_rest(engine)
    assert sum(r.cached_tokens or 0 for r, _, _ in made), "the test has no power: no prefix hit"
    assert all(outputs(r)[0][1] in ("length", "abort") for r, _, _ in made)


def test_the_estimates_of_waiting_requests_are_the_hits_that_they_would_have():
    rng = random.Random(1)
    engine = sim_engine(slots=2, blocks=40, block=4, checkpoints=3)
    begins, met, made = [[rng.randrange(50) for _ in range(24)] for _ in range(3)], [], []
    for i in range(60):
        prompt = rng.choice(begins)[: rng.choice([8, 16, 24])] + [rng.randrange(50) for _ in range(rng.randint(1, 24))]
        made.append(request(engine, f"r{i}", prompt, max_tokens=rng.randint(1, 12), ignore_eos=True))
        for _ in range(rng.randint(1, 3)):
            engine.step()
            waiting = [seq for r in made for seq in r.sequences if seq.queued]
            hints = engine.cache.hints(waiting).tolist()
            assert hints == [4 * len(engine.cache.lookup(seq, seq.known)[0]) for seq in waiting]
            met += hints
    assert len(set(met)) > 2 and engine.cache.checkpoints.evictions, "the test has no power"
    run(engine)


def test_a_hit_ends_where_a_checkpoint_is():
    engine = sim_engine(block=4, blocks=64, checkpoints=4)
    served(engine, "a", PROMPT)
    # a checkpoint lies 16 tokens or more before the last token of the prompt
    assert served(engine, "b", PROMPT).cached_tokens == 20
    # the previous request left a checkpoint where its prompt differs from the cached chain
    assert served(engine, "c", [*PROMPT[:36], 9, 9, 9]).cached_tokens == 36
    assert served(engine, "d", [*PROMPT[:28], 9, 9, 9]).cached_tokens == 20
    plain = sim_engine(block=4, blocks=64, partial=False)
    served(plain, "a", PROMPT)
    assert served(plain, "b", PROMPT).cached_tokens == 36


def test_a_chain_is_walked_once_for_a_prompt_that_enters(monkeypatch):
    engine = sim_engine(block=4, blocks=64, checkpoints=4)
    served(engine, "a", PROMPT)
    pool, walks = engine.cache.pools[0], []
    lookup = pool.lookup
    monkeypatch.setattr(pool, "lookup", lambda *args: walks.append(1) or lookup(*args))
    assert served(engine, "b", PROMPT).cached_tokens == 20 and len(walks) == 1


def test_without_room_for_a_checkpoint_nothing_is_hit():
    engine = sim_engine(block=4, blocks=64, checkpoints=0)
    assert [served(engine, str(i), PROMPT).cached_tokens for i in range(2)] == [0, 0]


@pytest.mark.parametrize("fault", ["a hit without a checkpoint", "a copy of another slot", "a copy too early"])
def test_the_device_finds_a_state_that_is_not_the_rows(fault, monkeypatch):
    engine = sim_engine(block=4, blocks=64, checkpoints=4)
    served(engine, "a", PROMPT)
    if fault == "a hit without a checkpoint":
        monkeypatch.setattr(engine.cache, "_adopt_states", lambda *args: None)
    elif fault == "a copy of another slot":
        monkeypatch.setattr(Checkpoints, "use", lambda self, block: 1)
    else:
        covered = engine.executor.states.covered
        covered[engine.cache.checkpoints.of_block[next(iter(engine.cache.checkpoints.of_block))]] -= 4
    with pytest.raises(EngineDeadError, match="state of slot"):
        served(engine, "b", PROMPT)
