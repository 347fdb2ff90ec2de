"""The stores of tiers: damage, limits, sharing and kills of the disk store, and tokens of a model with and without."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from minivllm import LLM, SamplingParams
from minivllm.cli import main
from minivllm.core.interfaces.kvstore import StoreContext
from minivllm.errors import ConfigError, RequestError, ResourceError
from minivllm.plugins.kvstore import disk as disk_module
from minivllm.plugins.kvstore.disk import DiskStore
from minivllm.plugins.kvstore.options import DiskStoreOptions
from minivllm.plugins.kvstore.segments import FILE_HEAD, PAGE_HEAD
from minivllm.testing import tiny
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
    """Return the numbers of the pages that come back, each of which is whole."""
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


# ---------------------------------------------------------------- a model

TEXT = "The quick brown fox jumps over the lazy dog. " * 20
SMALL = {"model": "pocket", "device": "cpu", "num_kvcache_blocks": 60, "max_num_seqs": 4, "max_model_len": 512}
ALWAYS = {"load": "always"}
CPU = {"name": "cpu", "options": ALWAYS}
DRAW = SamplingParams(max_tokens=12, temperature=0.8, seed=5, ignore_eos=True)
PROMPTS = [f"{i} {TEXT}" for i in range(5)]


def tokens(llm, prompts=PROMPTS):
    return [list(o.outputs[0].token_ids) for o in llm.generate(prompts, DRAW, use_tqdm=False)]


@pytest.fixture(scope="module")
def expected():
    with LLM(**SMALL, enable_prefix_caching=False) as llm:
        return tokens(llm)


@pytest.mark.parametrize("executor", ["local", "process"])
@pytest.mark.parametrize("stores", [["cpu"], ["disk"], ["cpu", "disk"]], ids="-".join)
def test_tokens_are_those_without_tiers(tmp_path, stores, executor, expected):
    chosen = [{"name": "disk", "options": {"path": str(tmp_path), **ALWAYS}} if s == "disk" else CPU for s in stores]
    with LLM(**SMALL, kvstore=chosen, executor=executor) as llm:
        assert tokens(llm) == expected
        assert tokens(llm) == expected
        figures = llm.stats()["tiers"]
        llm.check()
    assert [f["name"] for f in figures] == stores
    assert sum(f["loads"] for f in figures) > 15
    assert not sum(f["faults"] + f["lost"] for f in figures)


SHAPES = {
    "qwen3_5": {
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 24,
    },
    "gemma3": {"sliding_window": 20, "layer_types": ["sliding_attention", "full_attention"] * 2},
}  # fmt: skip


@pytest.mark.parametrize("kind", list(SHAPES))
def test_states_and_windows_come_from_tiers_too(tmp_path, kind):
    sizes = {"num_hidden_layers": 4, "vocab_size": 256, **SHAPES[kind]}
    model = tiny.tiny_model(tiny.small_config(tiny.CONFIGS[kind], **sizes))
    tiny.save(model, tmp_path / kind)
    rng = np.random.default_rng(0)
    prompts = [{"prompt_token_ids": rng.integers(5, 200, 150).tolist()} for _ in range(4)]
    options = {
        "model": str(tmp_path / kind),
        "device": "cpu",
        "skip_tokenizer_init": True,
        "max_num_seqs": 2,
        "max_model_len": 256,
    }
    with LLM(**options, enable_prefix_caching=False) as llm:
        want = tokens(llm, prompts)
    store = {"name": "disk", "options": {"path": str(tmp_path / "kv"), **ALWAYS}}
    for engine in range(2):
        with LLM(**options, num_kvcache_blocks=25, kvstore=store) as llm:
            assert tokens(llm, prompts) == want
            assert tokens(llm, prompts) == want
            (figures,) = llm.stats()["tiers"]
            assert figures["loads"] > 10, engine
            assert not figures["faults"] + figures["lost"]


def test_the_second_start_is_warm(tmp_path, expected):
    store = {"name": "disk", "options": {"path": str(tmp_path)}}
    cached = []
    for _ in range(2):
        with LLM(**SMALL, kvstore=store) as llm:
            outputs = llm.generate(PROMPTS[:1], DRAW, use_tqdm=False)
            assert list(outputs[0].outputs[0].token_ids) == expected[0]
            cached.append(outputs[0].num_cached_tokens)
    assert cached[0] == 0
    assert cached[1] >= len(outputs[0].prompt_token_ids) - 17


class StallingStore(DiskStore):
    """A disk that stops for seconds."""

    seconds = 0.0

    def put(self, key, page):
        time.sleep(self.seconds)
        return super().put(key, page)

    def get(self, key):
        time.sleep(self.seconds)
        return super().get(key)


def test_a_disk_that_stalls_delays_no_step(tmp_path, expected, monkeypatch):
    monkeypatch.setattr(disk_module, "DiskStore", StallingStore)
    store = {"name": "disk", "options": {"path": str(tmp_path), "patience": 0.3, **ALWAYS}}
    with LLM(**SMALL, kvstore=store) as llm:
        assert tokens(llm) == expected
        llm.engine.cache.tiers.flush(lambda *a: llm.engine.executor.call(*a), time.sleep)
        StallingStore.seconds = 3.0
        try:
            begun = time.monotonic()
            assert tokens(llm) == expected
            taken = time.monotonic() - begun
            (figures,) = llm.stats()["tiers"]
        finally:
            StallingStore.seconds = 0.0
    assert taken < 2.5, "requests or steps have waited for the disk"
    assert figures["hits"] and not figures["loads"]


def test_options_are_refused_with_their_reasons(tmp_path):
    with pytest.raises(ConfigError, match="enable_prefix_caching=false finds no stored block"):
        LLM(**SMALL, kvstore="cpu", enable_prefix_caching=False)
    with pytest.raises(ConfigError, match=r"unknown option .*byte.*Did you mean .bytes"):
        LLM(**SMALL, kvstore={"name": "disk", "options": {"byte": 5}})
    with pytest.raises(ConfigError, match="expected a whole number from 65536"):
        LLM(**SMALL, kvstore={"name": "cpu", "options": {"bytes": 5}})
    with pytest.raises(ConfigError, match="'cpu' is there twice"):
        LLM(**SMALL, kvstore=["cpu", "cpu"])


def test_metrics_count_what_tiers_do():
    pytest.importorskip("prometheus_client")
    from minivllm.server.metrics import TIER_EVENTS, Metrics

    with LLM(**SMALL, kvstore=CPU) as llm:
        tokens(llm)
        tokens(llm)
        stats = llm.stats()
    figures = stats["tiers"][0]

    class Info:
        selections: dict = {}
        kv_tokens = 960

    metrics = Metrics("pocket", Info())
    metrics.text(stats)
    metrics.text({**stats, "tiers": [{**figures, "loads": figures["loads"] + 5}]})
    labels = {"engine": "0", "model_name": "pocket", "tier": "cpu"}

    def value(name, **more):
        return metrics.registry.get_sample_value(f"minivllm:kv_tier_{name}", {**labels, **more})

    for event in TIER_EVENTS:
        assert value("pages_total", event=event) == figures[event] + 5 * (event == "loads")
    assert value("moved_bytes_total", event="load") == figures["load_bytes"] > 0
    assert value("load_seconds_total") == figures["load_seconds"]
    assert value("used_bytes") == figures["used"] > 0


# ---------------------------------------------------------------- prefixes with names


def disk_at(path, **options):
    return {"name": "disk", "options": {"path": str(path), **ALWAYS, **options}}


def test_a_saved_prefix_outlives_everything_but_its_name(tmp_path, expected):
    # a page of pocket has 131,072 bytes: 11 of the 14 pages in use may be of the prefix, and five prompts evict others
    disk = disk_at(tmp_path, bytes=6 << 20)
    prefix = TEXT[:500]
    with LLM(**SMALL, kvstore=disk) as llm:
        saved = llm.save_prefix("fox", prefix)
        keys = llm.block_keys(prefix)
        assert saved == 16 * len(keys) > 100
        for _ in range(2):
            tokens(llm)
        llm.reset_prefix_cache()
        assert llm.prefixes() == {"fox": saved}
        assert tokens(llm) == expected
        llm.check()
    with LLM(**SMALL, kvstore=disk) as llm:
        assert llm.prefixes() == {"fox": saved}
        assert llm.block_keys(prefix) == keys
        assert llm.block_keys(prefix, tenant="a") != keys
        out = llm.generate(prefix + " And then", DRAW, use_tqdm=False)[0]
        assert out.num_cached_tokens >= saved
        tier = llm.engine.cache.tiers.tiers[0]
        assert len(tier.pinned) == len(keys)
        llm.drop_prefix("fox")
        assert not llm.prefixes()
        assert not tier.pinned
        tokens(llm)
        llm.check()
    with LLM(**SMALL, kvstore=disk) as llm:
        assert not llm.prefixes()


def test_what_cannot_be_saved_is_refused_with_its_reason(tmp_path):
    with LLM(**SMALL) as llm:
        for call in (llm.prefixes, lambda: llm.save_prefix("a", TEXT)):
            with pytest.raises(RequestError, match="set kvstore=disk"):
                call()
        with pytest.raises(RequestError, match="set kvstore"):
            llm.block_keys(TEXT)
    with LLM(**SMALL, kvstore="cpu") as llm, pytest.raises(RequestError, match="add the store disk"):
        llm.save_prefix("a", TEXT)
    with LLM(**SMALL, kvstore=disk_at(tmp_path, bytes=1 << 20)) as llm:
        with pytest.raises(RequestError, match="expected a prompt of at least 17 tokens"):
            llm.save_prefix("a", "fox")
        with pytest.raises(RequestError, match="expected 1 to 60 bytes"):
            llm.save_prefix("a" * 61, TEXT)
        with pytest.raises(RequestError, match="no prefix is called 'b'; there are: none"):
            llm.drop_prefix("b")
        with pytest.raises(RequestError, match="the blocks have no place in the tier"):
            llm.save_prefix("a", TEXT)
        assert not llm.prefixes()
        assert llm.save_prefix("small", TEXT[:100]) > 0
        llm.check()


def test_the_command_lists_verifies_and_moves_prefixes(tmp_path, capsys):
    here, there = tmp_path / "here", tmp_path / "there"
    with LLM(**SMALL, kvstore=disk_at(here)) as llm:
        saved = llm.save_prefix("fox é", TEXT)
        tokens(llm)

    def said(*args):
        code = main(["cache", *map(str, args)])
        return code, capsys.readouterr()

    code, shown = said("ls", "--path", here)
    assert code == 0
    assert "prefix fox é" in shown.out
    assert "float32 on cpu" in shown.out
    assert said("verify", "--path", here)[0] == 0
    target = tmp_path / "fox.tar"
    code, shown = said("export", "fox é", target, "--path", here)
    assert (code, shown.out) == (0, f"{saved // 16} pages in {target}\n")
    assert said("export", "hen", target, "--path", here)[1].err.startswith(
        "minivllm: error: no model has a prefix 'hen'"
    )
    os.chmod(target, 0o644)
    assert said("export", "fox é", target, "--path", here)[0] == 0
    assert said("import", target, "--path", there)[0] == 0
    private = [target, *files_of(there), *there.glob("*/*.name")]
    assert {path.stat().st_mode & 0o777 for path in private} == {0o600}
    with LLM(**SMALL, kvstore=disk_at(there)) as llm:
        assert llm.prefixes() == {"fox é": saved}
        assert llm.generate(TEXT, DRAW, use_tqdm=False)[0].num_cached_tokens == saved
    raw = bytearray(target.read_bytes())
    raw[len(raw) // 2] ^= 1
    target.write_bytes(raw)
    code, shown = said("import", target, "--path", tmp_path / "third")
    assert code != 0
    assert "it is damaged" in shown.err
    assert not (tmp_path / "third").exists()
    (file, *_) = files_of(there)
    raw = bytearray(file.read_bytes())
    raw[-5] ^= 1
    file.write_bytes(raw)
    code, shown = said("verify", "--path", there)
    assert code == 1
    assert "1 pages damaged" in shown.out
    assert said("ls", "--path", tmp_path / "nowhere")[1].err.endswith("expected the option path of a disk store\n")
    assert said("export", "fox", "--path", here)[1].err == "minivllm: error: cache export: expected NAME FILE\n"


ENGINE = """
import sys, time
from test_kv_stores import *
with LLM(**SMALL, kvstore=disk_at(sys.argv[1])) as llm:
    tokens(llm, PROMPTS[:2])
    while llm.engine.cache.tiers.active:
        llm.engine.step()
    print("done", flush=True)
    time.sleep(600)
"""


def test_an_engine_that_is_killed_leaves_its_pages_and_another_one_finds_them(tmp_path, expected):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    with LLM(**SMALL, kvstore=disk_at(tmp_path)) as other:
        command = [sys.executable, "-c", ENGINE, str(tmp_path)]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment)
        assert child.stdout is not None
        assert child.stdout.readline() == b"done\n"
        end = time.monotonic() + 30
        while not other.stats()["tiers"][0]["pages"] and time.monotonic() < end:
            other.engine.step()
            time.sleep(0.1)
        assert tokens(other, PROMPTS[:1]) == expected[:1]
        assert other.stats()["tiers"][0]["loads"] > 10  # of an engine that runs
        child.send_signal(signal.SIGKILL)
        child.wait()
    with LLM(**SMALL, kvstore=disk_at(tmp_path)) as llm:
        assert tokens(llm, PROMPTS[:2]) == expected[:2]
        assert llm.stats()["tiers"][0]["loads"] > 20
        llm.check()


def test_an_identity_is_of_weights_options_and_code(tmp_path, monkeypatch):
    from minivllm.config import load_config
    from minivllm.config.resolve import resolve
    from minivllm.device.loading import fingerprint
    from minivllm.device.worker import pages
    from minivllm.device.worker.pages import identity_of
    from minivllm.registry import Catalog

    model = tmp_path / "model"
    made = tiny.tiny_model(tiny.small_config(tiny.CONFIGS["llama"]))
    tiny.save(made, model)

    def identity(layout="x", **options):
        keywords = {"model": str(model), "device": "cpu", "skip_tokenizer_init": True, **options}
        return identity_of(resolve(load_config(keywords=keywords).engine, Catalog.discover()).wiring, layout)

    first = identity()
    assert identity() == first == identity(max_num_seqs=3, seed=9, scheduler="priority", evictor="lfu")
    others = [identity("y"), identity(kv_format="int8"), identity(kvcache_block_size=32), identity(quantizer="int8")]
    others += [identity(batch_invariant=True), identity(graph="off"), identity(dtype="bfloat16")]
    (weights,) = model.glob("*.safetensors")
    raw = bytearray(weights.read_bytes())
    raw[-1] ^= 1
    weights.write_bytes(raw)
    others.append(identity())
    monkeypatch.setattr(pages, "KEYS", 1)
    others.append(identity())
    monkeypatch.setattr(fingerprint, "_code", lambda package: "changed")
    others.append(identity())
    assert len({first, *others}) == len(others) + 1


def test_the_code_of_plug_ins_is_told_apart(tmp_path, monkeypatch):
    from importlib import metadata

    from minivllm.device.loading import fingerprint
    from minivllm.registration import given

    monkeypatch.syspath_prepend(tmp_path)
    module, package, spread = tmp_path / "kv_module.py", tmp_path / "kv_package", tmp_path / "kv_spread"
    for folder in (package, spread):
        folder.mkdir()
        (folder / "part.py").write_text("x = 1")
    (package / "__init__.py").write_text("raise RuntimeError")
    module.write_text("x = 1")

    def code(target):
        for cached in (fingerprint._code, fingerprint._distributions):
            cached.cache_clear()
        return fingerprint.code_of([target])

    def changed(target, change):
        before = code(target)
        assert code(target) == before
        change()
        return code(target) != before

    assert changed("kv_module:X", lambda: module.write_text("x = 2"))
    assert changed("kv_package.part:X", lambda: (package / "part.py").write_text("x = 2"))
    assert changed("kv_spread.part:X", lambda: (spread / "part.py").write_text("x = 2"))
    assert code("__main__:X")
    versions = iter(["1.0", "1.1"])
    monkeypatch.setattr(metadata, "packages_distributions", lambda: {"kv_package": ["Kv"]})
    monkeypatch.setattr(metadata, "version", lambda name: next(versions))
    assert code("kv_package:X") != code("kv_package:X")

    class Source:
        hash = "one"

    target = given.give(StallingStore, lambda cls: Source)
    assert changed(target, lambda: setattr(Source, "hash", "two"))
    Source.hash = ""
    assert fingerprint.UNREADABLE in code(target).values()
