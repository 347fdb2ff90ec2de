"""The KV cache of all groups: block tables of the running rows, prefix hits, growth, trimming, publication.

Group 0 is the leading group: a prefix hit is a chain in its pool, and it keeps every block of a sequence.  A
sliding-window group follows it.  It keeps the blocks that its window still covers, and the parent of each of its cached
blocks is the block of group 0 with the same content.  So it needs no chain::

    group 0   [b4]──[b9]──[b7]──[b2]      chain by parent
    group 1     .     .   [c3]  [c8]      window of two blocks; the parent of c3 is b7, of c8 b2

A hit may end inside a block. If the next cached block of the chain begins with the tokens that follow, it is copied
into a new block of the row (copy-on-write), and the row computes from there.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from .blocks import NO_BLOCKS
from .cache_walk import walk
from .checkpoints import OPENING
from .compaction import Compaction
from .tail_use import TailUse
from .taps import most_cached

if TYPE_CHECKING:
    from .blocks import BlockPool, Salt
    from .checkpoints import Checkpoints
    from .request import Seq
    from .slots import Slots
    from .tiers import Tiers


Count = TypeVar("Count", int, np.ndarray)  # a number of tokens or blocks, or a column of numbers
RUN = 4  # smallest number of blocks of a row that one call publishes (enters into the prefix cache)
MAX_WATCHED = 8192  # keys that ``hints`` may watch in the pool, in addition to four per sequence


class KVCache:
    """Block pools of all KV groups, and the block tables of the running rows.  It writes ``slots.table`` and
    ``slots.blocks``, and records each change for the device."""

    def __init__(
        self,
        pools: list[BlockPool],
        windows: list[int | None],
        slots: Slots,
        prefix: bool = True,
        partial: bool = True,
        checkpoints: Checkpoints | None = None,
    ) -> None:
        self.pools, self.slots, self.block = pools, slots, slots.block
        # None for a model without recurrent states. Without space for a checkpoint no prefix hit is usable.
        self.checkpoints = checkpoints
        self.prefix = prefix = prefix and (checkpoints is None or checkpoints.count > 0)
        # a hit may end inside a block, which is copied
        self.partial = prefix and partial and checkpoints is None
        if checkpoints is not None:
            pools[0].forgotten = checkpoints.drop
        self.copied = 0  # tokens not computed thanks to copied blocks
        self.tails = TailUse()
        # Group 0 keeps all blocks, because prefix hits are chains in this group.
        self.windows = [None, *windows[1:]] if prefix else windows
        self.limited = [
            window is not None for window in windows
        ]  # a group's layers have a sliding window
        self.slides = any(self.windows)
        self.table: list[np.ndarray] = []  # changes since ``changes``, as in plan.Delta
        self.trims: list[tuple[int, int, int, int]] = []
        self.copies: list[tuple[int, int, int]] = []
        self.states: list[tuple[int, int]] = []
        self.saves: list[tuple[int, int, int, int]] = []
        self.compacts = False  # rows may be compressed
        # each step is planned in full while fewer blocks per running row are available (``pressure``)
        self.margin = 0
        self.compactions: list[Compaction] = []
        self.read: list[Compaction] = []  # of ``Delta.kept`` of the last changes
        self.watched = 0  # upper bound of the sequences in ``pools[0].watch``
        self.duplicates = False  # a cached equal block replaced a row's block since ``changes``
        self.tiers: Tiers | None = None  # the storage tiers below device memory, or None
        # the last lookup of a model with states: sequence, blocks looked for, length of the chain
        self.looked: tuple[Seq | None, int, int] = (None, 0, 0)

    # ---- questions ---------------------------------------------------------------------------------------------------

    @property
    def available(self) -> int:
        """Return the number of blocks that the pool with the fewest can still supply."""
        return min(p.available for p in self.pools)

    def blocks_for(self, tokens: Count) -> Count:
        return -(-tokens // self.block)

    def worst(self, group: int, prompt: int, end: int, n: int = 1) -> int:
        """Return the most blocks that a request of ``n`` branches can hold at a time in a group when it runs alone.
        ``prompt`` and ``end`` are its lengths in tokens at the start and at the end."""
        shared = (prompt - 1) // self.block  # full blocks below prompt - 1, where branches fork
        whole = shared + n * (self.blocks_for(end) - shared)
        return min(whole, shared * (n > 1) + n * self.at_once(group, end))

    def at_once(self, group: int, tokens: int) -> int:
        """Return the blocks that a row of ``tokens`` tokens must hold at the same time in a group.  That is all of its
        blocks, or in a sliding-window group the window plus two blocks.  Longer chunks are cut to the available
        blocks."""
        window = self.windows[group]
        return self.blocks_for(tokens if window is None else min(tokens, window + 2 * self.block))

    def fits_alone(self, prompt: int, end: int, n: int = 1) -> bool:
        return all(self.worst(g, prompt, end, n) <= p.total - 1 for g, p in enumerate(self.pools))

    def has_room(self, hit: list[np.ndarray], tokens: int, spare: int, beside: int = 0) -> bool:
        """Return whether every pool can supply a new row of ``tokens`` tokens and keep ``spare`` blocks.  ``hit``
        has the row's cached blocks for each group.  ``beside`` is the number of tokens of a second row that enters
        with it, 0 for none."""
        for g, (pool, blocks) in enumerate(zip(self.pools, hit, strict=True)):
            own = blocks[blocks > 0] if g else blocks
            idle = pool.ref.take(own).tolist().count(0) if len(own) else 0
            need = self.at_once(g, tokens) - len(own) + self.at_once(g, beside)
            if need + spare > pool.available - idle:
                return False
        return True

    def room(self, slot: int, chunk: int, promised: int = 0) -> tuple[int, int]:
        """Return (tokens, blocks): the tokens of a chunk that fit, and the new blocks that they need in a group.
        The row's own blocks and the available blocks that are not ``promised`` to other rows count."""
        s = self.slots
        have, stored = s.blocks[:, slot], s.computed[slot] - s.dropped[:, slot]
        room = (have + (self.available - promised)) * s.block - stored
        chunk = max(0, min(chunk, int(room.min())))
        return chunk, max(0, int((self.blocks_for(stored + chunk) - have).max()))

    def lookup(self, seq: Seq, known: int) -> list[np.ndarray]:
        """Return the longest usable prefix hit of a sequence, as block ids i32 for each KV group.  A block before
        the sliding window of a group is the null block.  At least one of the first ``known`` tokens is left to
        compute.  No reference is taken."""
        none = [NO_BLOCKS] * len(self.pools)
        usable = (known - 1) // self.block
        if not self.prefix or usable <= 0:
            return none
        lead = self.pools[0]
        keys = seq.keys
        chain = lead.lookup(seq.tokens, seq.request.salt, keys, usable)
        if self.checkpoints is not None:
            self.looked = seq, usable, len(chain)
            chain = chain[: self.checkpoints.usable(chain)]
        if len(self.pools) == 1:
            return [chain]
        rows = seq.tokens[: len(chain) * self.block].reshape(-1, self.block)
        found = [
            np.array(
                [
                    pool.follow(keys[i], lead.follower_of(b), rows[i])
                    for i, b in enumerate(chain.tolist())
                ]
            )
            for pool in self.pools[1:]
        ]
        for n in range(len(chain), 0, -1):
            firsts = [self.first_seen(w, n) for w in self.windows[1:]]
            if self.checkpoints is not None and int(chain[n - 1]) not in self.checkpoints.of_block:
                continue
            if all((f[first:n] >= 0).all() for f, first in zip(found, firsts, strict=True)):
                follow = [
                    np.where(np.arange(n) >= a, f[:n], 0).astype(np.int32)
                    for f, a in zip(found, firsts, strict=True)
                ]
                return [chain[:n], *follow]
        return none

    def first_seen(self, window: int | None, blocks: int) -> int:
        """Return the index of the first block that the token after ``blocks`` blocks attends to."""
        return 0 if window is None else max(0, blocks * self.block - window + 1) // self.block

    def hints(self, seqs: list[Seq]) -> np.ndarray:
        """Return i32 [n]: the tokens that a prefix hit would save for each waiting sequence, judged only by keys.
        The result per sequence is stored in ``seq.hint``, in blocks.  It stays correct while the last block found is
        cached and the next block is not.  The pool clears it otherwise, so that a call in every step is cheap."""
        if not self.prefix or len(self.pools) > 1:
            hits = [self.lookup(seq, most_cached(seq, seq.known)) for seq in seqs]
            blocks = [len(hit[0]) for hit in hits]
        elif self.checkpoints is not None:
            blocks = [self._state_hint(seq, self.checkpoints) for seq in seqs]
        else:
            # most watching sequences have left the queue
            if self.watched > MAX_WATCHED + 4 * len(seqs):
                for key in list(self.pools[0].watch):
                    self.pools[0].void(key)
                self.watched = 0
            blocks = [self._hint(seq) if seq.hint is None else seq.hint for seq in seqs]
        return np.array(blocks, np.int32) * self.block

    def _state_hint(self, seq: Seq, checkpoints: Checkpoints) -> int:
        """Return the number of blocks of the longest hit that ends at a checkpoint.  The stored hint stays correct
        until a block receives or loses a checkpoint: a chain that becomes shorter than the hit loses the checkpoint
        at its end."""
        if seq.hint is None or seq.hinted != checkpoints.changes:
            n, index = self.cached_blocks(seq), self.pools[0].index
            while n and index[seq.keys[n - 1]] not in checkpoints.of_block:
                n -= 1
            seq.hint, seq.hinted = n, checkpoints.changes
        return seq.hint

    def _usable(self, seq: Seq) -> int:
        """Return the blocks of a waiting sequence that may come from the prefix cache."""
        return (most_cached(seq, seq.known) - 1) // self.block

    def cached_blocks(self, seq: Seq) -> int:
        """Return how many of a sequence's first blocks are cached, and hash the next one."""
        lead, keys, usable = self.pools[0], seq.keys, self._usable(seq)
        # A cached block's parent is cached too, so the cached blocks are a prefix of the keys.
        hashed = min(len(keys), usable)
        n = bisect_left(keys, True, hi=hashed, key=lambda key: key not in lead.index)
        while n == hashed < usable:  # a block is hashed only if all earlier blocks are cached
            hashed += 1
            n += (
                lead.keys_of(seq.tokens[: hashed * self.block], seq.request.salt, keys)[n]
                in lead.index
            )
        return n

    def _hint(self, seq: Seq) -> int:
        n, usable, lead = self.cached_blocks(seq), self._usable(seq), self.pools[0]
        for key in seq.keys[max(n - 1, 0) : min(n + 1, usable)]:
            lead.watch.setdefault(key, []).append(seq)
        self.watched += 2
        seq.hint = n
        return n

    # ---- a row's table -----------------------------------------------------------------------------------------------

    def adopt(self, slot: int, hit: list[np.ndarray], known: int) -> int:
        """Start a row's block tables with its prefix hit, and return the number of tokens that count as computed.
        ``hit`` has the cached blocks i32 of each group for the first ``known`` tokens.  A cached block whose first
        tokens continue the row is copied too."""
        n = len(hit[0])
        for g, blocks in enumerate(hit if n else ()):
            own = blocks[blocks > 0] if g else blocks
            self.pools[g].hit(own, len(own) * self.block)
            self.pools[g].share(own)
            self._append(g, slot, np.arange(n), blocks)
            self.slots.blocks[g, slot] = n
            self.slots.trimmed[g, slot] = n - len(own)
        self.slots.prefix_published[slot] = n
        filled = n if self.tiers is None else self._fill(self.tiers, slot, n)
        if self.checkpoints is not None and self.prefix:
            self._adopt_states(self.checkpoints, slot, hit[0], filled)
        self.slots.computed[slot] = filled * self.block
        if filled == n:
            last = int(hit[0][-1]) if n else None
            self.slots.computed[slot] += self._copy_partial(slot, last, known)
        if self.prefix:
            self.pools[0].queries += known
            self.pools[0].count((known - 1) // self.block, n)
        return int(self.slots.computed[slot])

    def _fill(self, tiers: Tiers, slot: int, n: int) -> int:
        """Extend a row's prefix hit of ``n`` blocks by pages that were loaded from a tier, and return its new length in
        blocks.  The next delta writes the pages; the row publishes these blocks with its first step."""
        seq = self.slots.at(slot)
        m, tickets = tiers.take(seq, n)
        for g, pool in enumerate(self.pools):
            index = [i for group, i in tickets if group == g]
            if not index:
                continue
            blocks = pool.take(len(index))
            self._append(g, slot, np.array(index), blocks)
            for i, block in zip(index, blocks.tolist(), strict=True):
                tiers.fill(g, block, tickets[g, i])
        if m > n:
            self.slots.blocks[:, slot] = m
        if m > n and self.checkpoints is not None:
            ticket = tickets[tiers.states, m - 1]
            tiers.fill(tiers.states, slot, ticket)
            copy = self.checkpoints.reserve(slot, m)
            if copy is not None:
                tiers.fill(tiers.states, copy, ticket)
        tiers.leave(seq)
        return m

    def _adopt_states(
        self, checkpoints: Checkpoints, slot: int, hit: np.ndarray, filled: int
    ) -> None:
        """Start a row from the checkpoint of recurrent states at the end of its prefix hit, and reserve checkpoints to
        write at later points of its prompt.  ``hit`` holds the cached blocks i32 of the leading group.  If the row has
        more blocks than that (``filled``), its states come from a tier."""
        seq, n = self.slots.at(slot), filled
        if n and n == len(hit):
            self.states.append((checkpoints.use(int(hit[-1])), slot))
        last = (seq.known - 1) // self.block
        end = max(0, seq.known - 1 - OPENING) // self.block or last
        cached = self.looked[2]
        if self.looked[:2] != (seq, last):  # the hit was looked up for fewer tokens, or not at all
            cached = len(self.pools[0].lookup(seq.tokens, seq.request.salt, seq.keys, last))
        for which, blocks in enumerate(sorted({end, cached})):
            index = checkpoints.reserve(slot, blocks) if blocks > n else None
            if index is not None:
                self.saves.append((slot, which, blocks * self.block, index))

    def _copy_partial(self, slot: int, parent: int | None, known: int) -> int:
        """Copy the cached block whose first tokens continue the row after its prefix hit, and return the number of
        shared tokens.  ``parent`` is the last hit block, None without a hit; ``known`` is the row's length in
        tokens. 0 means that nothing was copied.  The device reads the source block when it applies the next step's
        delta, before it writes any block.  So the source needs no reference.  If it is taken for another row, that
        row writes it later."""
        seq, n = self.slots.at(slot), int(self.slots.prefix_published[slot])
        wanted = seq.tokens[n * self.block : min((n + 1) * self.block, known - 1)]
        if not self.partial or not len(wanted) or not self.available:
            return 0
        lead = self.pools[0]
        first, shared = lead.partial(
            lead.root(seq.request.salt)[0] if parent is None else parent, wanted
        )
        if not shared:
            return 0
        sources = [first]
        for pool in self.pools[1:]:
            sources.append(
                pool.follow(int(lead.key[first]), lead.follower_of(first), lead.tokens[first])
            )
        if min(sources) < 0:
            return 0
        for g, (pool, source) in enumerate(zip(self.pools, sources, strict=True)):
            pool.hit(np.array([source], np.int32), shared)
            pool.touch(source)
            self._append_copy(g, slot, n, source)
        self.copied += shared
        if lead.tokens[first, -1] < 0:
            self.tails.copied()
        return shared

    def _append_copy(self, g: int, slot: int, index: int, source: int) -> None:
        """Append a new private block at ``index`` of a row's table.  The device copies the content of block ``source``
        into it before the next step."""
        new = self.pools[g].take(1)
        self._append(g, slot, [index], new)
        self.slots.blocks[g, slot] = index + 1
        # The device reads all sources before it writes copies. A source that is a pending copy is replaced by its
        # source.
        source = next((s for group, s, to in self.copies if group == g and to == source), source)
        self.copies.append((g, source, int(new[0])))

    def missing(self, slots: np.ndarray, upto: np.ndarray) -> np.ndarray:
        """Return i32 [G, n]: the blocks that each row lacks in each KV group to hold ``upto`` tokens."""
        s = self.slots
        stored = upto - s.dropped[:, slots] if self.compacts else upto
        return np.maximum(self.blocks_for(stored) - s.blocks[:, slots], 0)

    def can_take(self, missing: np.ndarray) -> bool:
        need = np.add.reduce(missing, axis=1).tolist()
        return all(n <= pool.available for n, pool in zip(need, self.pools, strict=True))

    def grow(self, slots: np.ndarray, missing: np.ndarray) -> None:
        """Append the number of new blocks in ``missing`` (i32 [G, n]) to the block table of each row.  The caller has
        checked ``can_take``."""
        for g, pool in enumerate(self.pools):
            at = missing[g].nonzero()[0]
            rows, need = slots[at].astype(np.intp), missing[g, at]
            if not (total := sum(need.tolist())):
                continue
            blocks, have = pool.take(total), self.slots.blocks[g, rows]
            self.slots.blocks[g, rows] = have + need
            if total > len(at):  # most steps add one block per row
                start = (have - (need.cumsum() - need)).repeat(need)
                rows, have = rows.repeat(need), start + np.arange(total)
            self._append(g, rows, have, blocks)

    def grow_chunk(self, slot: int, chunk: int) -> int:
        """Take blocks for as much of a chunk as fits, and return the tokens that fit."""
        chunk, _ = self.room(slot, chunk)
        row = np.array([slot], np.int32)
        self.grow(row, self.missing(row, self.slots.computed[row] + chunk))
        return chunk

    def reserve(self, slot: int, tokens: int) -> None:
        """Take all blocks that a row needs for ``tokens`` tokens.  The caller has checked that the blocks are
        available."""
        have = self.slots.blocks[:, slot]
        want = np.array([self.at_once(g, tokens) for g in range(len(self.pools))], np.int32)
        want = np.minimum(want, self.slots.table.shape[2])
        self.grow(np.array([slot], np.int32), np.maximum(want - have, 0)[:, None])

    def _append(self, group: int, slots: Any, index: Any, blocks: np.ndarray) -> None:
        self.slots.table[group, slots, index] = blocks
        if len(blocks):
            change = np.empty((len(blocks), 4), np.int32)
            change[:, 0], change[:, 1], change[:, 2], change[:, 3] = group, slots, index, blocks
            self.table.append(change)

    def fork(self, parent: int, child: int, computed: int) -> None:
        """Fill the child's block tables from the parent's.  The child shares the parent's full blocks and receives a
        copy of the partly written block.  ``computed`` is the length in tokens that the child takes over.  The caller
        has checked ``can_take`` for one block per group."""
        full, part = divmod(computed, self.block)
        for g, pool in enumerate(self.pools):
            shared = self.slots.table[g, parent, :full].copy()
            pool.share(shared[shared > 0])
            self._append(g, child, np.arange(full), shared)
            self.slots.blocks[g, child] = full
            self.slots.trimmed[g, child] = self.slots.trimmed[g, parent]
            if part:
                self._append_copy(g, child, full, int(self.slots.table[g, parent, full]))
        self.slots.computed[child] = computed
        if self.checkpoints is not None:
            # The parent's states may arrive with this same delta; then the child reads the parent's source.
            source = next((source for source, to in self.states if to == parent), parent)
            ticket = None if self.tiers is None else self.tiers.state_of(parent)
            if self.tiers is not None and ticket is not None:
                self.tiers.fill(self.tiers.states, child, ticket)
            else:
                self.states.append((source, child))
        # The parent publishes a block that is full but not yet collected, so the child publishes only later blocks.
        self.slots.prefix_published[child] = min(int(self.slots.prefix_published[parent]), full)

    def to_compact(self, slot: int, keep: int, private: bool = False) -> list[Compaction]:
        """Return the compressions of a row to ``keep`` tokens, one for each KV group that stores more tokens of it.
        Groups with a sliding window are not compressed.  The cache does not change.  ``private`` marks the blocks
        that no other row and no other cached block uses as removed from the prefix cache, so that the kept tokens
        move to them."""
        s, found = self.slots, []
        for g, pool in enumerate(self.pools):
            stored = int(s.computed[slot] - s.dropped[g, slot])
            if self.limited[g] or stored <= keep:
                continue
            blocks = s.table[g, slot, : s.blocks[g, slot]].copy()
            used, n = self.blocks_for(stored), self.blocks_for(keep)
            head = blocks[:n]
            own = (pool.ref[head] == 1) & (pool.key[head] == 0)
            first = used
            if private and self.prefix:
                first = pool.private_from(blocks[:used])
                own |= np.arange(n) >= first
            found.append(Compaction(g, slot, stored, keep, blocks, used, own, unpublished=first))
        return found

    def freed_by(self, one: Compaction) -> int:
        """Return the number of blocks that a compaction makes available, minus the blocks that it takes."""
        gone = np.concatenate(
            [one.blocks[: len(one.own)][~one.own], one.blocks[len(one.own) : one.used]]
        )
        return int(np.count_nonzero(self.pools[one.group].ref[gone] == 1)) - one.to_take

    def compact(self, compactions: list[Compaction]) -> None:
        """Compress a row as ``to_compact`` returned.  The caller has checked that its blocks are available.  The
        kept tokens move to blocks that no other row and no cached prefix uses: blocks of the row itself, then those
        reserved for it, then new ones.  The blocks that are read stay taken until the device has the order."""
        s = self.slots
        for one in compactions:
            g, slot, own = one.group, one.slot, one.own
            self.pools[g].unpublish(one.blocks[one.unpublished : one.used])
            head, spare = one.blocks[: len(own)], one.blocks[one.used :]
            reserved = spare[: one.lacking]
            fresh = self.pools[g].take(one.lacking - len(reserved))
            new = head.copy()
            new[~own] = np.concatenate([reserved, fresh])
            table = np.zeros(len(one.blocks) + len(fresh), np.int32)
            after = np.concatenate([new, spare[len(reserved) :]])
            table[: len(after)] = after
            before = np.zeros(len(table), np.int32)
            before[: len(one.blocks)] = one.blocks
            changed = np.flatnonzero(table != before)
            self._append(g, slot, changed, table[changed])
            one.retired = np.concatenate([head[~own], one.blocks[len(own) : one.used]])
            one.computed = int(s.computed[slot])
            s.blocks[g, slot] = len(after)
            s.dropped[g, slot] += one.stored - one.kept
            s.prefix_published[slot] = s.table.shape[2]  # no later block of the row is published
            self.compactions.append(one)
            self.duplicates = True

    def trim(self, slots: np.ndarray) -> None:
        """Release the blocks of these rows that lie before the sliding window of every later query.  With prefix
        caching a block is released only after its publication."""
        for g, window in enumerate(self.windows):
            if window is None or not len(slots):
                continue
            first = np.maximum(self.slots.least_computed(slots) - window + 1, 0) // self.block
            for i in np.flatnonzero(first > self.slots.trimmed[g, slots]).tolist():
                slot, a, b = int(slots[i]), int(self.slots.trimmed[g, slots[i]]), int(first[i])
                if self.prefix:  # the blocks must be published before they are released
                    b = min(b, int(self.slots.prefix_published[slot]))
                if b <= a:
                    continue
                self.pools[g].release(self.slots.table[g, slot, a:b].copy())
                self.slots.table[g, slot, a:b] = 0
                self.slots.trimmed[g, slot] = b
                self.trims.append((g, slot, a, b - a))

    def release(self, slot: int) -> None:
        """Release all blocks of a row, and remove the row's changes that have not been sent to the device."""
        self.table = [t[t[:, 1] != slot] for t in self.table]
        self.trims = [t for t in self.trims if t[1] != slot]
        for one in self.compactions:
            if one.slot == slot:
                self.pools[one.group].release(one.retired)
        self.compactions = [one for one in self.compactions if one.slot != slot]
        if self.checkpoints is not None:
            self.states = [one for one in self.states if one[1] != slot]
            self.saves = [one for one in self.saves if one[0] != slot]
            if self.tiers is not None:
                copies = [index for _, index in self.checkpoints.pending.get(slot, ())]
                self.tiers.cancel(self.tiers.states, np.array([slot, *copies]))
            self.checkpoints.release(slot)
        for g, pool in enumerate(self.pools):
            blocks = self.slots.table[g, slot, : self.slots.blocks[g, slot]].copy()
            pool.release(blocks)
            gone = blocks[pool.ref[blocks] == 0]  # a branch may still hold the other blocks
            self.copies = [c for c in self.copies if c[0] != g or c[2] not in gone]
            if self.tiers is not None:
                self.tiers.cancel(g, gone)

    # ---- publication -------------------------------------------------------------------------------------------------

    def publish(self, rows: list[tuple[int, int]]) -> None:
        """Publish the full blocks of each (slot, done), whose first ``done`` tokens are computed and collected.  Later
        requests can then share these blocks."""
        s, size = self.slots, self.block
        for slot, done in rows:
            first = int(s.prefix_published[slot])
            last = done // size
            if last <= first:
                continue
            seq = s.at(slot)
            salt = seq.request.salt
            tokens = s.tokens[slot, : last * size]
            keys = self.pools[0].keys_of(tokens, salt, seq.keys)
            whole = tokens.reshape(last, size)
            if not self._publish_run(slot, first, salt, keys[first:last], whole[first:]):
                for i in range(first, last):
                    if not self._publish_index(slot, i, salt, keys[i], whole[i]):
                        break  # The parent's key collided, so the rest of the chain stays unpublished.
            s.prefix_published[slot] = last
            if self.tiers is not None:
                self.tiers.published(slot, first, last)
            if self.checkpoints is not None:
                self._publish_states(self.checkpoints, slot, last)
        for pool in self.pools:
            pool.announce()

    def _publish_states(self, checkpoints: Checkpoints, slot: int, blocks: int) -> None:
        """Assign the row's checkpoints of recurrent states to its first ``blocks`` blocks.  Blocks from the first
        unpublished one on (a key collided) get none."""
        table = self.slots.table[0, slot, :blocks]
        private = np.flatnonzero(self.pools[0].key[table] == 0)
        checkpoints.publish(slot, table, int(private[0]) if len(private) else blocks)

    def publish_tail(self, slot: int, seq: Seq) -> None:
        """Publish the partly filled last block of a sequence that ends, so that a later prompt with the same beginning
        can copy it, unless the cache is full and such blocks are rarely used.  The last token was drawn but never
        computed, so it is not included."""
        done = int(self.slots.collected[slot]) - 1  # the last token was drawn but not computed
        i, part = divmod(done, self.block)
        if (
            not self.partial
            or not part
            or done < seq.known
            or self.slots.dropped[:, slot].any()
            or self.slots.prefix_published[slot] < i
        ):
            return
        lead = self.pools[0]
        if not self.tails.pays(full=not lead.free):
            return
        self.tails.cached()
        salt, tokens = seq.request.salt, self.slots.tokens[slot, :done]
        lead.keys_of(tokens[: i * self.block], salt, seq.keys)  # a branch has no keys yet
        row = np.full(self.block, -1, np.int32)
        row[:part] = tokens[i * self.block :]
        key = lead.hash_fn(seq.keys[i - 1] if i else lead.root(salt)[1], row[:part].tobytes())
        self._publish_index(slot, i, salt, key, row)
        for pool in self.pools:
            pool.announce()

    def _publish_run(
        self, slot: int, first: int, salt: Salt, keys: list[int], tokens: np.ndarray
    ) -> bool:
        """Publish the blocks of a row from index ``first`` on at once, with these keys and tokens i32 [n, block].
        Return False without a change if they must be published one by one, see ``BlockPool.publish_run``."""
        lead, last = self.pools[0], first + len(keys)
        if len(self.pools) > 1 or len(keys) < RUN:
            return False
        table = self.slots.table[0, slot]
        parent = int(table[first - 1]) if first else lead.root(salt)[0]
        if parent >= 0 and not lead.published(parent):
            return False
        request, tenant = self.slots.at(slot).request, int(self.slots.tenant[slot])
        session, kinds = 0, None
        if request.turn is not None:
            session, kinds = request.turn.session, [request.kind_of(i) for i in range(first, last)]
        return lead.publish_run(
            table[first:last], parent, keys, tokens, first, tenant, session, kinds
        )

    def _publish_index(self, slot: int, i: int, salt: Salt, key: int, row: np.ndarray) -> bool:
        """Publish the blocks at index ``i`` of a row's tables in all KV groups.  Return False if the block of the
        leading group or its parent stays unpublished.  No block can then have it as parent."""
        lead = self.pools[0]
        parent = int(self.slots.table[0, slot, i - 1]) if i else lead.root(salt)[0]
        if parent >= 0 and not lead.published(parent):
            return False
        self._publish_one(0, slot, i, parent, key, row)
        block = int(self.slots.table[0, slot, i])
        if not lead.published(block):
            return False
        for g in range(1, len(self.pools)):
            if self.slots.table[g, slot, i]:
                self._publish_one(g, slot, i, lead.follower_of(block), key, row)
        return True

    def _publish_one(
        self, g: int, slot: int, i: int, parent: int, key: int, row: np.ndarray
    ) -> None:
        """Publish block i of a row in KV group g.  If an equal block is cached already, the row shares that block and
        releases its own."""
        pool, own = self.pools[g], int(self.slots.table[g, slot, i])
        if pool.published(own):
            return
        request, tenant = self.slots.at(slot).request, int(self.slots.tenant[slot])
        session, kind = 0, 0
        if request.turn is not None:
            session, kind = request.turn.session, request.kind_of(i)
        stands = pool.publish(own, parent, key, row, i, tenant, session, kind)
        if stands != own:
            self.duplicates = True
            pool.share(np.array([stands]))
            self._append(g, slot, [i], np.array([stands], np.int32))
            pool.release(np.array([own]))

    def changes(self) -> dict[str, Any]:
        """Return the fields of plan.Delta that this class keeps, of the time since the last call; no empty ones."""
        found = {}
        if self.table:
            table = np.concatenate(self.table)
            if self.duplicates:  # An entry may have changed twice; the last change is kept.
                place = (
                    (table[:, 0].astype(np.int64) << 52)
                    | (table[:, 1].astype(np.int64) << 26)
                    | table[:, 2]
                )
                _, last = np.unique(place[::-1], return_index=True)
                table = table[np.sort(len(table) - 1 - last)]
            found["table"] = table
        if self.trims:
            found["trim"] = np.array(self.trims, np.int32)
        if self.copies:
            found["copy"] = np.array(self.copies, np.int32)
        if self.states:
            found["state"] = np.array(self.states, np.int32)
        if self.saves:
            found["save"] = np.array(self.saves, np.int32)
        if self.compactions:
            found["compact"] = np.array([one.row for one in self.compactions], np.int32)
            found["sources"] = np.concatenate([one.sources for one in self.compactions])
            read = [i for i, one in enumerate(self.compactions) if one.reader is not None]
            if read:
                found["kept"] = np.array(read, np.int32)
                self.read += [self.compactions[i] for i in read]
            for one in self.compactions:
                self.pools[one.group].release(one.retired)
            self.compactions = []
        if self.tiers is not None:
            found |= self.tiers.changes()
        self.states, self.saves = [], []
        self.table, self.trims, self.copies, self.duplicates = [], [], [], False
        return found

    def by_depth(self) -> dict[str, dict[str, int]]:
        """Return the blocks that prefix lookups looked for and found, by depth in the prompt.  The keys are ranges of
        block indices: "0" is the first block, then "1", "2-3", "4-7" and so on."""
        out: dict[str, dict[str, int]] = {}
        first, end = 0, 1  # range of depths of one entry

        def blocks(lookups: dict[int, int]) -> int:
            return sum(max(0, min(depth, end) - first) * n for depth, n in lookups.items())

        while queries := blocks(self.pools[0].queried):
            name = str(first) if end == first + 1 else f"{first}-{end - 1}"
            out[name] = {"queries": queries, "hits": blocks(self.pools[0].found)}
            first, end = end, 2 * end
        return out

    def audit(self) -> None:
        """Raise EngineDeadError if the block counters of a pool are inconsistent.  The time does not depend on the
        number of blocks."""
        for pool in self.pools:
            pool.audit(at_rest=not len(self.slots.running))

    def check(self) -> None:
        """Compare all block tables with the pools (see ``cache_walk``).  AssertionError names an inconsistency.  The
        check is slow."""
        retired = [(one.group, one.retired) for one in self.compactions]
        walk(self.pools, self.slots, retired)
        if self.checkpoints is not None:
            self.checkpoints.check(self.pools[0].key != 0)
        if self.tiers is not None:
            self.tiers.check()
