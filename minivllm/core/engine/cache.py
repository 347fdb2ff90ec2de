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
    from .blocks import BlockPool
    from .checkpoints import Checkpoints
    from .request import Seq
    from .slots import Slots
    from .tiers import Tiers


Count = TypeVar("Count", int, np.ndarray)  # one number of tokens or blocks, or an array of them
# ``KVCache.hints`` watches at most this many keys of blocks, and four more per waiting sequence.
MAX_WATCHED = 8192


class KVCache:
    """The block pools of all KV groups, and the block tables of the running rows.  It writes ``slots.table`` and
    ``slots.blocks``, and records each change to send it to the device with the next step."""

    def __init__(
        self,
        pools: list[BlockPool],
        windows: list[int | None],
        slots: Slots,
        prefix: bool = True,
        partial: bool = True,
        checkpoints: Checkpoints | None = None,
    ) -> None:
        self.pools = pools
        self.slots = slots
        self.block = slots.block
        # Copies of recurrent states; None for a model without recurrent states. If there is no
        # memory for copies, no prefix hit can be used.
        self.checkpoints = checkpoints
        self.prefix = prefix = prefix and (checkpoints is None or checkpoints.count > 0)
        # whether a prefix hit may end inside a block, which is copied then
        self.partial = prefix and partial and checkpoints is None
        if checkpoints is not None:
            pools[0].forgotten = checkpoints.drop
        self.copied = 0  # count of tokens that were not computed thanks to copied blocks
        self.tails = TailUse()
        # With prefix caching, group 0 keeps all blocks even if it has a sliding window, because
        # prefix hits are chains in this group.
        self.windows = [None, *windows[1:]] if prefix else windows
        # whether the layers of each group have a sliding window
        self.limited = [window is not None for window in windows]
        self.slides = any(self.windows)
        # changed table entries since the last call of ``changes`` (``Delta.table``)
        self.table: list[np.ndarray] = []
        self.trims: list[tuple[int, int, int, int]] = []
        self.copies: list[tuple[int, int, int]] = []
        self.states: list[tuple[int, int]] = []
        self.saves: list[tuple[int, int, int, int]] = []
        self.compacts = False  # whether rows may be compressed to fewer KV tokens
        # Blocks per running row. While fewer are available, every step is planned in full, so that
        # rows can be compressed in time (see ``pressure``).
        self.margin = 0
        self.compactions: list[Compaction] = []
        # compressions whose kept tokens the last delta asked the device to return
        self.read: list[Compaction] = []
        # upper bound of the count of entries in ``pools[0].watch`` (keys that clear stored hints)
        self.watched = 0
        # whether a cached block with equal content replaced a row's block since the last call of
        # ``changes``
        self.duplicates = False
        # storage behind device memory, such as CPU memory and disk, or None
        self.tiers: Tiers | None = None
        # The last prefix lookup for a model with recurrent states: the sequence, the number of
        # blocks looked for, and the number found.
        self.looked: tuple[Seq | None, int, int] = (None, 0, 0)

    # ---- questions ---------------------------------------------------------------------------------------------------

    @property
    def available(self) -> int:
        """Return the number of blocks that every pool can still supply, so that of the pool with the fewest."""
        return min(p.available for p in self.pools)

    def blocks_for(self, tokens: Count) -> Count:
        return -(-tokens // self.block)

    def worst(self, group: int, prompt: int, end: int, n: int = 1) -> int:
        """Return the most blocks that a request of ``n`` branches can hold at a time in a group when it runs alone.
        ``prompt`` and ``end`` are its lengths in tokens at the start and at the end."""
        # full blocks before the last prompt token, where branches fork
        shared = (prompt - 1) // self.block
        whole = shared + n * (self.blocks_for(end) - shared)
        return min(whole, shared * (n > 1) + n * self.at_once(group, end))

    def at_once(self, group: int, tokens: int) -> int:
        """Return the number of blocks that a row of ``tokens`` tokens must hold at the same time in a KV group.  That
        is all of its blocks, or in a sliding-window group the blocks of the window plus two.  A prompt chunk that needs
        more blocks than are available is shortened."""
        window = self.windows[group]
        return self.blocks_for(tokens if window is None else min(tokens, window + 2 * self.block))

    def fits_alone(self, prompt: int, end: int, n: int = 1) -> bool:
        return all(self.worst(g, prompt, end, n) <= p.total - 1 for g, p in enumerate(self.pools))

    def has_room(self, hit: list[np.ndarray], tokens: int, spare: int, beside: int = 0) -> bool:
        """Return whether every pool has blocks for a new row of ``tokens`` tokens and ``spare`` more.  ``hit`` has, for
        each KV group, the cached blocks that the row shares.  ``beside`` is the number of tokens of a second row that
        enters together with it, 0 for none."""
        for g, (pool, blocks) in enumerate(zip(self.pools, hit, strict=True)):
            own = blocks[blocks > 0] if g else blocks
            idle = pool.ref.take(own).tolist().count(0) if len(own) else 0
            whole = self.at_once(g, tokens) + self.at_once(g, beside)
            need = whole - len(own) + spare
            if need > pool.available - idle:
                return False
        return True

    def room(self, slot: int, chunk: int, promised: int = 0) -> tuple[int, int]:
        """Return (tokens, blocks) for a chunk of at most ``chunk`` next tokens of a row: how many of the tokens fit,
        and how many new blocks they need in the KV group that needs most.  The room is the row's own blocks and the
        available blocks except for ``promised`` ones."""
        s = self.slots
        have = s.blocks[:, slot]
        stored = s.computed[slot] - s.dropped[:, slot]
        left = self.available - promised
        room = (have + left) * s.block - stored
        chunk = max(0, min(chunk, int(room.min())))
        lacking = self.blocks_for(stored + chunk) - have
        return chunk, max(0, int(lacking.max()))

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
        leaders = [lead.follower_of(block) for block in chain.tolist()]
        following = []
        for pool in self.pools[1:]:
            # ``map`` ends with ``rows``, its shortest argument, so there is a result for each block
            found = map(pool.follow, keys, leaders, rows)
            following.append(np.array(list(found), np.int32))
        for n in range(len(chain), 0, -1):
            if self.checkpoints is not None and int(chain[n - 1]) not in self.checkpoints.of_block:
                continue
            hit = self._with_followers(chain[:n], following)
            if hit is not None:
                return hit
        return none

    def _with_followers(
        self, chain: np.ndarray, following: list[np.ndarray]
    ) -> list[np.ndarray] | None:
        """Return a chain of cached blocks i32 of the leading group with the blocks of the other groups, where the null
        block stands before a sliding window.  None if a block within a window is not cached.  ``following`` has the
        cached blocks of each other group, or -1 where there is none."""
        hit = [chain]
        n = len(chain)
        for window, blocks in zip(self.windows[1:], following, strict=True):
            first = self.first_seen(window, n)
            seen = blocks[:n].copy()
            if (seen[first:] < 0).any():
                return None
            seen[:first] = 0
            hit.append(seen)
        return hit

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
            # With too many watched keys, all are dropped, because most belong to sequences that
            # have left the queue.
            if self.watched > MAX_WATCHED + 4 * len(seqs):
                for key in list(self.pools[0].watch):
                    self.pools[0].void(key)
                self.watched = 0
            blocks = [self._hint(seq) if seq.hint is None else seq.hint for seq in seqs]
        return np.array(blocks, np.int32) * self.block

    def _state_hint(self, seq: Seq, checkpoints: Checkpoints) -> int:
        """Return the number of blocks of the longest usable prefix hit of a sequence for a model with recurrent states,
        which must end at a checkpoint (a copy of the states).

        The result is stored in ``seq.hint`` until a block receives or loses a checkpoint.  If the chain of cached
        blocks becomes shorter than the hit, the checkpoint at its end is lost too."""
        if seq.hint is None or seq.hinted != checkpoints.changes:
            n = self.cached_blocks(seq)
            index = self.pools[0].index
            while n and index[seq.keys[n - 1]] not in checkpoints.of_block:
                n -= 1
            seq.hint = n
            seq.hinted = checkpoints.changes
        return seq.hint

    def _usable(self, seq: Seq) -> int:
        """Return how many blocks of a waiting sequence may come from the prefix cache at most."""
        return (most_cached(seq, seq.known) - 1) // self.block

    def cached_blocks(self, seq: Seq) -> int:
        """Return how many of a sequence's first blocks are cached.  The key of the block after them is computed too."""
        lead = self.pools[0]
        keys = seq.keys
        usable = self._usable(seq)
        # A cached block's parent is cached too, so the cached blocks are a prefix of the keys.
        hashed = min(len(keys), usable)
        n = bisect_left(keys, True, hi=hashed, key=lambda key: key not in lead.index)
        # a block's key is computed only if all earlier blocks are cached
        while n == hashed < usable:
            hashed += 1
            tokens = seq.tokens[: hashed * self.block]
            lead.keys_of(tokens, seq.request.salt, keys)
            n += keys[n] in lead.index
        return n

    def _hint(self, seq: Seq) -> int:
        n = self.cached_blocks(seq)
        watch = self.pools[0].watch
        first = max(n - 1, 0)
        end = min(n + 1, self._usable(seq))
        for key in seq.keys[first:end]:
            watch.setdefault(key, []).append(seq)
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
            self.append(g, slot, np.arange(n), blocks)
            self.slots.blocks[g, slot] = n
            self.slots.trimmed[g, slot] = n - len(own)
        self.slots.prefix_published[slot] = n
        filled = n
        if self.tiers is not None:
            filled = self._fill(self.tiers, slot, n)
        if self.checkpoints is not None and self.prefix:
            self._adopt_states(self.checkpoints, slot, hit[0], filled)
        computed = filled * self.block
        if filled == n:
            last = int(hit[0][-1]) if n else None
            computed += self._copy_partial(slot, last, known)
        self.slots.computed[slot] = computed
        if self.prefix:
            lead = self.pools[0]
            lead.queries += known
            lead.count((known - 1) // self.block, n)
        return computed

    def _fill(self, tiers: Tiers, slot: int, n: int) -> int:
        """Extend a row's prefix hit of ``n`` blocks by the KV pages that were loaded from a tier (CPU memory or disk),
        and return the new length in blocks.  The next delta writes the pages into new blocks of the row.  These blocks
        enter the prefix cache with the row's first step."""
        seq = self.slots.at(slot)
        m, tickets = tiers.take(seq, n)
        for g, pool in enumerate(self.pools):
            index = [i for group, i in tickets if group == g]
            if not index:
                continue
            blocks = pool.take(len(index))
            self.append(g, slot, np.array(index), blocks)
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
        seq = self.slots.at(slot)
        n = filled
        if n and n == len(hit):
            self.states.append((checkpoints.use(int(hit[-1])), slot))
        last = (seq.known - 1) // self.block
        before_opening = max(0, seq.known - 1 - OPENING)
        end = before_opening // self.block or last
        looked, most, cached = self.looked
        if (
            looked is not seq or most != last
        ):  # the last lookup was for another sequence or another length
            salt = seq.request.salt
            cached = len(self.pools[0].lookup(seq.tokens, salt, seq.keys, last))
        for which, blocks in enumerate(sorted({end, cached})):
            if blocks <= n:
                continue
            index = checkpoints.reserve(slot, blocks)
            if index is not None:
                self.saves.append((slot, which, blocks * self.block, index))

    def _copy_partial(self, slot: int, parent: int | None, known: int) -> int:
        """Copy the cached block whose first tokens continue the row after its prefix hit, and return the number of
        tokens that match; 0 means that nothing was copied.

        ``parent`` is the last block of the hit, None without a hit; ``known`` is the row's length in tokens.  The
        device reads the source block when it applies the next step's changes, before it writes any block.  So the
        source needs no reference, and another row may take it in the meantime."""
        seq = self.slots.at(slot)
        n = int(self.slots.prefix_published[slot])
        start = n * self.block
        end = min(start + self.block, known - 1)
        if not self.partial or end <= start or not self.available:
            return 0
        lead = self.pools[0]
        if parent is None:
            parent = lead.root(seq.request.salt)[0]
        first, shared = lead.partial(parent, seq.tokens[start:end])
        if not shared:
            return 0
        key = int(lead.key[first])
        leader = lead.follower_of(first)
        tokens = lead.tokens[first]
        followers = [pool.follow(key, leader, tokens) for pool in self.pools[1:]]
        sources = [first, *followers]
        if min(sources) < 0:
            return 0
        for g, (pool, source) in enumerate(zip(self.pools, sources, strict=True)):
            pool.hit(np.array([source], np.int32), shared)
            pool.touch(source)
            self._append_copy(g, slot, n, source)
        self.copied += shared
        if tokens[-1] < 0:
            self.tails.copied()
        return shared

    def _append_copy(self, g: int, slot: int, index: int, source: int) -> None:
        """Append a new private block at ``index`` of a row's table.  The device copies the content of block ``source``
        into it before the next step."""
        new = self.pools[g].take(1)
        self.append(g, slot, [index], new)
        self.slots.blocks[g, slot] = index + 1
        # The device reads all sources before it writes copies. A source that is a pending copy is replaced by its
        # source.
        for group, origin, to in self.copies:
            if group == g and to == source:
                source = origin
                break
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
            rows = slots[at].astype(np.intp)
            need = missing[g, at]
            if not (total := sum(need.tolist())):
                continue
            blocks = pool.take(total)
            have = self.slots.blocks[g, rows]
            self.slots.blocks[g, rows] = have + need
            if total > len(at):  # in most steps no row needs more than one block
                start = (have - (need.cumsum() - need)).repeat(need)
                rows = rows.repeat(need)
                have = start + np.arange(total)
            self.append(g, rows, have, blocks)

    def grow_chunk(self, slot: int, chunk: int) -> int:
        """Take blocks for the next ``chunk`` tokens of a row, or for as many as fit, and return the number of tokens
        that have blocks."""
        chunk, _ = self.room(slot, chunk)
        row = np.array([slot], np.int32)
        self.grow(row, self.missing(row, self.slots.computed[row] + chunk))
        return chunk

    def reserve(self, slot: int, tokens: int) -> None:
        """Take all blocks that a row needs for ``tokens`` tokens.  The caller has checked that the blocks are
        available."""
        most = self.slots.table.shape[2]
        row = np.array([slot], np.int32)
        lacking = np.zeros((len(self.pools), 1), np.int32)
        for g in range(len(self.pools)):
            want = min(self.at_once(g, tokens), most)
            lacking[g] = max(0, want - int(self.slots.blocks[g, slot]))
        self.grow(row, lacking)

    def append(self, group: int, slots: Any, index: Any, blocks: np.ndarray) -> None:
        self.slots.table[group, slots, index] = blocks
        if len(blocks):
            change = np.empty((len(blocks), 4), np.int32)
            change[:, 0] = group
            change[:, 1] = slots
            change[:, 2] = index
            change[:, 3] = blocks
            self.table.append(change)

    def fork(self, parent: int, child: int, computed: int) -> None:
        """Fill the block tables of the row ``child`` from those of ``parent``.  The child shares the parent's full
        blocks and receives a copy of the partly filled one.  ``computed`` is the number of tokens that the child takes
        over.  The caller has checked ``can_take`` for one block per group."""
        s = self.slots
        full, part = divmod(computed, self.block)
        for g, pool in enumerate(self.pools):
            shared = s.table[g, parent, :full].copy()
            pool.share(shared[shared > 0])
            self.append(g, child, np.arange(full), shared)
            s.blocks[g, child] = full
            s.trimmed[g, child] = s.trimmed[g, parent]
            if part:
                partly = int(s.table[g, parent, full])
                self._append_copy(g, child, full, partly)
        s.computed[child] = computed
        if self.checkpoints is not None:
            self._fork_states(parent, child)
        # The parent publishes its full blocks once their tokens are collected. The child publishes
        # only the blocks behind them.
        published = int(s.prefix_published[parent])
        s.prefix_published[child] = min(published, full)

    def _fork_states(self, parent: int, child: int) -> None:
        """Give the row in slot ``child`` the recurrent states of its parent.  If the next delta copies states to the
        parent, the child copies them from the same source."""
        if self.tiers is not None:
            ticket = self.tiers.state_of(parent)
            if ticket is not None:
                self.tiers.fill(self.tiers.states, child, ticket)
                return
        source = parent
        for origin, to in self.states:
            if to == parent:
                source = origin
                break
        self.states.append((source, child))

    def to_compact(self, slot: int, keep: int, private: bool = False) -> list[Compaction]:
        """Return the compressions of a row to ``keep`` tokens, one for each KV group in which it has more; groups with
        a sliding window are not compressed.  The cache does not change yet.

        With ``private``, blocks that only this row uses shall leave the prefix cache, so that the kept tokens can move
        to them."""
        s = self.slots
        found = []
        for g, pool in enumerate(self.pools):
            stored = int(s.computed[slot] - s.dropped[g, slot])
            if self.limited[g] or stored <= keep:
                continue
            blocks = s.table[g, slot, : s.blocks[g, slot]].copy()
            used = self.blocks_for(stored)
            head = blocks[: self.blocks_for(keep)]
            unshared = pool.ref[head] == 1
            unpublished = pool.key[head] == 0
            own = unshared & unpublished
            first = used
            if private and self.prefix:
                first = pool.private_from(blocks[:used])
                own[first:] = True
            found.append(Compaction(g, slot, stored, keep, blocks, used, own, unpublished=first))
        return found

    def freed_by(self, one: Compaction) -> int:
        """Return the number of blocks that a compaction makes available, minus the blocks that it takes."""
        holders = self.pools[one.group].ref[one.gone]
        return int(np.count_nonzero(holders == 1)) - one.to_take

    def compact(self, compactions: list[Compaction]) -> None:
        """Apply the compressions of a row that ``to_compact`` returned.  The caller has checked that the blocks are
        available.

        The kept tokens move to blocks that no other row and no cached prefix uses: first blocks of the row, then blocks
        reserved for it, then new ones.  The blocks with the old content are released when the next delta is sent."""
        s = self.slots
        for one in compactions:
            g = one.group
            slot = one.slot
            pool = self.pools[g]
            pool.unpublish(one.blocks[one.unpublished : one.used])
            after = one.blocks_after(pool.take(one.to_take))
            size = max(len(one.blocks), len(after))
            table = np.zeros(size, np.int32)
            table[: len(after)] = after
            before = np.zeros(size, np.int32)
            before[: len(one.blocks)] = one.blocks
            changed = np.flatnonzero(table != before)
            self.append(g, slot, changed, table[changed])
            one.retired = one.gone
            one.computed = int(s.computed[slot])
            s.blocks[g, slot] = len(after)
            s.dropped[g, slot] += one.stored - one.kept
            # The row counts as published up to the end of its table, so that no later block of it
            # enters the prefix cache.
            s.prefix_published[slot] = s.table.shape[2]
            self.compactions.append(one)
            self.duplicates = True

    def trim(self, slots: np.ndarray) -> None:
        """Release the blocks of these rows that lie before the sliding window of every later query.  With prefix
        caching a block is released only after its publication."""
        s = self.slots
        for g, window in enumerate(self.windows):
            if window is None or not len(slots):
                continue
            unseen = np.maximum(s.least_computed(slots) - window + 1, 0)
            first = unseen // self.block
            for i in np.flatnonzero(first > s.trimmed[g, slots]).tolist():
                slot = int(slots[i])
                start = int(s.trimmed[g, slot])
                end = int(first[i])
                if self.prefix:  # only blocks that have entered the prefix cache may be released
                    end = min(end, int(s.prefix_published[slot]))
                if end <= start:
                    continue
                blocks = s.table[g, slot, start:end]
                self.pools[g].release(blocks.copy())
                blocks[:] = 0
                s.trimmed[g, slot] = end
                self.trims.append((g, slot, start, end - start))

    def release(self, slot: int) -> None:
        """Release all blocks of a row, and remove the row's changes that have not been sent to the device."""
        self.table = [rows[rows[:, 1] != slot] for rows in self.table]
        self.trims = [trim for trim in self.trims if trim[1] != slot]
        for one in self.compactions:
            if one.slot == slot:
                self.pools[one.group].release(one.retired)
        self.compactions = [one for one in self.compactions if one.slot != slot]
        if self.checkpoints is not None:
            self._release_states(self.checkpoints, slot)
        for g, pool in enumerate(self.pools):
            n = self.slots.blocks[g, slot]
            blocks = self.slots.table[g, slot, :n].copy()
            pool.release(blocks)
            # another branch of the request may still hold some blocks
            gone = blocks[pool.ref[blocks] == 0]
            if self.copies:
                self.copies = [copy for copy in self.copies if copy[0] != g or copy[2] not in gone]
            if self.tiers is not None:
                self.tiers.cancel(g, gone)

    def _release_states(self, checkpoints: Checkpoints, slot: int) -> None:
        """Release the checkpoints of recurrent states that a row has reserved.  Copies of its states that have not been
        sent to the device are removed."""
        self.states = [change for change in self.states if change[1] != slot]
        self.saves = [save for save in self.saves if save[0] != slot]
        if self.tiers is not None:
            copies = [index for _, index in checkpoints.pending.get(slot, ())]
            written = np.array([slot, *copies])
            self.tiers.cancel(self.tiers.states, written)
        checkpoints.release(slot)

    # ---- changes for the device --------------------------------------------------------------------------------------

    def changes(self) -> dict[str, Any]:
        """Return the changes of the KV cache since the last call, as those fields of ``plan.Delta`` that are not
        empty."""
        found = {}
        if self.table:
            table = np.concatenate(self.table)
            found["table"] = last_changes(table) if self.duplicates else table
        if self.trims:
            found["trim"] = np.array(self.trims, np.int32)
        if self.copies:
            found["copy"] = np.array(self.copies, np.int32)
        if self.states:
            found["state"] = np.array(self.states, np.int32)
        if self.saves:
            found["save"] = np.array(self.saves, np.int32)
        if self.compactions:
            found |= self._take_compactions()
        if self.tiers is not None:
            found |= self.tiers.changes()
        self.states = []
        self.saves = []
        self.table = []
        self.trims = []
        self.copies = []
        self.duplicates = False
        return found

    def _take_compactions(self) -> dict[str, np.ndarray]:
        """Return the fields of plan.Delta about the compressions since the last call, and release the blocks that the
        compressed rows gave up."""
        rows = []
        read = []
        for i, one in enumerate(self.compactions):
            rows.append(one.row)
            if one.reader is not None:
                read.append(i)
                self.read.append(one)
            self.pools[one.group].release(one.retired)
        sources = np.concatenate([one.sources for one in self.compactions])
        found = {"compact": np.array(rows, np.int32), "sources": sources}
        if read:
            found["kept"] = np.array(read, np.int32)
        self.compactions = []
        return found

    def stats(self) -> dict[str, Any]:
        """Return the figures of the blocks, the prefix cache and the evictions."""
        lead = self.pools[0]
        return {
            "blocks_total": lead.total - 1,
            "blocks_free": lead.free,
            "blocks_cached": lead.idle,
            "prefix_queries": lead.queries,
            "prefix_hits": lead.hits,
            "prefix_hits_copied": self.copied,
            "prefix_by_depth": lead.by_depth(),
            "evictions": sum(pool.evictions for pool in self.pools),
            "evicted_needed": sum(pool.lost.needed for pool in self.pools),
        }

    def audit(self) -> None:
        """Raise EngineDeadError if the block counters of a pool are inconsistent.  The time does not depend on the
        number of blocks."""
        for pool in self.pools:
            pool.audit(at_rest=not len(self.slots.running))

    def check(self) -> None:
        """Compare all block tables with the pools (see ``cache_walk``).  AssertionError names an inconsistency.  The
        check is slow."""
        retired: list[list[np.ndarray]] = [[] for _ in self.pools]
        for one in self.compactions:
            retired[one.group].append(one.retired)
        walk(self.pools, self.slots, retired)
        if self.checkpoints is not None:
            self.checkpoints.check(self.pools[0].key != 0)
        if self.tiers is not None:
            self.tiers.check()


def last_changes(table: np.ndarray) -> np.ndarray:
    """Return the rows (group, slot, index, block) of ``plan.Delta.table`` i32 [n, 4], without those that a later row
    for the same table entry replaces."""
    group, slot, index = table[:, :3].astype(np.int64).T
    entry = group << 52 | slot << 26 | index
    _, last = np.unique(entry[::-1], return_index=True)
    kept = np.sort(len(table) - 1 - last)
    return table[kept]
