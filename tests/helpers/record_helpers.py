"""Shared code of tests of records; a module makes fixtures of the first three functions."""

from __future__ import annotations

import copy
import importlib.metadata

import torch

from minivllm import SamplingParams
from minivllm.config import load_config
from minivllm.config.resolve import resolve
from minivllm.frontend.record import bill, machine, sources
from minivllm.frontend.record.diff import compare, report
from minivllm.frontend.record.nodes import fingerprint
from minivllm.registry import Catalog
from minivllm.testing.tiny import tiny_dir

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
OPTIONS = dict(
    skip_tokenizer_init=True,
    dtype="float32",
    device="cpu",
    num_kvcache_blocks=40,
    max_num_seqs=4,
    max_num_batched_tokens=64,
)
EVICTOR = "from minivllm.plugins.evictor.lru import Lru\nclass Mine(Lru):\n    'another one'\n"


def tiny_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen3")
    tiny_dir(folder, "qwen3")
    return folder


def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def bills(model, monkeypatch):
    """Return bills of configurations without running them."""
    monkeypatch.setattr(machine, "git_state", lambda *_: None)
    package, installed = sources.package_source(), importlib.metadata.packages_distributions()
    monkeypatch.setattr(sources, "package_source", lambda: package)
    monkeypatch.setattr(importlib.metadata, "packages_distributions", lambda: installed)  # slow

    def make(sampling=None, **options):
        loaded = load_config(keywords={"model": str(model), **OPTIONS, **options, "sampling": sampling or {}})
        return bill.make(resolve(loaded.engine, Catalog.discover(), loaded.origins), loaded)

    return make


def lines(a, b):
    return report(compare(a, b), "a", "b").splitlines()


def changed(record, **parts):
    """Return a copy with other values, such as ``versions__torch="9"``."""
    found = copy.deepcopy(record)
    for path, value in parts.items():
        *folders, name = path.split("__")
        place = found
        for folder in folders:
            place = place[folder]
        place[name] = value
    found["fingerprint"] = fingerprint(found)
    return found


def results(**values):
    base = dict(
        requests=2,
        unfinished=0,
        prompt_tokens=9,
        cached_prompt_tokens=0,
        output_tokens=12,
        seconds=1.0,
        error=None,
        prompts_hash="p",
        sampling_hash="s",
        tokens_hash="t",
        outputs=["1", "2"],
        stats={"evictions": 4},
    )
    return {**base, **values}
