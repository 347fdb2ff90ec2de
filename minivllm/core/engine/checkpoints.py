"""Copies of recurrent states behind cached blocks.  A prefix hit needs the KV blocks and the state behind the last
block.

    block    [b4]──[b9]──[b7]──[b2]──[b5]        cached chain of a prompt
    states          c1          c0               a hit is the first four blocks, or the first two

A row copies its states at two points of its prompt (``Delta.save``).  One is near the end, where the next turn of a
chat continues.  The other is where the prompt leaves a cached chain, because later prompts may leave it there too.  A
copy is assigned to its block once that block is published (entered into the prefix cache), and is freed with it.  If
all copies are in use, the least recently used one is evicted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

# Tokens between a copy of the states and the end of the prompt. A chat template ends a prompt with
# a few tokens that open the answer, and the next turn may render the answer without them.
OPENING = 16


class Checkpoints:
    """The copies of recurrent states, by the block of the leading group behind which they are.

    ``first`` is the index of the first copy among all states, and ``count`` the number of copies.
    """

    def __init__(self, first: int, count: int) -> None:
        self.count = count
        self.free = list(range(first + count - 1, first - 1, -1))
        # block -> index of the copy of the states at its end; the least recently used first
        self.of_block: dict[int, int] = {}
        # slot -> (number of blocks before the copy, index of the copy), for copies that are
        # reserved and not yet assigned to a cached block
        self.pending: dict[int, list[tuple[int, int]]] = {}
        self.evictions = 0
        self.changes = 0  # count of the times that a block got or lost a copy of states
        # callback(block, index) when a block receives a copy of states, and callback(index) when a
        # copy is removed
        self.published: Callable[[int, int], None] | None = None
        self.dropped: Callable[[int], None] | None = None

    def usable(self, chain: np.ndarray) -> int:
        """Return how many blocks of the cached chain ``chain`` i32 a prefix hit can use: those up to the last block
        with a copy of the recurrent states at its end."""
        for n in range(len(chain), 0, -1):
            if int(chain[n - 1]) in self.of_block:
                return n
        return 0

    def use(self, block: int) -> int:
        """Return the index of the copy of the states at the end of a block, and mark the copy as the most recently used
        one."""
        index = self.of_block.pop(block)
        self.of_block[block] = index
        return index

    def reserve(self, slot: int, blocks: int) -> int | None:
        """Reserve a copy of the recurrent states that a row has after its first ``blocks`` blocks, and return its
        index.  None if rows have reserved all copies."""
        if not self.free:
            if not self.of_block:
                return None
            self.drop(next(iter(self.of_block)))
            self.evictions += 1
        index = self.free.pop()
        self.pending.setdefault(slot, []).append((blocks, index))
        return index

    def publish(self, slot: int, table: np.ndarray, blocks: int) -> None:
        """Assign the reserved copies of a row to cached blocks.  The first ``blocks`` blocks of its block table
        ``table`` are in the prefix cache now.

        A copy belongs to the block at whose end it was made.  It is freed if this block has a copy already."""
        pending = self.pending.get(slot)
        if pending is None:
            return
        left = []
        for n, index in pending:
            if n > blocks:
                left.append((n, index))
            elif (block := int(table[n - 1])) in self.of_block:
                self.free.append(index)
            else:
                self.of_block[block] = index
                self.changes += 1
                if self.published is not None:
                    self.published(block, index)
        if left:
            self.pending[slot] = left
        else:
            del self.pending[slot]

    def drop(self, block: int) -> None:
        """Free the copy of the states at the end of a block, if there is one."""
        index = self.of_block.pop(block, None)
        if index is not None:
            if self.dropped is not None:
                self.dropped(index)
            self.free.append(index)
            self.changes += 1

    def release(self, slot: int) -> None:
        """Free the copies that a row has reserved and that belong to no cached block, because the row leaves its
        slot."""
        self.free += [index for _, index in self.pending.pop(slot, ())]

    def stats(self, state_bytes: int) -> dict[str, Any]:
        """Return the statistics of recurrent states; ``state_bytes`` is the size of the states of one sequence."""
        figures = {
            "bytes_per_sequence": state_bytes,
            "checkpoints": self.count,
            "cached": len(self.of_block),
            "evictions": self.evictions,
        }
        return {"states": figures}

    def check(self, published: np.ndarray) -> None:
        """Compare the checkpoints with the blocks in the prefix cache, ``published`` bool [blocks].

        AssertionError names the inconsistency."""
        held = [index for copies in self.pending.values() for _, index in copies]
        taken = [*self.free, *self.of_block.values(), *held]
        assert len(taken) == len(set(taken)) == self.count, "a copy of states is lost or held twice"
        assert all(published[block] for block in self.of_block), (
            "a copy of states has no cached block"
        )
