"""Noise, draws and the flags: the noise by its statistics, the supports by a float64 reference."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm.core.interfaces.plan import EOS, LENGTH, NAN, STOP_ID, STOP_IDS
from minivllm.core.interfaces.sampling import Draw, Rows, SamplingContext
from minivllm.core.request import SamplingParams
from minivllm.core.sampling import (
    apply_mask,
    bad_rows,
    gumbel,
    logprobs_of,
    noise,
    noise_bits,
    stop_flags,
    suppress_stops,
)
from minivllm.plugins.sampler import default as module
from minivllm.plugins.sampler.default import DRAWN, FULL, GREEDY, LIMITED, DefaultSampler

INF = float("inf")


def reference_bits(seed, position, sample, lane):
    """The pseudo-code of noise_bits in numpy's unsigned words."""
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
    """Wilson-Hilferty: chi-square as a standard normal."""
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
    monkeypatch.setattr("minivllm.core.sampling.noise_bits", lambda *_: words.clone()[None])
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
    """n neighbours along one axis, the other arguments fixed at ``other``."""
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


def sampler(vocab):
    return DefaultSampler(None, SamplingContext(vocab, 4096, ()))


def draw(logits, params, seed=None, position=None, sample=None):
    """Tokens of one step: row i has ``params[i]``; slots are handed out in reverse."""
    n, vocab = logits.shape
    sampler_ = sampler(vocab)
    once = {id(p): sampler_.bind(p, 1) for p in params}
    slots = torch.arange(n - 1, -1, -1)
    state = {}
    for name, column in sampler_.columns().items():
        values = [once[id(p)].values[name] for p in params]
        state[name] = torch.empty(n, dtype=getattr(torch, column.dtype))
        state[name][slots] = torch.tensor(values, dtype=state[name].dtype)
    variant = 0
    for row in once.values():
        variant |= row.variant
    zero = torch.zeros(n, dtype=torch.long)
    position = torch.arange(n) if position is None else position
    rows = Rows(
        slots,
        position,
        zero,
        zero if seed is None else seed,
        zero if sample is None else sample,
        variant,
        torch.zeros(n, 8, dtype=torch.int32),
        8,
    )
    out = Draw(torch.full((n,), -1))
    sampler_.draw(logits.clone(), rows, state, out)
    return out.tokens


def support64(logits, p):
    """Tokens that may be drawn: temperature, min-p, top-k, top-p in float64; ties with the last one kept stay in."""
    x = logits.double() / p.temperature
    prob = torch.softmax(x, 0)
    alive = prob >= p.min_p * prob.max()
    order = torch.argsort(torch.where(alive, prob, -1.0), descending=True)
    order = order[: int(alive.sum())]
    if p.top_k > 0:
        order = order[: p.top_k]
    mass = prob[order] / prob[order].sum()
    before = mass.cumsum(0) - mass
    keep = order[before < p.top_p] if p.top_p < 1 else order
    return set(torch.nonzero(alive & (x >= x[keep].min()) & (prob > 0)).flatten().tolist())


def drawable(logits, p, others=()):
    """Which tokens can come up: each in turn gets a noise that wins unless it was excluded; ``others`` are in the step
    too."""
    n, vocab = 1, logits.shape[0]
    seen = set()
    sampler_ = sampler(vocab)
    bound = sampler_.bind(p, 1)
    state = {
        k: torch.as_tensor(v)[None].to(getattr(torch, sampler_.columns()[k].dtype)) for k, v in bound.values.items()
    }
    variant = bound.variant
    for o in others:
        variant |= sampler_.bind(o, 1).variant
    zero = torch.zeros(n, dtype=torch.long)
    rows = Rows(zero, zero, zero, zero, zero, variant, torch.zeros(1, 8, dtype=torch.int32), 8)
    captured = {}

    def flat(seed, position, sample, width):
        return captured["add"]

    original, module.gumbel = module.gumbel, flat
    try:
        for t in range(vocab):
            captured["add"] = torch.zeros(1, vocab)
            captured["add"][0, t] = 1e9
            out = Draw(torch.zeros(1, dtype=torch.long))
            sampler_.draw(logits[None].clone(), rows, state, out)
            if out.tokens.item() == t:
                seen.add(t)
    finally:
        module.gumbel = original
    return seen


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_support_is_that_of_the_float64_reference(data):
    vocab = data.draw(st.integers(2, 40))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    logits = torch.tensor(rng.normal(0, data.draw(st.sampled_from([0.1, 1.0, 5.0])), vocab), dtype=torch.float32)
    if data.draw(st.booleans()):
        logits = (logits * 2).round() / 2  # ties
    if data.draw(st.booleans()):
        logits[torch.tensor(rng.permutation(vocab)[: vocab // 3].copy())] = -INF
    # numbers that no sum of the masses hits exactly
    p = SamplingParams(
        temperature=data.draw(st.sampled_from([0.31, 1.0, 2.7])),
        top_k=data.draw(st.sampled_from([0, 1, 2, 5, 17, 1000])),
        top_p=data.draw(st.sampled_from([1.0, 0.913579, 0.5012345, 0.0123])),
        min_p=data.draw(st.sampled_from([0.0, 0.0519, 0.7071])),
    )
    others = data.draw(
        st.sampled_from(
            [(), (SamplingParams(top_p=0.5),), (SamplingParams(top_k=7),), (SamplingParams(temperature=0),)]
        )
    )
    assert drawable(logits, p, others=others) == support64(logits, p)


def test_greedy_takes_the_lowest_id_of_equal_logits():
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0], [5.0, 5.0, 5.0, 5.0]])
    assert draw(logits, [SamplingParams(temperature=0)] * 2).tolist() == [1, 0]
    mixed = draw(logits, [SamplingParams(temperature=0), SamplingParams(temperature=1e-7)])
    assert mixed.tolist() == [1, 0]


def test_an_all_greedy_step_neither_draws_nor_sorts():
    p = SamplingParams(temperature=0, top_p=0.5, top_k=3)
    assert sampler(100).bind(p, 1).variant == GREEDY
    assert sampler(100).bind(SamplingParams(), 1).variant == DRAWN
    assert sampler(100).bind(SamplingParams(top_k=100), 1).variant == DRAWN
    assert not sampler(5000).bind(SamplingParams(top_k=20, top_p=0.9), 1).variant & FULL
    assert sampler(5000).bind(SamplingParams(top_p=0.9), 1).variant & (FULL | LIMITED) == FULL | LIMITED


def chi_square(tokens, probs):
    expected = probs * len(tokens)
    assert (expected[probs > 0] >= 5).all()
    got = torch.bincount(tokens, minlength=len(probs)).double()
    assert (got[probs == 0] == 0).all()
    used = probs > 0
    return normal_tail((((got - expected) ** 2)[used] / expected[used]).sum().item(), int(used.sum()) - 1)


@pytest.mark.parametrize("axis", ["position", "seed", "sample"])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.7),
        SamplingParams(top_k=5),
        SamplingParams(top_p=0.8),
        SamplingParams(temperature=1.3, top_k=12, top_p=0.9, min_p=0.05),
    ],
    ids=["plain", "cool", "top_k", "top_p", "all"],
)
def test_draws_follow_the_softmax_of_what_is_left(params, axis):
    """60,000 draws: with 20 cells a distribution that is off by 3 % (r.m.s., relative) has z = 9, above the limit 4.5
    with power > 0.99."""
    n = 60_000
    logits = torch.randn(20, generator=torch.Generator().manual_seed(1))
    args = {"position": torch.full((n,), 7), "seed": torch.full((n,), 99), "sample": torch.full((n,), 1)}
    args[axis] = torch.arange(n)
    tokens = draw(logits.repeat(n, 1), [params] * n, **args)
    x = logits.double() / params.temperature
    allowed = torch.zeros(20, dtype=torch.bool)
    allowed[list(support64(logits, params))] = True
    assert abs(chi_square(tokens, torch.softmax(x.masked_fill(~allowed, -INF), 0))) < 4.5


def test_a_row_draws_the_same_alone_and_in_any_batch():
    rng = torch.Generator().manual_seed(5)
    vocab, n = 300, 48
    kinds = [
        SamplingParams(temperature=0),
        SamplingParams(),
        SamplingParams(top_k=3),
        SamplingParams(top_k=40, top_p=0.6),
        SamplingParams(top_p=0.7),
        SamplingParams(min_p=0.2, temperature=2.0),
        SamplingParams(top_k=299, top_p=0.99),
    ]
    params = [kinds[i % len(kinds)] for i in range(n)]
    logits = (torch.randn(n, vocab, generator=rng) * 3).bfloat16().float()
    seed, position = torch.randint(-(2**60), 2**60, (n,), generator=rng), torch.arange(n) * 3
    sample = torch.arange(n) % 5
    together = draw(logits, params, seed, position, sample)
    for order in (torch.arange(n).flip(0), torch.arange(0, n, 3)):
        again = draw(logits[order], [params[i] for i in order], seed[order], position[order], sample[order])
        assert torch.equal(again, together[order])
    for i in range(n):
        j = slice(i, i + 1)
        assert draw(logits[j], params[i : i + 1], seed[j], position[j], sample[j])[0] == together[i]


def test_sorting_in_chunks_changes_nothing(monkeypatch):
    logits = torch.randn(9, 50)
    params = [SamplingParams(top_p=0.6, min_p=0.01)] * 9
    whole = draw(logits, params)
    monkeypatch.setattr("minivllm.plugins.sampler.default.CHUNK", 100)
    assert torch.equal(draw(logits, params), whole)


@pytest.mark.parametrize(
    "params", [SamplingParams(), SamplingParams(top_k=4), SamplingParams(top_p=0.9), SamplingParams(min_p=0.1)]
)
def test_impossible_tokens_are_never_drawn(params):
    n = 4000
    logits = torch.full((n, 64), -INF)
    logits[:, [3, 60]] = torch.tensor([-100.0, -104.0])
    assert set(draw(logits, [params] * n).tolist()) <= {3, 60}


@pytest.mark.parametrize(
    "params", [SamplingParams(temperature=0), SamplingParams(), SamplingParams(top_k=2, top_p=0.5)]
)
def test_bad_rows_give_a_token_and_leave_the_others_alone(params):
    logits = torch.randn(4, 32)
    want = draw(logits, [params] * 4)
    logits[1, 5], logits[2] = float("nan"), -INF
    got = draw(logits, [params] * 4)
    assert ((got >= 0) & (got < 32)).all() and torch.equal(got[[0, 3]], want[[0, 3]])
    assert bad_rows(logits).tolist() == [False, True, True, False]
    logits[3, 0] = INF
    assert bad_rows(logits)[3]


def test_tiny_and_huge_temperatures_stay_finite():
    logits = torch.tensor([[1e4, -1e4, 9999.0, 0.0]])
    assert draw(logits, [SamplingParams(temperature=1.1e-5)]).item() == 0
    seen = {draw(logits / 1e4, [SamplingParams(temperature=100)], position=torch.tensor([i])).item() for i in range(60)}
    assert seen == {0, 1, 2, 3}


def test_logprobs_are_those_of_log_softmax():
    logits = torch.randn(7, 50) * 4
    logits[0, 3] = -INF
    chosen = torch.tensor([3, 4, 9, 49, 0, 1, 2])
    value, rank, top_ids, top = logprobs_of(logits, chosen, 5)
    want = torch.log_softmax(logits.double(), 1)
    torch.testing.assert_close(value.double(), want[range(7), chosen], rtol=1e-5, atol=1e-5)
    assert rank.tolist() == [int((want[i] > want[i, c]).sum()) + 1 for i, c in enumerate(chosen)]
    torch.testing.assert_close(top.double(), want.topk(5).values, rtol=1e-5, atol=1e-5)
    assert torch.equal(want.gather(1, top_ids.long()), want.topk(5).values)
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
