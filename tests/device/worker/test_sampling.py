"""Noise by its statistics, log-probabilities, flags and masks, and what is particular to the built-in sampler."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm.core.interfaces.params import SamplingParams
from minivllm.core.interfaces.plan import EOS, LENGTH, NAN, STOP_ID, STOP_IDS
from minivllm.device.worker.sampling import (
    apply_mask,
    bad_rows,
    gumbel,
    logprobs_of,
    noise,
    noise_bits,
    stop_flags,
    suppress_stops,
)
from minivllm.plugins.sampler.default import DRAWN, FULL, GREEDY, LIMITED
from minivllm.testing import chisquare
from minivllm.testing.sampler import LARGEST, SMALLEST, SamplerConformance
from minivllm.testing.sampling_rows import SampledSeq, Stage

INF = float("inf")


def reference_bits(seed, position, sample, lane):
    """Compute noise_bits by its pseudo-code in numpy's unsigned words."""
    with np.errstate(over="ignore"):
        word = lambda x: np.asarray(np.asarray(x).astype(np.int64) & 0xFFFFFFFF).astype(np.uint32)  # noqa: E731
        u = np.uint32
        a, b = u(0x9E3779B9), u(0)
        for w in (word(seed), word(np.asarray(seed) >> 32), word(position), word(sample)):
            a = (a ^ w) * u(0xCC9E2D51)
            a = a ^ (a >> u(16))
            b = (b + a) * u(0x1B873593)
        b = b ^ (b >> u(15))
        x = word(lane) * u(0x9E3779B9)
        x = x ^ (x >> u(15)) ^ a
        x = (x ^ (x >> u(16))) * u(0x7FEB352D) + b
        x = (x ^ (x >> u(15))) * u(0x846CA68B)
        return x ^ (x >> u(16))


def key(n, seed=0):
    return torch.full((n,), seed), torch.arange(n), torch.zeros(n, dtype=torch.long)


def normal_tail(chi2, df):
    """Return chi-square as a standard normal (Wilson-Hilferty)."""
    return ((chi2 / df) ** (1 / 3) - (1 - 2 / (9 * df))) / math.sqrt(2 / (9 * df))


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=5),
    st.integers(0, 2**31 - 1),
    st.integers(0, 127),
    st.integers(0, 2**31 - 1),
    st.integers(1, 67),
)
def test_noise_is_the_written_function_of_unsigned_words(seeds, position, sample, lane, width):
    seed = torch.tensor(seeds)
    lanes = (lane + torch.arange(width)) % 2**31
    got = noise_bits(seed[:, None], torch.tensor(position), torch.tensor(sample), lanes)
    want = reference_bits(np.array(seeds)[:, None], position, sample, lanes.numpy())
    assert np.array_equal(got.numpy().view(np.uint32), want)
    assert noise(seed, torch.tensor(position), torch.tensor(sample), lane).shape == seed.shape


def test_noise_and_gumbel_stay_finite_at_every_end_of_the_bits(monkeypatch):
    words = torch.tensor([0, 1, 2**31 - 1, 2**31 - 2, 2**30, 2**24 + 1, -1, -(2**31)], dtype=torch.int32)
    monkeypatch.setattr("minivllm.device.worker.sampling.noise_bits", lambda *_: words.clone()[None])
    u = noise(*key(1), 0)
    assert ((u > 0) & (u < 1)).all() and u.min() == 2.0**-32 and u.max() == 1 - 2.0**-24
    g = gumbel(*key(1), len(words)).double()
    assert g.isfinite().all()
    torch.testing.assert_close(g, -torch.log(-torch.log1p(-u.double())), rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
def test_noise_has_the_same_bits_on_the_gpu():
    seed = torch.randint(-(2**62), 2**62, (7,))
    args = seed[:, None], torch.arange(7)[:, None], torch.arange(7)[:, None], torch.arange(5001)
    on_gpu = [a.cuda() for a in args]
    assert torch.equal(noise_bits(*args), noise_bits(*on_gpu).cpu())
    assert torch.equal(noise(*args), noise(*on_gpu).cpu())


AXES = ("lane", "position", "sample", "seed", "seed_high")


def along(axis, n, other):
    """Return the noise of n neighbours along one axis, with the other arguments fixed at ``other``."""
    step = torch.arange(n)
    args = {name: torch.tensor(other) for name in ("seed", "position", "sample", "lane")}
    if axis == "seed_high":
        args["seed"] = other + (step << 32)
    else:
        args[axis] = args[axis] + step
    return noise(**args)


@pytest.mark.parametrize("axis", AXES)
def test_noise_along_each_axis_is_uniform_and_uncorrelated(axis):
    """n = 2**18 neighbours in 1,024 cells: cells off by 4 % (r.m.s.) put the chi-square at z = 9, a correlation of
    0.015 is 7.7 standard deviations: both pass the limit of 4.5 with power > 0.99."""
    n, cells = 1 << 18, 1024
    for other in (0, 12345):
        u = along(axis, n, other)
        chi2 = ((torch.bincount((u * cells).long(), minlength=cells) - n / cells) ** 2).sum() / (n / cells)
        assert abs(normal_tail(chi2.item(), cells - 1)) < 4.5
        small = (u[u < 2**-6] * 2**12).long()  # the tail that wins draws: 4,096 values in 64 cells, z = 9 at 16 %
        chi2 = ((torch.bincount(small, minlength=64) - len(small) / 64) ** 2).sum() / (len(small) / 64)
        assert abs(normal_tail(chi2.item(), 63)) < 4.5
        v = (u.double() - 0.5) * math.sqrt(12)
        for lag in (1, 2, 3, 16, 64, 256, 1024):
            r = (v[lag:] * v[:-lag]).mean().item()
            assert abs(r) * math.sqrt(n) < 4.5, lag
        pairs = (u[:-1] * 32).long() * 32 + (u[1:] * 32).long()
        chi2 = ((torch.bincount(pairs, minlength=1024) - n / 1024) ** 2).sum() / (n / 1024)
        assert abs(normal_tail(chi2.item(), 1023)) < 5.5  # neighbours overlap: slightly wider than chi-square


def test_every_input_bit_flips_every_output_bit_half_of_the_time():
    """Avalanche over 2**14 inputs: a bias of 0.03 is 7.7 standard deviations; the worst of 3,224 must be below 5.5."""
    n = 1 << 14
    rng = torch.Generator().manual_seed(3)
    base = {
        "seed": torch.randint(-(2**62), 2**62, (n,), generator=rng),
        "position": torch.randint(0, 4096, (n,), generator=rng),
        "sample": torch.randint(0, 8, (n,), generator=rng),
        "lane": torch.randint(0, 150_000, (n,), generator=rng),
    }
    plain = noise_bits(**base)
    for name, bits in (("seed", 63), ("position", 16), ("sample", 7), ("lane", 18)):
        for bit in range(bits):
            flipped = plain ^ noise_bits(**{**base, name: base[name] ^ (1 << bit)})
            share = torch.stack([((flipped >> i) & 1).double().mean() for i in range(31)])
            assert ((share - 0.5).abs() * 2 * math.sqrt(n) < 5.5).all(), (name, bit)


def test_rows_of_neighbouring_keys_have_unrelated_noise():
    """4,096 lanes, all pairs of 96 rows: |r| * sqrt(4096) < 5.5 for 4,560 pairs; the same with one row shifted."""
    seed = torch.arange(96) % 4
    position = torch.arange(96) // 4 % 6
    sample = torch.arange(96) // 24
    u = noise(seed[:, None], position[:, None], sample[:, None], torch.arange(4096)).double()
    v = (u - 0.5) * math.sqrt(12)
    for shift in (0, 1, 7):
        r = v @ v.roll(shift, dims=1).T / 4096
        if shift == 0:
            r.fill_diagonal_(0)
        assert r.abs().max() * 64 < 5.5


def suite(vocab):
    made = SamplerConformance()
    made.plugin, made.vocab = "default", vocab
    return made


def test_greedy_takes_the_lowest_id_of_equal_logits():
    for logits, best in ([0.0, 3.0, 3.0, 1.0], 1), ([5.0, 5.0, 5.0, 5.0], 0):
        for temperature in (0, 1e-7):
            tokens = suite(4).draws(SamplingParams(temperature=temperature), torch.tensor(logits), suite(4).keys(9))
            assert tokens.tolist() == [best] * 9


def test_an_all_greedy_step_neither_draws_nor_sorts():
    p = SamplingParams(temperature=0, top_p=0.5, top_k=3)
    sampler = lambda vocab: suite(vocab).make(vocab)  # noqa: E731
    assert sampler(100).bind(p, 1).variant == GREEDY
    assert sampler(100).bind(SamplingParams(), 1).variant == DRAWN
    assert sampler(100).bind(SamplingParams(top_k=100), 1).variant == DRAWN
    assert not sampler(5000).bind(SamplingParams(top_k=20, top_p=0.9), 1).variant & FULL
    assert sampler(5000).bind(SamplingParams(top_p=0.9), 1).variant & (FULL | LIMITED) == FULL | LIMITED


def test_sorting_in_chunks_changes_nothing(monkeypatch):
    rows = [SampledSeq(SamplingParams(top_p=0.6, min_p=0.01), (0,), (), torch.randn(50), i) for i in range(9)]
    stage, logits = Stage(suite(50), 9), torch.stack([s.logits for s in rows])
    stage.join(range(9), rows)
    whole = stage.draw(range(9), logits)
    monkeypatch.setattr("minivllm.plugins.sampler.default.CHUNK", 100)
    assert torch.equal(stage.draw(range(9), logits), whole)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["flat", "ties", "gaps", "sorted"])
def test_the_kernels_draw_what_the_reference_draws(kind, dtype):
    """Scores that differ by rounding alone may change places: one row of 51 at most."""
    from interpreted import LIMITS, draws, spread

    torch.manual_seed(7)
    logits = spread(kind, 3 * len(LIMITS), 151_936).to(dtype).cuda()
    got, want = (draws(logits, LIMITS * 3, fused) for fused in (True, False))
    assert sum(a != b for a, b in zip(got, want, strict=True)) <= 1
    for j in range(len(LIMITS)):
        assert draws(logits[j : j + 1].float(), LIMITS[j : j + 1], True, first=j) == [got[j]], LIMITS[j]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernels_report_the_log_probabilities_of_the_reference(dtype):
    logits, chosen = torch.randn(9, 151_936).mul(3).to(dtype).cuda(), torch.arange(9).cuda() * 11_000
    for k in (0, 1, 20):
        got, want = logprobs_of(logits, chosen, k, fuse=True), logprobs_of(logits, chosen, k)
        assert torch.equal(got[1], want[1])
        torch.testing.assert_close((got[0], got[3]), (want[0], want[3]), atol=2e-5, rtol=1e-5)
        assert torch.equal(got[2], want[2])


def test_bad_rows_are_those_that_nothing_can_be_drawn_from():
    logits = torch.randn(5, 32)
    logits[0, :31] = -INF
    logits[1, 5], logits[2], logits[3, 0] = float("nan"), -INF, INF
    assert bad_rows(logits).tolist() == [False, True, True, True, False]


def test_the_seeds_at_the_ends_of_the_noise_are_there():
    one = torch.ones(1, dtype=torch.long)
    for seed, lane in SMALLEST:
        assert noise(one * seed, one, one * 0, lane) < 2.0**-23
    for seed, lane in LARGEST:
        assert noise(one * seed, one, one * 0, lane) == 1 - 2.0**-24


@pytest.mark.parametrize(("df", "alpha", "value"), [(1, 0.05, 3.8415), (7, 0.01, 18.4753), (63, 1e-3, 103.442)])
def test_chi_square_is_that_of_the_tables(df, alpha, value):
    assert chisquare.critical(df, alpha) == pytest.approx(value, abs=1e-3)
    assert chisquare.power(1e-9, df, alpha) == pytest.approx(alpha, rel=1e-3)


def test_power_is_how_often_a_difference_is_found():
    """Of 4,000 samples from a faulty die: the share beyond the critical value is the power, within 4 sigma (0.03)."""
    n, p = 2000, torch.full((6,), 1 / 6, dtype=torch.float64)
    q = p + torch.tensor([0.02, -0.02, 0.01, -0.01, 0.0, 0.0])
    rng = torch.Generator().manual_seed(1)
    draws = torch.multinomial(q.expand(4000, 6), n, replacement=True, generator=rng)
    count = torch.nn.functional.one_hot(draws, 6).sum(dim=1).double()
    found = (((count - n * p) ** 2 / (n * p)).sum(dim=1) > chisquare.critical(5, 0.01)).double().mean().item()
    shift = n * float(((q - p) ** 2 / p).sum())
    assert found == pytest.approx(chisquare.power(shift, 5, 0.01), abs=0.03)
    w = chisquare.detectable(n, 5, 0.01)
    assert chisquare.power(n * w * w, 5, 0.01) == pytest.approx(chisquare.POWER, abs=1e-6)


def test_rare_cells_share_bins():
    probs = torch.tensor([0.5, 0.3, 0.19, 0.004, 0.003, 0.003, 0.0])
    bins, k = chisquare.pooled(probs, 1000)
    assert k == 4 and bins.tolist() == [3, 2, 1, 1, 0, 0, 0]  # expected: 500, 300, 190 + 4, 3 + 3 + 0
    assert chisquare.pooled(torch.tensor([0.999, 0.001]), 1000)[1] == 1


def test_logprobs_are_those_of_log_softmax():
    logits = torch.randn(7, 50) * 4
    logits[0, 3] = -INF
    chosen = torch.tensor([3, 4, 9, 49, 0, 1, 2])
    value, rank, top_ids, top = logprobs_of(logits, chosen, 5)
    want = torch.log_softmax(logits.double(), 1)
    torch.testing.assert_close(value.double(), want[range(7), chosen], rtol=1e-5, atol=1e-5)
    assert rank.tolist() == [int((want[i] > want[i, c]).sum()) + 1 for i, c in enumerate(chosen)]
    torch.testing.assert_close(top.double(), want.topk(5).values, rtol=1e-5, atol=1e-5)
    assert top_ids.tolist() == want.topk(5).indices.tolist()
    assert (rank.dtype, top_ids.dtype) == (torch.int32, torch.int32)
    assert logprobs_of(logits, chosen, 0)[2].shape == (7, 0) and logprobs_of(logits, chosen, 99)[3].shape == (7, 50)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_flags_and_suppression_agree_with_the_definition(data):
    n, vocab = data.draw(st.integers(1, 5)), 12
    ids = np.full((n, STOP_IDS), -1, np.int32)
    n_eos, flags = [], []
    tokens = [data.draw(st.integers(0, vocab - 1)) for _ in range(n)]
    position, min_end, end, bad = ([data.draw(st.integers(1, 6)) for _ in range(n)] for _ in range(4))
    for i in range(n):
        eos = data.draw(st.lists(st.integers(0, vocab + 3), max_size=4))
        stop = data.draw(st.lists(st.integers(0, vocab + 3), max_size=4))
        ids[i, : len(eos) + len(stop)] = eos + stop
        n_eos.append(len(eos))
        counts = position[i] >= min_end[i]
        flag = EOS * (counts and tokens[i] in eos) | STOP_ID * (counts and tokens[i] in stop)
        flag |= LENGTH * (position[i] + 1 >= end[i])
        flags.append(NAN if bad[i] == 1 else flag)
    t = [torch.tensor(x) for x in (tokens, position, ids, n_eos, min_end, end)]
    assert stop_flags(*t, torch.tensor(bad) == 1).tolist() == flags
    assert stop_flags(*t).dtype == torch.uint8
    logits = torch.randn(n, vocab)
    want = logits.clone()
    for i in range(n):
        for s in ids[i]:
            if position[i] < min_end[i] and 0 <= s < vocab:
                want[i, s] = -INF
    suppress_stops(logits, t[1], t[4], t[2])
    assert torch.equal(logits, want)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 100), st.integers(1, 4), st.integers(0, 2**32), st.booleans())
def test_mask_bits_are_tokens(vocab, n, seed, some_rows):
    rng = np.random.default_rng(seed)
    allowed = rng.random((n, vocab)) < 0.5
    bits = np.zeros((n, -(-vocab // 32) * 32), bool)
    bits[:, :vocab] = allowed
    mask = torch.tensor(np.packbits(bits, axis=1, bitorder="little").view("<i4").copy())
    logits = torch.randn(n + 2, vocab)
    want = logits.clone()
    rows = torch.tensor(rng.permutation(n + 2)[:n]) if some_rows else None
    target = want if some_rows else want[:n]
    target[rows if some_rows else slice(None)] = torch.where(
        torch.tensor(allowed), target[rows if some_rows else slice(None)], torch.tensor(-INF)
    )
    apply_mask(logits if some_rows else logits[:n], mask, rows)
    assert torch.equal(logits, want)
