"""The purpose of the evictors that use facts of sessions.  The conformance kit checks their contract."""

from __future__ import annotations

import numpy as np
import pytest

from minivllm.core.interfaces.evictor import BlockInfo, EvictorContext
from minivllm.core.interfaces.session import SessionTurn
from minivllm.plugins.evictor.agent_ttl import AgentTtl
from minivllm.plugins.evictor.options import AgentTtlOptions, TailLruOptions
from minivllm.plugins.evictor.tail_lru import TailLru

BLOCK = 16


class Cache:
    """An evictor with chains of blocks of sessions, on a clock of its own."""

    def __init__(self, cls, options):
        self.time = 0.0
        self.evictor = cls(options, EvictorContext(1000, BLOCK, "device", lambda: self.time))
        self.name = {}

    def serve(self, name, blocks, session=0, tokens=0, **facts):
        """Serve a request with the new blocks ``name0``, ``name1``, ..."""
        keys = np.array([1000 * (len(self.name) + 1) + i for i in range(blocks)], np.uint64)
        parents = np.array([0, *keys.tolist()[:-1]], np.uint64)
        depth, zeros = np.arange(blocks, dtype=np.int32), np.zeros(blocks, np.int32)
        sessions = np.full(blocks, session)
        self.evictor.add(keys, BlockInfo(parents, depth, zeros, zeros, zeros, sessions))
        if session:
            turn = SessionTurn(session, tokens=tokens or BLOCK * blocks, **facts)
            self.evictor.began(keys[:0], turn)
            self.evictor.ended(keys, turn)
        self.evictor.free(keys)
        self.name.update({int(key): f"{name}{i}" for i, key in enumerate(keys)})

    def evicted(self, n):
        return [self.name[key] for key in self.evictor.victims(n).tolist()]


def test_tail_lru_evicts_the_end_that_the_next_request_may_compute():
    cache = Cache(TailLru, TailLruOptions(prompt=16))
    cache.serve("old", 2)
    cache.serve("a", 6, session=1, budget=48)  # 96 tokens + 16 - 48: blocks from token 64 on
    cache.serve("b", 3, session=2, budget=1000)  # all of it
    cache.serve("c", 3, session=3, budget=0)
    assert cache.evicted(5) == ["a5", "a4", "b2", "b1", "b0"]
    assert cache.evicted(4) == ["old1", "old0", "a3", "a2"]


def test_the_option_is_the_budget_of_clients_that_send_none():
    cache = Cache(TailLru, TailLruOptions(prompt=0, budget=32))
    cache.serve("a", 4, session=1)
    cache.serve("b", 4, session=2, budget=0)
    cache.serve("c", 4)
    assert cache.evicted(4) == ["a3", "a2", "a1", "a0"]


def test_agent_ttl_keeps_a_turn_while_the_next_is_expected_and_no_longer():
    cache = Cache(AgentTtl, AgentTtlOptions(slack=3.0, longest=60.0))
    cache.serve("a", 2, session=1, next_s=5.0)
    cache.serve("b", 1)
    cache.time = 14.0
    cache.serve("c", 1)
    assert cache.evictor.figures() == {"kept": 1, "expired": 0, "sessions": 1}
    assert cache.evicted(1) == ["b0"]
    cache.time = 15.0
    assert cache.evicted(3) == ["a1", "a0", "c0"]
    assert cache.evictor.figures()["expired"] == 1


def test_the_time_to_live_has_a_limit():
    cache = Cache(AgentTtl, AgentTtlOptions(slack=3.0, longest=10.0))
    cache.serve("a", 1, session=1, next_s=100.0)
    cache.serve("b", 1)
    cache.time = 9.0
    assert cache.evicted(1) == ["b0"]
    cache.serve("c", 1)
    cache.time = 10.0
    assert cache.evicted(1) == ["a0"]


def test_without_loose_blocks_those_go_first_whose_next_use_is_last():
    cache = Cache(AgentTtl, AgentTtlOptions())
    for name, session, pause in (("a", 1, 5.0), ("b", 2, 50.0), ("c", 3, 1.0)):
        cache.serve(name, 1, session=session, next_s=pause)
    assert cache.evicted(3) == ["b0", "a0", "c0"]


def test_pauses_are_learned_where_the_client_expects_nothing():
    cache = Cache(AgentTtl, AgentTtlOptions(slack=2.0))
    cache.serve("a", 1, session=1)
    assert cache.evictor.figures()["kept"] == 0, "nothing is known yet"
    cache.time = 4.0
    cache.serve("b", 1, session=1)
    cache.time = 5.0
    cache.serve("c", 1)
    assert cache.evicted(1) == ["a0"]
    cache.time = 11.0  # the pause was 4 seconds, so b is kept until 12
    assert cache.evicted(1) == ["c0"]
    cache.serve("d", 1)
    cache.time = 12.0
    assert cache.evicted(1) == ["b0"]


@pytest.mark.parametrize("cls", [TailLru, AgentTtl])
def test_a_page_of_a_tier_that_is_stored_after_its_turn_has_the_facts_of_the_session(cls):
    options = {TailLru: TailLruOptions(prompt=0), AgentTtl: AgentTtlOptions()}[cls]
    cache = Cache(cls, options)
    cache.serve("other", 1)
    cache.evictor.ended(np.empty(0, np.uint64), SessionTurn(1, tokens=16, budget=16, next_s=9.0))
    key, zero = np.array([77], np.uint64), np.zeros(1, np.int32)
    cache.evictor.add(key, BlockInfo(key * 0, zero, zero, zero, zero, np.array([1])))
    cache.evictor.free(key)
    cache.name[77] = "page"
    assert cache.evicted(1) == (["page"] if cls is TailLru else ["other0"])
