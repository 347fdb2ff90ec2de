"""The chi-square test with its power: which difference it finds, not only that it found none."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor

ALPHA = 1e-6  # how often a right sampler may fail, if seeds were drawn anew
POWER = 0.999
MUST_COME = 40  # an event expected so often stays away with probability exp(-40)


def survival(x: float, df: float) -> float:
    """P(chi-square with df degrees of freedom > x)."""
    half = torch.tensor([df / 2, max(x, 0.0) / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def bisect(rises: Any, low: float, high: float) -> float:
    """Where a falling ``rises(x) > 0`` turns false."""
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if rises(middle) else (low, middle)
    return high


def power(shift: float, df: int, alpha: float = ALPHA) -> float:
    """With which probability a test of level alpha finds noncentrality ``shift``: a Poisson mixture of central ones."""
    x = critical(df, alpha)
    j = torch.arange(int(shift / 2 + 12 * math.sqrt(shift / 2 + 1) + 20), dtype=torch.float64)
    weight = torch.exp(j * math.log(shift / 2) - shift / 2 - torch.lgamma(j + 1))
    return float((weight * torch.special.gammaincc(df / 2 + j, torch.full_like(j, x / 2))).sum())


@lru_cache(maxsize=64)
def critical(df: int, alpha: float = ALPHA) -> float:
    """The value that chi-square exceeds with probability alpha."""
    return bisect(lambda x: survival(x, df) > alpha, 0.0, 40.0 * df + 400.0)


@lru_cache(maxsize=64)
def detectable(n: int, df: int, alpha: float = ALPHA) -> float:
    """The least w that n draws find with probability POWER: w**2 = sum((q - p)**2 / p) over the bins, q the faulty
    probabilities, so that the noncentrality is n * w**2.  One bin's p times (1 + e) is w = e * sqrt(p * (1 - p)), to
    first order in e once the others give way."""
    return math.sqrt(bisect(lambda shift: power(shift, df, alpha) < POWER, 1e-3, 40.0 * df + 1000.0) / n)


def pooled(probs: Tensor, n: int) -> tuple[Tensor, int]:
    """(bin of each cell i64, number of bins): cells expected less than 5 times of n share bins that are."""
    expected = (probs * n).tolist()
    bins, last, mass = [0] * len(expected), 0, 0.0
    for cell in sorted(range(len(expected)), key=lambda c: expected[c]):
        if mass >= 5:
            last, mass = last + 1, 0.0
        bins[cell] = last
        mass += expected[cell]
    if mass < 5 and last:  # what is left over joins the bin before
        bins = [min(b, last - 1) for b in bins]
        last -= 1
    return torch.tensor(bins), last + 1


def check_draws(tokens: Tensor, probs: Tensor, what: str, alpha: float = ALPHA) -> None:
    """That tokens i64 [n] come with probabilities f64 [cells]: none of probability 0, none that stays away, and no
    chi-square beyond alpha.  ``what`` says in a failure what was drawn."""
    n, tokens = len(tokens), tokens.cpu()
    lost = int(((tokens < 0) | (tokens >= len(probs))).sum())
    assert not lost, f"{what}: {lost} of {n} tokens are outside 0 to {len(probs) - 1}, such as {tokens.min()}"
    count = torch.bincount(tokens, minlength=len(probs)).double()
    never = ((count > 0) & (probs == 0)).nonzero().flatten().tolist()
    if never:
        shown = {t: int(count[t]) for t in never[:6]}
        pytest.fail(f"{what}: drew tokens of probability 0: {shown} (token: times of {n})", pytrace=False)
    away = ((count == 0) & (probs * n >= MUST_COME)).nonzero().flatten().tolist()
    if away:
        shown = {t: round(float(probs[t]), 6) for t in away[:6]}
        pytest.fail(f"{what}: never drew {shown} (token: its probability) in {n} draws", pytrace=False)
    bins, k = pooled(probs, n)
    if k < 2:
        return
    got = torch.zeros(k, dtype=torch.float64).index_add_(0, bins, count)
    want = torch.zeros(k, dtype=torch.float64).index_add_(0, bins, probs * n)
    terms = (got - want) ** 2 / want
    p_value = survival(float(terms.sum()), k - 1)
    if p_value < alpha:
        worst = int(((count - probs * n) ** 2 / (probs * n).clamp_min(5)).argmax())
        pytest.fail(
            f"{what}: {n} draws have chi-square {float(terms.sum()):.1f} with {k - 1} degrees of freedom, p = "
            f"{p_value:.1g} < {alpha:g}; worst is token {worst}: drawn {int(count[worst])} times, want "
            f"{float(probs[worst]) * n:.1f}",
            pytrace=False,
        )
