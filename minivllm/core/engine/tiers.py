"""The tiers behind the KV cache of the device, such as CPU memory and a disk, with the transfers of their pages.

    published, evicted ──► orders ──► delta ──► worker reads the block ──► thread stores the page ──► index

    new request ──► pages of its prompt that a tier has ──► loads ──► staged in the worker
                    (it waits outside the queue)                         │
    queue ◄── all loads have ended, or the time limit has ───────────────┘
    admitted ──► its own blocks ──► delta.fill ──► published with its first step, as computed blocks are

A loaded page is written to a block only by a delta, in the order of the steps.  So a load that ends late, or whose
request has ended, changes no block.  The key of a page is made of all tokens up to its end, the digests of the images
among them, the salt and the identity of the model, so a page is correct wherever it was computed.
"""

from __future__ import annotations

from dataclasses import replace
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from minivllm.core.interfaces.kvstore import KEY_BYTES
from minivllm.core.mover import DROP, LOOK, RELEASE

from .image_content import digests_by_block, without_numbers
from .taps import most_cached
from .tier_choice import LoadChoice
from .tier_index import TierIndex
from .tier_loads import Named, PageLoad, Staged, Stored
from .tier_names import NamedPrefixes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from minivllm.core.interfaces.evictor import Evictor, EvictorContext
    from minivllm.core.interfaces.images import PlacedImage
    from minivllm.core.interfaces.session import SessionTurn

    from .blocks import BlockPool, Salt
    from .checkpoints import Checkpoints
    from .request import Seq
    from .slots import Slots

VERB = "kv_tiers"  # of ``Executor.call``
# Bytes of loaded pages of waiting requests. Beyond this limit, later requests wait for earlier
# ones.
STAGED = 1 << 30
POLL = 3e-4  # seconds between two queries of the state of loads and stores
FLUSH = 10.0  # the end of the engine waits so many seconds for pages to be stored


def halves(key: bytes) -> list[int]:
    """Return the 16 bytes of a key as two 64-bit integers, the last columns of ``Delta.store``."""
    return np.frombuffer(key, ">i8").tolist()


class TieredCache(Protocol):
    """The attributes of a KV cache that its tiers use."""

    pools: list[BlockPool]
    slots: Slots
    block: int
    windows: list[int | None]
    prefix: bool
    checkpoints: Checkpoints | None
    tiers: Any

    def lookup(self, seq: Seq, known: int) -> list[np.ndarray]: ...

    def first_seen(self, window: int | None, blocks: int) -> int: ...


class Tiers:
    """The tiers of an engine (storage for KV pages behind the device), the fastest first."""

    def __init__(
        self,
        cache: TieredCache,
        opened: Sequence[Mapping[str, Any]],
        names: Sequence[str],
        evictor: Callable[[EvictorContext], Evictor],
        context: Callable[[str, int], EvictorContext],
        now: Callable[[], float],
    ) -> None:
        """Create the index of each tier with the pages that its storage has already.

        ``opened`` has what each rank (worker process) reported when it opened the tiers.  ``context(name, pages)``
        returns the arguments of an evictor for a tier of ``pages`` pages."""
        self.cache = cache
        self.now = now
        self.ranks = len(opened)
        self.identity = bytes.fromhex(opened[0]["identity"])
        # bytes of a page of each KV group: the part that one rank stores, and all ranks together
        self.part = [rank["page_bytes"] for rank in opened]
        self.page_bytes = [sum(sizes) for sizes in zip(*self.part, strict=True)]
        self.states = len(cache.pools) if cache.checkpoints is not None else -1
        self.tiers: list[TierIndex] = []
        for i, name in enumerate(names):
            facts = opened[0]["tiers"][i]
            pages = max(1, facts["limit"] // max(1, self.page_bytes[0]))
            queue = self.ranks * min(rank["tiers"][i]["queue"] for rank in opened)
            fixed = facts["limit"], queue, facts["patience"], facts["eager"]
            index = TierIndex(name, *fixed, evictor(context(name, pages)))
            held = [key for keys in facts["names"].values() for key in keys]
            index.open([rank["tiers"][i]["keys"] for rank in opened], held)
            self.tiers.append(index)
        # pages that another engine stored in a shared tier: (tier, key) -> count of ranks that have
        # found their part, and bytes
        self.found: dict[tuple[int, str], tuple[int, int]] = {}
        self.prefixes = NamedPrefixes(self, opened)
        measured = [rank["copy_seconds"] for rank in opened if rank["copy_seconds"] is not None]
        always = [facts["always"] for facts in opened[0]["tiers"]]
        # The time per byte is divided by the count of ranks, because all ranks copy their parts of a
        # page at the same time.
        copy = max(measured) / self.ranks if measured else None
        self.choice = LoadChoice(always, copy)
        # for each KV group: cached block -> key of its page
        self.named: list[dict[int, Named]] = [{} for _ in self.page_bytes]
        # (group, block) of blocks that eager tiers have still to store, in this order
        self.backlog: dict[tuple[int, int], None] = {}
        self.rows: list[tuple[int, ...]] = []  # rows of ``Delta.store`` for the next delta
        self.fills: list[tuple[int, int, int]] = []  # of ``Delta.fill``, likewise
        self.gets: list[list[Any]] = []  # pages to load with the next call of the workers
        self.storing: dict[int, Stored] = {}
        # id of a load -> page, until all ranks have ended the load
        self.loading: dict[int, Staged] = {}
        self.staged: dict[bytes, Staged] = {}  # key -> page that sequences still use
        self.waits: dict[Seq, PageLoad] = {}  # sequences that wait for pages, outside of the queue
        self.staged_bytes = 0
        self.next_ticket = 0
        self.polled = 0.0
        self._attach(cache)

    def _attach(self, cache: TieredCache) -> None:
        """Add the tiers to the cache, and their methods to the callbacks of its block pools and checkpoints."""
        cache.tiers = self
        for g, pool in enumerate(cache.pools):
            pool.evicted = lambda block, g=g: self.evicting(g, block)
            before = pool.forgotten
            pool.forgotten = lambda block, g=g, before=before: self._forgotten(g, block, before)
        if cache.checkpoints is not None:
            cache.checkpoints.published = self.checkpointed
            cache.checkpoints.dropped = self._state_dropped

    # ---- keys --------------------------------------------------------------------------------------------------------

    def root(self, salt: Salt) -> bytes:
        """Return the digest from which the keys of all prompts with this salt are derived."""
        return blake2b(self.identity + repr(salt).encode(), digest_size=KEY_BYTES).digest()

    def keys_of(
        self,
        tokens: np.ndarray,
        salt: Salt,
        keys: list[bytes],
        blocks: int,
        images: Sequence[PlacedImage] = (),
    ) -> list[bytes]:
        """Append the digests of further blocks of ``tokens`` to ``keys``, up to ``blocks`` blocks, and return ``keys``.
        It must begin with the digests of the first blocks.

        ``images`` are the images among the tokens.  The numbers of their contents in ``tokens`` are those of this
        engine only, so the digests of the pixels enter the keys in place of the numbers."""
        if len(keys) < blocks:
            digest = keys[-1] if keys else self.root(salt)
            size = self.cache.block
            raw = without_numbers(tokens, images).tobytes()
            of_images = digests_by_block(images, size, len(keys), blocks)
            for i in range(len(keys), blocks):
                part = raw[4 * size * i : 4 * size * (i + 1)] + of_images.get(i, b"")
                digest = blake2b(digest + part, digest_size=KEY_BYTES).digest()
                keys.append(digest)
        return keys

    @staticmethod
    def page_key(digest: bytes, group: int) -> bytes:
        """Return the key of the page of one KV group for a block, whose digest is ``digest``."""
        return digest[:-1] + bytes([group])

    # ---- to the tiers ------------------------------------------------------------------------------------------------

    def published(self, slot: int, first: int, last: int) -> None:
        """Compute the keys under which tiers store the blocks ``first`` to ``last`` - 1 of a row, which have just
        entered the prefix cache.

        A tier stores a block when the block is evicted, or an eager tier soon after this call."""
        s = self.cache.slots
        seq = self.cache.slots.at(slot)
        request = seq.request
        tenant = int(s.tenant[slot])
        session = 0 if request.turn is None else request.turn.session
        tokens = s.tokens[slot, : last * s.block]
        keys = self.keys_of(tokens, request.salt, seq.page_keys, last, request.images)
        for g, pool in enumerate(self.cache.pools):
            for i in range(first, last):
                block = int(s.table[g, slot, i])
                if block and pool.published(block) and block not in self.named[g]:
                    key = self.page_key(keys[i], g)
                    kind = request.kind_of(i)
                    self._name(g, block, Named(key, i, tenant, session, kind))

    def checkpointed(self, block: int, index: int) -> None:
        """Compute the key under which tiers store the copy ``index`` of the recurrent states at the end of a cached
        block."""
        behind = self.named[0].get(block)
        if behind is not None:
            key = self.page_key(behind.key, self.states)
            self._name(self.states, index, replace(behind, key=key))

    def _name(self, group: int, block: int, named: Named) -> None:
        self.named[group][block] = named
        if any(tier.eager and named.key not in tier.size for tier in self.tiers):
            self.backlog[group, block] = None

    def evicting(self, group: int, block: int) -> None:
        """Order that a block, or a copy of recurrent states, is stored, because the device is about to overwrite it."""
        named = self.named[group].get(block)
        if named is not None:
            self._order(group, block, named, evicted=True)
            self.backlog.pop((group, block), None)

    def forget(self, group: int, block: int) -> None:
        """Remove the key of a block that is no longer in the prefix cache."""
        self.named[group].pop(block, None)
        self.backlog.pop((group, block), None)

    def _state_dropped(self, index: int) -> None:
        self.evicting(self.states, index)
        self.forget(self.states, index)

    def _forgotten(self, group: int, block: int, before: Callable[[int], None] | None) -> None:
        if before is not None:
            before(block)
        self.forget(group, block)

    def _order(self, group: int, block: int, named: Named, evicted: bool) -> None:
        """Order that a block is stored in each tier that does not have it."""
        for i, tier in enumerate(self.tiers):
            if named.key not in tier.size and (evicted or tier.eager):
                tier.skipped += not self.order(i, group, block, named)

    def order(self, tier: int, group: int, block: int, named: Named) -> bool:
        """Order that one tier stores a block.  Return False if too many bytes are being stored, or if the tier has no
        room."""
        size = self.page_bytes[group]
        cost = float((named.depth + 1) * self.cache.block)
        index = self.tiers[tier]
        facts = named.tenant, named.session, named.kind
        room = index.has_place(size)
        if not room or not index.reserve(named.key, size, named.depth, cost, *facts):
            return False
        ticket = self.new_ticket()
        self.storing[ticket] = Stored(tier, named.key, size)
        index.queued += size
        self.rows.append((tier, group, block, ticket, *halves(named.key)))
        return True

    def _drain(self) -> None:
        """Order that blocks of the backlog are stored, as long as eager tiers can take more pages."""
        while self.backlog:
            group, block = next(iter(self.backlog))
            named = self.named[group][block]
            size = self.page_bytes[group]
            lacking = [tier for tier in self.tiers if tier.eager and named.key not in tier.size]
            if not all(tier.has_place(size) for tier in lacking):
                return
            del self.backlog[group, block]
            self._order(group, block, named, evicted=False)

    def new_ticket(self) -> int:
        """Return a new id for a load or a store."""
        self.next_ticket += 1
        return self.next_ticket

    def changes(self, idle: bool = False) -> dict[str, np.ndarray]:
        """Return the fields of plan.Delta since the last call; no empty ones.

        ``idle`` means that no delta is sent.  Then pages that are written to blocks stay here, because the tables,
        copies and states of their rows are only sent with the next delta."""
        self._drain()
        found = {}
        rows = [*self._drops(), *self.rows]
        if rows:
            found["store"] = np.array(rows, np.int64)
            self.rows = []
        writes = any(group != RELEASE for group, *_ in self.fills)
        if self.fills and not (idle and writes):
            found["fill"] = np.array(self.fills, np.int64)
            self.fills = []
        return found

    def _drops(self) -> list[tuple[int, ...]]:
        """Return the rows of ``Delta.store`` that remove evicted pages from the storage.

        They precede all other rows of the delta, because new pages use the freed room.  A page that was evicted and is
        stored again is first removed."""
        rows: list[tuple[int, ...]] = []
        for i, tier in enumerate(self.tiers):
            rows += [(i, DROP, 0, 0, *halves(key)) for key in tier.dropped]
            tier.dropped = []
        return rows

    # ---- back to the device ------------------------------------------------------------------------------------------

    def begin(self, seq: Seq) -> bool:
        """Start loading the pages that extend the prefix hit of a waiting sequence, if that saves time.

        Return True if the sequence must wait for them."""
        cache = self.cache
        request = seq.request
        usable = (most_cached(seq, seq.known) - 1) // cache.block
        if not cache.prefix or request.beams is not None or usable <= 0:
            return False
        n = len(cache.lookup(seq, usable * cache.block + 1)[0])
        keys = self.keys_of(seq.tokens, request.salt, seq.page_keys, usable, request.images)
        wanted = self._wanted(keys, n, usable)
        if not wanted or not self._worth(wanted, n):
            return False
        patience = max(self.tiers[tier].patience for tier, _ in wanted.values())
        load = seq.load = PageLoad(self.now(), patience, wanted)
        load.predicted = self.choice.seconds_to_load(self._bytes(wanted, ahead=True))
        self.waits[seq] = load
        load.busy, load.alone = self.choice.busy_seconds, self._alone()
        self._start(load)
        return True

    def _worth(self, wanted: Mapping[tuple[int, int], tuple[int, bytes]], n: int) -> bool:
        """Return True if loading the pages behind ``n`` cached blocks should cost less time than computing them."""
        blocks = max(i for g, i in wanted if g == 0) + 1 - n
        own = self._bytes(wanted)
        sizes = self._bytes(wanted, ahead=True)
        others = len(self.cache.slots.running) + len(self.waits)
        if not self.choice.loads(own, sizes, blocks * self.cache.block, others):
            return False
        for tier, index in enumerate(self.tiers):
            keys = [key for t, key in wanted.values() if t == tier]
            if keys:
                index.hits += len(keys)
                index.touch(keys)
        return True

    def _bytes(
        self, wanted: Mapping[tuple[int, int], tuple[int, bytes]], ahead: bool = False
    ) -> dict[int, int]:
        """Return how many bytes the pages ``wanted`` have in each tier.  ``ahead`` adds the bytes that earlier requests
        load from these tiers."""
        sizes: dict[int, int] = {}
        for (g, _), (tier, _) in wanted.items():
            sizes[tier] = sizes.get(tier, 0) + self.page_bytes[g]
        for page in self.loading.values() if ahead else ():
            if page.tier in sizes:
                sizes[page.tier] += page.size
        for load in self.waits.values() if ahead else ():
            for tier, size in () if load.pages else self._bytes(load.wanted).items():
                if tier in sizes:
                    sizes[tier] += size
        return sizes

    def _wanted(
        self, keys: Sequence[bytes], n: int, usable: int
    ) -> dict[tuple[int, int], tuple[int, bytes]]:
        """Return the pages in tiers that follow the first ``n`` cached blocks of a prompt, each with the index of its
        tier and its key."""
        found: dict[tuple[int, int], tuple[int, bytes]] = {}
        end = n
        while end < usable and self._find(found, keys, 0, end):
            end += 1
        for tier in self.tiers:
            tier.misses += usable - end
        for m in range(end, n, -1):
            pages = self.pages_of(n, m)
            if all(self._find(found, keys, g, i) for g, i in pages):
                return {page: found[page] for page in pages}
        return {}

    def pages_of(self, n: int, m: int) -> list[tuple[int, int]]:
        """Return the pages (group, block) that extend a hit of ``n`` blocks to ``m`` blocks."""
        pages = [
            (g, i)
            for g, window in enumerate(self.cache.windows)
            for i in range(max(n, self.cache.first_seen(window, m)), m)
        ]
        return pages if self.states < 0 else [*pages, (self.states, m - 1)]

    def _find(self, found: dict, keys: Sequence[bytes], group: int, i: int) -> bool:
        """Look for the page of block ``i`` in the tiers, the fastest first, and add it to ``found``.  Return False if
        no tier has it."""
        if (group, i) in found:
            return True
        key = self.page_key(keys[i], group)
        for tier, index in enumerate(self.tiers):
            if index.has(key):
                found[group, i] = tier, key
                return True
        return False

    def _start(self, load: PageLoad) -> None:
        """Order the loads of a waiting sequence, if there is host memory for their pages."""
        sizes = [
            self.page_bytes[g] for (g, _), (_, key) in load.wanted.items() if key not in self.staged
        ]
        if self.staged_bytes and self.staged_bytes + sum(sizes) > STAGED:
            return
        for (g, i), (tier, key) in load.wanted.items():
            page = self.staged.get(key)
            if page is None:
                page = Staged(self.new_ticket(), tier, key, self.page_bytes[g])
                self.staged[key] = self.loading[page.ticket] = page
                self.staged_bytes += page.size
                self.gets.append([tier, page.ticket, key.hex(), g])
            page.users += 1
            load.pages[g, i] = page

    def take(self, seq: Seq, n: int) -> tuple[int, dict[tuple[int, int], int]]:
        """Return (m, ids of loads by (group, block)): the loaded pages that extend the prefix hit of a sequence from
        ``n`` to ``m`` blocks."""
        load = seq.load
        chosen = {}
        m = n
        if load is None:
            return n, {}
        ends = [i + 1 for g, i in load.pages if g == 0]
        for m in range(max(ends, default=n), n, -1):
            pages = {page: load.pages.get(page) for page in self.pages_of(n, m)}
            if all(page is not None and page.usable for page in pages.values()):
                chosen = {place: page.ticket for place, page in pages.items() if page is not None}
                break
        else:
            m = n
        return m, chosen

    def fill(self, group: int, block: int, ticket: int) -> None:
        """Order that the next delta writes a loaded page to a block, or to an index of recurrent states."""
        self.fills.append((group, block, ticket))

    def cancel(self, group: int, blocks: np.ndarray) -> None:
        """Remove the orders to write to these blocks that were not sent to the device."""
        if self.fills:
            self.fills = [f for f in self.fills if f[0] != group or f[1] not in blocks]

    def state_of(self, slot: int) -> int | None:
        """Return the id of the loaded page of recurrent states that the next delta writes to a slot; None
        without one."""
        return next((t for g, index, t in self.fills if (g, index) == (self.states, slot)), None)

    def leave(self, seq: Seq) -> None:
        """Record that a sequence does not use its loaded pages any longer, because it was admitted or has ended."""
        load = seq.load
        seq.load = None
        self.waits.pop(seq, None)
        for page in () if load is None else load.pages.values():
            page.users -= 1
            if page.users:
                continue
            del self.staged[page.key]
            if page.done:
                self._release(page)
            else:
                self.tiers[page.tier].overdue.add(page.ticket)

    def _release(self, page: Staged) -> None:
        self.staged_bytes -= page.size
        if not page.failed:
            self.fills.append((RELEASE, 0, page.ticket))

    def report(self, event: str, seq: Seq, turn: SessionTurn) -> None:
        """Call the method ``event`` of the tiers' evictor plug-ins, because a sequence of a session was admitted
        ("began") or ends ("ended")."""
        groups = range(len(self.page_bytes))
        pages = [self.page_key(key, g) for key in seq.page_keys for g in groups]
        for tier in self.tiers:
            if tier.reads_turns:
                tier.report(event, pages if event == "ended" else [], turn)

    # ---- the worker --------------------------------------------------------------------------------------------------

    @property
    def active(self) -> bool:
        """Return True while a page is being copied, or a sequence waits for one."""
        return bool(self.waits or self.storing or self.loading or self.backlog)

    def turn(self, call: Callable[..., Any], idle: bool) -> list[Seq]:
        """Send the orders for pages to the worker processes, process their reports, and return the sequences that do
        not have to wait any longer.

        ``idle`` means that no step is in flight, so that blocks may be read and written immediately."""
        args: dict[str, Any] = {}
        if self.gets:
            args["get"] = self.gets
            self.gets = []
        if self.prefixes.marks:
            args["mark"] = self.prefixes.marks
            self.prefixes.marks = []
        changes = self.changes(idle=True) if idle else {}
        for name, rows in changes.items():
            args[name] = rows.tolist()
        # While no row runs, a row may start before the copies of its pages have ended, because a
        # step that waits for them on the device delays no other row.
        begun = idle and bool(self.waits) and not len(self.cache.slots.running)
        if begun:
            args["begun"] = True
        waits = bool(self.storing or self.loading or self.prefixes.marking)
        due = self.now() - self.polled >= (POLL if waits else LOOK)
        if args or due or (waits and idle):
            self.polled = self.now()
            for number, rank in enumerate(call(VERB, args)):
                self._note(number, rank)
        return self._ready(begun) if self.waits else []

    def _note(self, number: int, rank: Mapping[str, Any]) -> None:
        """Process the report of one rank (worker process): the loads and stores that have ended, errors, and pages that
        other engines stored."""
        for ticket, ok, size, microseconds in rank["done"]:
            if ticket in self.prefixes.marking:
                self.prefixes.marked(ticket, bool(ok))
            elif ticket in self.storing:
                self._stored(ticket, bool(ok), size)
            else:
                self._loaded(self.loading[ticket], bool(ok), size, microseconds / 1e6)
        for tier, faults in zip(self.tiers, rank["faults"], strict=True):
            tier.faults = max(tier.faults, faults)
        for i, news in enumerate(rank["news"]):
            for key, part in news.items():
                self._news(i, key, part)
        size, microseconds = rank["written"]
        self.choice.written(number, size * self.ranks, microseconds / 1e6)

    def _news(self, tier: int, key: str, part: int) -> None:
        """Add a page that another engine has stored to the index of a tier, once all ranks have found their parts of
        it."""
        ranks, size = self.found.pop((tier, key), (0, 0))
        ranks = ranks + 1
        size = size + part
        if ranks < self.ranks:
            self.found[tier, key] = ranks, size
            return
        page = bytes.fromhex(key)
        index = self.tiers[tier]
        if index.reserve(page, size, 0, 1.0, 0):
            index.arrived(page)

    def _stored(self, ticket: int, ok: bool, size: int) -> None:
        order = self.storing[ticket]
        tier = self.tiers[order.tier]
        order.acks += 1
        order.failed |= not ok
        tier.store_bytes += size * ok
        if order.acks < self.ranks:
            return
        del self.storing[ticket]
        tier.queued -= order.size
        if order.key not in tier.size:
            return
        if not order.failed:
            tier.arrived(order.key)
            tier.stores += 1
            return
        tier.arrived(order.key)  # first marked as stored, because only stored pages can be removed
        tier.remove(order.key)
        tier.dropped.append(order.key)
        tier.skipped += 1

    def _loaded(self, page: Staged, ok: bool, size: int, seconds: float) -> None:
        tier = self.tiers[page.tier]
        page.acks += 1
        page.failed |= not ok
        page.seconds = max(page.seconds, seconds)
        tier.load_bytes += size * ok
        if page.acks < self.ranks:
            return
        page.done = True
        del self.loading[page.ticket]
        tier.load_seconds += page.seconds
        if page.failed:
            tier.lost += 1
            if page.key in tier.stored:  # removed from the index, so that it can be stored again
                tier.remove(page.key)
                tier.dropped.append(page.key)
        else:
            tier.loads += 1
            self.choice.page_loaded(page.tier, page.size, page.seconds)
        if page.ticket in tier.overdue:
            tier.overdue.remove(page.ticket)
            tier.late += 1
            self._release(page)
        if page.failed and self.ranks > 1:
            # The load has failed on one rank, so the other ranks free the parts that they have loaded.
            self.fills.append((RELEASE, 0, page.ticket))

    def _ready(self, begun: bool) -> list[Seq]:
        """Return the waiting sequences whose pages are loaded, or that have waited too long.

        ``begun`` means that pages may still be copied to the device.  The expected time of these copies counts as
        waiting time."""
        found = []
        now = self.now()
        for seq, load in self.waits.items():
            if not load.pages:
                self._start(load)
            ended = bool(load.pages) and all(page.done for page in load.pages.values())
            if ended or now - load.begun > load.patience:
                load.ready = True
                busy = self.choice.busy_seconds - load.busy
                copies = sum(page.seconds for page in load.pages.values()) if begun else 0.0
                alone = load.alone and self._alone()
                self.choice.ended(load.predicted, max(now - load.begun, copies), busy, alone)
                found.append(seq)
        for seq in found:
            del self.waits[seq]
        return found

    def _alone(self) -> bool:
        """Return True if no row runs and no other sequence waits for pages."""
        return not len(self.cache.slots.running) and len(self.waits) <= 1

    def flush(self, call: Callable[..., Any], sleep: Callable[[float], None]) -> None:
        """Store all cached blocks that eager tiers (which store each block soon, not only at its eviction) lack.

        Wait for this up to FLUSH seconds.  No step may be in flight."""
        for _ in range(int(FLUSH / POLL)):
            self.turn(call, idle=True)
            if not self.storing and not self.backlog:
                return
            sleep(POLL)

    # ---- trust -------------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Remove all pages from all tiers.  Copies that run have no effect any more, and sequences that wait for pages
        go on without them."""
        for tier in self.tiers:
            tier.reset()
        for order in self.storing.values():
            order.failed = True
        for page in (*self.staged.values(), *self.loading.values()):
            page.void = True
        for load in self.waits.values():
            load.wanted = {}  # a load that has not started yet is given up
            if not load.pages:
                load.patience = -1.0
        self.backlog.clear()

    def stats(self) -> dict[str, Any]:
        """Return the state and the counters of each tier, and of the choices between loads and computing."""
        return {
            "tiers": [tier.figures() for tier in self.tiers],
            "tier_choice": self.choice.figures(),
        }

    def check(self) -> None:
        """Compare this object's dicts with the block pools; AssertionError names the inconsistency."""
        for g, pool in enumerate(self.cache.pools):
            for block in self.named[g]:
                assert pool.published(block), "a block has the key of a page and is not cached"
        self._check_keys()
        if self.cache.checkpoints is not None:
            kept = set(self.cache.checkpoints.of_block.values())
            assert set(self.named[self.states]) <= kept, (
                "states have the key of a page and no block"
            )
        for tier in self.tiers:
            tier.check()
        used: dict[int, int] = {}
        for page in self.staged.values():
            used[page.ticket] = page.users
            assert page.users > 0, "a staged page has no user"
        sizes = sum(page.size for page in self.staged.values())
        for tier in self.tiers:
            sizes += sum(self.loading[ticket].size for ticket in tier.overdue)
        assert self.staged_bytes == sizes, "the bytes of staged pages do not add up"
        for i, tier in enumerate(self.tiers):
            queued = sum(order.size for order in self.storing.values() if order.tier == i)
            assert tier.queued == queued, f"tier {tier.name}: the bytes of its queue"

    def _check_keys(self) -> None:
        """Compare the keys of the cached blocks of all running rows with the tokens of the rows."""
        s = self.cache.slots
        for slot in s.running.tolist():
            if s.dropped[:, slot].any():
                continue  # its blocks do not hold all of its tokens any more
            n = int(s.prefix_published[slot])
            request = s.at(slot).request
            tokens = s.tokens[slot, : n * s.block]
            keys = self.keys_of(tokens, request.salt, [], n, request.images)
            for g in range(len(self.cache.pools)):
                blocks = s.table[g, slot, :n].tolist()
                for digest, block in zip(keys, blocks, strict=True):
                    named = self.named[g].get(block)
                    right = named is None or named.key == self.page_key(digest, g)
                    assert right, "a block has the key of other tokens"
