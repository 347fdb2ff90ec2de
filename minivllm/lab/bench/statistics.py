"""Percentiles, confidence intervals and paired tests, for few and noisy values.

The interval of a mean is Student's; that of paired runs is Student's over logarithms of ratios, because speeds of one
machine differ by factors.  Several tests of one table are corrected by Holm's procedure (Scandinavian Journal of
Statistics 6, 1979, p. 65), so that the chance that any sentence "a difference" is wrong stays below ``ALPHA``.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

ALPHA = 0.05
NAN = float("nan")
ROUNDING = 1e-12  # a spread below it is that of the arithmetic
NEAR = 1.1  # a factor: an interval within it around 1 shows that there is no large difference
DIFFERENT, UNDECIDED, MANY = "a difference", "these runs do not decide", ", with so many tests"


def percentile(values: Sequence[float], q: float) -> float:
    """The ``q``-th percentile (0 to 100) with linear interpolation, as ``numpy.percentile``; NaN of nothing."""
    if not values:
        return NAN
    ordered = sorted(values)
    at = q / 100 * (len(ordered) - 1)
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def _beta_fraction(a: float, b: float, x: float) -> float:
    """The continued fraction of the incomplete beta function (Lentz; DLMF 8.17.22)."""
    tiny = 1e-300
    c, d = 1.0, 1 / (1 - (a + b) * x / (a + 1) or tiny)
    total = d
    for m in range(1, 400):
        for top in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1 / (1 + top * d or tiny)
            c = 1 + top / c or tiny
            total *= c * d
        if abs(c * d - 1) < 1e-13:
            break
    return total


def _beta(a: float, b: float, x: float) -> float:
    """The regularized incomplete beta function I_x(a, b)."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x))
    if x < (a + 1) / (a + b + 2):
        return front * _beta_fraction(a, b, x) / a
    return 1 - front * _beta_fraction(b, a, 1 - x) / b


def student_p(t: float, df: int) -> float:
    """The chance of a value at least as far from 0 as ``t``, on both sides, under Student's distribution."""
    return _beta(df / 2, 0.5, df / (df + t * t)) if math.isfinite(t) else 0.0


@functools.cache
def student_quantile(df: int, alpha: float = ALPHA) -> float:
    """The t that is exceeded, on both sides together, with chance ``alpha``."""
    low, high = 0.0, 1e6
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if student_p(middle, df) > alpha else (low, middle)
    return high


def interval(values: Sequence[float], alpha: float = ALPHA) -> tuple[float, float] | None:
    """Where the mean lies with confidence 1 - ``alpha``; None of fewer than two values."""
    if len(values) < 2:
        return None
    half = student_quantile(len(values) - 1, alpha) * statistics.stdev(values) / math.sqrt(len(values))
    return statistics.fmean(values) - half, statistics.fmean(values) + half


@dataclass(frozen=True)
class Paired:
    """b over a, from runs in pairs.  ``low`` to ``high``: where the ratio lies with confidence 95 %, NaN of one pair;
    ``p``: the chance of a ratio as far from 1 if there were no difference, NaN of one pair and of pairs without any
    spread, of which Student's test says nothing."""

    ratio: float
    low: float
    high: float
    p: float
    pairs: int

    def sentence(self, p: float | None = None) -> str:
        """Return the verdict by ``p`` (default the pair's own; a table passes the value of Holm's correction)."""
        p = self.p if p is None else p
        if math.isnan(self.ratio):
            return "not measured"
        if math.isnan(p) and self.pairs > 1:
            return (
                "the same in every run" if self.ratio == 1 else "the same ratio in every run: no test without a spread"
            )
        if math.isnan(p):
            return "one pair: no test"
        if p < ALPHA:
            return DIFFERENT
        near = self.low >= 1 / NEAR and self.high <= NEAR
        return ("no difference shown" if near else UNDECIDED) + (MANY if self.p < ALPHA else "")


@dataclass(frozen=True)
class Shift:
    """b minus a, from values in pairs.  ``low`` to ``high``: where the mean difference lies with confidence 95 %; ``p``
    as that of ``Paired``."""

    difference: float
    low: float
    high: float
    p: float
    pairs: int

    def sentence(self, p: float | None = None) -> str:
        """Return the verdict, as ``Paired.sentence``."""
        p = self.p if p is None else p
        if math.isnan(self.difference):
            return "not measured"
        if math.isnan(p):
            same = "the same in every pair" if self.difference == 0 else "the same difference in every pair: no test"
            return same if self.pairs > 1 else "one pair: no test"
        return DIFFERENT if p < ALPHA else "no difference shown" + (MANY if self.p < ALPHA else "")


def shifted(a: Sequence[float], b: Sequence[float]) -> Shift:
    """Return the mean of ``b - a`` with its interval.  ValueError if the lengths differ."""
    if len(a) != len(b):
        raise ValueError(f"{len(a)} values and {len(b)}: want pairs")
    gaps = [y - x for x, y in zip(a, b, strict=True)]
    if not gaps:
        return Shift(NAN, NAN, NAN, NAN, 0)
    mean, found = statistics.fmean(gaps), interval(gaps)
    if found is None:
        return Shift(mean, NAN, NAN, NAN, 1)
    error = statistics.stdev(gaps) / math.sqrt(len(gaps))
    if error <= ROUNDING * max(1.0, abs(mean)):
        return Shift(mean, mean, mean, NAN, len(gaps))
    return Shift(mean, *found, student_p(mean / error, len(gaps) - 1), len(gaps))


def paired(a: Sequence[float], b: Sequence[float]) -> Paired:
    """Compare runs that share their seeds, pair by pair.  Values are positive (ValueError of unequal lengths); pairs
    with a zero or a NaN are compared by difference where all of them are the same, else left out."""
    if len(a) != len(b):
        raise ValueError(f"{len(a)} values and {len(b)}: want pairs")
    if a and list(a) == list(b):
        return Paired(1.0, 1.0, 1.0, NAN, len(a))
    logs = [math.log(y / x) for x, y in zip(a, b, strict=True) if 0 < x < math.inf and 0 < y < math.inf]
    if not logs:
        return Paired(NAN, NAN, NAN, NAN, 0)
    mean = statistics.fmean(logs)
    found = interval(logs)
    if found is None:
        return Paired(math.exp(mean), NAN, NAN, NAN, 1)
    error = statistics.stdev(logs) / math.sqrt(len(logs))
    if error <= ROUNDING * max(1.0, abs(mean)):
        return Paired(math.exp(mean), math.exp(mean), math.exp(mean), NAN, len(logs))
    t = mean / error
    return Paired(math.exp(mean), math.exp(found[0]), math.exp(found[1]), student_p(t, len(logs) - 1), len(logs))


def holm(ps: Sequence[float]) -> list[float]:
    """The p-values of several tests, corrected for their number; NaN (no test) stays and does not count."""
    order = sorted((p, i) for i, p in enumerate(ps) if not math.isnan(p))
    out, worst = list(ps), 0.0
    for rank, (p, i) in enumerate(order):
        worst = max(worst, min(1.0, p * (len(order) - rank)))
        out[i] = worst
    return out
