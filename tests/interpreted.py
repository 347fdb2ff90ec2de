"""The Triton kernels on a CPU, under Triton's interpreter, against their references in torch; run by test_kernels.py.

The interpreter cuts bfloat16 off instead of rounding it, so float32 is what is tested here; the conformance kit tests
every dtype on a GPU.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from minivllm.core import sampling
from minivllm.core.interfaces.plan import OVERSHOOT, STOP_IDS
from minivllm.core.kernels import activation, draw, norm, products, step
from minivllm.core.layers.activation import silu_mul
from minivllm.core.layers.fused import Normed
from minivllm.core.layers.norm import rms_norm
from minivllm.testing import AttentionConformance


class TestTriton(AttentionConformance):
    plugin, device = "triton", "cpu"

    def values(self, fact, *candidates):
        return [v for v in super().values(fact, *candidates) if v not in ("bfloat16", "float16", "bf16", "fp16")]


def near(got, want, tolerance=2e-5):
    torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)


def test_add_rms_norm_adds_in_place_and_normalises():
    x, r, w = torch.randn(3, 48), torch.randn(3, 48), torch.randn(48)
    want = rms_norm(x + r, w, 1e-6)
    total = x + r
    y, kept = norm.add_rms_norm(x, r, w, 1e-6)
    near(y, want)
    assert kept is r and torch.equal(r, total)
    near(norm.add_rms_norm(x, None, w, 1e-6)[0], rms_norm(x, w, 1e-6))


def test_silu_mul_over_more_than_one_block():
    x = torch.randn(3, 2 * 1500)
    near(activation.silu_mul(x), silu_mul(x))


@pytest.mark.parametrize("rows", [1, 2, 17, 70])
@pytest.mark.parametrize(("k", "n"), [(48, 24), (1536, 72), (2048, 136)])
def test_products_with_what_follows_them(rows, k, n):
    x, residual, w = torch.randn(rows, k), torch.randn(rows, n), torch.randn(n, k) / k**0.5
    bias, before, after, eps = torch.randn(n), torch.rand(k) + 0.5, torch.rand(n) + 0.5, 1e-5
    near(products.Product(w, bias)(x)[0], x @ w.t() + bias)
    squares, weighted = (x * x).unflatten(1, (3, -1)).sum(2) if k % 3 == 0 else (x * x).sum(1, True), x * before
    whole = rms_norm(x, before, eps)
    near(products.Product(w, bias)(weighted, squares, eps)[0], whole @ w.t() + bias)
    gate_up = torch.randn(2 * n, k) / k**0.5
    near(products.Product(gate_up, None, products.GATED)(weighted, squares, eps)[0], silu_mul(whole @ gate_up.t()))
    stream = residual + x @ w.t() + bias
    y, parts = products.Product(w, bias, products.ADDED)(x, residual=residual, norm=after)
    near(residual, stream)
    near(Normed(y, parts, eps).finished(), rms_norm(stream, after, eps))


def test_a_split_sum_leaves_its_counters_at_zero():
    x, w = torch.randn(5, 2048), torch.randn(72, 2048) / 45
    product = products.Product(w, None)
    assert products.matrix_tile(5, 72, 2048, False)["SK"] > 1
    first = product(x)[0]
    assert not product.arrived.any()
    assert torch.equal(product(x)[0], first)


def test_a_draw_is_that_of_the_same_noise_in_torch():
    rows, width = 6, 9000
    logits = torch.randn(rows, width) * 3
    seed, position = torch.tensor([1, -5, 2**40 + 3, 7, 7, 8]), torch.tensor([3, 4, 5, 6, 2**20, 0])
    sample, t = torch.tensor([0, 1, 2, 3, 0, 0]), torch.tensor([1.0, 0.7, 0.0, 2.0, 1e-3, 1.0])
    logits[5] = -torch.inf
    logits[5, 4321] = 0.5
    peaks, tokens = draw.best_of_tiles(logits), torch.empty(rows, dtype=torch.int64)
    near(peaks.amax(1), logits.amax(1))
    draw.draw(logits, peaks, t, seed, position, sample, tokens)
    noise = sampling.gumbel(seed, position, sample, width)
    score = (logits - logits.amax(1, keepdim=True)) / torch.where(t > 0, t, 1.0)[:, None]
    assert tokens.tolist() == (score + torch.where(t > 0, 1.0, 0.0)[:, None] * noise).argmax(1).tolist()
    assert tokens[5] == 4321


def test_a_nan_shows_in_the_peak_of_its_tile():
    logits = torch.zeros(2, 9000)
    logits[1, 5000] = torch.nan
    assert draw.best_of_tiles(logits).isnan().tolist() == [[False] * 3, [False, True, False]]


def columns(slots=5, length=40, groups=2, block=4):
    long = lambda *v: torch.tensor(v, dtype=torch.int64)  # noqa: E731
    stop = torch.full((slots, STOP_IDS), -1, dtype=torch.int32)
    stop[:, 0], stop[:, 1] = 7, 9
    return SimpleNamespace(
        tokens=torch.arange(slots * length, dtype=torch.int32).view(slots, length), known=long(17, 1, 8, 30, 1),
        stopped=torch.tensor([False, False, True, False, True]), end=long(39, 39, 39, 31, 39), block=block,
        min_end=long(0, 5, 0, 0, 0), stop_ids=stop, n_eos=torch.ones(slots, dtype=torch.int64),
        table=torch.arange(groups * slots * 10, dtype=torch.int32).view(groups, slots, 10),
    )  # fmt: skip


def test_begin_reads_token_position_and_slot_of_each_row():
    state, slots = columns(), torch.tensor([3, 0, 2])
    ids, position = torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)
    kv_len, slot_map = torch.zeros(2, 3, dtype=torch.int32), torch.zeros(2, 3, dtype=torch.int64)
    step.begin(slots, state, ids, position, kv_len, slot_map)
    assert position.tolist() == [29, 16, 7] and kv_len.tolist() == [[30, 17, 8]] * 2
    assert torch.equal(ids, state.tokens[slots, position].long())
    want = state.table[:, slots, position // 4].long() * 4 + position % 4
    want[:, 2] = 0  # it has ended: the null block
    assert torch.equal(slot_map, want)
    got = step.gather(slots, (state.known, state.end, state.min_end, state.n_eos))
    assert [x.tolist() for x in got] == [[30, 17, 8], [31, 39, 39], [0, 0, 0], [1, 1, 1]]


def test_commit_accepts_flags_and_stops_as_the_reference():
    state, slots = columns(), torch.tensor([0, 1, 2, 3, 4])
    drawn, width = torch.tensor([9, 7, 5, 5, 5]), 100
    logits = torch.zeros(5, width)
    logits[4] = torch.nan
    peaks, out, before = draw.best_of_tiles(logits), torch.zeros(3, 5, dtype=torch.int32), columns()
    flags = sampling.stop_flags(
        drawn, before.known, before.stop_ids, before.n_eos, before.min_end, before.end, sampling.bad_rows(logits)
    )
    step.commit(slots, drawn, peaks, state, out, width)
    want = torch.where(before.stopped, OVERSHOOT, flags.int())
    assert out[0].tolist() == drawn.tolist() and out[1].tolist() == [1, 1, 0, 1, 0] and out[2].tolist() == want.tolist()
    assert state.known.tolist() == [18, 2, 8, 31, 1] and state.stopped.tolist() == [True, False, True, True, True]
    assert [int(state.tokens[s, before.known[s]]) for s in (0, 1, 3)] == [9, 7, 5]
