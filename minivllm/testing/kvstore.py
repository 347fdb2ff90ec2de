"""The conformance suite of KV stores, which keep pages (blocks of keys and values) outside of the device, as on a disk.

A store is compared with a dict in random runs.  A durable store is also closed and opened again.
"""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from minivllm.core.interfaces.kvstore import KEY_BYTES, KVStore, StoreContext

from .base import Seen, since
from .kept import Lasting
from .spec import SpecConformance

SIZES = (1, 7, 64, 4096, 5000)  # bytes of pages
MODEL = hashlib.sha256(b"the model of the kit").hexdigest()
OTHER = hashlib.sha256(b"another model").hexdigest()
LARGEST = 64 << 20  # most bytes that the test of the limit stores


def key_of(number: int) -> bytes:
    """Return the key of test page ``number``."""
    return hashlib.sha256(f"page {number}".encode()).digest()[:KEY_BYTES]


def page_of(number: int, size: int) -> np.ndarray:
    """Return a page, uint8 [size], whose contents differ for each ``number``."""
    generator = np.random.default_rng(number)
    return generator.integers(0, 256, size, dtype=np.uint8)


class _StoreMachine(RuleBasedStateMachine):
    """A hypothesis state machine that uses a store and a dict together.  The test sets ``suite`` and ``seen``."""

    suite: KVStoreConformance
    seen: Seen

    def __init__(self) -> None:
        super().__init__()
        # each example uses another model identity, because pages of earlier examples may still be on the disk
        self.seen["examples"] += 1
        self.model = hashlib.sha256(f"model {self.seen['examples']}".encode()).hexdigest()
        self.store = self.suite.build(self.suite.context_of(self.model))
        self.pages: dict[bytes, np.ndarray] = {}
        self.kept: list[tuple[np.ndarray, np.ndarray]] = []  # (array that ``get`` returned, copy of its content)

    @rule(number=st.integers(0, 12), size=st.sampled_from(SIZES))
    def put(self, number: int, size: int) -> None:
        key = key_of(number)
        page = page_of(100 * number + size, size)
        if key in self.pages:
            return
        given = page.copy()
        if self.store.put(key, given):
            self.pages[key] = page
            self.seen["stored"] += 1
        if not self.store.keeps_pages:
            given[:] = 0  # the caller may use its memory for other pages

    @rule(number=st.integers(0, 12))
    def get(self, number: int) -> None:
        self._get(key_of(number))

    @precondition(lambda self: self.pages)
    @rule(data=st.data())
    def get_stored(self, data: Any) -> None:
        """Get a page that is stored."""
        self._get(data.draw(st.sampled_from(sorted(self.pages))))

    def _get(self, key: bytes) -> None:
        """Get a page, and compare it with that of the dict."""
        found = self.store.get(key)
        page = self.pages.get(key)
        if page is None:
            assert found is None, "get returned a page that was not stored, or was dropped: expected None"
            return
        assert found is not None, "get lost a page: expected the page that was stored"
        same = isinstance(found, np.ndarray) and found.dtype == np.uint8 and np.array_equal(found, page)
        assert same, f"get returned {found!r}: expected the array u8 [{len(page)}] that was stored"
        self.kept.append((found, page))
        self.seen["found"] += 1

    @rule(numbers=st.lists(st.integers(0, 14), max_size=4))
    def expect(self, numbers: list[int]) -> None:
        self.store.expect([key_of(number) for number in numbers])

    @rule(numbers=st.lists(st.integers(0, 14), max_size=4))
    def drop(self, numbers: list[int]) -> None:
        keys = [key_of(number) for number in numbers]
        self.store.drop(keys)
        gone = [self.pages.pop(key, None) is not None for key in keys]
        self.seen["dropped"] += sum(gone)

    @rule()
    def compare(self) -> None:
        """Check that the store has the keys of the dict, and that arrays returned earlier have not changed."""
        sizes = {key: page.nbytes for key, page in self.pages.items()}
        assert dict(self.store.keys()) == sizes, "keys differs from the stored pages and their sizes"
        for array, page in self.kept:
            assert np.array_equal(array, page), "a later call changed an array that get had returned"

    @precondition(lambda self: self.suite.claims("durable"))
    @rule()
    def open_again(self) -> None:
        """Close the store and open it again.  Dropped pages may return then."""
        self.store.close()
        self.store = self.suite.build(self.suite.context_of(self.model))
        unknown = [key for key in dict(self.store.keys()) if key not in self.pages]
        self.store.drop(unknown)
        self.seen["opened"] += 1
        self.compare()

    def teardown(self) -> None:
        self.compare()
        self.store.close()


class KVStoreConformance(Lasting, SpecConformance):
    """The conformance suite of KV stores.

    Each test runs in an empty folder, which is also the home directory.  Set ``options`` if the plug-in has options
    without a default, and choose a limit of a few MB, so that the test of the limit can fill the store.
    """

    kind = "kvstore"

    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("HOME", str(tmp_path))

    def context_of(self, identity: str, rank: int = 0, ranks: int = 1) -> StoreContext:
        """Return the constructor's context of a store for a model, on one of ``ranks`` ranks.

        As in an engine, the number of ranks changes the identity.
        """
        if ranks > 1:
            identity = hashlib.blake2b(f"{identity} {ranks}".encode(), digest_size=32).hexdigest()
        return StoreContext(identity, rank, ranks)

    def context(self) -> tuple[Any, ...]:
        """Return the arguments of the plug-in's constructor after its options."""
        return (self.context_of(MODEL),)

    def exercise(self, instance: KVStore) -> Any:
        """Store and read pages, and return the contents."""
        for number in range(3):
            instance.put(key_of(number), page_of(number, 100))
        instance.drop([key_of(1)])
        found = [instance.get(key_of(number)) for number in range(3)]
        instance.drop([key_of(0), key_of(2)])
        instance.close()
        return [None if page is None else page.tolist() for page in found]

    def lasting(self) -> KVStore:
        """Create the instance of the leak test, which serves until ``let_go``."""
        return self.build(*self.context())

    def once_more(self, instance: KVStore, number: int) -> None:
        """Store, read and drop a page."""
        key = key_of(number)
        instance.put(key, page_of(number, 5000))
        instance.get(key)
        instance.drop([key])

    def let_go(self, instance: KVStore) -> None:
        """Close an instance."""
        instance.close()

    @since(1, 0)
    def test_pages_come_back_as_they_were_stored(self) -> None:
        """Check that a store returns the same as a dict of pages, in any order of calls."""
        wanted = {"stored": 20, "found": 20, "dropped": 5}
        if self.claims("durable"):
            wanted["opened"] = 5
        seen = Seen()
        machine = type("Machine", (_StoreMachine,), {"suite": self, "seen": seen})
        self.run_machine(machine, 60, 40)
        self.meet(seen, **wanted)

    @since(1, 0)
    def test_a_page_that_is_there_is_not_stored_twice(self) -> None:
        """Check that ``put`` of a key that is stored already returns True and keeps the stored page."""
        store = self.build(*self.context())
        page = page_of(1, 1000)
        assert store.put(key_of(1), page)
        assert store.put(key_of(1), page) is True, "put of a stored page: expected True"
        assert list(store.keys()) == [key_of(1)]
        store.drop([key_of(1)])
        assert store.get(key_of(1)) is None, "a page that was stored twice is still there after drop"
        store.close()

    @since(1, 0)
    def test_the_limit_is_kept(self) -> None:
        """Check that pages of ``limit`` bytes in total fit, also after drops, and that ``put`` of more never raises."""
        store = self.build(*self.context())
        limit = store.limit
        assert isinstance(limit, int) and limit > 0, f"limit is {limit!r}: expected a number of bytes"
        if limit > LARGEST:
            store.close()
            pytest.skip(f"the limit is {limit} bytes: set options with at most {LARGEST}")
        size = max(1, limit // 50)
        held: list[int] = []
        for number in range(200):
            if len(held) == limit // size:
                store.drop([key_of(held.pop(0))])
            stored = store.put(key_of(number), page_of(number, size))
            assert stored, f"page {number} has no place, although {len(held)} of {limit // size} pages are stored"
            held.append(number)
        for number in held:
            found = store.get(key_of(number))
            assert found is not None and np.array_equal(found, page_of(number, size)), f"page {number} is lost"
        for number in range(200, 260):
            answer = store.put(key_of(number), page_of(number, size))
            assert isinstance(answer, (bool, np.bool_)), f"put returned {answer!r}: expected True or False"
        store.close()

    @since(1, 0)
    def test_another_thread_may_use_a_store_than_the_one_that_made_it(self) -> None:
        """Check a store as the engine uses it: one thread makes it and lists its keys, and another makes all other
        calls, one of which is ``close``."""
        store = self.build(*self.context())
        assert not store.keys() and not store.names(), "a new store has pages or names"
        page = page_of(0, 700)

        def use() -> np.ndarray | None:
            store.expect([key_of(0)])
            assert store.put(key_of(0), page.copy()), "put returned False: expected room for a page of 700 bytes"
            store.look()
            store.mark("name", [key_of(0)])
            found = store.get(key_of(0))
            store.drop([key_of(0)])
            store.close()
            return found

        with ThreadPoolExecutor(1) as thread:
            found = thread.submit(use).result()
        assert found is not None and np.array_equal(found, page), "get lost the page"

    @since(1, 0)
    def test_models_and_ranks_share_no_page(self) -> None:
        """Check that a page that was stored for one model or one rank is never returned to another."""
        contexts = [self.context_of(MODEL), self.context_of(OTHER)]
        contexts += [self.context_of(MODEL, rank, 2) for rank in (0, 1)]
        stores = [self.build(ctx) for ctx in contexts]
        for i, store in enumerate(stores):
            store.put(key_of(i), page_of(i, 500))
        for i, store in enumerate(stores):
            foreign = []
            for j in range(len(stores)):
                if j != i and store.get(key_of(j)) is not None:
                    foreign.append(j)
            assert not foreign, f"the store of {contexts[i]} has a page of {contexts[foreign[0]]}"
        for store in stores:
            store.close()

    @since(1, 0)
    def test_durable_pages_are_found_by_the_next_store(self) -> None:
        """Check that pages survive ``close`` and are found by a new store of the same model and rank, and no other."""
        if not self.claims("durable"):
            pytest.skip("the store is not durable")
        store = self.build(*self.context())
        for number in range(20):
            store.put(key_of(number), page_of(number, 700))
        store.close()
        for ctx, expected in ((self.context_of(OTHER), 0), (self.context_of(MODEL, 1, 2), 0), (*self.context(), 20)):
            store = self.build(ctx)
            assert len(store.keys()) == expected, f"{len(store.keys())} pages for {ctx}: expected {expected}"
            store.close()

    @since(1, 0)
    def test_look_finds_pages_of_other_processes(self) -> None:
        """Check that ``look`` returns only new pages that another store of the same model has stored, each once.

        The pages that it returns can be read.  It may also return none.
        """
        first = self.build(*self.context())
        second = self.build(*self.context())
        assert not first.look() and not second.look(), "look found pages, and there are none"
        for number in range(5):
            first.put(key_of(number), page_of(number, 600))
        found = dict(second.look())
        assert not first.look(), "look returned pages of the store itself"
        assert set(found) <= {key_of(number) for number in range(5)}, "look returned pages that nobody has stored"
        for number in range(5):
            page = second.get(key_of(number))
            if key_of(number) in found:
                assert found[key_of(number)] == 600, f"look gave {found[key_of(number)]} bytes: expected 600"
                assert page is not None and np.array_equal(page, page_of(number, 600)), "a found page is not there"
        assert not second.look(), "look returned a page twice"
        first.close()
        second.close()

    @since(1, 0)
    def test_names_are_kept_until_they_are_forgotten(self) -> None:
        """Check names of prefixes: they survive ``close`` with their keys, and other models have none of them.

        A store with ``keeps_names`` False must return False from ``mark``.
        """
        store = self.build(*self.context())
        keys = [key_of(number) for number in range(3)]
        if not store.keeps_names:
            assert store.mark("a", keys) is False and not store.names(), "keeps_names is False: expected no names"
            store.close()
            return
        for name in ("a/b .. \u00e9", "second"):
            assert store.mark(name, keys[:2]) is True
        assert store.mark("second", keys) is True
        store.close()
        store = self.build(*self.context())
        found = {name: list(kept) for name, kept in store.names().items()}
        expected = {"a/b .. \u00e9": keys[:2], "second": keys}
        assert found == expected, f"names returned {found}"
        other = self.build(self.context_of(OTHER))
        assert not other.names(), "another model has the names"
        assert store.mark("second", None) is True and store.mark("third", None) is True
        assert list(store.names()) == ["a/b .. \u00e9"], "a name is still there after it was forgotten"
        store.close()
        other.close()

    @since(1, 0)
    def test_two_durable_stores_share_pages(self) -> None:
        """Check that two open stores of the same model do not damage or drop each other's pages.

        ``drop`` of the page of another store only forgets the page.
        """
        if not self.claims("durable"):
            pytest.skip("the store is not durable")
        first = self.build(*self.context())
        for number in range(10):
            first.put(key_of(number), page_of(number, 900))
        second = self.build(*self.context())
        for number in range(10, 20):
            first.put(key_of(number), page_of(number, 900))
            second.put(key_of(number), page_of(number, 900))
            second.drop([key_of(number - 10)])
        for store in (first, second):
            store.look()
            for number in range(20):
                found = store.get(key_of(number))
                whole = found is None or np.array_equal(found, page_of(number, 900))
                assert whole, f"page {number} is damaged while two stores are open"
        kept = all(first.get(key_of(number)) is not None for number in range(20))
        assert kept, "drop() of another store removed its pages: expected that drop() removes what its own store put"
        first.close()
        second.close()
