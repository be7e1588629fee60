"""A judge's opinion of all pairs, corrected by a person's answers about some of them."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reflact.gate.corrected_claim import (
    MIN_ANSWERS,
    TORN_WEIGHT,
    CorrectedClaim,
    JudgedPair,
    correct_claim,
    list_looks,
    order_pairs,
)

LIKES: tuple[int, ...] = (1, 1, 0, -1)


def make_pairs(rights: list[int], *, right: float, fond: float = 0.0) -> list[JudgedPair]:
    """Return pairs with two votes, each of which is right, or for the candidate, with these probabilities."""
    chance = random.Random(7)
    pairs = []
    for number, preference in enumerate(rights):
        votes = []
        for _ in range(2):
            place = chance.random()
            drawn = chance.choice((-1, 0, 1))
            votes.append(float(preference if place < right else 1 if place < right + fond else drawn))
        pairs.append(JudgedPair(pair_id=str(number), votes=tuple(votes)))
    return pairs


def draw_rights(n: int, likes: tuple[int, ...] = LIKES) -> list[int]:
    chance = random.Random(5)
    return [chance.choice(likes) for _ in range(n)]


def ask(pairs: list[JudgedPair], rights: list[int], n: int) -> CorrectedClaim:
    answers = {pair_id: rights[int(pair_id)] for pair_id in order_pairs(pairs, seed=3)[:n]}
    return correct_claim(pairs, answers)


def test_a_judge_that_agrees_narrows_the_interval() -> None:
    rights = draw_rights(300, (1, 1, 1, 0, -1))
    claim = ask(make_pairs(rights, right=0.8), rights, 40)
    alone = claim.answered.high - claim.answered.low
    assert claim.is_judge_used
    assert claim.gain.high - claim.gain.low < 0.8 * alone
    assert 15 <= claim.n_saved <= 260
    assert claim.kappa is not None
    assert claim.kappa > 0.5
    assert claim.proven == "better"
    assert claim.width_with_more < claim.gain.high - claim.gain.low


def test_a_judge_fond_of_the_candidate_proves_nothing() -> None:
    """Its own mean is a large gain; the answers correct it to none."""
    rights = draw_rights(300, (1, 0, -1))
    claim = ask(make_pairs(rights, right=0.2, fond=0.7), rights, 60)
    assert claim.judged > 0.6
    assert claim.gain.low < 0 < claim.gain.high
    assert claim.proven is None


def test_a_judge_that_says_the_opposite_is_left_out() -> None:
    rights = draw_rights(200)
    opposite = [JudgedPair(pair_id=str(n), votes=(-right,)) for n, right in enumerate(rights)]
    claim = ask(opposite, rights, 60)
    assert not claim.is_judge_used
    assert claim.gain == claim.answered
    assert claim.n_saved == 0


def test_a_worse_candidate_is_proven_worse() -> None:
    rights = draw_rights(200, (-1, -1, -1, 0, 1))
    assert ask(make_pairs(rights, right=0.7), rights, 60).proven == "worse"


def test_few_answers_prove_nothing() -> None:
    rights: list[int] = [1] * 100
    pairs = make_pairs(rights, right=1.0)
    assert ask(pairs, rights, MIN_ANSWERS - 1).proven is None
    assert ask(pairs, rights, MIN_ANSWERS).proven == "better"


def test_equal_answers_have_an_interval_with_a_width() -> None:
    claim = ask(make_pairs([0] * 100, right=1.0), [0] * 100, 30)
    assert claim.gain.low < 0 < claim.gain.high
    assert claim.kappa is None
    assert claim.agreement == 1


def test_a_later_look_has_a_smaller_level() -> None:
    rights = draw_rights(100)
    pairs = make_pairs(rights, right=0.7)
    answers = {pair_id: rights[int(pair_id)] for pair_id in order_pairs(pairs, seed=3)[:30]}
    levels = [correct_claim(pairs, answers, look=look).level for look in range(1, 200)]
    assert levels == sorted(levels, reverse=True)
    assert 0.024 < sum(levels) < 0.025


@pytest.mark.parametrize(
    ("n_answers", "looks"), [(0, ()), (29, ()), (30, (30,)), (99, (30, 60)), (100, (30, 60, 100))]
)
def test_claims_are_made_at_fixed_numbers_of_answers(n_answers: int, looks: tuple[int, ...]) -> None:
    assert list_looks(n_answers, 100) == looks


def test_pairs_of_one_text_are_equal_and_not_asked() -> None:
    rights = draw_rights(100, (1, 1, 1, -1))
    differing = make_pairs(rights, right=0.8)
    same = [JudgedPair(pair_id=f"same {n}", votes=(0.0,), is_same=True) for n in range(300)]
    assert set(order_pairs([*differing, *same], seed=3)) == {pair.pair_id for pair in differing}
    answers = {pair_id: rights[int(pair_id)] for pair_id in order_pairs(differing, seed=3)[:40]}
    alone = correct_claim(differing, answers)
    among = correct_claim([*differing, *same], answers)
    assert among.n_same == 300
    assert among.gain.value == pytest.approx(alone.gain.value / 4)
    assert among.judged == pytest.approx(alone.judged / 4)
    assert 0 < among.gain.low < among.gain.high < alone.gain.low
    assert among.proven == "better"
    with pytest.raises(ValueError, match="there is no pair same 1 to ask about"):
        correct_claim([*differing, *same], {"same 1": 1})


@given(st.lists(st.booleans(), min_size=1, max_size=60), st.integers(0, 9))
def test_each_beginning_of_the_order_has_its_share_of_torn_pairs(torn: list[bool], seed: int) -> None:
    votes = [(1.0, -1.0) if each else (1.0, 1.0) for each in torn]
    pairs = [JudgedPair(pair_id=str(n), votes=each) for n, each in enumerate(votes)]
    order = order_pairs(pairs, seed=seed)
    assert sorted(order) == sorted(pair.pair_id for pair in pairs)
    n_torn = sum(torn)
    share = TORN_WEIGHT * n_torn / (TORN_WEIGHT * n_torn + len(torn) - n_torn)
    for n in range(1, len(order) + 1):
        taken = sum(torn[int(pair_id)] for pair_id in order[:n])
        assert taken == min(n_torn, taken)
        assert taken >= min(n_torn, int(share * n)) - 1 or n - taken == len(torn) - n_torn
        assert taken <= share * n + 1 or n - taken == len(torn) - n_torn


def test_what_is_unknown_is_refused() -> None:
    pairs = make_pairs([1, 0], right=1.0)
    with pytest.raises(ValueError, match="no pair is answered"):
        correct_claim(pairs, {})
    with pytest.raises(ValueError, match="there is no pair 9 to ask about"):
        correct_claim(pairs, {"9": 1})
