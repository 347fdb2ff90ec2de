"""Faults in the block manager and the planner.  The state machine must detect every one of them."""

from __future__ import annotations

import numpy as np
import pytest
from cache_machine import drive

from minivllm.core.engine import publication
from minivllm.core.engine.blocks import BlockPool
from minivllm.core.engine.cache import KVCache
from minivllm.core.engine.planner import Planner

FAULTS = {}


def fault(owner):
    """Return a decorator for a method of a class, or a function of a module.

    The decorated function replaces it, and gets it as first argument.
    """

    def plant(fn):
        FAULTS[fn.__name__] = (owner, fn.__doc__.split("``")[1], fn)
        return fn

    return plant


@fault(BlockPool)
def a_decrement_is_skipped(real, self, blocks):
    """In ``release``, the last of several blocks keeps its reference."""
    real(self, blocks[:-1] if len(blocks) > 2 else blocks)


@fault(BlockPool)
def a_block_is_freed_twice(real, self, blocks):
    """In ``release``, the block that was freed last is put on the free list again."""
    before = self.free
    real(self, blocks)
    if self.free > before and self.held:
        self._free[self.free] = self._free[self.free - 1]
        self.free += 1


@fault(Planner)
def a_stop_frees_twice(real, self, slot):
    """In ``leave``, the blocks are released before the row leaves, and again afterwards."""
    self.cache.release(slot)
    real(self, slot)


@fault(Planner)
def a_preempted_row_keeps_its_blocks(real, self, slot):
    """In ``leave``, the tables of a row that returns to the queue are dropped without a release of the blocks."""
    if self.slots.seq[slot].preempted:
        self.slots.blocks[:, slot] = 0
    real(self, slot)


@fault(BlockPool)
def a_hit_does_not_hold(real, self, blocks):
    """In ``share``, idle blocks are used without a reference."""
    real(self, blocks[self.ref[blocks] > 0])


@fault(BlockPool)
def the_salt_is_forgotten(real, self, salt):
    """In ``root``, only the tenant is used."""
    return real(self, (salt[0], ""))


@fault(BlockPool)
def the_tenant_is_forgotten(real, self, salt):
    """In ``root``, only the salt is used."""
    return real(self, ("", salt[1]))


@fault(BlockPool)
def a_hit_trusts_the_hash(real, self, *args):
    """In ``lookup``, neither token ids nor parents are compared."""
    return np.array(list(self.chain(*args)), np.int32)


@fault(BlockPool)
def the_parent_is_wrong(real, self, block, parent, *args):
    """In ``publish``, the parent of a block is its grandparent."""
    above = int(self.parent[parent]) if parent >= 0 else parent
    return real(self, block, above if above >= 0 else parent, *args)


@fault(BlockPool)
def an_evicted_block_stays_in_the_index(real, self, key, block):
    """In ``_forget``, an evicted block can still be found."""
    real(self, key, block)
    self.index[key] = block


@fault(BlockPool)
def a_sibling_is_not_unlinked(real, self, key, block):
    """In ``_forget``, an older sibling becomes the head although a younger one exists."""
    older, younger, line = self.older[block], self.younger[block], (int(self.parent[block]), self.first[block])
    real(self, key, block)
    if older and younger:
        self.youngest[line] = older


@fault(KVCache)
def a_fork_shares_the_half_written_block(real, self, parent, child, computed):
    """In ``fork``, the block that both rows write next is not copied."""
    real(self, parent, child, -(-computed // self.block) * self.block)
    self.slots.computed[child] = computed
    self.slots.prefix_published[child] = min(int(self.slots.prefix_published[child]), computed // self.block)


@fault(KVCache)
def a_copy_writes_its_source(real, self, g, slot, index, source):
    """In ``_append_copy``, source and copy are exchanged."""
    real(self, g, slot, index, source)
    self.copies.append((g, *reversed(self.copies.pop()[1:])))


@fault(KVCache)
def a_copy_of_a_copy_reads_what_is_not_there_yet(real, self, g, slot, index, source):
    """In ``_append_copy``, a source that the same delta copies is not replaced by its own source."""
    real(self, g, slot, index, source)
    self.copies.append((g, source, self.copies.pop()[2]))


@fault(BlockPool)
def a_partial_hit_counts_a_token_too_many(real, self, parent, tokens):
    """In ``partial``, the first token that differs counts as equal."""
    block, shared = real(self, parent, tokens)
    return block, min(shared + 1, len(tokens)) if shared else 0


@fault(publication)
def a_tail_holds_the_token_that_was_never_read(real, cache, slot, seq):
    """In ``publish_tail``, the last token drawn is included, which has no KV yet."""
    more = int(cache.slots.collected[slot] % cache.block > 1)
    cache.slots.collected[slot] += more
    real(cache, slot, seq)
    cache.slots.collected[slot] -= more


@fault(publication)
def a_block_is_published_before_it_is_full(real, cache, rows):
    """In ``publish``, the block that is being written counts as full."""
    real(cache, [(slot, done + cache.block - 1) for slot, done in rows])


@fault(publication)
def a_twin_leaves_the_row_its_own_block(real, cache, g, slot, i, parent, key, row):
    """In ``_publish_one``, a block that the row has already published gets one reference too many."""
    before = int(cache.slots.table[g, slot, i])
    real(cache, g, slot, i, parent, key, row)
    if cache.slots.table[g, slot, i] != before:
        cache.slots.table[g, slot, i] = before


@fault(KVCache)
def a_trim_gives_back_what_the_window_still_sees(real, self, slots):
    """In ``trim``, one block too many is released."""
    self.slots.computed[slots] += self.block
    real(self, slots)
    self.slots.computed[slots] -= self.block


@fault(KVCache)
def the_device_is_not_told_of_a_new_block(real, self, slots, missing):
    """In ``grow``, the row's table on the device lacks a new block."""
    received = len(self.table)
    real(self, slots, missing)
    del self.table[received:]


def test_the_block_manager_keeps_its_invariants_whatever_happens():
    seen = drive(80)
    seen.require(hit=100, copied=30, preempted=20, evicted=100, forked=30, aborted=20, failed=5, finished=100)


@pytest.mark.parametrize(
    "name", [n if i < 8 else pytest.param(n, marks=pytest.mark.slow) for i, n in enumerate(FAULTS)]
)
def test_a_planted_fault_is_caught(name, monkeypatch):
    cls, method, wrong = FAULTS[name]
    real, used = getattr(cls, method), []

    def planted(self, *args, **kw):
        used.append(True)
        return wrong(real, self, *args, **kw)

    monkeypatch.setattr(cls, method, planted)
    with pytest.raises(Exception) as caught:
        drive(600, shrink=False)
    received = f"{type(caught.value).__name__}: {caught.value}"
    print(f"{name}: {received.splitlines()[0][:160]}")
    assert used
    assert not any(e in received for e in ("TypeError", "AttributeError", "NameError")), (
        f"the fault itself is wrong: {received}"
    )
