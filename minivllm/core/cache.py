"""The KV cache of all groups: block tables of the running rows, prefix hits, growth, trimming, publication.

Group 0 leads: a prefix hit is a chain in its pool, and it keeps every block of a sequence.  A sliding-window group
follows: it keeps the blocks that its window still sees, and each of its cached blocks hangs on the block of group 0
with the same content, so it needs no chain of its own::

    group 0   [b4]──[b9]──[b7]──[b2]      chain by parent
    group 1     .     .   [c3]  [c8]      window of two blocks; c3 hangs on b7, c8 on b2
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .blocks import NO_BLOCKS

if TYPE_CHECKING:
    from .blocks import BlockPool
    from .request import Seq
    from .slots import Slots


class KVCache:
    """Owns the pools; writes ``slots.table`` and ``slots.blocks`` and notes each change for the device."""

    def __init__(self, pools: list[BlockPool], windows: list[int | None], slots: Slots, prefix: bool = True) -> None:
        self.pools, self.slots, self.block, self.prefix = pools, slots, slots.block, prefix
        self.windows = [None, *windows[1:]]  # the leading group keeps all its blocks
        self.table: list[np.ndarray] = []  # changes since ``changes``, as in plan.Delta
        self.trims: list[tuple[int, int, int, int]] = []
        self.copies: list[tuple[int, int, int]] = []

    # ---- questions -----------------------------------------------------------------------------------------------

    @property
    def available(self) -> int:
        """Blocks that the scarcest pool can give."""
        return min(p.available for p in self.pools)

    def blocks_for(self, tokens: int | np.ndarray):
        return -(-tokens // self.block)

    def worst(self, group: int, prompt: int, end: int, n: int = 1) -> int:
        """Blocks that a request of n branches can hold at once in a group, if it runs alone."""
        shared = (prompt - 1) // self.block  # full blocks below prompt - 1, where branches fork
        whole = shared + n * (self.blocks_for(end) - shared)
        return whole if self.windows[group] is None else min(whole, shared * (n > 1) + n * self.at_once(group, end))

    def at_once(self, group: int, tokens: int) -> int:
        """Blocks without which a row of so many tokens cannot go on: all of them, or what its window still sees (chunks
        are cut to the blocks that there are)."""
        window = self.windows[group]
        return self.blocks_for(tokens if window is None else min(tokens, window + 2 * self.block))

    def fits_alone(self, prompt: int, end: int, n: int = 1) -> bool:
        return all(self.worst(g, prompt, end, n) <= p.total - 1 for g, p in enumerate(self.pools))

    def lookup(self, seq: Seq) -> list[np.ndarray]:
        """The longest usable prefix hit: blocks per group (null where a window no longer sees them).  At least one
        known token is left to compute.  Takes no reference."""
        none = [NO_BLOCKS] * len(self.pools)
        usable = (seq.known - 1) // self.block
        if not self.prefix or usable <= 0:
            return none
        lead = self.pools[0]
        keys = lead.keys_of(seq.tokens[: seq.known], seq.request.salt, seq.keys)[:usable]
        chain = lead.lookup(keys, seq.tokens, seq.request.salt)
        if not len(chain) or len(self.pools) == 1:
            return [chain] if len(chain) else none
        rows = seq.tokens[: len(chain) * self.block].reshape(-1, self.block)
        found = [
            np.array([pool.follow(keys[i], lead.follower_of(b), rows[i]) for i, b in enumerate(chain.tolist())])
            for pool in self.pools[1:]
        ]
        for n in range(len(chain), 0, -1):
            firsts = [0 if w is None else max(0, n * self.block - w + 1) // self.block for w in self.windows[1:]]
            if all((f[first:n] >= 0).all() for f, first in zip(found, firsts, strict=True)):
                follow = [
                    np.where(np.arange(n) >= a, f[:n], 0).astype(np.int32) for f, a in zip(found, firsts, strict=True)
                ]
                return [chain[:n], *follow]
        return none

    # ---- a row's table -------------------------------------------------------------------------------------------

    def adopt(self, slot: int, hit: list[np.ndarray]) -> None:
        """Start a row's tables with a prefix hit.  Counts the tokens as computed."""
        for g, blocks in enumerate(hit):
            self.pools[g].hit(blocks[blocks > 0])
            self.pools[g].share(blocks[blocks > 0])
            self._append(g, np.full(len(blocks), slot, np.int32), np.arange(len(blocks), dtype=np.int32), blocks)
            self.slots.blocks[g, slot] = len(blocks)
            self.slots.trimmed[g, slot] = int((blocks == 0).sum())
        self.slots.published[slot] = len(hit[0])
        self.slots.computed[slot] = len(hit[0]) * self.block
        self.pools[0].queries += int(self.slots.known[slot])

    def missing(self, slots: np.ndarray, upto: np.ndarray) -> np.ndarray:
        """Blocks i32 [G, n] that rows lack to hold ``upto`` tokens each."""
        return np.maximum(self.blocks_for(upto)[None, :] - self.slots.blocks[:, slots], 0)

    def can_take(self, missing: np.ndarray) -> bool:
        return all(int(need) <= pool.available for need, pool in zip(missing.sum(axis=1), self.pools, strict=True))

    def grow(self, slots: np.ndarray, missing: np.ndarray) -> None:
        """Give rows the blocks that ``missing`` counts; ``can_take`` has said that there are so many."""
        for g, pool in enumerate(self.pools):
            need = missing[g]
            total = int(need.sum())
            if not total:
                continue
            blocks = pool.take(total)
            rows = np.repeat(slots, need)
            start = np.repeat(self.slots.blocks[g, slots] - (np.cumsum(need) - need), need)
            self._append(g, rows, (start + np.arange(total)).astype(np.int32), blocks)
            self.slots.blocks[g, slots] += need

    def reserve(self, slot: int, tokens: int) -> None:
        """Give a row at once what it needs to reach ``tokens``; the caller has checked that it is there."""
        have = self.slots.blocks[:, slot]
        want = np.array([self.at_once(g, tokens) for g in range(len(self.pools))], np.int32)
        self.grow(np.array([slot], np.int32), np.maximum(want - have, 0)[:, None])

    def _append(self, group: int, slots: np.ndarray, index: np.ndarray, blocks: np.ndarray) -> None:
        self.slots.table[group, slots, index] = blocks
        if len(blocks):
            change = np.empty((len(blocks), 4), np.int32)
            change[:, 0], change[:, 1], change[:, 2], change[:, 3] = group, slots, index, blocks
            self.table.append(change)

    def fork(self, parent: int, child: int, computed: int) -> None:
        """The child shares the parent's full blocks and gets a copy of the one that is partly written; the caller has
        asked ``can_take`` for one block a group."""
        full, part = divmod(computed, self.block)
        for g, pool in enumerate(self.pools):
            shared = self.slots.table[g, parent, :full].copy()
            pool.share(shared[shared > 0])
            self._append(g, np.full(full, child, np.int32), np.arange(full, dtype=np.int32), shared)
            self.slots.blocks[g, child] = full
            self.slots.trimmed[g, child] = self.slots.trimmed[g, parent]
            if part:
                new = pool.take(1)
                self._append(g, np.array([child], np.int32), np.array([full], np.int32), new)
                self.slots.blocks[g, child] = full + 1
                self.copies.append((g, int(self.slots.table[g, parent, full]), int(new[0])))
        self.slots.computed[child] = computed
        # A block that is full but not yet collected belongs to the parent to publish: the child starts after it.
        self.slots.published[child] = min(int(self.slots.published[parent]), full)

    def trim(self, slots: np.ndarray) -> None:
        """Give back blocks that no later query of these rows can see."""
        for g, window in enumerate(self.windows):
            if window is None or not len(slots):
                continue
            first = np.maximum(self.slots.computed[slots] - window + 1, 0) // self.block
            for i in np.flatnonzero(first > self.slots.trimmed[g, slots]).tolist():
                slot, a, b = int(slots[i]), int(self.slots.trimmed[g, slots[i]]), int(first[i])
                b = min(b, int(self.slots.published[slot])) if self.prefix else b  # a block is published before it goes
                if b <= a:
                    continue
                self.pools[g].release(self.slots.table[g, slot, a:b].copy())
                self.slots.table[g, slot, a:b] = 0
                self.slots.trimmed[g, slot] = b
                self.trims.append((g, slot, a, b - a))

    def release(self, slot: int) -> None:
        """Give back all blocks of a row, and forget what the device has not been told of it."""
        self.table = [t[t[:, 1] != slot] for t in self.table]
        self.trims = [t for t in self.trims if t[1] != slot]
        for g, pool in enumerate(self.pools):
            blocks = self.slots.table[g, slot, : self.slots.blocks[g, slot]].copy()
            self.copies = [c for c in self.copies if c[0] != g or c[2] not in blocks]
            pool.release(blocks)

    # ---- publication ---------------------------------------------------------------------------------------------

    def publish(self, slot: int, seq: Seq, done: int) -> None:
        """The first ``done`` tokens of a row are computed and collected: make its full blocks findable."""
        first, last = int(self.slots.published[slot]), done // self.block
        if not self.prefix or last <= first:
            return
        tokens = self.slots.tokens[slot]
        lead = self.pools[0]
        keys = lead.keys_of(tokens[: last * self.block], seq.request.salt, seq.keys)
        for i in range(first, last):
            parent = int(self.slots.table[0, slot, i - 1]) if i else lead.root(seq.request.salt)[0]
            if parent >= 0 and not lead.published(parent):
                break  # its parent collided with another key: the rest of the chain stays private
            row = tokens[i * self.block : (i + 1) * self.block]
            self._publish_one(0, slot, i, parent, keys[i], row)
            code = lead.follower_of(int(self.slots.table[0, slot, i]))
            for g in range(1, len(self.pools)):
                if self.slots.table[g, slot, i]:
                    self._publish_one(g, slot, i, code, keys[i], row)
        self.slots.published[slot] = last

    def _publish_one(self, g: int, slot: int, i: int, parent: int, key: int, row: np.ndarray) -> None:
        """Publish block i of a row; if a twin is cached already the row uses the twin and gives its own back."""
        pool, own = self.pools[g], int(self.slots.table[g, slot, i])
        if pool.published(own):
            return
        stands = pool.publish(own, parent, key, row, i, int(self.slots.tenant[slot]))
        if stands != own:
            pool.share(np.array([stands]))
            self._append(g, np.array([slot], np.int32), np.array([i], np.int32), np.array([stands], np.int32))
            pool.release(np.array([own]))

    def changes(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(table, trim, copy) of plan.Delta since the last call."""
        table = np.concatenate(self.table) if self.table else np.empty((0, 4), np.int32)
        if len(self.table) > 1:  # an entry may have changed twice (a twin took its place): the last word counts
            place = (table[:, 0].astype(np.int64) << 52) | (table[:, 1].astype(np.int64) << 26) | table[:, 2]
            _, last = np.unique(place[::-1], return_index=True)
            table = table[np.sort(len(table) - 1 - last)]
        trims = np.array(self.trims, np.int32).reshape(-1, 4)
        copies = np.array(self.copies, np.int32).reshape(-1, 3)
        self.table, self.trims, self.copies = [], [], []
        return table, trims, copies

    def check(self) -> None:
        """Every invariant of every pool against the tables of the running rows (for tests)."""
        for g, pool in enumerate(self.pools):
            pool.check([self.slots.table[g, s, : self.slots.blocks[g, s]] for s in self.slots.running.tolist()])
