"""Prefixes that running rows are computing.  A new request with the same prefix waits for them.

Blocks are published once the step that computes them was collected.  Requests that arrive together would otherwise all
compute the prompt that they share::

    step 1    A computes its prompt          B, C: same prefix, wait
    step 2    (planned before step 1 ends)   B, C wait
    step 3    A decodes                      B, C enter with a prefix hit

Waiting costs B a step or two, and computing the prefix again would take at least as long.  Sequences behind B in the
queue may enter before it.  B waits only while the row that computes its prefix is in a step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from .taps import most_cached

if TYPE_CHECKING:
    from collections.abc import Container

    from .cache import KVCache
    from .request import Seq
    from .slots import Slots

LEAST_TOKENS = 256  # a new request waits only for a common prefix of this many tokens
# A plan makes at most this many new requests wait for a running row with the same prefix.
MOST_PASSED = 64


class Computing(NamedTuple):
    """A running row that is computing a long prompt."""

    serial: int  # serial number of the row's stay in its slot
    blocks: int  # count of full blocks of the row's tokens when it entered the slot
    # count of the row's blocks that were in the prefix cache when ``key`` was set
    published: int
    key: int  # key of the row's first block that is not in the prefix cache yet


class Underway:
    """The running rows that compute prompts of at least ``LEAST_TOKENS`` tokens, by the key of their first block that
    is not in the prefix cache yet."""

    def __init__(self, cache: KVCache, slots: Slots) -> None:
        self.cache = cache
        self.slots = slots
        self.rows: dict[int, Computing] = {}
        self.of_key: dict[int, int] = {}  # key -> slot
        # False for models with recurrent states, because their prefix hits need not end where a common
        # prefix ends, so that waiting might not help
        self.usable = cache.prefix and cache.checkpoints is None
        self.waits = 0  # count of the times that a plan passed over a new request
        self.delayed: list[Seq] = []  # requests that the last plan passed over

    def enter(self, slot: int) -> None:
        """Add a row to the rows that compute long prompts, after it has entered a slot; rows with short prompts are not
        added."""
        blocks = int(self.slots.known[slot]) // self.cache.block
        published = int(self.slots.prefix_published[slot])
        self._remove(slot)
        if self.usable and (blocks - published) * self.cache.block >= LEAST_TOKENS:
            self._store(slot, blocks, published)

    def refresh(self) -> None:
        """Remove rows whose prompts have entered the prefix cache, and update the keys of the other rows.

        Call it before ``delays``."""
        s = self.slots
        for slot, row in list(self.rows.items()):
            published = int(s.prefix_published[slot])
            if row.serial == s.serial[slot] and published == row.published:
                continue
            self._remove(slot)
            if row.serial == s.serial[slot] and published < row.blocks:
                self._store(slot, row.blocks, published)

    def delays(self, seq: Seq, planned: Container[int]) -> bool:
        """Return whether a waiting sequence should wait, because a running row computes a prefix that both have.

        ``planned`` has the slots of the rows that compute prompt chunks in the step that is being planned."""
        if not self.rows or seq.request.beams is not None:
            return False
        size = self.cache.block
        s = self.slots
        cached = self.cache.cached_blocks(seq)
        least = cached + -(-LEAST_TOKENS // size)
        if least > (most_cached(seq, seq.known) - 1) // size:
            return False
        slot = self.of_key.get(seq.keys[cached])
        if slot is None or self.rows[slot].blocks < least:
            return False
        if slot not in planned and s.step[slot] <= s.published:
            return False  # the running row lacks blocks, and does not go on in this step
        if self._keys(seq, least) != self._keys(s.at(slot), least):
            return False
        self.waits += 1
        return True

    def _store(self, slot: int, blocks: int, published: int) -> None:
        seq = self.slots.at(slot)
        key = self._keys(seq, published + 1)[published]
        row = Computing(int(self.slots.serial[slot]), blocks, published, key)
        self.rows[slot] = row
        self.of_key.setdefault(key, slot)

    def _remove(self, slot: int) -> None:
        row = self.rows.pop(slot, None)
        if row is not None and self.of_key.get(row.key) == slot:
            del self.of_key[row.key]

    def _keys(self, seq: Seq, blocks: int) -> list[int]:
        """Return the keys of the first ``blocks`` blocks of a sequence, which has as many full ones."""
        tokens = seq.tokens[: blocks * self.cache.block]
        return self.cache.pools[0].keys_of(tokens, seq.request.salt, seq.keys)[:blocks]
