"""Percentiles, confidence intervals and paired tests, for few and noisy values.

The interval of a mean is Student's.  The interval of a ratio of paired runs is Student's for the logarithms of ratios,
since speeds of a machine differ by factors.  The p-values of a table are corrected by Holm's procedure (Scandinavian
Journal of Statistics 6, 1979, p. 65).  The probability that any verdict "a difference" is wrong then stays below
``ALPHA``.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

ALPHA = 0.05
NAN = float("nan")
ROUNDING = 1e-12  # a smaller spread is a rounding error
NEAR = 1.1  # an interval between 1 / NEAR and NEAR shows that there is no large difference
DIFFERENT, UNDECIDED, MANY = "a difference", "these runs do not decide", ", with so many tests"


def percentile(values: Sequence[float], q: float) -> float:
    """Return the ``q``-th percentile (0 to 100) with linear interpolation, as numpy does; NaN without values."""
    if not values:
        return NAN
    ordered = sorted(values)
    place = q / 100 * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def _beta_fraction(a: float, b: float, x: float) -> float:
    """Return the continued fraction of the incomplete beta function (Lentz's method; DLMF 8.17.22)."""
    tiny = 1e-300
    c = 1.0
    d = 1 / (1 - (a + b) * x / (a + 1) or tiny)
    total = d
    for m in range(1, 400):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for top in (even, odd):
            d = 1 / (1 + top * d or tiny)
            c = 1 + top / c or tiny
            total *= c * d
        if abs(c * d - 1) < 1e-13:
            break
    return total


def _beta(a: float, b: float, x: float) -> float:
    """Return the regularized incomplete beta function I_x(a, b)."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    log_beta_inverse = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    front = math.exp(log_beta_inverse + a * math.log(x) + b * math.log1p(-x))
    if x < (a + 1) / (a + b + 2):
        return front * _beta_fraction(a, b, x) / a
    return 1 - front * _beta_fraction(b, a, 1 - x) / b


def student_p(t: float, df: int) -> float:
    """Return the two-sided p-value of ``t`` under Student's distribution with ``df`` degrees of freedom."""
    return _beta(df / 2, 0.5, df / (df + t * t)) if math.isfinite(t) else 0.0


@functools.cache
def student_quantile(df: int, alpha: float = ALPHA) -> float:
    """Return the t whose two-sided p-value is ``alpha``."""
    low = 0.0
    high = 1e6
    for _ in range(100):
        middle = (low + high) / 2
        if student_p(middle, df) > alpha:
            low = middle
        else:
            high = middle
    return high


def interval(values: Sequence[float], alpha: float = ALPHA) -> tuple[float, float] | None:
    """Return the confidence interval of the mean, for confidence 1 - ``alpha``; None for fewer than two values."""
    if len(values) < 2:
        return None
    n = len(values)
    half = student_quantile(n - 1, alpha) * statistics.stdev(values) / math.sqrt(n)
    mean = statistics.fmean(values)
    return mean - half, mean + half


@dataclass(frozen=True)
class Paired:
    """The ratio b / a of paired runs.

    ``low`` and ``high`` are its 95 % confidence interval, NaN for a single pair.  ``p`` is the p-value of no
    difference.  It is NaN for a single pair, and for pairs without any spread, to which Student's test does not apply.
    """

    ratio: float
    low: float
    high: float
    p: float
    pairs: int

    def sentence(self, p: float | None = None) -> str:
        """Return the verdict for a p-value; None means ``self.p``, a table passes the value of Holm's correction."""
        p = self.p if p is None else p
        if math.isnan(self.ratio):
            return "not measured"
        if math.isnan(p):
            if self.pairs <= 1:
                return "one pair: no test"
            return (
                "the same in every run" if self.ratio == 1 else "the same ratio in every run: no test without a spread"
            )
        if p < ALPHA:
            return DIFFERENT
        near = self.low >= 1 / NEAR and self.high <= NEAR
        verdict = "no difference shown" if near else UNDECIDED
        return verdict + MANY if self.p < ALPHA else verdict


@dataclass(frozen=True)
class Shift:
    """The mean difference b - a of paired values; the other fields are as in ``Paired``."""

    difference: float
    low: float
    high: float
    p: float
    pairs: int

    def sentence(self, p: float | None = None) -> str:
        """Return the verdict for a p-value, as ``Paired.sentence`` does."""
        p = self.p if p is None else p
        if math.isnan(self.difference):
            return "not measured"
        if math.isnan(p):
            if self.pairs <= 1:
                return "one pair: no test"
            return "the same in every pair" if self.difference == 0 else "the same difference in every pair: no test"
        if p < ALPHA:
            return DIFFERENT
        return "no difference shown" + (MANY if self.p < ALPHA else "")


def shifted(a: Sequence[float], b: Sequence[float]) -> Shift:
    """Return the mean of ``b - a`` with its interval.  Raise ValueError if the lengths differ."""
    if len(a) != len(b):
        raise ValueError(f"{len(a)} values and {len(b)}: expected pairs")
    return _shift_of([y - x for x, y in zip(a, b, strict=True)])


def _shift_of(differences: Sequence[float]) -> Shift:
    """Return the mean of some differences with its interval and p-value."""
    n = len(differences)
    if not n:
        return Shift(NAN, NAN, NAN, NAN, 0)
    mean = statistics.fmean(differences)
    bounds = interval(differences)
    if bounds is None:
        return Shift(mean, NAN, NAN, NAN, 1)
    error = statistics.stdev(differences) / math.sqrt(n)
    if error <= ROUNDING * max(1.0, abs(mean)):
        return Shift(mean, mean, mean, NAN, n)
    return Shift(mean, *bounds, student_p(mean / error, n - 1), n)


def paired(a: Sequence[float], b: Sequence[float]) -> Paired:
    """Return the ratio ``b / a`` of runs that share their seeds, with its interval.

    Pairs in which a value is not positive and finite are left out, unless all pairs are equal: the ratio is then 1.
    Raise ValueError if the lengths differ.
    """
    if len(a) != len(b):
        raise ValueError(f"{len(a)} values and {len(b)}: expected pairs")
    if a and list(a) == list(b):
        return Paired(1.0, 1.0, 1.0, NAN, len(a))
    ratios = []
    for x, y in zip(a, b, strict=True):
        if 0 < x < math.inf and 0 < y < math.inf:
            ratios.append(math.log(y / x))
    logs = _shift_of(ratios)
    return Paired(math.exp(logs.difference), math.exp(logs.low), math.exp(logs.high), logs.p, logs.pairs)


def holm(ps: Sequence[float]) -> list[float]:
    """Return the p-values of several tests, corrected for their number; NaN (no test) stays and does not count."""
    order = sorted((p, i) for i, p in enumerate(ps) if not math.isnan(p))
    corrected = list(ps)
    largest = 0.0
    for rank, (p, i) in enumerate(order):
        largest = max(largest, min(1.0, p * (len(order) - rank)))
        corrected[i] = largest
    return corrected
