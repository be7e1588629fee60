"""Intervals of means, and of improvements over the same items."""

from __future__ import annotations

import math
from statistics import NormalDist

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reflact.gate.intervals import improvement_interval, mean_interval, student_quantile, wilson_interval


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    [(0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (5, 10, 0.2366, 0.7634), (81, 263, 0.2553, 0.3662)],
)
def test_shares_have_wilsons_interval(successes: int, n: int, low: float, high: float) -> None:
    """Known values; 81 of 263 is the example of Newcombe (1998), table I."""
    assert wilson_interval(successes, n) == pytest.approx((low, high), abs=5e-5)


@given(st.integers(1, 400).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_intervals_hold_the_share_and_stay_within_bounds(counts: tuple[int, int]) -> None:
    """An interval lies in 0..1, contains the observed share, and mirrors that of the failures."""
    successes, n = counts
    low, high = wilson_interval(successes, n)
    assert 0 <= low <= successes / n <= high <= 1
    assert wilson_interval(n - successes, n) == pytest.approx((1 - high, 1 - low))


def test_fractional_scores_have_a_normal_interval() -> None:
    """Mean and standard error times 1.96, cut to 0..1; scores of 0 and 1 have Wilson's."""
    assert mean_interval([0.2, 0.4, 0.6]) == pytest.approx(
        (0.4 - 1.95996 * 0.2 / math.sqrt(3), 0.6263), abs=1e-4
    )
    assert mean_interval([0.0, 0.9]) == (0.0, 1.0)
    assert mean_interval([0.5]) == (0.0, 1.0)
    assert mean_interval([1.0, 0.0, 0.0]) == wilson_interval(1, 3)


@pytest.mark.parametrize(("successes", "n"), [(0, 0), (-1, 3), (4, 3)])
def test_impossible_counts_have_no_interval(successes: int, n: int) -> None:
    """There is no interval without trials, or with more successes than trials."""
    with pytest.raises(ValueError, match="no interval"):
        wilson_interval(successes, n)
    with pytest.raises(ValueError, match="no interval"):
        mean_interval([])


# ------------------------------------------------------------------------------------------- improvements


def test_matched_shares_have_agresti_and_mins_interval() -> None:
    """Half a pair is added to each of the four outcomes; worked by hand for 10 pairs, 4 won and 1 lost."""
    before = [0.0] * 4 + [1.0] + [1.0] * 3 + [0.0] * 2
    after = [1.0] * 4 + [0.0] + [1.0] * 3 + [0.0] * 2
    spread = 1.959964 * math.sqrt(6 - 9 / 12) / 12
    assert improvement_interval(before, after) == pytest.approx((0.3, 0.25 - spread, 0.25 + spread), abs=1e-6)


def test_fractional_differences_have_students_interval() -> None:
    """Mean and standard error times the quantile for 4 degrees of freedom."""
    mean, low, high = improvement_interval([0.1, 0.2, 0.3, 0.4, 0.5], [0.2, 0.2, 0.5, 0.4, 0.7])
    spread = 2.7764 * 0.1 / math.sqrt(5)
    assert (mean, low, high) == pytest.approx((0.1, 0.1 - spread, 0.1 + spread), abs=1e-6)


def test_one_item_says_little() -> None:
    """A single fractional difference excludes nothing; a single binary one has a wide interval."""
    assert improvement_interval([0.25], [0.5]) == (0.25, -1.0, 1.0)
    mean, low, high = improvement_interval([0.0], [1.0])
    assert (mean, high) == (1.0, 1.0)
    assert low < 0


@pytest.mark.parametrize(("before", "after"), [([], []), ([0.0], [1.0, 0.0])])
def test_improvements_need_the_same_items(before: list[float], after: list[float]) -> None:
    """Nothing is compared with nothing, or with something else."""
    with pytest.raises(ValueError, match="item by item"):
        improvement_interval(before, after)


pairs_of_scores = st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=30) | st.lists(
    st.tuples(st.sampled_from((0.0, 1.0)), st.sampled_from((0.0, 1.0))), min_size=1, max_size=60
)


@given(pairs_of_scores)
def test_improvements_lie_in_their_interval_and_mirror(pairs: list[tuple[float, float]]) -> None:
    """The interval lies in -1..1 and holds the mean; with the sides exchanged it is mirrored."""
    before, after = zip(*pairs, strict=True)
    mean, low, high = improvement_interval(before, after)
    assert -1 <= low <= mean + 1e-9
    assert mean - 1e-9 <= high <= 1
    assert improvement_interval(after, before) == pytest.approx((-mean, -high, -low), abs=1e-9)


@pytest.mark.parametrize(
    ("freedom", "quantile"), [(1, 12.706), (9, 2.262), (10, 2.228), (15, 2.131), (30, 2.042), (120, 1.980)]
)
def test_students_quantiles_are_the_tabulated_ones(freedom: int, quantile: float) -> None:
    """To three decimals, on both sides of the change from the table to the expansion."""
    assert student_quantile(freedom) == pytest.approx(quantile, abs=6e-4)


def test_students_quantile_falls_towards_the_normal_one() -> None:
    """Each further item narrows it, down to that of the normal distribution."""
    values = [student_quantile(freedom) for freedom in range(1, 400)]
    assert values == sorted(values, reverse=True)
    assert student_quantile(10**6) == pytest.approx(NormalDist().inv_cdf(0.975), abs=1e-5)
