"""Comparison of the Triton kernels with their references in torch, under the interpreter; run by test_kernels.py.

The interpreter truncates bfloat16 instead of rounding it, so float32 is tested here.  The conformance kit tests every
dtype on a GPU.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import delta_rule_cases
import expert_kernels
import numpy as np
import pytest
import short_conv_cases
import torch
import torch.nn.functional as F

from minivllm.core.interfaces.decoder import ACTIVATIONS
from minivllm.core.interfaces.params import SamplingParams
from minivllm.core.interfaces.plan import FAILED, LENGTH, OVERSHOOT, STOP_IDS
from minivllm.core.interfaces.sampling import Draw, Rows, SamplingContext
from minivllm.device.kernels import activation, logprobs, mask, norm, products, step
from minivllm.device.kernels.peaks import best_of_tiles
from minivllm.device.layers.activation import gate_mul
from minivllm.device.layers.fused import Normed
from minivllm.device.layers.norm import rms_norm
from minivllm.device.worker import graphs, sampling
from minivllm.device.worker.state import ProcessorState
from minivllm.plugins.processor import triton_penalties
from minivllm.plugins.processor.penalties import Penalties
from minivllm.plugins.sampler.default import DefaultSampler


def near(got, want, tolerance=2e-5):
    torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)


def test_a_size_that_a_larger_one_beats_is_not_used():
    assert graphs.useful_sizes({1: 1.0, 2: 2.0, 4: 1.5, 8: 3.0, 16: 2.9, 32: 2.9}) == [1, 4, 16, 32]
    assert graphs.useful_sizes({448: 14.0, 480: 10.5, 512: 11.3}) == [480, 512]


def test_add_rms_norm_adds_in_place_and_normalises():
    x, r, w = torch.randn(3, 48), torch.randn(3, 48), torch.randn(48)
    want = rms_norm(x + r, w, 1e-6)
    total = x + r
    y, kept = norm.add_rms_norm(x, r, w, 1e-6)
    near(y, want)
    assert kept is r and torch.equal(r, total)
    near(norm.add_rms_norm(x, None, w, 1e-6)[0], rms_norm(x, w, 1e-6))


def test_a_norm_before_the_addition_is_the_same_kernel():
    x, r, w, first = torch.randn(3, 48), torch.randn(3, 48), torch.randn(48), torch.rand(48) + 0.5
    total = rms_norm(x, first, 1e-3) + r
    y, kept = norm.add_rms_norm(x, r, w, 1e-6, first, 1e-3)
    near(y, rms_norm(total, w, 1e-6))
    assert kept is r
    near(r, total)


@pytest.mark.parametrize("biased", [False, True])
def test_add_layer_norm_adds_in_place_and_normalises(biased):
    x, r, w = torch.randn(3, 48) + 2, torch.randn(3, 48), torch.randn(48)
    bias, total = torch.randn(48) if biased else None, x + r
    y, kept = norm.add_layer_norm(x, r, w, bias, 1e-5)
    near(y, F.layer_norm(total, (48,), w, bias, 1e-5))
    assert kept is r and torch.equal(r, total)
    near(norm.add_layer_norm(x, None, w, bias, 1e-5)[0], F.layer_norm(x, (48,), w, bias, 1e-5))


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_every_activation_of_a_gate_in_both_kernels(name):
    x, w, before = torch.randn(2, 48), torch.randn(48, 48) / 7, torch.ones(48)
    near(activation.gate_mul(x, activation=name), gate_mul(x, name))
    squares = (x * x).sum(1, True)
    product = products.Product(w, None, products.GATED, name)
    near(product(x, squares, 1e-5)[0], gate_mul(rms_norm(x, before, 1e-5) @ w.t(), name))


def test_gate_mul_over_more_than_one_block():
    x = torch.randn(3, 2 * 1500)
    near(activation.gate_mul(x), gate_mul(x))
    squares = torch.rand(3, 5) * 100
    factor = torch.rsqrt(squares.sum(1, keepdim=True) / 40 + 1e-5)
    near(activation.gate_mul(x, squares, 40, 1e-5), gate_mul(x * factor))


@pytest.mark.parametrize(
    ("rows", "k", "n"), [*((r, *w) for r in (1, 2, 17, 70) for w in ((48, 24), (1536, 72), (2048, 136))), (150, 48, 24)]
)
def test_products_with_what_follows_them(rows, k, n):
    x, residual, w = torch.randn(rows, k), torch.randn(rows, n), torch.randn(n, k) / k**0.5
    bias, before, after, eps = torch.randn(n), torch.rand(k) + 0.5, torch.rand(n) + 0.5, 1e-5
    near(products.Product(w, bias)(x)[0], x @ w.t() + bias)
    squares, weighted = (x * x).unflatten(1, (3, -1)).sum(2) if k % 3 == 0 else (x * x).sum(1, True), x * before
    whole = rms_norm(x, before, eps)
    near(products.Product(w, bias)(weighted, squares, eps)[0], whole @ w.t() + bias)
    gate_up = torch.randn(2 * n, k) / k**0.5
    near(products.Product(gate_up, None, products.GATED)(weighted, squares, eps)[0], gate_mul(whole @ gate_up.t()))
    stream = residual + x @ w.t() + bias
    y, parts = products.Product(w, bias, products.ADDED)(x, residual=residual, norm=after)
    near(residual, stream)
    near(Normed(y, parts, eps).finished(), rms_norm(stream, after, eps))


@pytest.mark.parametrize("rows", [1, 2, 8, 9])
@pytest.mark.parametrize("n", [64, 80])
def test_products_of_few_rows_have_the_norm_of_the_stream_in_one_or_two_kernels(rows, n):
    x, residual, w, eps = torch.randn(rows, 1024), torch.randn(rows, n), torch.randn(n, 1024) / 32, 1e-3
    plain, gated = products.Product(w, None), products.Product(torch.cat([w, w * 2]), None, products.GATED)
    added = products.Product(w, None, products.ADDED)
    assert [one.loaded is not None for one in (plain, gated, added)] == [n == 64, n == 64, True]
    near(plain(x)[0], x @ w.t())
    near(gated(x)[0], gate_mul(x @ torch.cat([w, w * 2]).t()))
    after, stream = torch.rand(n) + 0.5, residual + x @ w.t()
    y, parts = added(x, eps=eps, residual=residual, norm=after)
    assert (parts is None) == (1 < rows <= products.FEW_ROWS)
    near(residual, stream)
    near(Normed(y, parts, eps).finished(), rms_norm(stream, after, eps))


def test_a_split_sum_leaves_its_counters_at_zero():
    x, w = torch.randn(5, 2048), torch.randn(72, 2048) / 45
    product = products.Product(w, None)
    assert products.matrix_tile(5, 72, 2048, False)["SK"] > 1
    first = product(x)[0]
    assert not product.arrived.any()
    assert torch.equal(product(x)[0], first)


LIMITS = (
    {}, {"temperature": 0.0}, {"temperature": 0.5}, {"top_k": 1}, {"top_k": 40}, {"top_p": 0.9}, {"top_p": 0.3},
    {"top_p": 0.01}, {"min_p": 0.1}, {"min_p": 1.0}, {"min_p": 0.02, "top_p": 0.5}, {"top_k": 30, "top_p": 0.5},
    {"top_k": 900, "top_p": 0.7}, {"top_k": 1500}, {"top_k": 1500, "top_p": 0.6}, {"top_p": 1e-46},
    {"top_p": 1e-46, "top_k": 5},
    {"temperature": 1.5, "top_k": 40, "top_p": 0.9, "min_p": 0.01}, {"top_k": 2000, "min_p": 0.3, "top_p": 0.8},
)  # fmt: skip


def draws(logits, limits, fused, first=0):
    """Return tokens of rows with these limits.  The noise of row j is that of row ``first + j``."""
    n, width = logits.shape
    sampler = DefaultSampler(None, SamplingContext(width, 100, ()))
    state, row = ProcessorState(sampler, n, logits.device), torch.arange(n, device=logits.device)
    bound = [sampler.bind(SamplingParams(**requested), 1) for requested in limits]
    state.join(np.arange(n), torch.arange(n, device=logits.device), dict(enumerate(bound)))
    key, variant = row + first, int(np.bitwise_or.reduce([b.variant for b in bound]))
    rows = Rows(row, key * 3 + 1, row * 0 + 1, (key << 33) - 7919 * key, key % 3, variant, torch.zeros(n, 101), 100)
    out = Draw(torch.full_like(row, -1))
    sampler.ctx = SamplingContext(width, 100, (), fuse=fused)
    (sampler._draw_fused if fused else sampler.draw)(logits, rows, state.columns, out)
    if fused:
        assert torch.equal(out.peaks.amax(1), logits.amax(1).nan_to_num(torch.inf, torch.inf, -torch.inf))
    return out.tokens.tolist()


def spread(kind, n, width):
    if kind == "flat":
        return torch.randn(n, width) * 0.3
    if kind == "ties":
        return (torch.randn(n, width) * 2).round() / 2
    if kind == "same":
        return torch.zeros(n, width)
    if kind == "sorted":  # the best logits are adjacent
        return torch.linspace(3, -9, width).expand(n, width).clone()
    logits = torch.randn(n, width) * 4
    logits[:, 1:].masked_fill_(torch.rand(n, width - 1) < 0.7, -torch.inf)
    return logits


@pytest.mark.parametrize(("width", "kind"), [
    (17, "flat"), (17, "gaps"), (1000, "ties"), (1000, "gaps"), (9000, "flat"), (9000, "same"), (9000, "sorted"),
])  # fmt: skip
def test_a_draw_is_that_of_the_reference_whatever_the_limits(width, kind):
    torch.manual_seed(width)
    logits = spread(kind, len(LIMITS), width)
    before = logits.clone()
    got = draws(logits, LIMITS, fused=True)
    assert torch.equal(logits, before), "the logits stay as they are"
    assert got == draws(logits, LIMITS, fused=False)


def test_a_search_in_a_nucleus_of_nothing_ends_with_the_best_token(monkeypatch):
    class Nothing(DefaultSampler):
        def bind(self, params, prompt_len):
            row = super().bind(params, prompt_len)
            return replace(row, values={**row.values, "top_p": 0.0})

    monkeypatch.setitem(globals(), "DefaultSampler", Nothing)
    torch.manual_seed(5)
    logits = spread("flat", 4, 300)
    assert draws(logits, [{"top_p": 0.5}] * 4, fused=True) == logits.argmax(1).tolist()


def test_a_row_draws_the_same_alone():
    torch.manual_seed(3)
    logits = spread("flat", len(LIMITS), 5000)
    together = draws(logits, LIMITS, fused=True)
    for j in range(0, len(LIMITS), 2):
        assert draws(logits[j : j + 1], LIMITS[j : j + 1], fused=True, first=j) == [together[j]], LIMITS[j]


def test_rows_without_a_distribution_end_and_leave_the_others_alone():
    torch.manual_seed(4)
    logits = spread("flat", len(LIMITS), 600)
    want = draws(logits, LIMITS, fused=True)
    for first, value in ((3, torch.nan), (4, torch.inf), (5, -torch.inf)):
        broken = logits.clone()
        broken[first::3] = value if value == -torch.inf else broken[first::3]
        broken[first::3, 17] = value
        got = draws(broken, LIMITS, fused=True)
        kept = [j for j in range(len(LIMITS)) if j < first or (j - first) % 3]
        assert [got[j] for j in kept] == [want[j] for j in kept] and all(0 <= t < 600 for t in got)


@pytest.mark.parametrize(("width", "kind"), [
    (3, "flat"), (17, "same"), (17, "gaps"), (1000, "gaps"), (1000, "same"), (9000, "gaps"), (9000, "ties"),
    (9000, "sorted"), (4096, "same"),
])  # fmt: skip
def test_log_probabilities_ranks_and_the_order_of_equals_are_those_of_the_reference(width, kind):
    torch.manual_seed(width)
    logits, chosen = spread(kind, 4, width), torch.tensor([0, width - 1, width // 2, 1])
    logits[3, 1:] = -torch.inf  # one token has the whole probability
    logits[2, ::7] = 0.0
    logits[2, ::14] = -0.0
    found = {k: logprobs.logprobs_of(logits, chosen, k, sampling.best_of) for k in (0, 1, 5, 20, logprobs.MOST, 40)}
    for k, got in found.items():
        want = sampling.logprobs_of(logits, chosen, k)
        near(got[0], want[0])
        near(got[3], want[3])
        assert got[1].tolist() == want[1].tolist() and got[2].tolist() == want[2].tolist()
        for a, b in zip(got, found[40], strict=True):
            assert torch.equal(a, b if b.dim() == 1 else b[:, :k]), f"other bits with k={k} than with 40"


def test_a_row_that_holds_a_nan_leaves_the_log_probabilities_of_the_others_alone():
    torch.manual_seed(8)
    logits, chosen = spread("ties", 4, 1000), torch.tensor([5, 6, 7, 8])
    broken = logits.clone()
    broken[1, 77], broken[2] = torch.nan, torch.nan
    for k in (3, 40):
        take = sampling.best_of
        got, want = logprobs.logprobs_of(broken, chosen, k, take), logprobs.logprobs_of(logits, chosen, k, take)
        assert all(torch.equal(a[[0, 3]], b[[0, 3]]) for a, b in zip(got, want, strict=True))
        assert got[3][1:3].isnan().all() and (got[2] >= 0).all() and (got[2] < 1000).all()


@pytest.mark.parametrize(("lengths", "ids", "cells"), [
    ((1, 2, 9, 30), 67, 8192), ((600, 1, 77, 599, 600), 300, 8192), ((600, 599), 300, 64), ((5000, 600), 2500, 1024),
])  # fmt: skip
def test_penalties_count_every_token_of_a_history_whatever_shares_its_cell(lengths, ids, cells, monkeypatch):
    monkeypatch.setattr(triton_penalties, "CELLS", cells)
    torch.manual_seed(1)
    n, width, position = len(lengths), 3000, torch.tensor(lengths)
    history = torch.randint(0, ids, (n + 1, max(lengths) + 1), dtype=torch.int32)
    history[:, ::5] = 3
    slots = torch.arange(n) + 1
    for slot, end in zip(slots, lengths, strict=True):
        history[slot, end:] = -9  # stale
    some = lambda *values: torch.tensor(values)[torch.arange(n + 1) % len(values)]  # noqa: E731
    state = {"repetition": some(1.1, 1.3, 0.8, 1.0), "presence": some(0.0, 0.7, -1.0), "frequency": some(0.5, 0.2)}
    rows = Rows(slots, position, (position // 2).clamp(min=1), slots, slots, 3, history, max(lengths))
    got = torch.randn(n, width) * 4
    got[:, 4] = -torch.inf
    want = got.clone()
    triton_penalties.penalize(got, rows, state["repetition"], state["presence"], state["frequency"])
    Penalties(None, SamplingContext(width, 100, (), fuse=False)).apply(want, rows, state)
    near(got, want)


@pytest.mark.parametrize("width", [33, 5000])
def test_a_mask_forbids_in_the_rows_that_have_one(width):
    torch.manual_seed(width)
    allowed = torch.rand(2, -(-width // 32) * 32) < 0.3
    bits = torch.from_numpy(np.packbits(allowed.numpy(), axis=1, bitorder="little").view("<i4").copy())
    logits = torch.randn(4, width + 3)[:, :width]
    got, want = logits.clone(), logits.clone()
    held = mask.DeviceMasks(4, width, torch.device("cpu"))
    for rows in (np.array([0]), np.array([3, 1])):  # results of the first step must not remain in the second
        held.put(rows, bits[: len(rows)].numpy())
    held.mask.zero_()
    held.host[:2] = bits.numpy()
    held.put(rows, held.host[:2])  # written to the memory from which they are copied
    assert held.index.tolist() == [-1, 1, -1, 0]
    mask.apply(got, held.index, held.mask)
    sampling.apply_mask(want, bits, torch.tensor([3, 1]))
    assert torch.equal(got, want) and torch.equal(got[[0, 2]], logits[[0, 2]])


def test_a_nan_shows_in_the_peak_of_its_tile():
    logits = torch.zeros(2, 9000)
    logits[1, 5000] = torch.nan
    assert best_of_tiles(logits).isnan().tolist() == [[False] * 3, [False, True, False]]


def columns(slots=5, length=40, groups=2, block=4):
    long = lambda *v: torch.tensor(v, dtype=torch.int64)  # noqa: E731
    stop = torch.full((slots, STOP_IDS), -1, dtype=torch.int32)
    stop[:, 0], stop[:, 1] = 7, 9
    return SimpleNamespace(
        tokens=torch.arange(slots * length, dtype=torch.int32).view(slots, length),
        known=long(17, 1, 8, 30, 1),
        stopped=torch.tensor([False, False, True, False, True]),
        end=long(39, 39, 39, 31, 39),
        block=block,
        min_end=long(0, 5, 0, 0, 0),
        stop_ids=stop,
        n_eos=torch.ones(slots, dtype=torch.int64),
        table=torch.arange(groups * slots * 10, dtype=torch.int32).view(groups, slots, 10),
        dropped=None,
    )


@pytest.mark.parametrize("dropped", [None, [[5, 0, 0, 9, 0], [0, 0, 3, 4, 0]]], ids=["complete", "compressed"])
def test_begin_reads_token_position_and_slot_of_each_row(dropped):
    state, slots = columns(), torch.tensor([3, 0, 2])
    if dropped is not None:
        state.dropped = torch.tensor(dropped)
    ids, position = torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)
    kv_len, slot_map = torch.zeros(2, 3, dtype=torch.int32), torch.zeros(2, 3, dtype=torch.int64)
    step.begin(slots, state, ids, position, kv_len, slot_map)
    gone = torch.zeros(2, 5, dtype=torch.int64) if dropped is None else state.dropped
    stored = position - gone[:, slots]  # position in the cache of each group of layers
    assert position.tolist() == [29, 16, 7] and torch.equal(kv_len.long(), stored + 1)
    assert torch.equal(ids, state.tokens[slots, position].long())
    groups = torch.arange(2)[:, None]
    want = state.table[groups, slots, stored // 4].long() * 4 + stored % 4
    want[:, 2] = 0  # it has ended, so it writes to the null block
    assert torch.equal(slot_map, want)
    got = step.gather(slots, (state.known, state.end, state.min_end, state.n_eos))
    assert [x.tolist() for x in got] == [[30, 17, 8], [31, 39, 39], [0, 0, 0], [1, 1, 1]]


def test_commit_accepts_flags_and_stops_as_the_reference():
    state, slots = columns(), torch.tensor([0, 1, 2, 3, 4])
    drawn, width = torch.tensor([9, 7, 5, 5, 5]), 100
    logits = torch.zeros(5, width)
    logits[4] = torch.nan
    peaks, out, before = best_of_tiles(logits), torch.zeros(3, 5, dtype=torch.int32), columns()
    flags = sampling.stop_flags(
        drawn, before.known, before.stop_ids, before.n_eos, before.min_end, before.end, sampling.bad_rows(logits)
    )
    step.commit(slots, drawn, peaks, state, out, width)
    want = torch.where(before.stopped, OVERSHOOT, flags.int())
    assert out[0].tolist() == drawn.tolist() and out[1].tolist() == [1, 1, 0, 1, 0] and out[2].tolist() == want.tolist()
    assert state.known.tolist() == [18, 2, 8, 31, 1] and state.stopped.tolist() == [True, False, True, True, True]
    assert [int(state.tokens[s, before.known[s]]) for s in (0, 1, 3)] == [9, 7, 5]


@pytest.mark.parametrize("outside", [-1, 100, 2**31 + 5, -(2**40)])
def test_a_token_outside_of_the_vocabulary_ends_its_row_and_is_never_indexed_by(outside):
    state, before = columns(), columns()
    drawn, out = torch.tensor([3, outside, 5]), torch.zeros(3, 3, dtype=torch.int32)
    step.commit(torch.tensor([0, 1, 3]), drawn, best_of_tiles(torch.zeros(3, 100)), state, out, 100)
    assert out[1].tolist() == [1, 0, 1] and out[2].tolist() == [0, FAILED, LENGTH]
    assert int(drawn.min()) >= 0 and int(drawn.max()) < 100
    assert torch.equal(state.tokens[1], before.tokens[1]) and bool(state.stopped[1])


# ---- experts ---------------------------------------------------------------------------------------------------------


def test_a_token_goes_to_the_experts_that_it_goes_to_in_torch():
    expert_kernels.check_routes("cpu", torch.float32)
    expert_kernels.check_bad_logits("cpu")
    expert_kernels.check_pruned("cpu")


def test_each_pair_of_a_token_and_an_expert_is_in_one_block_of_that_expert():
    expert_kernels.check_assignment("cpu")


@pytest.mark.parametrize("shape", expert_kernels.SHAPES)
def test_experts_give_the_weighted_sum_and_the_stream_with_it(shape):
    expert_kernels.check_products("cpu", torch.float32, shape)
    expert_kernels.check_twice_the_same_expert("cpu")


def test_an_odd_inner_width_of_experts_is_filled_up():
    expert_kernels.check_an_odd_width("cpu", torch.float32)


@pytest.mark.parametrize(("form", "shape"), [one for one in expert_kernels.PACKED if one[0][0] != "f"])
def test_packed_experts_give_it_of_the_numbers_that_they_hold(form, shape):
    expert_kernels.check_packed_products("cpu", torch.float32, shape, form)


def test_in_the_place_of_experts_of_transformers_they_give_the_same():
    expert_kernels.check_those_of_transformers("cpu")


def test_a_token_of_fixed_experts_has_the_bits_that_it_has_alone():
    expert_kernels.check_a_row_alone("cpu", torch.float32)


# ---- recurrent states ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", delta_rule_cases.SHAPES)
@pytest.mark.parametrize("seed", range(4))
def test_the_delta_rule_gives_the_outputs_states_rings_and_copies_of_the_reference(shape, seed):
    delta_rule_cases.check_scan("cpu", torch.float32, shape, seed, 1e-4)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("shape", delta_rule_cases.SHAPES)
def test_one_launch_gives_a_step_of_one_token_for_each_row(shape, seed):
    delta_rule_cases.check_one("cpu", torch.float32, shape, seed, 1e-5)
    delta_rule_cases.check_one("cpu", torch.float32, shape, seed, 1e-5, part=16)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("shape", delta_rule_cases.LONG_SHAPES[:2])
def test_long_rows_in_chunks_give_what_tokens_one_after_another_give(shape, seed):
    delta_rule_cases.check_long("cpu", torch.float16, shape, seed, 3e-3)  # the interpreter has no bfloat16 products


def test_the_gated_norm_is_that_of_the_reference():
    delta_rule_cases.check_gated_norm("cpu", torch.float32, 1e-5)


@pytest.mark.parametrize("shape", short_conv_cases.SHAPES)
@pytest.mark.parametrize("seed", range(4))
def test_the_short_convolution_has_the_outputs_rings_and_copies_of_the_reference(shape, seed):
    short_conv_cases.check_convolve("cpu", torch.float32, shape, seed, 1e-5)
