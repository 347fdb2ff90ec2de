"""Comparison of Triton's attention with the kit and with itself, under the interpreter; run by test_kernels.py.

The interpreter truncates bfloat16 instead of rounding it, so float32 and float16 are tested here.  The conformance kit
tests every dtype on a GPU.
"""

from __future__ import annotations

from types import SimpleNamespace

import copied_keys
import numpy as np
import pytest
import torch

from minivllm.core.interfaces.attention import AttentionContext, AttnLayer, AttnSpec, GraphKey
from minivllm.device.layers.rotary import prepare_qk
from minivllm.plugins.attention import triton_backend, triton_decode, triton_prefill, triton_shared
from minivllm.plugins.attention.triton_backend import Triton
from minivllm.plugins.kvformat.plain import Fp16, Fp32
from minivllm.plugins.kvformat.scaled import Fp8KV, Int8KV
from minivllm.testing import AttentionConformance
from minivllm.testing.attention_world import make_meta


class TestTriton(AttentionConformance):
    plugin, device = "triton", "cpu"
    # Compiled kernels keep the same data between calls. A hundred calls would take half an hour here.
    test_what_has_ended_leaves_nothing_behind = None

    @pytest.fixture(autouse=True)
    def few_programs(self, request, monkeypatch):
        """Cut steps with shared blocks for a small device, because the interpreter is slow."""
        if "share" in request.node.name:
            monkeypatch.setattr(triton_decode, "PROGRAMS", 12)
            monkeypatch.setattr(triton_shared, "TILE", triton_shared.Tile(programs=12))

    def values(self, fact, *candidates):
        return [v for v in super().values(fact, *candidates) if v not in ("bfloat16", "float16", "bf16", "fp16")]


@pytest.mark.parametrize("least", [1, 2])
@pytest.mark.parametrize("seed", range(4))
def test_the_device_orders_the_tiles_of_a_step_like_the_host_with_most_keys_first(least, seed):
    rng = np.random.default_rng(seed)
    q_len = np.array([1, 1, 7, 64, 0, 9, *rng.integers(0, 90, seed * 20)], np.int32)
    kv_len = (q_len + rng.integers(0, 50, len(q_len)) * (seed > 0)).astype(np.int32)
    most = int(-(-q_len // 8).sum()) + 5
    found = triton_prefill.tiles_on_device(torch.from_numpy(q_len), torch.from_numpy(kv_len), most, 8, least)
    kept = np.where(q_len >= least, q_len, 0).astype(np.int32)
    want = triton_prefill.make_tiles(kept, kv_len - q_len + kept, 0, 8)
    count = len(want[0])
    assert [x.tolist()[:count] for x in found] == [x.tolist() for x in want]
    assert found[0].tolist()[count:] == [-1] * (most - count)
    begin = (kv_len - q_len)[want[0]] + want[1]
    assert (np.diff(begin) <= 0).all() and len(set(zip(*(x.tolist() for x in want), strict=True))) == count


@pytest.mark.parametrize(("tokens", "window", "hopper"), [(2048, None, True), (64, None, False), (2048, 100, False)])
def test_a_captured_step_has_tiles_of_its_kernel_and_their_number(tokens, window, hopper, monkeypatch):
    given = []
    monkeypatch.setattr(triton_backend, "capability", lambda device: 9)
    stand_in = SimpleNamespace(attend=lambda *args: given.append((True, args[5])))
    monkeypatch.setattr(triton_backend, "kernel_module", lambda: stand_in)
    monkeypatch.setattr(triton_backend, "prefill", lambda *args: given.append((False, args[5])))
    monkeypatch.setattr(triton_backend, "decode", lambda *args: None)
    spec = AttnSpec(32, 8, 128, 128, window=window)
    backend = Triton(None, AttentionContext("cpu", "float16", Fp16(), 64, 4, 4096, prepare_qk))
    cache = {name: torch.zeros(2, 64, 8, 128, dtype=torch.float16) for name in "kv"}
    lens = [1, 40 * tokens // 64, 0]
    meta = make_meta([(slot, n, n) for slot, n in enumerate(lens)], np.ones((1, 3, 40), np.int32), 64)
    meta.decode_rows = 3
    q = torch.zeros(tokens, 32, 128, dtype=torch.float16)
    backend.plan(meta, GraphKey("mixed", 3, tokens, 8192))
    backend.forward(AttnLayer(0, 0, spec, cache), q, meta, q)
    (used, tiles), size = given[0], 32 if hopper else 16
    assert len(given) == 1 and used == hopper and tiles.lines == 4 * size and len(tiles.row) == tokens // size + 3
    real = tiles.row >= 0
    assert set(tiles.row[real].tolist()) == {1}
    assert sorted(tiles.token[real].tolist()) == list(range(0, lens[1], size))
    assert (tiles.count.tolist() == [int(real.sum())]) if hopper else tiles.count is None


def test_keys_are_copied_whole_for_the_kits_larger_heads(monkeypatch):
    chosen, choose = [], triton_prefill.by_tma
    monkeypatch.setattr(triton_prefill, "by_tma", lambda *facts: chosen.append(choose(*facts)) or chosen[-1])
    TestTriton().test_common_sizes_have_no_answer_of_their_own()
    assert chosen == [False, True], "heads of 64, and of 128"


def paged(window, kv_heads=1, heads=7, dim=16, block=4, blocks=40):
    """Return a layer of the Triton back end on the CPU with a cache of zeros, and the back end."""
    spec = AttnSpec(heads, kv_heads, dim, dim, window=window)
    ctx = AttentionContext("cpu", "float32", Fp32(), block, 4, 64, prepare_qk)
    cache = {name: torch.zeros(blocks, block, kv_heads, dim) for name in "kv"}
    return AttnLayer(0, 0, spec, cache), Triton(None, ctx)


@pytest.mark.parametrize("computed, chunk", [(30, 9), (21, 1), (40, 3), (0, 33)])
def test_a_window_reads_nothing_of_blocks_that_were_given_back(computed, chunk):
    """The row's table has the null block for them, whose content, NaN too, must have no effect."""
    torch.manual_seed(computed)
    layer, backend = paged(window=6)
    length = computed + chunk
    table = np.zeros((1, 4, 17), np.int32)
    table[0, 0, : -(-length // 4)] = np.arange(1, -(-length // 4) + 1)
    for name in "kv":
        layer.cache[name][1:13] = torch.randn(12, 4, 1, 16)
    rows = [(0, chunk, length)]
    meta = make_meta(rows, table, 4, "cpu")
    q, want, got = torch.randn(chunk, 7, 16), torch.empty(chunk, 7, 16), torch.empty(chunk, 7, 16)
    backend.plan(meta, GraphKey())
    backend.forward(layer, q, meta, want)
    gone = max(0, computed - 6 + 1) // 4
    table[0, 0, :gone] = 0
    for name in "kv":
        layer.cache[name][0] = torch.nan
    meta = make_meta(rows, table, 4, "cpu")
    backend.plan(meta, GraphKey())
    backend.forward(layer, q, meta, got)
    assert torch.equal(got, want)


@pytest.mark.parametrize("fmt", [Fp8KV(), Int8KV()], ids=["fp8", "int8"])
@pytest.mark.parametrize("shape", copied_keys.SHAPES)
def test_a_copy_of_bytes_in_16_bits_gives_the_long_rows_what_the_bytes_give(fmt, shape, monkeypatch):
    copied_keys.check(monkeypatch, fmt, shape, "cpu", "float16", 3e-3)


def test_what_belongs_to_nobody_is_not_written():
    layer, backend = paged(window=None)
    meta = make_meta([(0, 3, 3)], np.ones((1, 4, 17), np.int32), 4, "cpu")
    meta.slot_map = torch.tensor([[0, 5, 3]])  # slots below 4 belong to the null block
    x = torch.full((3, 1, 16), torch.nan)
    x[1] = 2.0
    backend.write(layer, torch.zeros(3, 7, 16), x, x.clone(), meta, None)
    for name in "kv":
        assert not layer.cache[name][0].any() and (layer.cache[name][1, 1] == 2).all()
