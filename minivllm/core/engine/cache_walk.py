"""The full check of the KV cache, with every block, every table and every chain.

It is for tests, ``LLM.check`` and MINIVLLM_CHECK=1.  ``BlockPool.audit`` is the fast check of every step.
AssertionError names the inconsistency.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from minivllm.core.interfaces.attention import NULL_BLOCK

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .blocks import BlockPool
    from .slots import Slots


def walk(pools: list[BlockPool], s: Slots, retired: Sequence[tuple[int, np.ndarray]] = ()) -> None:
    """Compare the pools with the block tables of the running rows, and the blocks published for a row with its tokens.
    ``retired`` holds (group, blocks) that compressed rows have given up and that the device still reads."""
    for g, pool in enumerate(pools):
        tables = [s.table[g, slot, : s.blocks[g, slot]] for slot in s.running.tolist()]
        walk_pool(pool, [*tables, *(blocks for group, blocks in retired if group == g)])
    lead = pools[0]
    for slot in s.running.tolist():
        stored = s.computed[slot] - s.dropped[:, slot]
        assert (stored <= s.blocks[:, slot] * s.block).all(), f"slot {slot} lacks a block"
        before = lead.root(s.seq[slot].request.salt)[0]
        for i, block in enumerate(s.table[0, slot, : s.prefix_published[slot]].tolist()):
            row = s.tokens[slot, i * s.block : (i + 1) * s.block]
            if not lead.published(block):
                break  # its key collided, so this block and all later ones are unpublished
            assert lead.parent[block] == before, (
                f"slot {slot}: block {i} hangs on a block or salt of others"
            )
            assert (lead.tokens[block] == row).all(), (
                f"slot {slot}: block {i} is published with other tokens"
            )
            before = block


def walk_pool(pool: BlockPool, tables: list[np.ndarray]) -> None:
    """Check every invariant of ``BlockPool``; AssertionError names the broken one.  ``tables`` holds all block tables
    in use."""
    free = pool._free[: pool.free]
    assert len(np.unique(free)) == len(free) and NULL_BLOCK not in free, (
        "a block is twice in the free list"
    )
    assert not pool.ref[free].any() and not pool.key[free].any(), (
        "a free block is held or published"
    )
    held, cached = pool.ref > 0, pool.key != 0
    assert held.sum() == pool.held and (cached & ~held).sum() == pool.idle, (
        "the counts of held and idle blocks"
    )
    assert pool.free + pool.held + pool.idle == pool.total - 1, "a block is lost"
    assert len(pool.index) == cached.sum(), "the index and the published blocks differ in number"
    for key, block in pool.index.items():
        assert pool.key[block] == key, "the index names a block with another key"
        assert pool.first[block] == pool.tokens[block, 0], "a block's first token is noted wrongly"
    lists: dict[tuple[int, int], set[int]] = {}
    for block in np.flatnonzero(cached).tolist():
        lists.setdefault((int(pool.parent[block]), int(pool.tokens[block, 0])), set()).add(block)
    assert lists.keys() == pool.youngest.keys(), "the lists of siblings and the parents differ"
    assert pool.children == Counter(pool.parent[cached].tolist()), (
        "the numbers of children are wrong"
    )
    for (parent, first), children in lists.items():
        assert parent < 0 or (cached[parent] and pool.tokens[parent, -1] >= 0), (
            "a cached block has lost its parent"
        )
        assert parent < 0 or held[parent] or not held[list(children)].any(), (
            "a block is held and its parent is not"
        )
        block = pool.youngest[parent, first]
        assert not pool.younger[block], "the list of siblings does not begin at its head"
        while block in children:
            children.remove(block)
            older = int(pool.older[block])
            assert not older or pool.younger[older] == block, "the links of siblings disagree"
            block = older
        assert not block and not children, "a block is not among its siblings"
    assert not pool.new, "the evictor has not heard of a published block"
    refs = np.zeros(pool.total, np.int32)
    for t in tables:
        np.add.at(refs, t[t != NULL_BLOCK], 1)
    assert (refs == pool.ref).all(), "the reference counts and the block tables differ"
