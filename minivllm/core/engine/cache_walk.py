"""The full check of the KV cache, with every block, every table and every chain.

It is for tests, ``LLM.check`` and MINIVLLM_CHECK=1.  ``BlockPool.audit`` is the fast check of every step.
AssertionError names the inconsistency.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING

import numpy as np

from minivllm.core.interfaces.attention import NULL_BLOCK

if TYPE_CHECKING:
    from .blocks import BlockPool
    from .slots import Slots


def walk(pools: list[BlockPool], s: Slots, retired: list[list[np.ndarray]]) -> None:
    """Compare the pools with the block tables of the running rows, and the published blocks of a row with its tokens.

    ``retired`` has, for each KV group, the blocks that compressed rows have given up and that the device still reads.
    """
    running = s.running.tolist()
    for g, pool in enumerate(pools):
        tables = [s.table[g, slot, : s.blocks[g, slot]] for slot in running]
        walk_pool(pool, [*tables, *retired[g]])
    lead = pools[0]
    for slot in running:
        stored = s.computed[slot] - s.dropped[:, slot]
        held = s.blocks[:, slot] * s.block
        assert (stored <= held).all(), f"slot {slot} lacks a block"
        walk_row(lead, s, slot)


def walk_row(lead: BlockPool, s: Slots, slot: int) -> None:
    """Compare the published blocks of a row in the leading group's pool with the tokens of the row."""
    before = lead.root(s.at(slot).request.salt)[0]
    published = s.table[0, slot, : s.prefix_published[slot]]
    for i, block in enumerate(published.tolist()):
        if not lead.published(block):
            # A collision of keys kept this block out of the prefix cache, and so all later blocks too.
            break
        where = f"slot {slot}: block {i}"
        tokens = s.tokens[slot, i * s.block : (i + 1) * s.block]
        right = np.array_equal(lead.tokens[block], tokens)
        assert lead.parent[block] == before, f"{where} hangs on a block or salt of others"
        assert right, f"{where} is published with other tokens"
        before = block


def walk_pool(pool: BlockPool, tables: list[np.ndarray]) -> None:
    """Check every invariant of ``BlockPool``; AssertionError names the broken one.  ``tables`` holds all block tables
    in use."""
    free = pool._free[: pool.free]
    assert len(np.unique(free)) == len(free), "a block is twice in the free list"
    assert NULL_BLOCK not in free, "the null block is in the free list"
    assert not pool.ref[free].any(), "a free block is held"
    assert not pool.key[free].any(), "a free block is published"
    held = pool.ref > 0
    cached = pool.key != 0
    idle = cached & ~held
    assert held.sum() == pool.held, "the count of held blocks is wrong"
    assert idle.sum() == pool.idle, "the count of idle blocks is wrong"
    assert pool.free + pool.held + pool.idle == pool.total - 1, "a block is lost"
    assert len(pool.index) == cached.sum(), "the index and the published blocks differ in number"
    for key, block in pool.index.items():
        assert pool.key[block] == key, "the index names a block with another key"
        assert pool.first[block] == pool.tokens[block, 0], "a block's first token is noted wrongly"
    walk_siblings(pool, cached, held)
    assert not pool.new, "a published block was not reported to the evictor"
    refs = np.zeros(pool.total, np.int32)
    for table in tables:
        np.add.at(refs, table[table != NULL_BLOCK], 1)
    assert (refs == pool.ref).all(), "the reference counts and the block tables differ"


def walk_siblings(pool: BlockPool, cached: np.ndarray, held: np.ndarray) -> None:
    """Check the parents of the published blocks, and the lists of the children of each parent.  ``cached`` and ``held``
    bool [blocks] mark the blocks that are published, and those with a reference."""
    lists = defaultdict(set)
    children = Counter[int]()
    for block in np.flatnonzero(cached).tolist():
        parent = int(pool.parent[block])
        first = int(pool.tokens[block, 0])
        lists[parent, first].add(block)
        children[parent] += 1
    assert lists.keys() == pool.youngest.keys(), "the lists of siblings and the parents differ"
    assert pool.children == children, "the numbers of children are wrong"
    for (parent, first), siblings in lists.items():
        if parent >= 0:
            assert cached[parent], "a cached block has lost its parent"
            assert pool.tokens[parent, -1] >= 0, "the parent of a cached block is not full"
            used = held[list(siblings)].any()
            assert held[parent] or not used, "a block is held and its parent is not"
        block = pool.youngest[parent, first]
        assert not pool.younger[block], "the list of siblings does not begin at its head"
        while block in siblings:
            siblings.remove(block)
            older = int(pool.older[block])
            assert not older or pool.younger[older] == block, "the links of siblings disagree"
            block = older
        assert not block, "a block of another parent is among the siblings"
        assert not siblings, "a block is not among its siblings"
