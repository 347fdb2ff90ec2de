"""Copies of recurrent states: the engine's tables against a simple model, and prefix hits of a cache with copies."""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from minivllm.core.engine.checkpoints import Checkpoints

FIRST, SLOTS, BLOCKS = 9, 4, 12


class Books(RuleBasedStateMachine):
    """Rows request copies, publish them and leave, and blocks are removed.  Each index has one holder at any time."""

    @initialize(count=st.integers(0, 5))
    def begin(self, count):
        self.books, self.count = Checkpoints(FIRST, count), count
        self.cached = np.zeros(BLOCKS, bool)
        self.table = {slot: [] for slot in range(SLOTS)}

    @rule(slot=st.integers(0, SLOTS - 1), blocks=st.integers(1, 3))
    def reserve(self, slot, blocks):
        held = sum(map(len, self.books.pending.values()))
        index = self.books.reserve(slot, blocks)
        assert (index is None) == (held == self.count)
        assert index is None or FIRST <= index < FIRST + self.count

    @rule(slot=st.integers(0, SLOTS - 1), table=st.permutations(range(BLOCKS)), blocks=st.integers(0, 3))
    def publish(self, slot, table, blocks):
        self.cached[table[:blocks]] = True
        before = dict(self.books.of_block)
        self.books.publish(slot, np.array(table), blocks)
        assert before.items() <= self.books.of_block.items(), "a published copy was replaced"
        assert all(n > blocks for n, _ in self.books.pending.get(slot, ()))

    @rule(block=st.integers(0, BLOCKS - 1))
    def evict(self, block):
        self.cached[block] = False
        self.books.drop(block)
        assert block not in self.books.of_block

    @rule(slot=st.integers(0, SLOTS - 1))
    def leave(self, slot):
        self.books.release(slot)
        assert slot not in self.books.pending

    @rule(chain=st.lists(st.integers(0, BLOCKS - 1), unique=True))
    def hit(self, chain):
        n = self.books.usable(np.array(chain, np.int32))
        assert not any(block in self.books.of_block for block in chain[n:])
        if n:
            index = self.books.of_block[chain[n - 1]]
            assert self.books.use(chain[n - 1]) == index
            assert list(self.books.of_block)[-1] == chain[n - 1]

    @invariant()
    def nothing_is_lost(self):
        if hasattr(self, "books"):
            self.books.check(self.cached)


Books.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestBooks = Books.TestCase


def test_the_least_recently_used_copy_gives_way():
    books = Checkpoints(FIRST, 2)
    for slot, block in ((0, 3), (1, 5)):
        books.reserve(slot, 1)
        books.publish(slot, np.array([block]), 1)
    books.use(3)
    assert books.reserve(2, 1) is not None
    assert set(books.of_block) == {3} and books.evictions == 1
