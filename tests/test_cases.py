"""Repeats on the same few cases: an exact test, case by case, that says nothing about other cases."""

from __future__ import annotations

import random
from math import comb

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from reflact.gate.cases import CaseScores, compare_cases, find_repeats
from reflact.records import CaseComparison

SCORES = st.lists(st.sampled_from([0.0, 0.25, 1.0]), min_size=1, max_size=3).map(tuple)
CASES = st.lists(st.tuples(SCORES, SCORES), min_size=1, max_size=4)


def compare(*cases: tuple[tuple[float, ...], tuple[float, ...]]) -> CaseComparison:
    """Compare cases that are named by their numbers."""
    named = [
        CaseScores(case_id=str(n), before=before, after=after) for n, (before, after) in enumerate(cases)
    ]
    return compare_cases(named, name="before")


def test_five_cases_prove_a_gain_on_themselves_with_two_repeats_and_not_with_one() -> None:
    """All flips of five cases have a chance of 1/32 with one run of each, and of 1/6**5 with two."""
    once = compare(*[((0.0,), (1.0,))] * 5)
    twice = compare(*[((0.0, 0.0), (1.0, 1.0))] * 5)
    assert once.chance_better == pytest.approx(1 / 32)
    assert twice.chance_better == pytest.approx(1 / comb(4, 2) ** 5)
    assert (once.proven, twice.proven) == (None, "better")
    assert (twice.gain, twice.better, twice.worse) == (1.0, tuple("01234"), ())
    assert [find_repeats(n) for n in (1, 2, 3, 5, 8)] == [4, 3, 2, 2, 1]
    assert find_repeats(1, most=3) is None


def test_what_flips_by_chance_is_counted_from_repeats() -> None:
    """A case that one of two runs solves differs in two of three pairs of runs or so; one run shows nothing."""
    assert compare(((0.0, 1.0), (0.0, 1.0))).flips_by_chance == 1.0
    assert compare(((1.0, 1.0), (1.0, 1.0))).flips_by_chance == 0.0
    assert compare(((1.0,), (0.0,))).flips_by_chance is None


@given(CASES)
def test_sides_and_order_do_not_matter(cases: list[tuple[tuple[float, ...], tuple[float, ...]]]) -> None:
    """Exchanged sides exchange the chances, and cases come in any order."""
    found, turned = compare(*cases), compare(*((after, before) for before, after in cases))
    assert found.chance_better == pytest.approx(turned.chance_worse)
    assert found.gain == pytest.approx(-turned.gain)
    assert found.chance_better == pytest.approx(compare(*reversed(cases)).chance_better)
    assert found.chance_better + found.chance_worse >= 1 - 1e-9


@pytest.mark.parametrize("n_cases", [3, 5, 8])
def test_false_claims_are_rare_where_nothing_helps(n_cases: int) -> None:
    """Neither a document without effect nor one that helps half of the cases and harms the others is called better."""
    chance = random.Random(n_cases)
    false_claims = 0
    for world in range(600):
        rates = [chance.choice((0.1, 0.5, 0.9)) for _ in range(n_cases)]
        later = rates if world % 2 else [1 - rate for rate in rates]
        pairs = [
            tuple(tuple(float(chance.random() < rate) for _ in range(3)) for rate in both)
            for both in zip(rates, later, strict=True)
        ]
        mean_gain = sum(after - before for before, after in zip(rates, later, strict=True))
        false_claims += mean_gain <= 0 and compare(*pairs).proven == "better"
    assert false_claims <= 600 * 0.025


def test_what_cannot_be_compared_is_refused() -> None:
    """No cases, equal ids, a side without a score, and scores outside of 0 to 1."""
    case = CaseScores(case_id="a", before=(0.0,), after=(1.0,))
    for cases in ([], [case, case]):
        with pytest.raises(ValueError, match=r"no cases|same id"):
            compare_cases(cases, name="before")
    for before in ((), (2.0,)):
        with pytest.raises(ValidationError):
            CaseScores(case_id="a", before=before, after=(1.0,))
