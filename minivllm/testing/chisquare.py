"""The chi-square test of random draws, with its power: the smallest difference that a number of draws detects."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import pytest
import torch
from torch import Tensor

ALPHA = 1e-6  # probability that a correct sampler fails, over all random seeds
POWER = 0.999  # probability that a test finds a difference of the size that ``detectable`` returns
MUST_COME = 40  # an event with this expected number of draws is missing by chance with probability exp(-40)


def survival(x: float, df: float) -> float:
    """Return the probability that a chi-square variable with ``df`` degrees of freedom exceeds ``x``."""
    half = torch.tensor([df / 2, max(x, 0.0) / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def bisect(above: Callable[[float], bool], low: float, high: float) -> float:
    """Return the point between ``low`` and ``high`` at which ``above(x)`` changes from true to false."""
    for _ in range(100):
        middle = (low + high) / 2
        if above(middle):
            low = middle
        else:
            high = middle
    return high


def power(shift: float, df: int, alpha: float = ALPHA) -> float:
    """Return the probability that a chi-square test of level ``alpha`` detects the noncentrality ``shift``.

    The noncentral chi-square distribution is a Poisson mixture of central distributions.
    """
    x = critical(df, alpha)
    mean = shift / 2
    terms = int(mean + 12 * math.sqrt(mean + 1) + 20)
    j = torch.arange(terms, dtype=torch.float64)
    factorial = torch.lgamma(j + 1)
    log_weight = j * math.log(shift / 2) - shift / 2 - factorial
    halves = torch.full_like(j, x / 2)
    exceeds = torch.special.gammaincc(df / 2 + j, halves)
    return float((log_weight.exp() * exceeds).sum())


@lru_cache(maxsize=64)
def critical(df: int, alpha: float = ALPHA) -> float:
    """Return the value that a chi-square variable exceeds with probability ``alpha``."""
    return bisect(lambda x: survival(x, df) > alpha, 0.0, 40.0 * df + 400.0)


@lru_cache(maxsize=64)
def detectable(n: int, df: int, alpha: float = ALPHA) -> float:
    """Return the smallest effect size w that ``n`` draws detect with probability ``POWER``.

    With correct probabilities p and faulty probabilities q, w**2 = sum((q - p)**2 / p) over the bins, so the
    noncentrality is n * w**2.  If one bin has probability p * (1 + e) and the other bins make room for it, then
    w = e * sqrt(p * (1 - p)) to first order in e.
    """
    shift = bisect(lambda shift: power(shift, df, alpha) < POWER, 1e-3, 40.0 * df + 1000.0)
    return math.sqrt(shift / n)


def pooled(probs: Tensor, n: int) -> tuple[Tensor, int]:
    """Merge cells into bins in which at least 5 of ``n`` draws are expected.

    ``probs`` has the probability of each cell.  Return the bin of each cell (int64 [cells]) and the number of bins.
    """
    expected = (probs * n).tolist()
    bins = [0] * len(expected)
    last = 0
    mass = 0.0
    for cell in sorted(range(len(expected)), key=lambda c: expected[c]):
        if mass >= 5:
            last += 1
            mass = 0.0
        bins[cell] = last
        mass += expected[cell]
    if mass < 5 and last:  # the last bin is too small, so it is merged with the bin before it
        last -= 1
        bins = [min(b, last) for b in bins]
    return torch.tensor(bins), last + 1


def check_draws(tokens: Tensor, probs: Tensor, what: str, alpha: float = ALPHA) -> None:
    """Fail unless ``tokens`` (int64 [n]) look like draws from ``probs`` (float64 [cells]).

    A token of probability 0 must not occur.  A token that is expected ``MUST_COME`` times must occur.  The
    chi-square statistic must stay below its critical value of level ``alpha``.  ``what`` names the draws in messages.
    """
    n = len(tokens)
    tokens = tokens.cpu()
    outside = (tokens < 0) | (tokens >= len(probs))
    lost = int(outside.sum())
    assert not lost, f"{what}: {lost} of {n} tokens are outside 0 to {len(probs) - 1}, such as {tokens.min()}"
    count = torch.bincount(tokens, minlength=len(probs)).double()
    impossible = (count > 0) & (probs == 0)
    never = impossible.nonzero().flatten().tolist()
    if never:
        shown = {token: int(count[token]) for token in never[:6]}
        pytest.fail(f"{what}: drew tokens of probability 0: {shown} (token: times of {n})", pytrace=False)
    missing = (count == 0) & (probs * n >= MUST_COME)
    away = missing.nonzero().flatten().tolist()
    if away:
        shown = {}
        for token in away[:6]:
            shown[token] = round(float(probs[token]), 6)
        pytest.fail(f"{what}: never drew {shown} (token: its probability) in {n} draws", pytrace=False)
    _check_statistic(count, probs, n, what, alpha)


def _check_statistic(count: Tensor, probs: Tensor, n: int, what: str, alpha: float) -> None:
    """Fail if the counts of ``n`` draws (float64 [cells]) have a chi-square p value below ``alpha``."""
    bins, k = pooled(probs, n)
    if k < 2:
        return
    expected = probs * n
    observed = torch.zeros(k, dtype=torch.float64).index_add_(0, bins, count)
    wanted = torch.zeros(k, dtype=torch.float64).index_add_(0, bins, expected)
    statistic = float(((observed - wanted) ** 2 / wanted).sum())
    p_value = survival(statistic, k - 1)
    if p_value >= alpha:
        return
    errors = (count - expected) ** 2 / expected.clamp_min(5)
    worst = int(errors.argmax())
    pytest.fail(
        f"{what}: {n} draws have chi-square {statistic:.1f} with {k - 1} degrees of freedom, p = {p_value:.1g} < "
        f"{alpha:g}; worst is token {worst}: drawn {int(count[worst])} times, expected {float(expected[worst]):.1f}",
        pytrace=False,
    )
