"""Hits that end inside a block, the counters of the cache, and its self-checks."""

from __future__ import annotations

import numpy as np
import pytest

from minivllm.core.engine import publication
from minivllm.core.engine.engine import CHECK
from minivllm.testing.sim import answer, at_rest, outputs, request, run, sim_engine

BLOCK = 4


def serve(engine, rid, prompt, **params):
    r = request(engine, rid, prompt, **{"max_tokens": 6, "ignore_eos": True, **params})
    run(engine, check=True)
    assert outputs(r) == [answer(r.prompt, r.params, s.sample) for s in r.sequences]
    return r


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("windows", [(None,), (None, 6)])
@pytest.mark.parametrize("shared", [1, 5, 6, 7, 8, 9, 11])
def test_a_hit_goes_on_to_the_first_token_that_differs(depth, windows, shared):
    engine = sim_engine(depth=depth, windows=windows)
    first = serve(engine, "a", range(12))
    second = serve(engine, "b", [*range(shared), 40, 41, 42])
    assert (first.cached_tokens, second.cached_tokens) == (0, shared)
    assert engine.cache.copied == shared % BLOCK
    at_rest(engine)


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("n", [9, 10, 11, 12])
def test_a_prompt_that_comes_again_computes_one_token(depth, n):
    engine = sim_engine(depth=depth)
    assert [serve(engine, f"r{i}", range(n)).cached_tokens for i in range(3)] == [0, n - 1, n - 1]


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("windows", [(None,), (None, 6)])
@pytest.mark.parametrize("out", [1, 2, 3, 4, 5])
def test_the_next_turn_of_a_conversation_goes_on_from_the_tail_of_the_last(depth, windows, out):
    engine = sim_engine(depth=depth, windows=windows)
    first = serve(engine, "a", range(10), max_tokens=out)
    turn = [*first.sequences[0].tokens.tolist(), 40, 41]
    assert serve(engine, "b", turn).cached_tokens == 10 + out - 1, "all but the last token of the answer were computed"


def test_a_tail_is_found_after_an_abort_and_not_after_an_error():
    engine = sim_engine()
    for rid, end in (("aborted", lambda r: engine.abort(r.id)), ("failed", None)):
        start = [len(rid)] * 9
        r = request(engine, rid, start, max_tokens=30, ignore_eos=True)
        for _ in range(3):
            engine.step()
        if end is None:
            engine.executor.fail_at = {engine.planner.step_id + 1}
        else:
            end(r)
        run(engine, check=True)
        cached = serve(engine, f"after {rid}", [*r.sequences[0].tokens.tolist(), 1, 2]).cached_tokens
        assert cached == (11 if rid == "aborted" else 8)


def test_the_longest_of_the_blocks_that_begin_alike_is_copied():
    engine = sim_engine()
    for i, prompt in enumerate(([7, 7, 7, 7, 1, 2, 9, 9], [7, 7, 7, 7, 1, 2, 3, 9], [7, 7, 7, 7, 1, 8, 8, 8])):
        serve(engine, f"r{i}", [*prompt, 5])
    assert serve(engine, "b", [7, 7, 7, 7, 1, 2, 3, 4, 5]).cached_tokens == 7


def test_branches_fork_from_a_copy_within_one_step():
    engine = sim_engine()
    serve(engine, "a", range(11))
    r = serve(engine, "b", range(11), n=3)
    assert r.cached_tokens == 10 and engine.cache.copied == 2


def test_without_partial_hits_whole_blocks_only_are_shared():
    engine = sim_engine(partial=False)
    assert [serve(engine, f"r{i}", range(11)).cached_tokens for i in range(2)] == [0, 8]
    assert engine.cache.copied == 0 and engine.cache.pools[0].idle == 4, "no tails"


def test_hits_are_counted_by_depth():
    engine = sim_engine(blocks=100)
    for i, prompt in enumerate((range(40), range(40), [*range(14), *range(30, 45)])):
        serve(engine, f"r{i}", prompt, max_tokens=1)
    depths = {name: (d["hits"], d["queries"]) for name, d in engine.stats()["prefix_by_depth"].items()}
    # 9, 9 and 7 whole blocks were looked up (one token is always left to compute), and 0, 9 and 3 found
    assert depths == {"0": (2, 3), "1": (2, 3), "2-3": (3, 6), "4-7": (4, 11), "8-15": (1, 2)}
    stats = engine.stats()
    assert stats["prefix_queries"] == 40 + 40 + 29 and stats["prefix_hits"] == 39 + 14
    assert stats["prefix_hits_copied"] == 3 + 2


def test_a_block_that_is_lost_ends_the_engine_when_nothing_runs():
    engine = sim_engine()
    r = request(engine, "r", range(9), max_tokens=9, ignore_eos=True)
    for _ in range(3):
        engine.step()
    engine.cache.pools[0].share(engine.slots.table[0, r.sequences[0].slot, :1])  # a reference that is never released
    run(engine)
    assert "1 KV blocks are in use although nothing runs" in engine.dead


def test_counts_that_do_not_add_up_end_the_engine_at_once():
    engine = sim_engine()
    r = request(engine, "r", range(9), max_tokens=9)
    engine.step()
    engine.cache.pools[0].free -= 1
    engine.step()
    assert "do not add up" in engine.dead and r.sequences[0].finish_reason == "error"


def test_the_full_walk_runs_after_every_step_if_asked_for(monkeypatch):
    ended = {}
    for requested in ("", "1"):
        monkeypatch.setenv(CHECK, requested)
        engine = sim_engine()
        request(engine, "r", range(9), max_tokens=9)
        engine.step()
        engine.cache.pools[0].ref[engine.slots.table[0, 0, 0]] += 1  # no counter changes yet
        engine.step()
        ended[requested] = engine.dead
    assert ended[""] is None and "AssertionError" in ended["1"]
    with pytest.raises(AssertionError, match="reference counts"):
        engine.check()


@pytest.mark.parametrize("salted", [False, True])
def test_blocks_published_at_once_are_cached_like_blocks_published_one_by_one(salted, monkeypatch):
    found = []
    for at_once in (True, False):
        with monkeypatch.context() as patched:
            if not at_once:
                patched.setattr(publication, "RUN", 1 << 30)
            engine, runs = sim_engine(), []
            pool = engine.cache.pools[0]
            publish_run, info = pool.publish_run, []
            patched.setattr(pool, "publish_run", lambda *a, p=publish_run, r=runs: r.append(p(*a)) or r[-1])
            add = pool.evictor.add
            patched.setattr(
                pool.evictor,
                "add",
                lambda keys, received, a=add, i=info: i.append((keys, received)) or a(keys, received),
            )
            for i, prompt in enumerate([range(40), [*range(20), *range(15, 45)], [9] * 41, range(49), range(40)]):
                serve(engine, f"r{i}", prompt, **({"cache_salt": "s"} if salted and i % 2 else {}))
        columns = [pool.key, pool.parent, pool.stamp, pool.tokens, pool.ref]
        state = [x.tolist() for x in (*columns, pool.first)]
        state += [pool.children, pool.youngest, pool.older, pool.younger, pool.index, pool.stamps, pool.lost.number]
        received = [
            (keys.tolist(), {name: column.tolist() for name, column in vars(each).items()}) for keys, each in info
        ]
        found.append([*state, received])
        assert runs.count(True) >= 3 if at_once else not runs
    assert found[0] == found[1]


def test_blocks_of_which_one_is_cached_are_not_published_at_once():
    pool = sim_engine().cache.pools[0]
    blocks, root = pool.take(5), pool.root(())
    tokens = np.arange(5 * BLOCK, dtype=np.int32).reshape(5, BLOCK)
    keys = pool.keys_of(tokens.ravel(), (), [])
    pool.publish(int(blocks[0]), root[0], keys[0], tokens[0], 0)
    index, new = dict(pool.index), list(pool.new)
    assert not pool.publish_run(blocks, root[0], keys, tokens, 0)
    assert not pool.publish_run(blocks[1:], int(blocks[0]), keys[:4], tokens[1:], 1)
    assert not pool.publish_run(blocks[1:], int(blocks[0]), [keys[1]] * 4, tokens[1:], 1)
    assert (pool.index, pool.new) == (index, new)
    assert pool.publish_run(blocks[1:], int(blocks[0]), keys[1:], tokens[1:], 1)
    assert pool.lookup(tokens.ravel(), (), [], 5).tolist() == blocks.tolist()
