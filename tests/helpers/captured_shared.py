"""Captured decode steps whose rows share prefixes, on a CPU with Triton's interpreter; run by test_graphs.py."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from cpu_captures import cpu_captures
from greedy import prompts

from minivllm import LLM, SamplingParams
from minivllm.device.worker import shared_pages
from minivllm.plugins.attention import triton_backend, triton_decode, triton_shared
from minivllm.plugins.attention.spec import TRITON
from minivllm.plugins.attention.triton_backend import Triton
from minivllm.registration.spec import ANY
from minivllm.testing.tiny import tiny_dir

torch.set_num_threads(1)
SEQS, PREFIX = 6, 52


class OnCpu(Triton):
    """The Triton back end, without the limit to CUDA."""

    spec = replace(TRITON, impl=f"{__name__}:OnCpu", limits={**TRITON.limits, "device": ANY, "sm": ANY})


@pytest.fixture
def folder(tmp_path):
    tiny_dir(tmp_path, "qwen3", num_hidden_layers=1)
    return tmp_path


@pytest.fixture(autouse=True)
def short_prefixes(monkeypatch):
    for module in (triton_shared, shared_pages):
        monkeypatch.setattr(module, "LEAST_TOKENS", 32)
    monkeypatch.setattr(triton_shared, "LEAST_CHUNK", 32)
    monkeypatch.setattr(triton_shared, "TILE", triton_shared.Tile(programs=4))
    monkeypatch.setattr(triton_decode, "PROGRAMS", 4)  # few programs, because the interpreter is slow


def play(folder, items, params, mode, **options):
    base = dict(
        skip_tokenizer_init=True,
        dtype="float32",
        device="cpu",
        attention={"name": "captured_shared:OnCpu", "options": {"shared_prefixes": mode}},
        max_num_seqs=SEQS,
        num_kvcache_blocks=60,
        kvcache_block_size=16,
        max_num_batched_tokens=64,
        max_model_len=80,
        allow_targets=["captured_shared"],
    )
    with cpu_captures(), LLM(model=str(folder), **{**base, **options}) as llm:
        llm.generate([items[0]], SamplingParams(max_tokens=1), use_tqdm=False)  # caches the prefix
        outs = llm.generate(items, params, use_tqdm=False)
        assert [o.error for o in outs] == [None] * len(outs)
        stats, graphs = llm.stats(), llm.engine.executor.runner.graphs
        keys = set() if graphs is None else {key for key in graphs.forwards if key.shared}
        assert graphs is None or graphs.notes == []
        return [c.token_ids for o in outs for c in o.outputs], stats, keys


@pytest.mark.parametrize("options", [{"run_ahead": 1}, {"graph": "off"}], ids=["captured", "separate launches"])
def test_rows_that_share_a_prefix_get_the_tokens_of_rows_that_are_read_alone(folder, options):
    head = np.random.default_rng(5).integers(10, 60, PREFIX).tolist()
    own = prompts(61, [3, 9, 17, 2, 6])
    items = [head + [int(t) for t in tokens] for tokens in own]
    params = [SamplingParams(seed=i, max_tokens=3 + i, ignore_eos=True) for i in range(4)]
    params.append(SamplingParams(seed=9, max_tokens=5, n=2, ignore_eos=True))
    got, stats, keys = play(folder, items, params, "always", **options)
    want, none, no_keys = play(folder, items, params, "off", **options)
    assert got == want
    assert stats["prefix_shared_steps"] >= 4 and stats["prefix_shared_rows"] >= 4 * stats["prefix_shared_steps"]
    assert none["prefix_shared_steps"] == none["prefix_shared_rows"] == 0 and not no_keys
    assert (len(keys) > 0) == ("graph" not in options)


def test_with_the_option_off_no_kernel_of_shared_prefixes_is_launched_or_captured(folder, monkeypatch):
    """Triton compiles a kernel at its first launch, so none is compiled."""
    launched = []
    for name in ("find_shared", "attend_shared"):
        real = getattr(triton_backend, name)
        monkeypatch.setattr(triton_backend, name, lambda *args, real=real: launched.append(1) or real(*args))
    head = np.random.default_rng(5).integers(10, 60, PREFIX).tolist()
    items, params = [[*head, i] for i in range(10, 14)], SamplingParams(max_tokens=2, ignore_eos=True)
    counts = {}
    for mode in ("always", "off"):
        launched.clear()
        _, _, keys = play(folder, items, params, mode, run_ahead=1)
        counts[mode] = len(launched), len(keys)
    assert min(counts["always"]) > 0 and counts["off"] == (0, 0)


def test_sizes_that_cannot_save_enough_are_not_captured_at_the_start(folder):
    params = SamplingParams(max_tokens=1)
    items = [[10, 11, 12]]
    for mode, count in (("auto", 0), ("always", 1)):
        assert len(play(folder, items, params, mode, run_ahead=1)[2]) == count


def test_steps_that_would_save_little_read_each_row_alone(folder):
    head = np.random.default_rng(5).integers(10, 60, PREFIX).tolist()
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    _, stats, _ = play(folder, [[*head, i] for i in range(10, 15)], params, "auto", graph="off")
    assert stats["prefix_shared_steps"] == 0
