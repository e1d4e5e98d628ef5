"""Spread, tests, Holm's correction and effect sizes, in plain arithmetic: the report needs no statistics package.

    tests = [paired(deep, shallow) for deep, shallow in rows]     # seed by seed
    tests = [welch(deep, shallow) for deep, shallow in rows]      # seeds that have nothing in common
    corrected = holm([test.p for test in tests])                  # over all that are asked at once

Differences are deep minus shallow throughout, so that below zero is better. Everything here is compared with scipy in
tests/reproduction/test_statistics.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95
"""of every interval"""


def mean(values: Sequence[float]) -> float:
    """The arithmetic mean of at least one value."""
    return math.fsum(values) / len(values)


def deviation(values: Sequence[float]) -> float | None:
    """Sample standard deviation (n - 1), None for fewer than two values."""
    if len(values) < 2:
        return None
    centre = mean(values)
    return math.sqrt(math.fsum((v - centre) ** 2 for v in values) / (len(values) - 1))


def plus_minus(values: Sequence[float], places: int) -> str:
    """Mean ± deviation with so many decimals; a dash for nothing."""
    if not values:
        return "—"
    spread = deviation(values)
    return f"{mean(values):.{places}f}" + ("" if spread is None else f" ± {spread:.{places}f}")


@dataclass(frozen=True)
class Interval:
    """A value with the bounds of its confidence interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Comparison:
    """What the seeds of two models say about their difference (deep minus shallow)."""

    difference: float
    better: int
    """pairs at which the deep model is below the shallow one: of equal seeds, or of all seeds with all others"""
    pairs: int
    seeds: int
    """of the deep model"""
    p: float | None = None
    """two-sided; None for fewer than two seeds"""
    interval: Interval | None = None
    """the difference and its confidence interval"""
    effect: Interval | None = None
    """Hedges' g: the difference in standard deviations, corrected for few seeds; None without spread"""


def paired(deep: Sequence[float], shallow: Sequence[float]) -> Comparison:
    """Compare two models seed by seed (paired t-test); the sequences are in the same order of seeds."""
    gaps = [d - s for d, s in zip(deep, shallow, strict=True)]
    count, centre, spread = len(gaps), mean(gaps), deviation(gaps)
    better = sum(g < 0 for g in gaps)
    if spread is None:
        return Comparison(centre, better, count, count)
    error = spread / math.sqrt(count)
    effect = _hedges(centre, spread, 1 / count, count - 1)
    return Comparison(
        centre,
        better,
        count,
        count,
        t_test(centre, error, count - 1),
        _around(centre, error, count - 1),
        effect,
    )


def welch(deep: Sequence[float], shallow: Sequence[float]) -> Comparison:
    """Compare two models whose runs are not paired, each with a variance of its own (Welch's t-test)."""
    gap, m, n = mean(deep) - mean(shallow), len(deep), len(shallow)
    better = sum(d < s for d in deep for s in shallow)
    a, b = deviation(deep), deviation(shallow)
    if a is None or b is None:
        return Comparison(gap, better, m * n, m)
    parts = (a * a / m, b * b / n)
    error = math.sqrt(sum(parts))
    scale = parts[0] ** 2 / (m - 1) + parts[1] ** 2 / (n - 1)
    freedom = sum(parts) ** 2 / scale if scale else float(m + n - 2)
    pooled = math.sqrt(((m - 1) * a * a + (n - 1) * b * b) / (m + n - 2))
    effect = _hedges(gap, pooled, 1 / m + 1 / n, m + n - 2)
    return Comparison(
        gap, better, m * n, m, t_test(gap, error, freedom), _around(gap, error, freedom), effect
    )


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Each p corrected for all that are asked at once (Holm 1979); None, where nothing was tested, stays."""
    tested = sorted((p, place) for place, p in enumerate(p_values) if p is not None)
    out: list[float | None] = [None] * len(p_values)
    largest = 0.0
    for rank, (p, place) in enumerate(tested):
        largest = max(largest, min(1.0, (len(tested) - rank) * p))
        out[place] = largest
    return out


# ---- Student's t


def t_test(centre: float, error: float, freedom: float) -> float:
    """Two-sided p of a mean with this standard error, against zero."""
    if error == 0:
        return 1.0 if centre == 0 else 0.0
    t = centre / error
    return incomplete_beta(freedom / 2, 0.5, freedom / (freedom + t * t))


def t_quantile(freedom: float) -> float:
    """How many standard errors a confidence interval reaches to either side."""
    return _solve(lambda t: 1 - t_test(t, 1.0, freedom) - CONFIDENCE, 0.0, 1.0)


def _around(centre: float, error: float, freedom: float) -> Interval:
    reach = error * t_quantile(freedom)
    return Interval(centre, centre - reach, centre + reach)


def _solve(rising: Callable[[float], float], low: float, high: float) -> float:
    """Where a rising function crosses zero; the bounds are first moved apart until they hold that place."""
    while rising(high) < 0:
        low, high = high, high + 2 * (high - low)
    while rising(low) > 0:
        low, high = low - 2 * (high - low), low
    while high - low > 1e-12 * max(1.0, abs(low), abs(high)):
        middle = (low + high) / 2
        low, high = (low, middle) if rising(middle) > 0 else (middle, high)
    return (low + high) / 2


def incomplete_beta(a: float, b: float, x: float) -> float:
    """The regularised incomplete beta function I_x(a, b), by its continued fraction (Lentz)."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):  # the fraction converges fast on the other side only
        return 1 - incomplete_beta(b, a, 1 - x)
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    tiny = 1e-300
    c, d = 1.0, 1 / _away(1 - (a + b) * x / (a + 1), tiny)
    total = d
    for m in range(1, 300):
        for factor in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1 / _away(1 + factor * d, tiny)
            c = _away(1 + factor / c, tiny)
            total *= c * d
        if abs(c * d - 1) < 1e-14:
            break
    return math.exp(log_front) * total / a


def _away(value: float, tiny: float) -> float:
    return value if abs(value) > tiny else tiny


# ---- effect sizes


def _hedges(gap: float, spread: float, weight: float, freedom: int) -> Interval | None:
    """Hedges' g with its exact interval: the shifts of the noncentral t that leave gap / (spread √weight) in a tail."""
    if spread == 0 or freedom < 2:
        return None
    root = math.sqrt(weight)
    t, tail = gap / spread / root, (1 - CONFIDENCE) / 2
    low = _solve(lambda shift: 1 - tail - noncentral_t(t, freedom, shift), t - 1, t + 1)
    high = _solve(lambda shift: tail - noncentral_t(t, freedom, shift), t - 1, t + 1)
    half = freedom / 2
    few = math.exp(math.lgamma(half) - math.lgamma(half - 0.5)) / math.sqrt(half)  # d is too large by 1 / few
    return Interval(few * gap / spread, few * root * low, few * root * high)


def noncentral_t(t: float, freedom: float, shift: float) -> float:
    """P(T <= t) of (Z + shift) / s, with Z normal and s² a χ² over its degrees of freedom.

    The integral over log s of Φ(t s - shift) times the density of s: smooth, and falling fast at both ends, so that
    equal steps converge faster than any power of their length.
    """
    low, high = -36 / freedom, math.log(1 + math.sqrt(80 / freedom))
    steps = min(40_000, 200 + math.ceil((high - low) * (20 + 4 * abs(t) + 4 * math.sqrt(freedom))))
    width = (high - low) / steps
    front = math.log(2 * width) + freedom / 2 * math.log(freedom / 2) - math.lgamma(freedom / 2)
    total = 0.0
    for i in range(steps + 1):
        log_s = low + i * width
        s = math.exp(log_s)
        below = 0.5 * math.erfc((shift - t * s) / math.sqrt(2))
        total += below * math.exp(front + freedom * (log_s - s * s / 2))
    return total
