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
    MAX_REPEATED_ITEMS,
    GateSettings,
    Ruling,
    ScorePair,
    choose_repeats,
    count_required,
    decide,
    find_lost_items,
    find_unconfirmed,
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
)

Sides = tuple[float | None, float | None]
WON, LOST, BOTH, NEITHER = (1.0, 0.0), (0.0, 1.0), (1.0, 1.0), (0.0, 0.0)


def pair(item_id: str, sides: Sides) -> ScorePair:
    """Return a pair whose scores are also what is solved."""
    candidate, current = sides
    return ScorePair(
        item_id=item_id,
        candidate=candidate,
        current=current,
        candidate_solved=None if candidate is None else candidate > 0,
        current_solved=None if current is None else current > 0,
    )


def trial(sides: Iterable[Sides | None]) -> list[ScorePair]:
    """Return one trial's pairs; None leaves an item out."""
    return [pair(f"item-{i:02}", both) for i, both in enumerate(sides) if both is not None]


def ruled(sides: Iterable[Sides], **changes: Any) -> Ruling:
    """Return the decision on one pass."""
    pairs = trial(sides)
    item_ids = tuple(each.item_id for each in pairs)
    return decide(GateSettings.model_validate({"item_ids": item_ids, **changes}), pairs)


# --------------------------------------------------------------------------------------------- one pass


@pytest.mark.parametrize(
    ("sides", "action"),
    [([WON, BOTH], "accept"), ([WON, LOST], "reject"), ([BOTH, BOTH], "reject"), ([LOST, BOTH], "reject")],
)
def test_a_greater_mean_is_accepted(sides: list[Sides], action: str) -> None:
    """One pass decides, and a tie is a rejection."""
    assert ruled(sides).action == action


def test_the_reason_names_both_means() -> None:
    """They are those of the pairs that are measured on both sides."""
    assert ruled([WON, BOTH]).reason == "The candidate's 1 is above the current skill's 0.5, on 2 items."
    partly = ruled([LOST, BOTH, (None, 1.0)], coverage=0.5)
    assert partly.action == "unmeasured"
    partly = ruled([LOST, BOTH, (None, None)], coverage=0.5)
    assert partly.reason == "The candidate's 0.5 is not above the current skill's 1, on 2 of 3 items."


def test_a_share_of_items_is_counted_in_whole_numbers() -> None:
    """A coverage in hundredths needs as many items as its decimal says, at least one, although floats are rounded."""
    for percent, total in itertools.product(range(1, 101), range(1, 201)):
        assert count_required(percent / 100, total) == -(-percent * total // 100), (percent, total)
    assert (count_required(0.0, 10), count_required(1e-05, 100_000), count_required(1 / 3, 9)) == (1, 1, 3)


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=12))
def test_no_candidate_and_its_parent_both_win(sides: list[tuple[float, float]]) -> None:
    """With the sides exchanged at most one is accepted, and an equal one never is."""
    there, back, same = (
        ruled(each).action for each in (sides, [(b, a) for a, b in sides], [(a, a) for a, _ in sides])
    )
    assert {there, back} != {"accept"}
    assert same == "reject"


def test_rounding_is_no_improvement() -> None:
    """Scores that differ in the last binary digit are equal."""
    assert ruled([(0.1 + 0.2, 0.3)]).action == "reject"


# ----------------------------------------------------------------------------------------------- repeats


def test_the_first_items_that_differ_are_repeated() -> None:
    """Items that do not differ or are not measured say nothing about noise; six that do are enough."""
    few = trial([WON, LOST, BOTH, (None, 0.0), WON, NEITHER])
    assert choose_repeats(few) == ("item-00", "item-01", "item-04")
    many = trial([BOTH, *[WON] * 9])
    assert choose_repeats(many) == tuple(f"item-{n:02}" for n in range(1, 1 + MAX_REPEATED_ITEMS))


@pytest.mark.parametrize(
    ("again", "is_noisy"), [(WON, False), ((None, 0.0), False), (BOTH, True), (NEITHER, True), (LOST, True)]
)
def test_one_side_of_one_repeat_is_enough_to_show_noise(again: Sides, is_noisy: bool) -> None:
    """A repeat of either side that disagrees is seen; one that could not be measured does not disagree."""
    assert has_disagreement(trial([WON, WON]), trial([WON, again])) == is_noisy
    assert has_disagreement(trial([WON, WON]), trial([None, again])) == is_noisy


def test_repeats_that_are_unmeasured_count_only_against_the_candidate() -> None:
    """What could not be repeated proves nothing; what is proven without it is accepted."""
    repeats = trial([WON, (None, 0.0), LOST, None])
    found = find_unconfirmed(trial([WON, WON, LOST, BOTH]), repeats)
    assert found is not None
    assert found.action == "unmeasured"
    assert found.reason == "Of 3 items that were repeated, 1 could not be measured again."
    assert find_unconfirmed(trial([WON, WON, WON, LOST]), trial([WON, (None, 0.0), WON, LOST])) is None


# ----------------------------------------------------------------------------------------------- coverage


def test_below_coverage_nothing_is_decided() -> None:
    """Nineteen pairs of twenty are enough for a coverage of 0.95, eighteen are not."""
    assert ruled([(None, None), *[WON] * 19], coverage=0.95).action == "accept"
    found = ruled([(None, None), (None, None), *[WON] * 18], coverage=0.95)
    assert found.action == "unmeasured"
    assert found.reason == (
        "Only 18 of 20 comparisons are measured with both skills: 2 rollouts of the candidate and 2 of the current "
        "skill are missing. The gate needs a share of 0.95, and the skills' shares at most 5 points apart."
    )


def test_nothing_measured_has_no_score() -> None:
    """Absence is None, never a zero."""
    assert ruled([(None, 0.0)], coverage=0.01).action == "unmeasured"


def test_sides_that_fail_unequally_are_not_compared() -> None:
    """One side unmeasured 5 points more often than the other is as far as it may go."""
    at_most = [(None, 0.0), *[WON] * 19]
    beyond = [(None, 0.0), (None, 0.0), *[WON] * 18]
    alike = [(None, 0.0), (0.0, None), *[WON] * 18]
    actions = [ruled(each, coverage=0.5).action for each in (at_most, beyond, alike)]
    assert actions == ["accept", "unmeasured", "accept"]


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


# ------------------------------------------------------------------------------------------ no regression


@pytest.mark.parametrize(("allowed", "action"), [(0, "reject"), (1, "accept"), (None, "accept")])
def test_lost_items_veto_an_acceptance(allowed: int | None, action: str) -> None:
    """Three items won and one lost: accepted by the mean, vetoed if none may be lost."""
    found = ruled([WON, WON, WON, LOST], no_regression=allowed)
    assert found.action == action
    vetoed = "The candidate fails 1 item that was solved before; `no_regression` allows 0."
    assert (found.reason == vetoed) == (action == "reject")


def test_an_unmeasured_item_is_not_lost() -> None:
    """Nor is one whose current side alone was measured."""
    assert ruled([WON, WON, (None, None), WON], coverage=0.5, no_regression=0).action == "accept"
    assert ruled([(None, 1.0), *[WON] * 19], coverage=0.5, no_regression=0).action == "accept"
    assert find_lost_items(trial([LOST, (None, 1.0), BOTH, (0.0, None)])) == ("item-00",)


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


@pytest.mark.parametrize(
    ("won", "lost", "chance"),
    [
        (4, 0, 1 / 16),
        (6, 0, 1 / 64),
        (7, 1, 9 / 256),
        (8, 1, 10 / 512),
        (0, 0, 1.0),
        (2, 2, 11 / 16),
        (0, 3, 1.0),
    ],
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
    assert compute_chance([0.0] * 5000 + [1.0] * 5000, [1.0] * 5000 + [0.0] * 5000) == pytest.approx(
        0.504, abs=1e-3
    )


def test_the_fewest_items_of_a_claim() -> None:
    """On one item less, no gain has so small a chance."""
    chances = {n: compute_chance([0.0] * n, [1.0] * n) for n in (MIN_CLAIM_ITEMS - 1, MIN_CLAIM_ITEMS)}
    assert [chance <= CLAIM_LEVEL for chance in chances.values()] == [False, True]
    assert "too small to confirm any gain" in describe_claim(MIN_CLAIM_ITEMS - 1)
    gains = [re.findall(r"about (\d+) points", describe_claim(n)) for n in (MIN_CLAIM_ITEMS, 10, 20, 280)]
    assert gains == [["97"], ["68"], ["37"], ["9"]]


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
