"""Tiers behind a model: tokens with and without them, prefixes with names, and the identity of pages."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from devices import DEVICE

from minivllm import LLM, SamplingParams
from minivllm.cli import main
from minivllm.errors import ConfigError, RequestError
from minivllm.plugins.kvstore import disk as disk_module
from minivllm.plugins.kvstore.disk import DiskStore
from minivllm.testing import tiny


def files_of(path) -> list[Path]:
    return sorted(Path(path).glob("*/*.kv"))


# ---------------------------------------------------------------- a model

TEXT = "The quick brown fox jumps over the lazy dog. " * 20
SMALL = {"model": "pocket", "device": DEVICE, "num_kvcache_blocks": 60, "max_num_seqs": 4, "max_model_len": 512}
SMALL |= {"dtype": "float32", "kvcache_block_size": 16}
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
        "device": DEVICE,
        "dtype": "float32",
        "kvcache_block_size": 16,
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
    with LLM(**SMALL, kvstore="cpu") as llm, pytest.raises(RequestError, match="add disk to kvstore"):
        llm.save_prefix("a", TEXT)
    with LLM(**SMALL, kvstore=disk_at(tmp_path, bytes=1 << 20)) as llm:
        with pytest.raises(RequestError, match="expected a prompt of at least 17 tokens"):
            llm.save_prefix("a", "fox")
        with pytest.raises(RequestError, match="expected 1 to 60 bytes"):
            llm.save_prefix("a" * 61, TEXT)
        with pytest.raises(RequestError, match="no prefix is called 'b'; there are: none"):
            llm.drop_prefix("b")
        with pytest.raises(RequestError, match="the tier has no room for the blocks"):
            llm.save_prefix("a", TEXT)
        assert not llm.prefixes()
        assert llm.save_prefix("small", TEXT[:100]) > 0
        llm.check()


def test_the_command_lists_verifies_and_moves_prefixes(tmp_path, capsys):
    here, there = tmp_path / "here", tmp_path / "there"
    with LLM(**SMALL, kvstore=disk_at(here)) as llm:
        saved = llm.save_prefix("fox é", TEXT)
        tokens(llm)

    def reported(*args):
        code = main(["cache", *map(str, args)])
        return code, capsys.readouterr()

    code, shown = reported("ls", "--path", here)
    assert code == 0
    assert "prefix fox é" in shown.out
    assert f"float32 on {DEVICE}" in shown.out
    assert reported("verify", "--path", here)[0] == 0
    target = tmp_path / "fox.tar"
    code, shown = reported("export", "fox é", target, "--path", here)
    assert (code, shown.out) == (0, f"{saved // 16} pages in {target}\n")
    assert reported("export", "hen", target, "--path", here)[1].err.startswith(
        "minivllm: error: no model has a prefix 'hen'"
    )
    os.chmod(target, 0o644)
    assert reported("export", "fox é", target, "--path", here)[0] == 0
    assert reported("import", target, "--path", there)[0] == 0
    private = [target, *files_of(there), *there.glob("*/*.name")]
    assert {path.stat().st_mode & 0o777 for path in private} == {0o600}
    with LLM(**SMALL, kvstore=disk_at(there)) as llm:
        assert llm.prefixes() == {"fox é": saved}
        assert llm.generate(TEXT, DRAW, use_tqdm=False)[0].num_cached_tokens == saved
    raw = bytearray(target.read_bytes())
    raw[len(raw) // 2] ^= 1
    target.write_bytes(raw)
    code, shown = reported("import", target, "--path", tmp_path / "third")
    assert code != 0
    assert "it is damaged" in shown.err
    assert not (tmp_path / "third").exists()
    (file, *_) = files_of(there)
    raw = bytearray(file.read_bytes())
    raw[-5] ^= 1
    file.write_bytes(raw)
    code, shown = reported("verify", "--path", there)
    assert code == 1
    assert "1 pages damaged" in shown.out
    assert reported("ls", "--path", tmp_path / "nowhere")[1].err.endswith("expected the option path of a disk store\n")
    tail = "; --path names the folder of the cache\n"
    assert reported("export", "fox")[1].err == f"minivllm: error: cache export: expected NAME FILE{tail}"
    assert reported("ls", here)[1].err == f"minivllm: error: cache ls: expected no argument{tail}"


ENGINE = """
import sys, time
from test_kv_tiers import *
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
