"""The rule of the greater mean, coverage and the veto; intervals and the claim."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reflact.gate.greater_mean import (
    GateSettings,
    ScorePair,
    count_required,
    decide,
    has_disagreement,
)
from reflact.gate.intervals import (
    CLAIM_LEVEL,
    MIN_CLAIM_ITEMS,
    compute_chance,
    describe_claim,
    improvement_interval,
    mean_interval,
    student_quantile,
    wilson_interval,
    within_item_interval,
)
from reflact.types import Verdict

Sides = tuple[float | None, float | None]
WON, LOST, BOTH, NEITHER = (1.0, 0.0), (0.0, 1.0), (1.0, 1.0), (0.0, 0.0)


def trial(sides: Iterable[Sides | None]) -> list[ScorePair]:
    """Return one trial's pairs, whose scores are also what is solved; None leaves an item out."""
    return [
        ScorePair(item_id=f"item-{i:02}", candidate=both[0], current=both[1], is_lost=both == LOST)
        for i, both in enumerate(sides)
        if both is not None
    ]


def ruled(sides: Iterable[Sides], **changes: Any) -> Verdict:
    """Return the decision on one pass."""
    pairs = trial(sides)
    item_ids = tuple(each.item_id for each in pairs)
    return decide(GateSettings.model_validate({"item_ids": item_ids, **changes}), pairs)


@pytest.mark.parametrize(
    ("sides", "action"),
    [
        ([WON, BOTH], "accept"),
        ([WON, LOST], "reject"),
        ([BOTH, BOTH], "reject"),
        ([LOST, BOTH], "reject"),
        ([(0.1 + 0.2, 0.3)], "reject"),  # rounding is no improvement
        ([(None, 0.0)], "unmeasured"),
        ([LOST, BOTH, (None, 1.0)], "unmeasured"),
    ],
)
def test_a_greater_mean_is_accepted(sides: list[Sides], action: str) -> None:
    assert ruled(sides).action == action


def test_the_reason_names_the_means_of_what_is_measured_on_both_sides() -> None:
    assert ruled([WON, BOTH]).reason == "The candidate's 1 is above the current skill's 0.5, on 2 items."
    partly = ruled([LOST, BOTH, (None, None)], coverage=0.5)
    assert partly.reason == "The candidate's 0.5 is not above the current skill's 1, on 2 of 3 items."


def test_a_share_of_items_is_counted_in_whole_numbers() -> None:
    """A coverage in hundredths needs as many items as its decimal says, although floats are rounded."""
    for percent, total in itertools.product(range(1, 101), range(1, 201)):
        assert count_required(percent / 100, total) == -(-percent * total // 100), (percent, total)
    assert (count_required(0.0, 10), count_required(1e-05, 100_000), count_required(1 / 3, 9)) == (1, 1, 3)


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=12))
def test_no_candidate_and_its_parent_both_win(sides: list[tuple[float, float]]) -> None:
    there, back, same = (
        ruled(each).action for each in (sides, [(b, a) for a, b in sides], [(a, a) for a, _ in sides])
    )
    assert {there, back} != {"accept"}
    assert same == "reject"


@pytest.mark.parametrize(
    ("again", "is_noisy"), [(WON, False), ((None, 0.0), False), (BOTH, True), (NEITHER, True), (LOST, True)]
)
def test_one_side_of_one_repeat_is_enough_to_show_noise(again: Sides, is_noisy: bool) -> None:
    assert has_disagreement(trial([WON, WON]), trial([WON, again])) == is_noisy
    assert has_disagreement(trial([WON, WON]), trial([None, again])) == is_noisy


def test_below_coverage_nothing_is_decided() -> None:
    assert ruled([(None, None), *[WON] * 19], coverage=0.95).action == "accept"
    below = ruled([(None, None), (None, 0.0), *[WON] * 18], coverage=0.95)
    assert below.action == "unmeasured"
    assert below.reason.startswith(
        "Only 18 of 20 items are measured with the candidate and the current skill;"
    )


@pytest.mark.parametrize(
    ("sides", "candidate", "current", "action"),
    [
        ([*[(None, None)] * 15, *[WON] * 5], 15, 15, "accept"),  # both are refused: the others decide
        ([*[(None, None)] * 15, *[WON] * 5], 15, 14, "unmeasured"),  # one more is lost, and may come back
        ([*[(None, None)] * 15, *[WON] * 5], 13, 13, "unmeasured"),
        ([*[(None, 0.0)] * 2, *[WON] * 18], 2, 0, "reject"),  # with the candidate alone: no retry can mend it
        ([(None, 0.0), *[WON] * 19], 1, 0, "accept"),
        ([(None, 0.0)] * 20, 20, 0, "reject"),
        ([(None, None)] * 20, 20, 20, "unmeasured"),
        ([(0.0, None)] * 20, 0, 20, "unmeasured"),
    ],
)
def test_what_is_refused_for_ever_is_no_loss(
    sides: list[Sides], candidate: int, current: int, action: str
) -> None:
    """Items that no skill can be measured on do not count; a candidate that the endpoint refuses is rejected."""
    pairs = [
        each.model_copy(update={"candidate_refused": n < candidate, "current_refused": n < current})
        for n, each in enumerate(trial(sides))
    ]
    settings = GateSettings(item_ids=tuple(each.item_id for each in pairs), coverage=0.9)
    assert decide(settings, pairs).action == action


@pytest.mark.parametrize(("allowed", "action"), [(0, "reject"), (1, "accept"), (None, "accept")])
def test_lost_items_veto_an_acceptance(allowed: int | None, action: str) -> None:
    verdict = ruled([WON, WON, WON, LOST], no_regression=allowed)
    assert verdict.action == action
    assert ("`no_regression` allows 0" in verdict.reason) == (action == "reject")


# ---------- intervals


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    [(0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (5, 10, 0.2366, 0.7634), (81, 263, 0.2553, 0.3662)],
)
def test_shares_have_wilsons_interval(successes: int, n: int, low: float, high: float) -> None:
    """Known values; 81 of 263 is the example of Newcombe (1998), table I."""
    assert wilson_interval(successes, n) == pytest.approx((low, high), abs=5e-5)


@given(st.integers(1, 400).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_intervals_hold_the_share_and_stay_within_bounds(counts: tuple[int, int]) -> None:
    successes, n = counts
    low, high = wilson_interval(successes, n)
    assert 0 <= low <= successes / n <= high <= 1
    assert wilson_interval(n - successes, n) == pytest.approx((1 - high, 1 - low))


def test_fractional_scores_have_a_normal_interval() -> None:
    low = 0.4 - 1.95996 * 0.2 / math.sqrt(3)
    assert mean_interval([0.2, 0.4, 0.6]) == pytest.approx((low, 0.6263), abs=1e-4)
    assert mean_interval([0.0, 0.9]) == mean_interval([0.5]) == (0.0, 1.0)
    assert mean_interval([1.0, 0.0, 0.0]) == wilson_interval(1, 3)


def test_what_cannot_be_compared_has_no_interval() -> None:
    for successes, n in [(0, 0), (-1, 3), (4, 3)]:
        with pytest.raises(ValueError, match="no interval"):
            wilson_interval(successes, n)
    for before, after in [([], []), ([0.0], [1.0, 0.0])]:
        with pytest.raises(ValueError, match="item by item"):
            improvement_interval(before, after)


def test_matched_shares_have_agresti_and_mins_interval() -> None:
    """Half a pair is added to each of the four outcomes; worked by hand for 10 pairs, 4 won and 1 lost."""
    before = [0.0] * 4 + [1.0] + [1.0] * 3 + [0.0] * 2
    after = [1.0] * 4 + [0.0] + [1.0] * 3 + [0.0] * 2
    spread = 1.959964 * math.sqrt(6 - 9 / 12) / 12
    assert improvement_interval(before, after) == pytest.approx((0.3, 0.25 - spread, 0.25 + spread), abs=1e-6)


@pytest.mark.parametrize(("n", "is_shown"), [(2, False), (6, True)])
def test_equal_fractional_differences_are_counted(n: int, is_shown: bool) -> None:
    """A gain of the same fraction on each of two items shows nothing, although their differences do not vary."""
    mean, low, high = improvement_interval([0.1] * n, [0.4] * n)
    _, binary_low, _ = improvement_interval([0.0] * n, [1.0] * n)
    assert (mean, low) == (pytest.approx(0.3), pytest.approx(0.3 * binary_low))
    assert (low > 0) is is_shown
    assert high >= mean
    assert improvement_interval([0.5] * n, [0.5] * n) == (0.0, 0.0, 0.0)


def test_fractional_differences_have_students_interval() -> None:
    """Mean and standard error times the quantile for 4 degrees of freedom; one pair excludes nothing."""
    interval = improvement_interval([0.1, 0.2, 0.3, 0.4, 0.5], [0.2, 0.2, 0.5, 0.4, 0.7])
    spread = 2.7764 * 0.1 / math.sqrt(5)
    assert interval == pytest.approx((0.1, 0.1 - spread, 0.1 + spread), abs=1e-6)
    assert improvement_interval([0.25], [0.5]) == (0.25, -1.0, 1.0)
    quantiles = {1: 12.706, 9: 2.262, 10: 2.228, 15: 2.131, 30: 2.042, 120: 1.980}
    assert {n: student_quantile(n) for n in quantiles} == pytest.approx(quantiles, abs=6e-4)


@pytest.mark.parametrize(
    ("won", "lost", "chance"),
    [(4, 0, 1 / 16), (6, 0, 1 / 64), (7, 1, 9 / 256), (0, 0, 1.0), (2, 2, 11 / 16), (0, 3, 1.0)],
)
def test_the_chance_of_a_gain_is_that_of_the_exact_sign_test(won: int, lost: int, chance: float) -> None:
    """Items that do not differ count for nothing, also if all differences are the same fraction."""
    before, after = [0.0] * won + [1.0] * lost + [1.0, 0.0], [1.0] * won + [0.0] * lost + [1.0, 0.0]
    assert compute_chance(before, after) == pytest.approx(chance)
    assert compute_chance([x / 3 for x in before], [x / 3 for x in after]) == pytest.approx(chance)


def test_the_chance_of_other_gains_is_no_smaller_than_that_of_all_signs() -> None:
    """Two items cannot confirm a gain, however alike their gains are; a thousand can."""
    assert compute_chance([0.5, 0.5], [0.6, 0.61]) == 0.25
    assert compute_chance([0.5] * 1000 + [0.0], [0.6] * 1000 + [0.2]) < 1e-300
    even = compute_chance([0.0] * 5000 + [1.0] * 5000, [1.0] * 5000 + [0.0] * 5000)
    assert even == pytest.approx(0.504, abs=1e-3)


def test_the_fewest_items_of_a_claim() -> None:
    """On one item less, no gain has so small a chance."""
    chances = {n: compute_chance([0.0] * n, [1.0] * n) for n in (MIN_CLAIM_ITEMS - 1, MIN_CLAIM_ITEMS)}
    assert [chance <= CLAIM_LEVEL for chance in chances.values()] == [False, True]
    assert "too small to confirm any gain" in describe_claim(MIN_CLAIM_ITEMS - 1)
    gains = [re.findall(r"about (\d+) points", describe_claim(n)) for n in (MIN_CLAIM_ITEMS, 10, 20, 280)]
    assert gains == [["97"], ["68"], ["37"], ["9"]]


scores = st.floats(0, 1) | st.sampled_from((0.0, 1.0))


@given(
    st.lists(st.tuples(scores, scores), min_size=1, max_size=30)
    | st.lists(st.tuples(*[st.sampled_from((0.0, 1.0))] * 2), min_size=1, max_size=60)
)
def test_improvements_lie_in_their_interval_and_mirror(pairs: list[tuple[float, float]]) -> None:
    before, after = zip(*pairs, strict=True)
    mean, low, high = improvement_interval(before, after)
    assert -1 <= low <= mean + 1e-9
    assert mean - 1e-9 <= high <= 1
    assert improvement_interval(after, before) == pytest.approx((-mean, -high, -low), abs=1e-9)


def test_the_interval_within_items_ignores_the_items_differences() -> None:
    """Items that always win or always lose have no variance; two coins have that of their means."""
    assert within_item_interval([[0, 0], [1, 1]], [[1, 1], [1, 1]]) == (0.5, 0.5, 0.5)
    coins = within_item_interval([[0, 0]], [[0, 1]])
    assert coins == (0.5, pytest.approx(0.5 - 1.96 * 0.5, abs=1e-3), 1.0)
