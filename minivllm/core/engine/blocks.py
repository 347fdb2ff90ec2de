"""Paged KV blocks of one KV group, and the prefix index over them.

Every block is in exactly one of three states::

    free ──take──► held (ref >= 1) ──release──► free                    if it was never published
                     ▲        └──────release──► idle (ref 0, cached)    if it was
                     └──share── idle ──evicted──► free

A block is published when it is full and all its tokens were collected, or as the *tail* of a sequence that ended.
It then has a *key*: the hash of (parent key, its token ids), so equal prefixes have equal chains.  A key is only a
hint: on a hit the token ids and the parent block are compared, so a collision costs a miss and never a wrong token.  An
idle block may be evicted iff no cached block has it as parent; the evictor plug-in chooses the order.

The cached blocks with one parent and one first token are a linked list in two arrays, the youngest first; ``partial``
searches it for the block whose first tokens are the next tokens of a prompt::

    youngest[b4, "The"] ──► b7 ──older──► b2 ──older──► 0        younger[b2] = b7, younger[b7] = 0
"""

from __future__ import annotations

from array import array
from collections import Counter
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np

from minivllm.core.interfaces.attention import NULL_BLOCK
from minivllm.errors import EngineDeadError, describe_error

from .evicted import EvictedKeys, block_info, reads_turns

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from minivllm.core.interfaces.evictor import Evictor
    from minivllm.core.interfaces.session import SessionTurn
    from minivllm.core.timing import SeamTimes

    from .events import EngineEvents
    from .evicted import InfoRow
    from .request import Seq

# Each salt of requests has a root number. When more than MAX_ROOTS salts are stored, those without
# a cached block are removed.
MAX_ROOTS = 65536
# largest number of cached blocks with the same parent and first token that ``partial`` compares,
# youngest first
SIBLINGS = 32
NO_BLOCKS = np.empty(0, np.int32)
# The salt of a request: (tenant, cache_salt, ...) and anything else that changes its KV values.
# Only requests with an equal salt share cached blocks.
Salt = tuple[str, ...]


def chain_key(parent: int, tokens: bytes) -> int:
    """Return the 64-bit key of a block from its parent's key and its token ids (i32 as bytes).  The key is never 0,
    which means "no key"."""
    digest = blake2b(parent.to_bytes(8, "little") + tokens, digest_size=8).digest()
    return int.from_bytes(digest, "little") or 1


def owner_of(salt: Salt) -> int:
    """Return a signed 64-bit number that identifies the owner of sequences with this salt, a hash of the salt; 0 if all
    parts of the salt are empty."""
    if not any(salt):
        return 0
    key = chain_key(0, repr(salt).encode())
    return key - (1 << 64) if key >= 1 << 63 else key


def _within(lookups: Mapping[int, int], first: int, end: int) -> int:
    """Return how many blocks lookups reached in total at the depths ``first`` to ``end`` - 1 of a prompt.

    ``lookups`` maps a length of a lookup in blocks to the count of lookups with this length."""
    blocks = 0
    for depth, n in lookups.items():
        blocks += n * max(0, min(depth, end) - first)
    return blocks


class BlockPool:
    """Pool of ``total`` KV blocks of ``block`` tokens each.  Block 0 is the null block, which no sequence owns.

    Invariants: free + held + idle = total - 1;  ref[b] = number of block tables that hold block b; index[key[b]] == b
    for every published block b;  children[p] = number of published blocks whose parent is p, > 0; the list from
    youngest[p, t] links the published blocks whose parent is p and whose first token is t."""

    def __init__(
        self,
        total: int,
        block: int,
        evictor: Evictor,
        block_bytes: int,
        seams: SeamTimes,
        events: EngineEvents,
        kv_group: int = 0,
        hash_fn: Callable[[int, bytes], int] = chain_key,
    ) -> None:
        self.total = total
        self.block = block
        self.block_bytes = block_bytes
        self.hash_fn = hash_fn
        self.evictor = evictor
        self.seams = seams
        self.events = events
        self.kv_group = kv_group
        self.ref = np.zeros(total, np.int32)
        self.key = np.zeros(total, np.uint64)  # hash of each cached block; 0 means not published
        # number of each cached block's parent: the block before it, or below -1 either the root
        # number of a salt or the number that ``follower_of`` returns
        self.parent = np.full(total, -1, np.int64)
        # serial number of each block's publication, never used twice
        self.stamp = np.zeros(total, np.int64)
        self.stamps = 0
        self.children: dict[int, int] = {}  # parent -> count of its cached children
        # (parent, first token id) -> the child block that was published last
        self.youngest: dict[tuple[int, int], int] = {}
        # Linked list of the cached blocks with one parent and first token; 0 is its end. They are
        # Python lists, because single elements are read.
        self.older = [0] * total
        self.younger = [0] * total
        # token ids of published blocks; unused positions of a partly filled block hold -1
        self.tokens = np.zeros((total, block), np.int32)
        # first token id of each block, in an array because numpy reads single elements slowly
        self.first = array("i", bytes(4 * total))
        self.index: dict[int, int] = {}
        # key -> waiting sequences whose ``hint`` becomes invalid when the key enters or leaves the index
        self.watch: dict[int, list[Seq]] = {}
        # a stack of block numbers; its first ``free`` elements are the free blocks
        self._free = np.arange(total - 1, 0, -1, dtype=np.int32)
        self.free = total - 1
        self.held = self.idle = 0
        # salt -> (root number, key); has at least the salts with a cached block
        self.roots: dict[Salt, tuple[int, int]] = {}
        self.most_roots = MAX_ROOTS
        self.next_root = -1
        # (key, properties) of the blocks that were published, and not yet reported to the evictor
        self.new: list[tuple[int, InfoRow]] = []
        self.lost = EvictedKeys(total)
        self.reads_turns = reads_turns(evictor)
        self.queries = self.hits = self.evictions = 0  # tokens, tokens, blocks
        # callback(block) before a block is evicted, and when a block leaves the prefix index
        self.evicted: Callable[[int], None] | None = None
        self.forgotten: Callable[[int], None] | None = None
        # counts of lookups, by the number of blocks that they looked for, and that they found
        self.queried, self.found = Counter[int](), Counter[int]()

    @property
    def available(self) -> int:
        """Return the count of blocks that ``take`` can return: the free ones and the idle ones, which it may evict."""
        return self.free + self.idle

    def root(self, salt: Salt) -> tuple[int, int]:
        """Return (root number, root key) of a salt, which stand for the parent of the first block of a sequence.  The
        number is below -1 and differs between salts, so sequences with different salts never share a block."""
        found = self.roots.get(salt)
        if found is None:
            if len(self.roots) >= self.most_roots:
                self.roots = {s: r for s, r in self.roots.items() if r[0] in self.children}
                self.most_roots = max(MAX_ROOTS, 2 * len(self.roots))
            self.next_root -= 1  # never used twice
            found = self.roots[salt] = (self.next_root, chain_key(0, repr(salt).encode()))
        return found

    def _call_evictor(self, what: str, *args: Any) -> Any:
        """Call the evictor's method with the name ``what`` and return its result.

        The result of ``victims`` is converted to keys u64 [n].  EngineDeadError if the method raises, because the pool
        and the evictor may then disagree about the cached blocks."""
        try:
            found = self.seams.run("evictor", getattr(self.evictor, what), *args)
            if what == "victims":
                found = np.asarray(found, np.uint64).ravel()
        except Exception as e:
            message = (
                f"{type(self.evictor).__name__} failed in {what}: {describe_error(e, self.evictor)}"
            )
            raise EngineDeadError(f"evictor {message}") from e
        return found

    def _drop(self, keys: np.ndarray) -> None:
        """Report to the evictor and the event listeners that cached blocks with these keys u64 are about to be removed
        from the index for another reason than lack of space."""
        self._call_evictor("drop", keys)
        self.events.blocks_dropped(self.kv_group, keys)

    def report(self, event: str, keys: np.ndarray, turn: SessionTurn) -> None:
        """Call the evictor's method ``event``, which is "began" or "ended", for a request of a session.  ``keys`` u64
        are the keys of the request's cached blocks."""
        self._call_evictor(event, keys, turn)

    # ---- a sequence's blocks -----------------------------------------------------------------------------------------

    def take(self, n: int) -> np.ndarray:
        """Return the numbers i32 [n] of n blocks that the caller now holds, each with one reference.  Idle blocks are
        evicted if the free ones do not suffice.  ValueError if ``available`` is below n, which the caller checks first.
        """
        if n > self.free:
            if n > self.available:
                raise ValueError(f"{n} blocks are needed, and {self.available} are available")
            self._evict(n - self.free)
        self.free -= n
        self.held += n
        blocks = self._free[self.free : self.free + n].copy()
        self.ref[blocks] = 1
        return blocks

    def share(self, blocks: np.ndarray) -> None:
        """Add one reference to each of these blocks i32, which are held by other rows or idle in the cache.  Parents
        come before their children."""
        woken = blocks[self.ref[blocks] == 0]
        self.ref[blocks] += 1
        if len(woken):
            self.idle -= len(woken)
            self.held += len(woken)
            self._call_evictor("hold", self.key[woken])

    def touch(self, block: int) -> None:
        """Report to the evictor that a cached block is used for a moment, because its content is about to be copied.
        If a row holds the block, the evictor already counts it as in use, and nothing is reported."""
        key = self.key[block : block + 1].copy()
        if not self.ref[block]:
            self._call_evictor("hold", key)
            self._call_evictor("free", key)

    def release(self, blocks: np.ndarray) -> None:
        """Remove one reference from each of these distinct blocks i32, parents before children.  Null blocks are
        skipped.  A published block without a reference becomes idle, any other becomes free.  EngineDeadError if a
        block has no reference."""
        if np.count_nonzero(blocks) < len(blocks):
            blocks = blocks[blocks != NULL_BLOCK]
        left = self.ref[blocks] - 1
        gone = blocks
        if np.count_nonzero(left):  # some blocks still have references of other rows, which is rare
            if left.min() < 0:
                raise EngineDeadError(
                    f"blocks {blocks[left < 0].tolist()} were released more often than taken"
                )
            gone = blocks[left == 0]
        self.ref[blocks] = left
        self.held -= len(gone)
        cached = self.key[gone] != 0
        if np.count_nonzero(cached):
            kept = gone[cached]
            gone = gone[~cached]
            self.idle += len(kept)
            self._call_evictor("free", self.key[kept])
        self._free[self.free : self.free + len(gone)] = gone
        self.free += len(gone)

    # ---- the prefix index --------------------------------------------------------------------------------------------

    def keys_of(self, tokens: np.ndarray, salt: Salt, keys: list[int]) -> list[int]:
        """Append the keys of all full blocks of ``tokens`` that are missing in ``keys``, and return ``keys``.  ``keys``
        begins with the keys of the first blocks.  The caller keeps the list, so that each block is hashed once."""
        full = len(tokens) // self.block
        if len(keys) < full:
            parent = keys[-1] if keys else self.root(salt)[1]
            new = tokens[len(keys) * self.block : full * self.block]
            raw = np.ascontiguousarray(new, np.int32).tobytes()
            step = 4 * self.block
            for at in range(0, len(raw), step):
                parent = self.hash_fn(parent, raw[at : at + step])
                keys.append(parent)
        return keys

    def chain(self, tokens: np.ndarray, salt: Salt, keys: list[int], most: int) -> Iterator[int]:
        """Yield the cached blocks that hold the first tokens of ``tokens``, at most ``most``, up to the first block
        that is not cached.

        Only the keys (hashes) are compared.  ``keys`` has the keys of the first blocks as far as they are known, and
        newly computed keys are appended to it."""
        raw = np.ascontiguousarray(tokens, np.int32)
        size = self.block
        for i in range(most):
            if i == len(keys):
                before = keys[-1] if keys else self.root(salt)[1]
                part = raw[i * size : (i + 1) * size]
                keys.append(self.hash_fn(before, part.tobytes()))
            block = self.index.get(keys[i])
            if block is None:
                return
            yield block

    def lookup(self, tokens: np.ndarray, salt: Salt, keys: list[int], most: int) -> np.ndarray:
        """Return the cached blocks i32 that hold exactly the first tokens of ``tokens``, at most ``most`` blocks.
        Token ids and parents are compared too, so a collision of keys shortens the result.  No reference is taken.
        Keys that the lookup computes are appended to ``keys``."""
        found = list(self.chain(tokens, salt, keys, most))
        if not found:
            return NO_BLOCKS
        blocks = np.array(found, np.int32)
        n = len(found)
        wanted = tokens[: n * self.block].reshape(n, self.block)
        before = [self.root(salt)[0], *found[:-1]]
        there = self.tokens.take(blocks, 0)
        parents = self.parent.take(blocks)
        if np.array_equal(there, wanted) and parents.tolist() == before:
            return blocks
        same = (there == wanted).all(axis=1)
        same &= parents == before
        return blocks[: int(np.argmin(same))]

    def partial(self, parent: int, tokens: np.ndarray) -> tuple[int, int]:
        """Return (block, n): the cached child of ``parent`` that shares most leading tokens with ``tokens``, and the
        number of shared tokens.  ``tokens`` holds at most one block.  Only the youngest ``SIBLINGS`` children with the
        same first token are compared.  (0, 0) means that no child shares the first token."""
        rows: list[int] = []
        b = self.youngest.get((parent, int(tokens[0])), 0)
        while b and len(rows) < SIBLINGS:
            rows.append(b)
            b = self.older[b]
        if not rows:
            return 0, 0
        same = self.tokens[rows, : len(tokens)] == tokens
        shared = np.where(same.all(axis=1), len(tokens), same.argmin(axis=1))
        best = int(shared.argmax())
        return rows[best], int(shared[best])

    def follow(self, key: int, leader: int, tokens: np.ndarray) -> int:
        """Return the cached block of a sliding-window KV group with this key and these token ids, or -1 if there is
        none.

        ``leader`` is the number that ``follower_of`` returns for the block of the leading group (group 0) with the same
        content.  It must be the parent of the returned block."""
        block = self.index.get(key, -1)
        if block < 0 or self.parent[block] != leader:
            return -1
        return block if np.array_equal(self.tokens[block], tokens) else -1

    def follower_of(self, block: int) -> int:
        """Return a negative number that identifies the current publication of ``block``.  Blocks of other KV groups
        with the same content store it as their parent.  A later publication of the same block has another number."""
        return -(1 << 40) - int(self.stamp[block])

    def hit(self, blocks: np.ndarray, tokens: int) -> None:
        """Count ``tokens`` as prefix hits and report the hit blocks i32 to the evictor.  A sequence is about to share
        these blocks, or to copy the first tokens of one block."""
        self.hits += tokens
        if len(blocks):
            self._call_evictor("hit", self.key[blocks])

    def count(self, queried: int, found: int) -> None:
        """Count a prefix lookup that looked for ``queried`` blocks and found ``found``.

        A hit always begins with the first block, so these two counts give the hits at each depth."""
        self.queried[queried] += 1
        self.found[found] += 1

    def by_depth(self) -> dict[str, dict[str, int]]:
        """Return the blocks that prefix lookups looked for and found, by depth in the prompt.  The keys are ranges of
        block indices: "0" is the first block, then "1", "2-3", "4-7" and so on."""
        out: dict[str, dict[str, int]] = {}
        first = 0
        end = 1
        while queries := _within(self.queried, first, end):
            name = str(first) if end == first + 1 else f"{first}-{end - 1}"
            hits = _within(self.found, first, end)
            out[name] = {"queries": queries, "hits": hits}
            first = end
            end *= 2
        return out

    def publish(
        self,
        block: int,
        parent: int,
        key: int,
        tokens: np.ndarray,
        depth: int,
        tenant: int = 0,
        session: int = 0,
        kind: int = 0,
    ) -> int:
        """Add a held block to the prefix index, and return the block that holds this content from now on.

        The result is the block itself, or an older cached block with the same parent and token ids, which the caller
        shares instead.  A key that collides with a block in use leaves the new block unpublished.  Positions of the
        block that hold tokens must not be written any more.  ``parent`` is the preceding block or the root number of
        the salt; ``tokens`` i32 [block], where -1 fills up a partial block; ``depth`` is the block's index in the
        sequence; ``session`` and ``kind`` are columns of ``BlockInfo``.  ``announce`` reports the block to the
        evictor."""
        duplicate = self.index.get(key)
        if duplicate is not None:
            if self.parent[duplicate] == parent and np.array_equal(self.tokens[duplicate], tokens):
                return duplicate
            if self.ref[duplicate] or duplicate in self.children:
                # another block in use has the same key by chance, so this block is not shared
                return block
            # The older block has no reference and no child, so the new block replaces it.
            self._drop(np.array([key], np.uint64))
            self._forget(key, duplicate)
        self.index[key] = block
        if key in self.watch:
            self.void(key)
        self.key[block] = key
        self.parent[block] = parent
        self.tokens[block] = tokens
        self.stamps += 1
        self.stamp[block] = self.stamps
        self._link(block, parent, int(tokens[0]))
        filled = self.block
        if tokens[-1] < 0:
            filled = int((tokens >= 0).sum())
        cost = depth * self.block + filled
        parent_key = int(self.key[parent]) if parent >= 0 else 0
        evicted = self.lost.take(key)
        size = self.block_bytes
        row = (parent_key, depth, size, cost, tenant, session, kind, evicted)
        self.new.append((key, row))
        return block

    def publish_run(
        self,
        blocks: np.ndarray,
        parent: int,
        keys: list[int],
        tokens: np.ndarray,
        depth: int,
        tenant: int = 0,
        session: int = 0,
        kinds: Sequence[int] | None = None,
    ) -> bool:
        """Add held blocks i32 [n] of one sequence to the prefix index, each as the child of the previous one.

        Return True.  Return False without a change if one of the blocks is the null block or published, or if one of
        the keys is in the index or occurs twice.

        The result equals that of ``publish`` for each block, in less time.  ``parent`` precedes the first block, which
        has the index ``depth`` in the sequence.  The blocks have the keys ``keys`` and the token ids ``tokens`` i32 [n,
        block], without -1.  ``kinds`` has the kind of each block; None means 0.
        """
        n = len(keys)
        if not self.index.keys().isdisjoint(keys) or len(set(keys)) < n:
            return False
        if np.count_nonzero(blocks) < n or np.count_nonzero(self.key[blocks]):
            return False
        numbers = blocks.tolist()
        parents = [parent, *numbers[:-1]]
        parent_key = int(self.key[parent]) if parent >= 0 else 0
        self.index.update(zip(keys, numbers, strict=True))
        for key in self.watch.keys() & set(keys) if self.watch else ():
            self.void(key)
        self.key[blocks] = np.array(keys, np.uint64)
        self.parent[blocks] = parents
        self.tokens[blocks] = tokens
        first_stamp = self.stamps + 1
        self.stamps += n
        self.stamp[blocks] = np.arange(first_stamp, self.stamps + 1)
        first_tokens = tokens[:, 0].tolist()
        for block, above, first in zip(numbers, parents, first_tokens, strict=True):
            self._link(block, above, first)
        size = self.block_bytes
        before = parent_key
        for at, key in enumerate(keys, depth):
            cost = (at + 1) * self.block
            kind = 0 if kinds is None else kinds[at - depth]
            row = (before, at, size, cost, tenant, session, kind, self.lost.take(key))
            self.new.append((key, row))
            before = key
        return True

    def _link(self, block: int, parent: int, first: int) -> None:
        """Add a published block to the list of its parent's children whose first token id is ``first``."""
        self.first[block] = first
        self.children[parent] = self.children.get(parent, 0) + 1
        sibling = self.youngest.get((parent, first), 0)
        self.older[block] = sibling
        self.younger[block] = 0
        if sibling:
            self.younger[sibling] = block
        self.youngest[parent, first] = block

    def announce(self) -> None:
        """Report the newly published blocks to the evictor and the event listeners.  The evictor must receive this
        report before any other call about these blocks."""
        if not self.new:
            return
        keys = np.array([key for key, _ in self.new], np.uint64)
        info = block_info([row for _, row in self.new])
        self.new.clear()
        self._call_evictor("add", keys, info)
        self.events.blocks_stored(self.kv_group, keys, info)

    def published(self, block: int) -> bool:
        return bool(self.key[block])

    def _evict(self, n: int) -> None:
        """Evict n idle blocks that the evictor selects, children before parents.  EngineDeadError if the evictor
        returns another number of keys, or a block that is unknown, in use, or the parent of a cached block."""
        keys = self._call_evictor("victims", n)
        if len(keys) != n:
            raise EngineDeadError(
                f"evictor {type(self.evictor).__name__} returned {len(keys)} keys of blocks to evict; expected {n}"
            )
        for key in keys.tolist():
            block = self.index.get(key)
            if block is None or self.ref[block] or block in self.children:
                who = type(self.evictor).__name__
                why = self._why_not_evictable(block)
                raise EngineDeadError(f"evictor {who} gave up a block that is {why}")
            if self.evicted is not None:
                self.evicted(block)
            self._forget(key, block)
        self.lost.add(keys.tolist())
        self.evictions += n
        self.events.blocks_evicted(self.kv_group, keys)

    def _why_not_evictable(self, block: int | None) -> str:
        if block is None:
            return "unknown"
        return "in use" if self.ref[block] else "the parent of a cached block"

    def void(self, key: int) -> None:
        """Clear the stored prefix-hit estimate (``hint``) of each waiting sequence that depends on this key, so that
        its lookup is repeated."""
        for seq in self.watch.pop(key):
            seq.hint = None

    def private_from(self, blocks: np.ndarray) -> int:
        """Return an index in the block table ``blocks`` i32 of a row.  The blocks from this index on are held by this
        row only, and all their cached children are among them."""
        numbers = blocks.tolist()
        refs = self.ref[blocks].tolist()
        parents = self.parent[blocks].tolist()
        following = -2  # parent of the block that the loop has just visited; -2 is no block number
        for i in range(len(numbers) - 1, -1, -1):
            own = int(following == numbers[i])
            if refs[i] != 1 or self.children.get(numbers[i], 0) > own:
                return i + 1
            following = parents[i]
        return 0

    def unpublish(self, blocks: np.ndarray) -> None:
        """Remove blocks i32 of one row from the prefix index.  The row keeps them.

        They are the end of a row's block table, in order, from the index that ``private_from`` returned."""
        cached = blocks[self.key[blocks] != 0]
        if not len(cached):
            return
        keys = self.key[cached]
        self._call_evictor("free", keys)
        self._drop(keys)
        for key, block in zip(keys[::-1].tolist(), cached[::-1].tolist(), strict=True):
            self._unlink(key, block)

    def _forget(self, key: int, block: int) -> None:
        """Remove an idle block from the prefix index and make it a free block."""
        self._unlink(key, block)
        self.idle -= 1
        self._free[self.free] = block
        self.free += 1

    def _unlink(self, key: int, block: int) -> None:
        """Remove a block from the prefix index and from the lists of siblings."""
        del self.index[key]
        if self.forgotten is not None:
            self.forgotten(block)
        if key in self.watch:
            self.void(key)
        parent = int(self.parent[block])
        older = self.older[block]
        younger = self.younger[block]
        self.children[parent] -= 1
        if not self.children[parent]:
            del self.children[parent]
        if older:
            self.younger[older] = younger
        if younger:
            self.older[younger] = older
        elif older:
            self.youngest[parent, self.first[block]] = older
        else:
            del self.youngest[parent, self.first[block]]
        self.key[block] = 0
        self.parent[block] = -1

    def reset(self) -> None:
        """Remove every idle block from the prefix index.  Blocks in use stay cached."""
        idle = [(key, b) for key, b in self.index.items() if not self.ref[b]]
        self._drop(np.array([key for key, _ in idle], np.uint64))
        for key, block in idle:
            self._forget(key, block)

    # ---- trust -------------------------------------------------------------------------------------------------------

    def audit(self, at_rest: bool) -> None:
        """Raise EngineDeadError if the counts of free, held and idle blocks do not add up.  It is cheap enough for
        every step.  ``at_rest`` means that no row runs, so that no block may be held."""
        blocks = self.free + self.held + self.idle
        least = min(self.free, self.held, self.idle)
        if blocks != self.total - 1 or least < 0:
            raise EngineDeadError(
                f"the KV blocks do not add up: {self.free} free, {self.held} in use and {self.idle} cached of "
                f"{self.total - 1}"
            )
        if at_rest and self.held:
            raise EngineDeadError(f"{self.held} KV blocks are in use although nothing runs")
