"""The kernel of attention sums, compared with float64; run by device/kernels/test_kernels.py.

Under Triton's interpreter it runs on a CPU.  Without it a GPU is needed.
"""

from __future__ import annotations

import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from minivllm import LLM, SamplingParams, Tap
from minivllm.core.interfaces.attention import AttnLayer, AttnSpec
from minivllm.device.kernels import attention_sums
from minivllm.device.kernels.attention_sums import SummedRows, SumTiles, add_sums
from minivllm.device.worker import compaction
from minivllm.device.worker.attention_sums import sum_attention
from minivllm.testing.tiny import tiny_dir

INTERPRETED = bool(os.environ.get("TRITON_INTERPRET"))
DEVICE = "cpu" if INTERPRETED else "cuda"
SMALL = SumTiles(32, 16, 4, 2)
BLOCK = 16


def exact_sums(q, keys, spec, sinks):
    """Return (the sums f64 [kv_heads, n], the log-sum-exp f64 [t, heads]) of the last t queries over n keys."""
    n, (tokens, heads) = len(keys), q.shape[:2]
    grown = keys.double().repeat_interleave(heads // spec.kv_heads, dim=1)
    scores = torch.einsum("thd,nhd->htn", q.double(), grown) * spec.softmax_scale
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    later = torch.arange(n, device=q.device) > torch.arange(n - tokens, n, device=q.device)[:, None]
    scores = scores.masked_fill(later, float("-inf"))
    norm = scores.logsumexp(-1)
    if spec.sinks:
        norm = torch.logaddexp(norm, sinks.double()[:, None])
    sums = (scores - norm[..., None]).exp().sum(1)
    return sums.view(spec.kv_heads, -1, n).sum(1), norm.T


def world(spec, rows, dtype, scaled=False, seed=0):
    """Return a layer, its step and its queries for ``rows`` of (tokens in the step, stored tokens)."""
    generator = torch.Generator().manual_seed(seed)
    tokens, counts = sum(t for t, _ in rows), [-(-n // BLOCK) for _, n in rows]
    blocks = 1 + torch.randperm(sum(counts), generator=generator)
    table = torch.zeros(1, len(rows) + 2, max(counts), dtype=torch.int32)
    slots = torch.randperm(len(rows) + 2, generator=generator)[: len(rows)]
    q = torch.randn(tokens, spec.heads, spec.dim_qk, generator=generator).to(dtype).to(DEVICE)
    shape = (sum(counts) + 1, BLOCK, spec.kv_heads, spec.dim_qk)
    keys = torch.randn(shape, generator=generator) * 2
    keys[0] = float("nan")
    cache = {"k": keys.to(dtype)}
    if scaled:
        scale = torch.rand(shape[:3], generator=generator) / 40
        cache = {"k": (keys * 10).nan_to_num().round().clamp(-127, 127).to(torch.int8), "k_scale": scale}
    for slot, part in zip(slots.tolist(), blocks.split(counts), strict=True):
        table[0, slot, : len(part)] = part
    layer = AttnLayer(0, 0, spec, {name: x.to(DEVICE) for name, x in cache.items()})
    if spec.sinks:
        layer.sinks = torch.randn(spec.heads, generator=generator).to(DEVICE)
    meta = SimpleNamespace(table=table.to(DEVICE), block=BLOCK)
    return layer, meta, q, slots.tolist()


def keys_of(layer, meta, slot, n, dtype):
    """Return the keys [n, kv_heads, dim] of a row."""
    at = meta.table[0, slot, : -(-n // BLOCK)].long()
    keys = layer.cache["k"][at].flatten(0, 1)[:n]
    if "k_scale" in layer.cache:
        return keys.to(dtype).double() * layer.cache["k_scale"][at].flatten(0, 1)[:n].double()[..., None]
    return keys


def check(spec, rows, dtype=torch.float32, scaled=False, tiles=SMALL, among=None, seed=0):
    """Compare the sums of some rows of a step with those of float64; the sums begin with other numbers than 0.

    Return the largest error, relative to the sum of a key or to 1."""
    layer, meta, q, slots = world(spec, rows, dtype, scaled, seed)
    firsts = np.cumsum([0, *(t for t, _ in rows)])
    wanted, found, columns, norms = [], [], [], torch.zeros(len(q), spec.heads, device=DEVICE)
    for i, (tokens, stored) in enumerate(rows):
        own = q[firsts[i] : firsts[i + 1]]
        keys = keys_of(layer, meta, slots[i], stored, dtype)
        exact, norm = exact_sums(own, keys, spec, layer.sinks)
        norms[firsts[i] : firsts[i + 1]] = norm
        sums = torch.full((3, spec.kv_heads, stored), 0.25, device=DEVICE)
        by_torch = torch.zeros(spec.kv_heads, stored, device=DEVICE)
        sum_attention(by_torch, own, keys.to(torch.float32), spec, layer.sinks)
        assert (by_torch - exact).abs().max() < 1e-4 * max(1.0, float(exact.max()))
        wanted.append(exact)
        found.append(sums)
        columns.append((firsts[i], tokens, stored, slots[i], sums.data_ptr(), sums.stride(0)))
    chosen = range(len(rows)) if among is None else among
    table = torch.tensor([columns[i] for i in chosen]).T.contiguous().to(DEVICE)
    add_sums(layer, 1, q, meta, norms, SummedRows(table, max(rows[i][1] for i in chosen), len(chosen)), tiles)
    worst = 0.0
    for i, (sums, exact) in enumerate(zip(found, wanted, strict=True)):
        assert torch.equal(sums[[0, 2]], torch.full_like(sums[[0, 2]], 0.25)), "sums of another layer were changed"
        if i not in chosen:
            assert torch.equal(sums[1], torch.full_like(sums[1], 0.25)), "sums of another row were changed"
            continue
        error = (sums[1].double() - 0.25 - exact).abs() / exact.clamp(min=1)
        worst = max(worst, float(error.max()))
    return worst


SPECS = {
    "grouped": AttnSpec(4, 2, 32, 32),
    "one KV head": AttnSpec(6, 1, 16, 16),
    "no groups": AttnSpec(2, 2, 64, 64),
    "heads of 24": AttnSpec(4, 2, 24, 24),
    "soft cap": AttnSpec(4, 2, 32, 32, softcap=2.0),
    "sinks": AttnSpec(4, 2, 32, 32, sinks=True),
    "scale": AttnSpec(4, 2, 32, 32, scale=0.5),
}
# (tokens of the step, stored tokens): whole prompts, chunks, single tokens, and sizes around those of tiles
ROWS = {
    "prompt": [(37, 37)],
    "chunk": [(21, 90)],
    "token": [(1, 65)],
    "tiles": [(32, 64)],
    "many": [(1, 1), (40, 40), (16, 48), (3, 33), (50, 70)],
}


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("spec", SPECS)
def test_sums_are_those_of_float64(spec, rows):
    assert check(SPECS[spec], ROWS[rows]) < 1e-5


@pytest.mark.parametrize("tiles", [SMALL, SumTiles(16, 16, 4, 2), SumTiles(64, 32, 4, 2)])
def test_sums_do_not_depend_on_the_tiles(tiles):
    assert check(SPECS["grouped"], [(70, 130), (33, 33)], tiles=tiles, seed=3) < 1e-5


def test_keys_of_eight_bits_are_read_with_their_scales():
    assert check(SPECS["grouped"], ROWS["many"], scaled=True) < 1e-5


@pytest.mark.parametrize("among", [[1], [4, 0], [2, 3]])
def test_only_the_rows_of_a_step_that_are_named_are_added_up(among):
    assert check(SPECS["grouped"], ROWS["many"], among=among) < 1e-5


def test_sums_in_float16_are_near_those_of_float64():
    assert check(SPECS["grouped"], ROWS["many"], torch.float16) < 2e-3


PROMPT = [5, 17, 3, 44, 60, 21, 9, 33, 12, 50, 7, 28, 1, 39, 55, 2, 19, 40, 8, 11, 22, 34, 45, 31, 10, 4, 18, 15]


@pytest.mark.skipif(not INTERPRETED, reason="the engine is one on a CPU")
@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 9}])
def test_an_engine_keeps_the_same_tokens_with_the_kernel_and_with_torch(options, tmp_path, monkeypatch):
    path, *_ = tiny_dir(tmp_path)
    launched = []
    real = attention_sums.add_sums
    monkeypatch.setattr(attention_sums, "add_sums", lambda *args: launched.append(args[-1].count) or real(*args, SMALL))
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, kv_budget=0.5)
    fixed = dict(skip_tokenizer_init=True, dtype="float32", max_model_len=64, max_num_seqs=4, kvcache_block_size=16)
    found = []
    fixed["graph"] = "off"
    for kernel in (False, True):
        monkeypatch.setattr(compaction, "has_kernels", lambda wiring, kernel=kernel: kernel)
        with LLM(str(path), compressor="h2o", compress_every=3, **fixed, **options) as llm:
            taps = [Tap("compression.kept", read=True)]
            outs = llm.generate([PROMPT, PROMPT[::-1], PROMPT[3:]], params, use_tqdm=False, taps=taps)
        assert bool(launched) == kernel and [out.error for out in outs] == [None] * 3
        events = [event for out in outs for event in out.taps["compression.kept"]]
        kept = [(e.computed, layer, e.positions[layer].tolist()) for e in events for layer in e.positions]
        found.append(([out.outputs[0].token_ids for out in outs], kept))
    assert found[0] == found[1] and max(launched) > 1 - bool(options)
