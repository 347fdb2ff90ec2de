"""The disk store: damage, limits, sharing and kills."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from minivllm.core.interfaces.kvstore import StoreContext
from minivllm.errors import ResourceError
from minivllm.plugins.kvstore import disk as disk_module
from minivllm.plugins.kvstore import segments
from minivllm.plugins.kvstore.disk import DiskStore
from minivllm.plugins.kvstore.options import DiskStoreOptions
from minivllm.plugins.kvstore.segments import FILE_HEAD, PAGE_HEAD
from minivllm.testing.kvstore import MODEL, OTHER, key_of, page_of

SIZE = 3000


def store_at(path, limit=64 << 20, identity=MODEL) -> DiskStore:
    return DiskStore(DiskStoreOptions(path=str(path), bytes=limit), StoreContext(identity))


def filled(path, n=10, **options) -> DiskStore:
    store = store_at(path, **options)
    for number in range(n):
        assert store.put(key_of(number), page_of(number, SIZE))
    return store


def files_of(path) -> list[Path]:
    return sorted(Path(path).glob("*/*.kv"))


def found(store, n=10) -> list[int]:
    """Return the numbers of the pages that the store returns.  Each page is whole."""
    numbers = []
    for number in range(n):
        page = store.get(key_of(number))
        if page is not None:
            assert np.array_equal(page, page_of(number, SIZE)), f"page {number} is damaged"
            numbers.append(number)
    return numbers


# ---------------------------------------------------------------- damage


@pytest.mark.parametrize("cut", [0, 10, FILE_HEAD.size, FILE_HEAD.size + 5, FILE_HEAD.size + PAGE_HEAD.size + SIZE, -1])
def test_a_file_that_is_cut_off_loses_its_last_pages(tmp_path, cut):
    filled(tmp_path).close()
    (file,) = files_of(tmp_path)
    size = file.stat().st_size
    os.truncate(file, cut if cut >= 0 else size + cut)
    store = store_at(tmp_path)
    whole = max(0, ((cut if cut >= 0 else size - 1) - FILE_HEAD.size) // (PAGE_HEAD.size + SIZE))
    assert found(store) == list(range(whole))
    assert store.put(key_of(9), page_of(9, SIZE))
    assert 9 in found(store)
    store.close()
    assert 9 in found(store_at(tmp_path))


def test_a_file_that_is_cut_off_while_it_is_open_gives_misses(tmp_path):
    store = filled(tmp_path)
    os.truncate(files_of(tmp_path)[0], FILE_HEAD.size + 2 * (PAGE_HEAD.size + SIZE))
    assert found(store) == [0, 1]
    assert len(store.keys()) == 2


def test_no_flipped_bit_gives_a_wrong_page(tmp_path):
    filled(tmp_path, 3).close()
    (file,) = files_of(tmp_path)
    raw = file.read_bytes()
    heads = [FILE_HEAD.size + i * (PAGE_HEAD.size + SIZE) for i in range(3)]
    fields = [range(FILE_HEAD.size), *(range(at, at + PAGE_HEAD.size + 4) for at in heads)]
    lost = 0
    for at in sorted({i for part in fields for i in part} | set(range(0, len(raw), 997))):
        damaged = bytearray(raw)
        damaged[at] ^= 1 << at % 8
        file.write_bytes(damaged)
        store = store_at(tmp_path)
        lost += len(found(store, 3)) < 3
        store.close()
    assert lost > 100


@pytest.mark.parametrize("seed", range(4))
def test_pages_that_are_read_ahead_are_the_stored_pages(tmp_path, monkeypatch, seed):
    """Announced pages may be dropped, stored again, damaged, or never requested, and their files closed."""
    for module in (disk_module, segments):
        monkeypatch.setattr(module, "DIRECT_FROM", 1)
    monkeypatch.setattr(disk_module, "DESCRIPTORS", 8)
    rng = np.random.default_rng(seed)
    store, pages = store_at(tmp_path, 1 << 20), {}
    read = 0
    for turn in range(300):
        numbers = rng.permutation(60)[: rng.integers(1, 40)].tolist()
        if turn % 3 == 0:
            for number in numbers:
                if number not in pages and store.put(key_of(number), page_of(number, 3000 + number)):
                    pages[number] = page_of(number, 3000 + number)
        store.expect([key_of(number) for number in numbers])
        for number in numbers[rng.integers(0, 3) :]:
            found, page = store.get(key_of(number)), pages.get(number)
            assert (found is None) == (page is None)
            assert page is None or np.array_equal(found, page)
            read += page is not None
        if turn % 7 == 0:
            gone = [number for number in numbers if number in pages]
            store.drop([key_of(number) for number in gone])
            for number in gone:
                del pages[number]
        if turn % 50 == 49:
            store.expect([key_of(number) for number in numbers])
            store.close()
            store = store_at(tmp_path, 1 << 20)
            store.drop([key for key in dict(store.keys()) if key not in {key_of(number) for number in pages}])
    assert read > 1000
    store.close()


def test_a_damaged_page_that_is_read_ahead_is_a_miss(tmp_path, monkeypatch):
    for module in (disk_module, segments):
        monkeypatch.setattr(module, "DIRECT_FROM", 1)
    store = store_at(tmp_path)
    for number in range(4):
        store.put(key_of(number), page_of(number, SIZE))
    (path,) = files_of(tmp_path)
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    store.expect([key_of(number) for number in range(4)])
    assert found(store, 4) == [0, 1, 2]
    assert key_of(3) not in dict(store.keys())
    store.close()


def test_a_page_under_another_key_is_not_returned(tmp_path):
    store = filled(tmp_path)
    store.places[key_of(1)], store.places[key_of(2)] = store.places[key_of(2)], store.places[key_of(1)]
    assert found(store) == [0, *range(3, 10)]


def test_files_of_another_model_or_version_are_not_read(tmp_path, monkeypatch):
    filled(tmp_path).close()
    (file,) = files_of(tmp_path)
    other = store_at(tmp_path, identity=OTHER)
    other.close()
    os.link(file, other.folder / file.name)  # as if somebody had moved it there
    store = store_at(tmp_path, identity=OTHER)
    assert not store.keys()
    assert store.skipped == 1
    (tmp_path / MODEL[:32] / "r0of1-junk.kv").write_bytes(b"junk")
    store = store_at(tmp_path)
    assert found(store) == list(range(10))
    assert store.skipped == 1
    store.close()
    monkeypatch.setattr("minivllm.plugins.kvstore.segments.VERSION", 99)
    assert not store_at(tmp_path).keys()


# ---------------------------------------------------------------- space


def test_a_full_disk_loses_pages_and_nothing_else(tmp_path, monkeypatch):
    store = filled(tmp_path, 3)
    real = os.writev

    def full(fd, parts):
        real(fd, [bytes(parts[0])[:20]])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "writev", full)
    with pytest.raises(OSError, match="No space left"):
        store.put(key_of(3), page_of(3, SIZE))
    monkeypatch.setattr(os, "writev", real)
    assert found(store) == [0, 1, 2]
    assert store.put(key_of(4), page_of(4, SIZE))
    store.close()
    assert found(store_at(tmp_path)) == [0, 1, 2, 4]


@pytest.mark.parametrize("part", [0, 30])
def test_a_file_that_cannot_be_begun_is_not_used(tmp_path, monkeypatch, part):
    store = store_at(tmp_path)
    real = os.writev

    def full(fd, parts):
        real(fd, [bytes(parts[0])[:part]])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "writev", full)
    with pytest.raises(OSError, match="No space left"):
        store.put(key_of(0), page_of(0, SIZE))
    assert not files_of(tmp_path)
    monkeypatch.setattr(os, "writev", real)
    for number in range(5):
        assert store.put(key_of(number), page_of(number, SIZE))
    assert found(store) == list(range(5))
    store.close()
    assert found(store_at(tmp_path)) == list(range(5))


def test_files_of_running_engines_of_other_models_take_no_room(tmp_path):
    limit = 1 << 20
    busy = filled(tmp_path, 200, limit=limit, identity=OTHER)
    store = filled(tmp_path, 300, limit=limit)
    assert found(store, 300) == list(range(300))
    assert found(busy, 200) == list(range(200))


def test_starts_continue_the_files_of_ended_engines(tmp_path):
    for number in range(20):
        store = store_at(tmp_path)
        assert store.put(key_of(number), page_of(number, SIZE))
        store.close()
    assert len(files_of(tmp_path)) == 1
    first, second = store_at(tmp_path), store_at(tmp_path)
    assert second.put(key_of(20), page_of(20, SIZE))
    assert first.put(key_of(21), page_of(21, SIZE))
    assert len(files_of(tmp_path)) == 2
    assert set(second.look()) == {key_of(21)} and set(first.look()) == {key_of(20)}
    assert found(first, 22) == found(second, 22) == list(range(22))


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_many_files_need_few_descriptors(tmp_path, monkeypatch):
    monkeypatch.setattr(disk_module, "DESCRIPTORS", 10)
    others = [store_at(tmp_path) for _ in range(50)]
    for number, store in enumerate(others):
        assert store.put(key_of(number), page_of(number, SIZE))
    before = descriptors()
    reader = store_at(tmp_path)
    assert found(reader, 50) == list(range(50))
    for store in others:
        store.close()
    before -= 50
    owner = store_at(tmp_path, 1 << 20)
    assert found(owner, 50) == list(range(50))
    owner.drop([key_of(number) for number in range(25)])
    assert owner.put(key_of(50), page_of(50, SIZE))
    assert descriptors() - before <= 20
    assert len(files_of(tmp_path)) == 25
    assert found(reader, 50) == list(range(25, 50))
    assert set(reader.look()) == {key_of(50)}
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", lambda *args: (_ for _ in ()).throw(OSError(errno.EMFILE, "Too many open files")))
        with pytest.raises(ResourceError, match=r"no more files can be opened .*this process may have \d+.*ulimit -n"):
            store_at(tmp_path)


def test_an_owner_that_closed_a_file_keeps_the_pages_that_another_one_added(tmp_path, monkeypatch):
    monkeypatch.setattr(disk_module, "DESCRIPTORS", 8)
    others = [store_at(tmp_path) for _ in range(12)]
    for number, store in enumerate(others):
        assert store.put(key_of(number), page_of(number, SIZE))
        store.close()
    first = store_at(tmp_path)
    closed = [file.path for file in first.files.values() if file.fd is None]
    assert len(closed) == 4
    second = store_at(tmp_path)
    assert second.put(key_of(12), page_of(12, SIZE))
    (shared,) = [file.path for number, file in second.files.items() if number == second.newest]
    assert shared in closed
    second.close()
    (number,) = [number for number, file in first.files.items() if file.path == shared]
    first.drop([key for key, place in first.places.items() if place.file == number])
    assert shared.exists() and set(first.look()) == {key_of(12)}
    for key in range(13, 20):
        assert first.put(key_of(key), page_of(key, SIZE))
    assert set(range(12, 20)) <= set(found(first, 20))
    first.close()
    assert set(range(12, 20)) <= set(found(store_at(tmp_path), 20))


def test_the_files_keep_the_limit_and_dropped_pages_make_room(tmp_path):
    limit = 1 << 20
    store = store_at(tmp_path, limit)
    held: list[int] = []
    for number in range(3000):
        if (len(held) + 1) * SIZE > store.limit:
            victim = held.pop(number * 7919 % len(held))
            store.drop([key_of(victim)])
        assert store.put(key_of(number), page_of(number, SIZE)), number
        held.append(number)
        if number % 50 == 0:
            assert sum(file.stat().st_size for file in files_of(tmp_path)) <= limit
    assert sorted(found(store, 3000)) == sorted(held)
    store.close()
    again = store_at(tmp_path, limit)
    assert set(held) <= set(found(again, 3000))


def test_files_of_models_that_are_not_used_go_first(tmp_path):
    limit = 1 << 20
    filled(tmp_path, 200, limit=limit, identity=OTHER).close()
    busy = filled(tmp_path, 20, limit=limit, identity="ab" * 32)
    store = filled(tmp_path, 230, limit=limit)
    assert found(store, 230) == list(range(230))
    assert found(busy, 20) == list(range(20))
    assert not files_of(tmp_path / OTHER[:32])
    assert sum(file.stat().st_size for file in files_of(tmp_path)) <= limit


def test_a_folder_that_cannot_be_used_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ResourceError, match=r"the folder .*file.* cannot be used"):
        store_at(tmp_path / "file")


def test_a_folder_that_goes_away_loses_no_page_that_is_open(tmp_path):
    store = filled(tmp_path)
    shutil.rmtree(store.folder)
    assert found(store) == list(range(10))
    store.newest = None
    assert store.put(key_of(10), page_of(10, SIZE))  # in a new file
    assert files_of(tmp_path)


# ---------------------------------------------------------------- processes

WRITER = """
import sys
from test_kv_stores import *
store = store_at(sys.argv[1])
for number in range(100000):
    store.put(key_of(number), page_of(number, SIZE))
    print(number, flush=True)
"""


def test_a_kill_loses_at_most_the_page_that_was_being_written(tmp_path):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    child = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, env=environment)
    assert child.stdout is not None
    written = -1
    while written < 300:
        written = int(child.stdout.readline())
    other = store_at(tmp_path)  # a second engine, while the first writes
    assert len(found(other, written + 1)) == written + 1
    assert not any(file.owned for file in other.files.values())
    child.send_signal(signal.SIGKILL)
    written = max([written, *(int(line) for line in child.stdout.read().split())])
    child.wait()
    other.close()
    store = store_at(tmp_path)
    assert len(found(store, written + 1)) == written + 1
    assert all(file.owned for file in store.files.values())


def test_pages_of_a_running_engine_are_found_while_it_writes_and_deletes(tmp_path):
    first, second = store_at(tmp_path, 1 << 20), store_at(tmp_path, 1 << 20)
    held: list[int] = []
    seen = set()
    for number in range(1500):
        if (len(held) + 1) * SIZE > first.limit:
            first.drop([key_of(held.pop(0))])
        assert first.put(key_of(number), page_of(number, SIZE))
        held.append(number)
        if number % 25 == 0:
            seen |= set(second.look())
            found(second, number + 1)
    assert len(seen) > 1400
    assert len(second.files) <= len(first.files) + 1
    assert not any(file.owned for file in second.files.values())
    assert set(held[:-25]) <= set(found(second, 1500))
