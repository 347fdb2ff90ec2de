"""Moves pages of the KV cache between the device and its tiers.  Each worker process has one mover.

    store(rows)   between steps   device ──read──► batch ─┐
    call(get)                                             ├─► thread of the tier ──► KVStore.put, get, drop
    fill(rows)    between steps   device ◄─write── staged ┘        │ stage: copies to the device begin
    call()                        done: [ticket, ok, bytes, us] ◄──┘ arrived: they have ended (``begun``: or run)

``store`` and ``fill`` are called in the order of the steps and wait for no store.  Every order has a *ticket*, a number
that is never used twice.  A page that was loaded is *staged* under its ticket until a release, on the device or in host
memory.  It reaches a block only by ``fill``, so a load that ends late changes no block.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np

from .interfaces.kvstore import KEY_BYTES, KVStore

# limit of the bytes of pages that were read from a CPU device and are not stored yet
QUEUE = 256 << 20
KEPT = 4  # this limit is larger by this factor for a store that keeps the arrays of its pages
READY = 2e-3  # seconds between two checks whether pages from a GPU have arrived on the host
RELEASE = -1  # in a row of ``fill`` in place of the KV group: release the page of the ticket
DROP = -1  # in a row of ``store`` in place of the KV group: remove the page from the tier
BATCH = 32 << 20  # bytes of pages that are copied to the device together
READ = 16 << 20  # bytes of pages that are read from the device together
# Seconds that a loaded page may wait for other pages, so that they are copied to the device
# together.
LINGER = 1e-3
LOOK = 1.0  # after this many idle seconds, a store looks for pages that other processes have added
CLOSING = 2.0  # seconds that the end of a mover waits for its threads
log = logging.getLogger("minivllm")


class PageBatch(Protocol):
    """Pages that were read from the device, perhaps not yet on the host."""

    @property
    def ready(self) -> bool:
        """Return True if the pages are on the host."""
        ...

    def page(self, i: int, own: bool) -> np.ndarray | None:
        """Wait for the copy of page ``i``, and return it as u8 [bytes], or None if it had no memory.

        ``own`` means that no other page shares the returned memory.
        """
        ...


class PageMemory(Protocol):
    """The memory of the KV cache on the device, as the mover uses it: blocks of each KV group, and recurrent states as
    the last group."""

    page_bytes: list[int]  # bytes of one block of each group
    queue: int  # limit of the bytes of pages that were read and that a store has not copied yet
    # seconds to copy a byte to the device, measured at the start; None if it was not measured
    copy_seconds: float | None
    written_bytes: int  # bytes and seconds of all finished copies from host to device
    written_seconds: float
    # whether no row runs, so that ``stage`` may queue any number of copies without delaying a step
    alone: bool

    def read(self, group: int, blocks: Sequence[int]) -> PageBatch:
        """Start the copy of blocks to the host, behind all work queued so far and before all later work."""
        ...

    def stage(self, group: int, pages: Sequence[np.ndarray]) -> Sequence[Any]:
        """Start the copies of loaded pages to the device, and return one object for each page, which ``write`` accepts.

        The threads of tiers call this while steps run."""
        ...

    def arrived(self, page: Any) -> float | None:
        """Return the seconds of the copy of a staged page; None while it runs."""
        ...

    def write(self, group: int, blocks: Sequence[int], pages: Sequence[Any]) -> None:
        """Copy staged pages to blocks, behind all work queued so far and before all later work."""
        ...

    def release(self) -> None:
        """Free device memory that only later copies would use."""
        ...

    def close(self) -> None:
        """End all threads, and free device memory.  Pages that were read stay valid."""
        ...


class TierThread:
    """The thread that calls one store.  It loads pages before it stores pages."""

    def __init__(
        self, store: KVStore, done: Callable[[int, bool, int, float], None], threaded: bool
    ) -> None:
        self.store, self._done = store, done
        self.looks = type(store).look is not KVStore.look
        self.expects = type(store).expect is not KVStore.expect
        self.news: dict[bytes, int] = {}
        self.faults = 0
        # Pages that were loaded and whose copies to the device have not begun: (KV group, ticket,
        # page, seconds of the load).
        self.loaded: list[tuple[int, int, np.ndarray, float]] = []
        self.lingers = 0.0  # time.monotonic() when the first of these pages was loaded
        self._loads: deque[Callable[[], None]] = deque()
        # Functions to call in order, each with the pages that must have arrived on the host before.
        self._others: deque[tuple[Callable[[], None], PageBatch | None]] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self._thread: threading.Thread | None = None
        if threaded:
            self._thread = threading.Thread(target=self._run, name="minivllm-tier", daemon=True)
            self._thread.start()

    def add(self, work: Callable[[], None], batch: PageBatch | None = None) -> None:
        """Queue work, which begins when the pages of ``batch`` are on the host."""
        with self._wake:
            self._others.append((work, batch))
            self._wake.notify()

    def add_load(self, work: Callable[[], None]) -> None:
        """Queue a load, which runs before all other work."""
        with self._wake:
            self._loads.append(work)
            self._wake.notify()

    @property
    def batch_is_full(self) -> bool:
        """Return True if the copies of the loaded pages to the device should begin now."""
        size = sum(page.nbytes for _, _, page, _ in self.loaded)
        late = time.monotonic() - self.lingers > LINGER
        return size >= BATCH or late or not self._loads

    def put(self, ticket: int, key: bytes, batch: PageBatch, index: int) -> None:
        """Store a page of a batch."""
        begun, size, stored = time.monotonic(), 0, False
        try:
            page = batch.page(index, self.store.keeps_pages)
            if page is not None:
                size = page.nbytes
                stored = bool(self.store.put(key, page))
        except Exception as e:
            self.fault("put", e)
        self._done(ticket, stored, size, time.monotonic() - begun)

    def get(self, key: bytes, size: int) -> np.ndarray | None:
        """Load a page of ``size`` bytes from the store; None if it is missing or damaged."""
        try:
            page = self.store.get(key)
        except Exception as e:
            self.fault("get", e)
            return None
        if page is None or page.dtype != np.uint8 or page.shape != (size,):
            self.faults += 1
            return None
        return page

    def mark(self, ticket: int, name: str, keys: list[bytes] | None) -> None:
        """Store or remove the name of a prefix, and report the ticket as done."""
        kept = False
        try:
            kept = bool(self.store.mark(name, keys))
        except Exception as e:
            self.fault("mark", e)
        self._done(ticket, kept, 0, 0.0)

    def expect(self, keys: list[bytes]) -> None:
        """Send the keys of the next loads to the store in advance, so that it can prepare them."""
        try:
            self.store.expect(keys)
        except Exception as e:
            self.fault("expect", e)

    def drop(self, keys: list[bytes]) -> None:
        """Remove pages."""
        try:
            self.store.drop(keys)
        except Exception as e:
            self.fault("drop", e)

    def fault(self, what: str, e: Exception) -> None:
        """Count an exception of the store, and log it if the count is a power of two."""
        self.faults += 1
        if self.faults & (self.faults - 1) == 0:  # the count is 1, 2, 4, 8 ...
            log.warning(
                "%s failed in %s (%d faults): %s", type(self.store).__name__, what, self.faults, e
            )

    def take_news(self) -> dict[str, int]:
        """Return the pages that other processes have added since the last call, by key (hex)."""
        with self._wake:
            news, self.news = self.news, {}
        return {key.hex(): size for key, size in news.items()}

    def look(self) -> None:
        """Record the pages that other processes have added to the store."""
        try:
            found = self.store.look()
        except Exception as e:
            self.fault("look", e)
            return
        with self._wake:
            self.news.update(found)

    def work(self) -> bool:
        """Call the next function of the queue, and return True; False if there is none, or if its pages have not
        arrived on the host."""
        piece = None
        with self._wake:
            if self._loads:
                piece = self._loads.popleft()
            elif self._others and _is_ready(self._others[0][1]):
                piece, _ = self._others.popleft()
        if piece is not None:
            piece()
        return piece is not None

    def _run(self) -> None:
        while self.work() or self._others or not self._closing:
            with self._wake:
                idle = not (self._loads or self._others or self._closing)
                if idle:
                    idle = not self._wake.wait(LOOK)
                elif not self._loads and self._others and not _is_ready(self._others[0][1]):
                    self._wake.wait(READY)
            if idle and self.looks:
                self.look()
        try:
            self.store.close()
        except Exception as e:
            self.fault("close", e)

    def close(self) -> None:
        """End the thread once its work is done."""
        with self._wake:
            self._closing = True
            self._loads.clear()
            self._wake.notify()

    def join(self, seconds: float) -> None:
        if self._thread is not None:
            self._thread.join(seconds)


def _is_ready(batch: PageBatch | None) -> bool:
    """Return True unless pages are still being copied to the host.

    An error of the copy is raised later, in the thread that reads the pages.
    """
    try:
        return batch is None or batch.ready
    except Exception:
        return True


def _description(store: KVStore, queue: int) -> dict[str, Any]:
    """Return the limits, the pages and the names of a store as JSON values.

    ``queue`` is the limit in bytes of pages on their way to a store that copies them."""
    names = {}
    for name, keys in store.names().items():
        names[name] = [key.hex() for key in keys]
    return {
        "limit": store.limit,
        "queue": queue * (KEPT if store.keeps_pages else 1),
        "patience": store.patience,
        "eager": bool(store.eager),
        "always": bool(store.always),
        "keeps_names": bool(store.keeps_names),
        "keys": {key.hex(): size for key, size in store.keys().items()},
        "names": names,
    }


def _keys_of(rows: np.ndarray) -> list[bytes]:
    """Return the page keys in rows of ``Mover.store``, where each is two numbers."""
    raw = rows[:, 4:].astype(">i8").tobytes()
    return [raw[at : at + KEY_BYTES] for at in range(0, len(raw), KEY_BYTES)]


class Mover:
    """The stores of one worker process, the threads that call them, and the pages that were loaded."""

    def __init__(
        self, stores: Sequence[KVStore], memory: PageMemory, identity: str, threaded: bool = True
    ) -> None:
        """Index the pages that the stores have.  Not ``threaded``: the caller runs ``TierThread.work``."""
        self.memory, self.identity = memory, identity
        # ticket -> loaded page, as ``PageMemory.stage`` returned it
        self._staged: dict[int, Any] = {}
        # Loaded pages that are not reported yet: (ticket, bytes, seconds).
        self._moving: deque[tuple[int, int, float]] = deque()
        self._finished: list[tuple[int, int, int, int]] = []
        self._lock = threading.Lock()
        # called before the threads start, so that two threads never call a store at the same time
        self._described = [_description(store, memory.queue) for store in stores]
        self.tiers = [TierThread(store, self._done, threaded) for store in stores]

    def opened(self) -> dict[str, Any]:
        """Return the identity and sizes of pages, and the stores, as JSON values for the engine's index."""
        described, self._described = self._described, []
        page_bytes = list(self.memory.page_bytes)
        facts = {"identity": self.identity, "page_bytes": page_bytes}
        return {**facts, "copy_seconds": self.memory.copy_seconds, "tiers": described}

    def _done(self, ticket: int, ok: bool, size: int, seconds: float) -> None:
        with self._lock:
            self._finished.append((ticket, int(ok), size, int(seconds * 1e6)))

    # ---- between steps -----------------------------------------------------------------------------------------------

    def store(self, rows: np.ndarray) -> None:
        """Read blocks and store them as pages.  ``rows`` i64 [n, 6] are (tier, group, block, ticket, and the key as two
        numbers); the group DROP removes the page of the key before all others are stored.  A block that cannot be
        read is not stored."""
        dropped = rows[rows[:, 1] == DROP]
        for tier in sorted(set(dropped[:, 0].tolist())):
            of_tier, thread = dropped[dropped[:, 0] == tier], self.tiers[tier]
            thread.add(partial(thread.drop, _keys_of(of_tier)))
        groups = set(rows[:, 1].tolist()) - {DROP}
        for group in sorted(groups):
            of_group = rows[rows[:, 1] == group]
            tiers, tickets = of_group[:, 0].tolist(), of_group[:, 3].tolist()
            most = max(1, READ // self.memory.page_bytes[group])
            for at in range(0, len(tiers), most):
                part = slice(at, at + most)
                self._store_batch(group, tiers[part], tickets[part], of_group[part])

    def _store_batch(
        self, group: int, tiers: list[int], tickets: list[int], rows: np.ndarray
    ) -> None:
        """Read the blocks of rows of ``store`` together, and queue their pages to be stored."""
        threads = [self.tiers[tier] for tier in tiers]
        blocks, index = np.unique(rows[:, 2], return_inverse=True)
        try:
            batch = self.memory.read(group, blocks.tolist())
        except (
            Exception
        ) as e:  # such as a lack of device memory: these pages are not stored, but the step runs
            for thread in dict.fromkeys(threads):
                thread.fault("read", e)
            for ticket in tickets:
                self._done(ticket, False, 0, 0.0)
            return
        orders = zip(threads, tickets, _keys_of(rows), index.tolist(), strict=True)
        for thread, ticket, key, place in orders:
            thread.add(partial(thread.put, ticket, key, batch, place), batch)

    def fill(self, rows: np.ndarray) -> None:
        """Write staged pages to blocks.  ``rows`` i64 [n, 3] are (group, block, ticket); the group RELEASE releases the
        ticket.  KeyError if a page is not staged."""
        writes: dict[int, tuple[list[int], list[Any]]] = {}
        for group, block, ticket in rows.tolist():
            if group == RELEASE:
                continue
            blocks, pages = writes.setdefault(group, ([], []))
            blocks.append(block)
            pages.append(self._staged[ticket])
        for group, (blocks, pages) in writes.items():
            self.memory.write(group, blocks, pages)
        for ticket in rows[rows[:, 0] == RELEASE, 2].tolist():
            self._staged.pop(ticket, None)

    # ---- calls -------------------------------------------------------------------------------------------------------

    def answer(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """Answer the verb "kv_tiers": ``opened`` with the argument ``open``, else ``call``."""
        return self.opened() if args.get("open") else self.call(args)

    def call(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """Carry out orders, and return the tickets that are done since the last call, as JSON values.

        ``get`` has rows (tier, ticket, key, KV group), ``mark`` has rows (tier, ticket, name, keys or None).  With
        ``begun`` a load is done once its copy to the device has begun: the step that writes the page waits for it, and
        no row runs meanwhile.
        ``store`` and ``fill`` have the rows of these methods; the engine sends them here only if no step is in
        flight."""
        begun = bool(args.get("begun"))
        self.memory.alone = begun
        gets = args.get("get", ())
        for tier, thread in enumerate(self.tiers):
            keys = [bytes.fromhex(key) for to, _, key, _ in gets if to == tier]
            if keys and thread.expects:
                thread.add_load(partial(thread.expect, keys))
        for tier, ticket, key, group in gets:
            self._order_get(self.tiers[tier], ticket, bytes.fromhex(key), group)
        for tier, ticket, name, keys in args.get("mark", ()):
            pages = None if keys is None else [bytes.fromhex(key) for key in keys]
            self.tiers[tier].add(partial(self.tiers[tier].mark, ticket, name, pages))
        for name, width in (("store", 6), ("fill", 3)):
            rows = np.array(args.get(name, ()), np.int64).reshape(-1, width)
            if len(rows):
                getattr(self, name)(rows)
        with self._lock:
            self._collect_arrived(begun)
            finished, self._finished = self._finished, []
        written = self.memory.written_bytes, int(self.memory.written_seconds * 1e6)
        faults = [thread.faults for thread in self.tiers]
        news = [thread.take_news() for thread in self.tiers]
        return {"done": finished, "faults": faults, "written": written, "news": news}

    def _order_get(self, thread: TierThread, ticket: int, key: bytes, group: int) -> None:
        size = self.memory.page_bytes[group]

        def load() -> None:
            begun = time.monotonic()
            page = thread.get(key, size)
            seconds = time.monotonic() - begun
            if page is None:
                self._done(ticket, False, size, seconds)
            else:
                thread.lingers = thread.lingers if thread.loaded else begun
                thread.loaded.append((group, ticket, page, seconds))
            if thread.batch_is_full:
                self._stage(thread)

        thread.add_load(load)

    def _stage(self, thread: TierThread) -> None:
        """Start the copies of the pages that a thread has loaded.

        Pages that cannot be staged are copied by the step that writes them.
        """
        loaded, thread.loaded = thread.loaded, []
        for group in sorted({group for group, *_ in loaded}):
            of_group = [row[1:] for row in loaded if row[0] == group]
            pages: Sequence[Any] = [page for _, page, _ in of_group]
            try:
                pages = self.memory.stage(group, pages)
            except Exception as e:  # such as a lack of memory on the device
                thread.fault("stage", e)
            with self._lock:
                for (ticket, page, seconds), staged in zip(of_group, pages, strict=True):
                    self._staged[ticket] = staged
                    self._moving.append((ticket, page.nbytes, seconds))

    def _collect_arrived(self, begun: bool) -> None:
        """Report the staged pages whose copies to the device have ended, in their order.

        ``begun`` also reports copies that have only begun, with their expected times."""
        while self._moving:
            ticket, size, seconds = self._moving[0]
            copy = self.memory.arrived(self._staged[ticket])
            if copy is None and not begun:
                return
            if copy is None:
                copy = size * (self.memory.copy_seconds or 0.0)
            self._moving.popleft()
            self._finished.append((ticket, 1, size, int((seconds + copy) * 1e6)))

    def close(self, seconds: float = CLOSING) -> None:
        """End the threads.  A thread whose store hangs is left running."""
        end = time.monotonic() + seconds
        for thread in self.tiers:
            thread.close()
        for thread in self.tiers:
            thread.join(max(0.0, end - time.monotonic()))
        self.memory.close()
