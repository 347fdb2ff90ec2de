"""Paged KV blocks of one KV group, and the prefix index over them.

Every block is in exactly one of three states::

    free ──take──► held (ref >= 1) ──release──► free                    if it was never published
                     ▲        └──────release──► idle (ref 0, cached)    if it was
                     └──share── idle ──evicted──► free

A block is published when it is full and all its tokens were collected, or as the *tail* of a sequence that ended.
Then it has a *key*: the hash of (parent key, its token ids), so equal prefixes have equal chains.  A key is only a
hint: on a hit the token ids and the parent block are compared, so a collision costs a miss and never a wrong token.  An
idle block may be evicted iff no cached block has it as parent; the evictor plug-in says in which order.

The cached blocks with one parent and one first token are a linked list in two arrays, the youngest first; ``partial``
looks along it for the block that begins as a prompt goes on::

    youngest[b4, "The"] ──► b7 ──older──► b2 ──older──► 0        younger[b2] = b7, younger[b7] = 0
"""

from __future__ import annotations

from array import array
from collections import Counter
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np

from minivllm.core.interfaces.attention import NULL_BLOCK
from minivllm.core.interfaces.evictor import BlockInfo
from minivllm.errors import EngineDeadError, describe_error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from minivllm.core.interfaces.evictor import Evictor
    from minivllm.core.timing import SeamTimes

    from .events import EngineEvents
    from .request import Seq

MAX_ROOTS = 65536  # salts beyond which those are forgotten that no cached block has
# blocks with one parent and first token that ``partial`` looks at, the youngest first
SIBLINGS = 32
NO_BLOCKS = np.empty(0, np.int32)
# (tenant, cache_salt), and what else makes KV differ: only prefixes with the same are shared
Salt = tuple[str, ...]


def chain_key(parent: int, tokens: bytes) -> int:
    """64-bit key of a block whose parent has key ``parent``; 0 is kept for "none"."""
    digest = blake2b(parent.to_bytes(8, "little") + tokens, digest_size=8).digest()
    return int.from_bytes(digest, "little") or 1


class BlockPool:
    """``total`` blocks of ``block`` tokens; block 0 is the null block and belongs to nobody.

    Invariants: free + held + idle = total - 1;  ref[b] = number of block tables that hold b;
    index[key[b]] == b for every published b;  children[p] = number of published blocks whose parent is p, > 0;
    the list from youngest[p, t] = those of them whose first token is t.
    """

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
        self.total, self.block, self.block_bytes, self.hash_fn = total, block, block_bytes, hash_fn
        self.evictor, self.seams, self.events, self.kv_group = evictor, seams, events, kv_group
        self.ref = np.zeros(total, np.int32)
        self.key = np.zeros(total, np.uint64)  # 0 = not published
        # parent block; below -1: a root, or a block of the leading group
        self.parent = np.full(total, -1, np.int64)
        self.stamp = np.zeros(total, np.int64)  # number of the publication, never used twice
        self.stamps = 0
        self.children: dict[int, int] = {}  # parent -> its cached children
        # (parent, first token) -> of these the one published last
        self.youngest: dict[tuple[int, int], int] = {}
        # siblings; 0 = none (walked one by one: lists are faster)
        self.older, self.younger = [0] * total, [0] * total
        # of published blocks; a tail is filled up with -1
        self.tokens = np.zeros((total, block), np.int32)
        # the first of these: numpy is slow to read one by one
        self.first = array("i", bytes(4 * total))
        self.index: dict[int, int] = {}
        # key -> whose ``hint`` is void once that is cached, or is no more
        self.watch: dict[int, list[Seq]] = {}
        self._free = np.arange(total - 1, 0, -1, dtype=np.int32)  # a stack; [0, free) are free
        self.free = total - 1
        self.held = self.idle = 0
        self.roots: dict[Salt, tuple[int, int]] = {}  # all on which a cached block hangs are here
        self.most_roots = MAX_ROOTS
        self.next_root = -1
        # published, not told yet: the columns of ``add``
        self.new: list[tuple[int, int, int, float, int]] = []
        self.queries = self.hits = self.evictions = 0  # tokens, tokens, blocks
        # called with each block that is no longer cached
        self.forgotten: Callable[[int], None] | None = None
        # lookups, by the blocks that they asked for and found
        self.asked, self.found = Counter[int](), Counter[int]()

    @property
    def available(self) -> int:
        """Blocks that ``take`` can give: free ones and idle ones."""
        return self.free + self.idle

    def root(self, salt: Salt) -> tuple[int, int]:
        """(parent number, parent key) of first blocks under a salt; chains of different salts never meet."""
        found = self.roots.get(salt)
        if found is None:
            if len(self.roots) >= self.most_roots:
                self.roots = {s: r for s, r in self.roots.items() if r[0] in self.children}
                self.most_roots = max(MAX_ROOTS, 2 * len(self.roots))
            self.next_root -= 1  # never used twice
            found = self.roots[salt] = (self.next_root, chain_key(0, repr(salt).encode()))
        return found

    def _tell(self, what: str, *args: Any) -> Any:
        """Call the evictor.  One that raises leaves the pool in doubt, so the engine has to end."""
        try:
            found = self.seams.run("evictor", getattr(self.evictor, what), *args)
            if what == "victims":
                found = np.asarray(found, np.uint64).ravel()
        except Exception as e:
            said = (
                f"{type(self.evictor).__name__} failed in {what}: {describe_error(e, self.evictor)}"
            )
            raise EngineDeadError(f"evictor {said}") from e
        return found

    def _drop(self, keys: np.ndarray) -> None:
        """Tell of keys u64 that are about to be forgotten, though their room is not needed."""
        self._tell("drop", keys)
        self.events.blocks_dropped(self.kv_group, keys)

    # ---- a sequence's blocks -------------------------------------------------------------------------------------

    def take(self, n: int) -> np.ndarray:
        """n blocks i32 with one reference each.  ValueError if ``available`` is less: who asks has looked."""
        if n > self.free:
            if n > self.available:
                raise ValueError(f"{n} blocks are wanted of {self.available}")
            self._evict(n - self.free)
        self.free -= n
        self.held += n
        blocks = self._free[self.free : self.free + n].copy()
        self.ref[blocks] = 1
        return blocks

    def share(self, blocks: np.ndarray) -> None:
        """One more reference to each; parents come first."""
        woken = blocks[self.ref[blocks] == 0]
        self.ref[blocks] += 1
        if len(woken):
            self.idle -= len(woken)
            self.held += len(woken)
            self._tell("hold", self.key[woken])

    def touch(self, block: int) -> None:
        """A cached block is used for a moment: an evictor hears that by hold and free."""
        key = self.key[block : block + 1].copy()
        if not self.ref[block]:
            self._tell("hold", key)
            self._tell("free", key)

    def release(self, blocks: np.ndarray) -> None:
        """One reference less to each (distinct blocks, parents first; null blocks are skipped)."""
        if np.count_nonzero(blocks) < len(blocks):
            blocks = blocks[blocks != NULL_BLOCK]
        left = self.ref[blocks] - 1
        gone = blocks
        if np.count_nonzero(left):  # else they all had one reference: the usual case
            if left.min() < 0:
                raise EngineDeadError(
                    f"blocks {blocks[left < 0].tolist()} were released more often than taken"
                )
            gone = blocks[left == 0]
        self.ref[blocks] = left
        self.held -= len(gone)
        cached = self.key[gone] != 0
        if np.count_nonzero(cached):
            kept, gone = gone[cached], gone[~cached]
            self.idle += len(kept)
            self._tell("free", self.key[kept])
        self._free[self.free : self.free + len(gone)] = gone
        self.free += len(gone)

    # ---- the prefix index ----------------------------------------------------------------------------------------

    def keys_of(self, tokens: np.ndarray, salt: Salt, keys: list[int]) -> list[int]:
        """Extend ``keys`` (of the first blocks of ``tokens``) to all full blocks; a block is hashed once in a life."""
        full = len(tokens) // self.block
        if len(keys) < full:
            parent = keys[-1] if keys else self.root(salt)[1]
            raw = np.ascontiguousarray(
                tokens[len(keys) * self.block : full * self.block], np.int32
            ).tobytes()
            step = 4 * self.block
            for at in range(0, len(raw), step):
                parent = self.hash_fn(parent, raw[at : at + step])
                keys.append(parent)
        return keys

    def chain(self, tokens: np.ndarray, salt: Salt, keys: list[int], most: int) -> Iterator[int]:
        """The blocks that the index names for the first ``most`` blocks of ``tokens``, until one is not there.  Hashes
        as far as it is asked: what lies behind the first miss is not looked up, and hashed when it is published."""
        raw, size = np.ascontiguousarray(tokens, np.int32), self.block
        for i in range(most):
            if i == len(keys):
                before = keys[-1] if keys else self.root(salt)[1]
                keys.append(self.hash_fn(before, raw[i * size : (i + 1) * size].tobytes()))
            block = self.index.get(keys[i])
            if block is None:
                return
            yield block

    def lookup(self, tokens: np.ndarray, salt: Salt, keys: list[int], most: int) -> np.ndarray:
        """The longest run of cached blocks i32, at most ``most``, that hold exactly the first tokens; takes no
        reference.  ``keys`` of these are extended as far as it looks."""
        found = list(self.chain(tokens, salt, keys, most))
        if not found:
            return NO_BLOCKS
        blocks, n = np.array(found, np.int32), len(found)
        wanted = tokens[: n * self.block].reshape(n, self.block)
        before = [self.root(salt)[0], *found[:-1]]
        there, parents = self.tokens.take(blocks, 0), self.parent.take(blocks)
        if np.array_equal(there, wanted) and parents.tolist() == before:
            return blocks
        return blocks[: int(np.argmin((there == wanted).all(axis=1) & (parents == before)))]

    def partial(self, parent: int, tokens: np.ndarray) -> tuple[int, int]:
        """Of the cached blocks after ``parent`` (of the youngest ``SIBLINGS``) the one that begins with most of these
        tokens (one block of them at most), and with how many; (0, 0) if none shares the first."""
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
        """In a pool whose blocks hang on those of another group: the block with this key whose ``leader`` code (see
        ``follower_of``) and token ids are these, or -1."""
        block = self.index.get(key, -1)
        if (
            block < 0
            or self.parent[block] != leader
            or not np.array_equal(self.tokens[block], tokens)
        ):
            return -1
        return block

    def follower_of(self, block: int) -> int:
        """The number that stands for this publication of ``block`` as parent of a block in another group's pool."""
        return -(1 << 40) - int(self.stamp[block])

    def hit(self, blocks: np.ndarray, tokens: int) -> None:
        """A sequence is about to share these, or to copy the first tokens of one: statistics and the evictor hear."""
        self.hits += tokens
        if len(blocks):
            self._tell("hit", self.key[blocks])

    def count(self, asked: int, found: int) -> None:
        """A lookup of so many blocks found so many; a hit is a prefix, so two numbers give the depths."""
        self.asked[asked] += 1
        self.found[found] += 1

    def publish(
        self, block: int, parent: int, key: int, tokens: np.ndarray, depth: int, tenant: int = 0
    ) -> int:
        """Make a held block findable; it must not be written any more where it has tokens.  Returns the block that
        stands for this content from now on: itself, or an older duplicate, which the caller then shares instead.
        ``parent``: the block before it, or its salt's root.  The evictor hears of it by ``announce``."""
        duplicate = self.index.get(key)
        if duplicate is not None:
            if self.parent[duplicate] == parent and np.array_equal(self.tokens[duplicate], tokens):
                return duplicate
            if self.ref[duplicate] or duplicate in self.children:
                return block  # a collision of keys: this block stays private
            # nobody uses it, or its leader is gone: the new one counts
            self._drop(np.array([key], np.uint64))
            self._forget(key, duplicate)
        self.index[key] = block
        if key in self.watch:
            self.void(key)
        first = self.first[block] = int(tokens[0])
        self.key[block], self.parent[block], self.tokens[block] = key, parent, tokens
        self.stamps += 1
        self.stamp[block] = self.stamps
        self.children[parent] = self.children.get(parent, 0) + 1
        sibling = self.youngest.get((parent, first), 0)
        self.older[block], self.younger[block] = sibling, 0
        if sibling:
            self.younger[sibling] = block
        self.youngest[parent, first] = block
        cost = depth * self.block + (self.block if tokens[-1] >= 0 else int((tokens >= 0).sum()))
        self.new.append((key, int(self.key[parent]) if parent >= 0 else 0, depth, cost, tenant))
        return block

    def announce(self) -> None:
        """Tell the evictor of what was published, before anything else happens to it."""
        if not self.new:
            return
        key, parent, depth, cost, tenant = zip(*self.new, strict=True)
        self.new.clear()
        info = BlockInfo(
            parent=np.array(parent, np.uint64),
            depth=np.array(depth, np.int32),
            bytes=np.array([self.block_bytes] * len(key), np.int64),
            cost=np.array(cost, np.float64),
            tenant=np.array(tenant, np.int32),
        )
        keys = np.array(key, np.uint64)
        self._tell("add", keys, info)
        self.events.blocks_stored(self.kv_group, keys, info)

    def published(self, block: int) -> bool:
        return bool(self.key[block])

    def _evict(self, n: int) -> None:
        """Give up at least n idle blocks, children before parents."""
        keys = self._tell("victims", n)
        if len(keys) != n:
            raise EngineDeadError(
                f"evictor {type(self.evictor).__name__} gave {len(keys)} victims of {n} wanted: it loses keys"
            )
        for key in keys.tolist():
            block = self.index.get(key)
            if block is None or self.ref[block] or block in self.children:
                why = (
                    "unknown"
                    if block is None
                    else "in use"
                    if self.ref[block]
                    else "the parent of a cached block"
                )
                raise EngineDeadError(
                    f"evictor {type(self.evictor).__name__} gave up a block that is {why}"
                )
            self._forget(key, block)
        self.evictions += n
        self.events.blocks_evicted(self.kv_group, keys)

    def void(self, key: int) -> None:
        """Who has counted on this key has to look again."""
        for seq in self.watch.pop(key):
            seq.hint = None

    def _forget(self, key: int, block: int) -> None:
        del self.index[key]
        if self.forgotten is not None:
            self.forgotten(block)
        if key in self.watch:
            self.void(key)
        parent, older, younger = int(self.parent[block]), self.older[block], self.younger[block]
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
        self.key[block], self.parent[block] = 0, -1
        self.idle -= 1
        self._free[self.free] = block
        self.free += 1

    def reset(self) -> None:
        """Forget every cached block that nobody refers to; blocks in use stay cached."""
        idle = [(key, b) for key, b in self.index.items() if not self.ref[b]]
        self._drop(np.array([key for key, _ in idle], np.uint64))
        for key, block in idle:
            self._forget(key, block)

    # ---- trust ---------------------------------------------------------------------------------------------------

    def audit(self, at_rest: bool) -> None:
        """The invariants that a few counters show, after every step.  ``at_rest``: no block table is in use."""
        if (
            self.free + self.held + self.idle != self.total - 1
            or min(self.free, self.held, self.idle) < 0
        ):
            raise EngineDeadError(
                f"the KV blocks do not add up: {self.free} free, {self.held} in use and {self.idle} cached of "
                f"{self.total - 1}"
            )
        if at_rest and self.held:
            raise EngineDeadError(f"{self.held} KV blocks are in use although nothing runs")
