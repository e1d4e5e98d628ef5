"""Mean, spread and the paired t-test, in plain arithmetic: the report needs no statistics package."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


def mean(values: Sequence[float]) -> float:
    """The arithmetic mean of at least one value."""
    return math.fsum(values) / len(values)


def deviation(values: Sequence[float]) -> float | None:
    """Sample standard deviation (n - 1), None for fewer than two values."""
    if len(values) < 2:
        return None
    centre = mean(values)
    return math.sqrt(math.fsum((v - centre) ** 2 for v in values) / (len(values) - 1))


@dataclass(frozen=True)
class Paired:
    """What paired differences (deep minus shallow, over shared seeds) say."""

    difference: float
    better: int
    """seeds at which the deep model is below the shallow one"""
    seeds: int
    p: float | None
    """two-sided paired t-test; None for fewer than two seeds"""


def paired(deep: Sequence[float], shallow: Sequence[float]) -> Paired:
    """Compare two models seed by seed; the sequences are in the same order of seeds."""
    gaps = [d - s for d, s in zip(deep, shallow, strict=True)]
    centre, spread = mean(gaps), deviation(gaps)
    p = None
    if spread is not None:
        p = t_test(centre, spread, len(gaps))
    return Paired(centre, sum(g < 0 for g in gaps), len(gaps), p)


def t_test(centre: float, spread: float, count: int) -> float:
    """Two-sided p of a mean with this sample deviation, against zero."""
    if spread == 0:
        return 1.0 if centre == 0 else 0.0
    t = centre / (spread / math.sqrt(count))
    freedom = count - 1
    return incomplete_beta(freedom / 2, 0.5, freedom / (freedom + t * t))


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
