"""SIEVE against the textbook, and what it is for: hot prefixes outlive a scan."""

from __future__ import annotations

import random

import numpy as np
import pytest
from minivllm_sieve.sieve import Sieve

from minivllm.plugin import BlockInfo, EvictorContext
from minivllm.testing import EvictorConformance
from minivllm.testing.sim import request, run, sim_engine


class TestSieve(EvictorConformance):
    plugin = "minivllm-sieve/sieve"


class Textbook:
    """The paper's algorithm 1, on a list: position 0 is the oldest."""

    def __init__(self) -> None:
        self.queue: list[int] = []
        self.marks: set[int] = set()
        self.hand = 0

    def evict(self) -> int:
        while True:
            self.hand %= len(self.queue)
            key = self.queue[self.hand]
            if key not in self.marks:
                return self.queue.pop(self.hand)  # the hand then points at the next one
            self.marks.discard(key)
            self.hand += 1


def keys(*values):
    return np.array(values, np.uint64)


def add(evictor, key):
    zero = np.zeros(1)
    evictor.add(keys(key), BlockInfo(zero.astype(np.uint64), zero.astype(np.int32), zero, zero, zero))
    evictor.free(keys(key))


@pytest.mark.parametrize("seed", range(20))
def test_blocks_without_parents_go_in_the_order_of_the_paper(seed):
    rng, evictor, book = random.Random(seed), Sieve(None, EvictorContext(64, 16, "device")), Textbook()
    for key in range(1, 400):
        add(evictor, key)
        book.queue.append(key)
        for _ in range(rng.randint(0, 3)):
            marked = rng.choice(book.queue)
            evictor.hit(keys(marked))
            book.marks.add(marked)
        if len(book.queue) > 20:
            assert evictor.victims(1).tolist() == [book.evict()]


def hits(evictor) -> int:
    """Return the blocks found on a trace of two hot prefixes among prompts that occur once."""
    rng, kinds = random.Random(5), {} if evictor is None else {"evictor": evictor}
    engine = sim_engine(slots=2, blocks=40, max_len=64, **kinds)
    hot = [[7, i] * 12 for i in range(2)]  # 6 blocks of 4 tokens each
    for i in range(120):
        prompt = hot[i % 2] if i % 3 == 0 else [rng.randrange(50) for _ in range(36)]
        request(engine, f"r{i}", prompt, max_tokens=4, ignore_eos=True)
        run(engine)
    return engine.cache.pools[0].hits


def test_hot_prefixes_survive_prompts_that_come_once():
    sieve, lru = hits(Sieve), hits(None)
    assert sieve > 1.5 * lru, (sieve, lru)


def test_entries_of_dropped_blocks_do_not_pile_up():
    evictor = Sieve(None, EvictorContext(64, 16, "device"))
    for key in range(1, 5000):
        add(evictor, key)
        evictor.drop(keys(key))
    assert len(evictor.ahead) + len(evictor.behind) <= 100 and not evictor.blocks
