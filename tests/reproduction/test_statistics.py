"""Our statistics against scipy's, and what they do at their edges."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from deeprnn.reproduction import statistics

stats = pytest.importorskip("scipy.stats")


def draws(count: int, centre: float, width: float, seed: int) -> list[float]:
    draw = random.Random(f"{count} {centre} {seed}")
    return [draw.gauss(centre, width) for _ in range(count)]


@pytest.mark.parametrize("count", [2, 3, 5, 10])
def test_paired_comparison_agrees_with_scipy(count: int):
    deep, shallow = draws(count, 0.0, 1.0, 1), draws(count, 0.6, 1.0, 2)
    ours, theirs = statistics.paired(deep, shallow), stats.ttest_rel(deep, shallow)
    interval = theirs.confidence_interval(0.95)
    assert ours.p == pytest.approx(theirs.pvalue, rel=1e-10)
    assert ours.interval is not None
    assert (ours.interval.low, ours.interval.high) == pytest.approx(tuple(interval), rel=1e-8)
    assert ours.pairs == ours.seeds == count


@pytest.mark.parametrize(("m", "n"), [(2, 2), (3, 5), (10, 10), (4, 12)])
def test_welch_comparison_agrees_with_scipy(m: int, n: int):
    deep, shallow = draws(m, 0.0, 1.0, 1), draws(n, 1.0, 3.0, 2)
    ours, theirs = statistics.welch(deep, shallow), stats.ttest_ind(deep, shallow, equal_var=False)
    interval = theirs.confidence_interval(0.95)
    assert ours.p == pytest.approx(theirs.pvalue, rel=1e-10)
    assert ours.interval is not None
    assert (ours.interval.low, ours.interval.high) == pytest.approx(tuple(interval), rel=1e-8)
    assert ours.pairs == m * n
    assert ours.better == sum(a < b for a, b in itertools.product(deep, shallow))


@pytest.mark.parametrize(
    ("freedom", "t", "shift"), [(2, -29.0, -20.0), (4, 0.5, 3.0), (18, -6.0, -4.0), (9, 0.0, 0.7)]
)
def test_noncentral_t_agrees_with_scipy(freedom: int, t: float, shift: float):
    assert statistics.noncentral_t(t, freedom, shift) == pytest.approx(
        stats.nct.cdf(t, freedom, shift), abs=1e-9
    )


def test_effect_size_and_its_interval_agree_with_the_noncentral_t():
    deep, shallow = draws(10, 0.0, 1.0, 3), draws(10, 0.9, 1.0, 4)
    found = statistics.welch(deep, shallow).effect
    assert found is not None
    pooled = math.sqrt((stats.tvar(deep) + stats.tvar(shallow)) / 2)
    few = math.gamma(9) / (3 * math.gamma(8.5))
    assert found.value == pytest.approx(few * (sum(deep) - sum(shallow)) / 10 / pooled, rel=1e-12)
    t = stats.ttest_ind(deep, shallow).statistic
    for bound, share in ((found.low, 0.975), (found.high, 0.025)):
        assert stats.nct.cdf(t, 18, bound / few / math.sqrt(0.2)) == pytest.approx(share, abs=1e-7)


def test_the_effect_sizes_interval_holds_zero_just_where_the_test_finds_nothing():
    for seed in range(12):
        found = statistics.paired(draws(5, 0.0, 1.0, seed), draws(5, 1.0, 1.0, seed + 50))
        assert found.effect is not None
        assert found.p is not None
        assert (found.effect.low < 0 < found.effect.high) == (found.p > 0.05)


def test_holm_is_the_step_down_of_its_definition():
    assert statistics.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert statistics.holm([0.9, 0.8]) == [1.0, 1.0], "never above one, never out of order"
    assert statistics.holm([0.02, None, 0.01]) == pytest.approx([0.02, None, 0.02]), (
        "what was not tested does not count"
    )
    assert statistics.holm([]) == []
    assert statistics.holm([None]) == [None]


def test_edges_of_few_and_equal_values():
    alone = statistics.paired([8.0], [8.4])
    assert (alone.p, alone.interval, alone.effect, alone.better) == (None, None, None, 1)
    equal = statistics.paired([8.0, 8.1], [8.4, 8.5])
    assert equal.p == pytest.approx(0.0, abs=1e-6)
    assert statistics.paired([1.0, 2.0], [1.0, 2.0]).p == 1.0
    assert statistics.welch([1.0, 1.0], [1.0, 1.0]).effect is None
    assert statistics.welch([1.0], [1.0, 2.0]).p is None
