"""Testing by betting: sums, evidence, and its error probability."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from statistics import mean, stdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reflact.gate.betting import PairStatistics, choose_stakes

scores = st.sampled_from((0.0, 0.25, 0.5, 1.0))
sides = st.tuples(scores, scores)


def counted(pairs: Sequence[tuple[float | None, float | None]], margin: float = 0.0) -> PairStatistics:
    """Return the tally of some pairs in a plan for 40."""
    tally = PairStatistics(stakes=choose_stakes(40, level=0.05, margin=margin), margin=margin)
    for candidate, current in pairs:
        tally.add(candidate, current)
    return tally


def test_stakes_are_those_of_the_plan() -> None:
    """Each is twice the one before it, and none can lose more than nine tenths in a pair."""
    assert choose_stakes(400, level=0.0125, margin=0.0) == pytest.approx(
        (0.20933, 0.41867, 0.83733), abs=1e-5
    )
    assert choose_stakes(20, level=0.0125, margin=0.25) == (0.72, 0.72, 0.72)


@given(st.lists(sides, min_size=2, max_size=20))
def test_sums_are_those_of_the_differences(pairs: list[tuple[float, float]]) -> None:
    """Mean and two standard errors are the sample's."""
    tally, found = counted(pairs), [new - old for new, old in pairs]
    assert tally.total == pytest.approx(sum(found))
    assert tally.upper_bound == pytest.approx(mean(found) + 2 * stdev(found) / math.sqrt(len(found)))


def test_unmeasured_pairs_are_counted_and_left_out() -> None:
    """Each side's are counted apart; neither sums nor evidence move."""
    tally, same = counted([(1.0, 0.0), (None, 1.0), (None, None), (1.0, None)]), counted([(1.0, 0.0)])
    assert (tally.n_pairs, tally.n_measured, tally.n_unmeasured) == (4, 1, (2, 2))
    assert (tally.total, tally.log_evidence(), tally.upper_bound) == (1.0, same.log_evidence(), math.inf)


@given(st.lists(sides, max_size=8), st.integers(0, 5), st.sampled_from((-1.0, 1.0)))
def test_evidence_of_further_pairs_is_that_of_adding_them(
    pairs: list[tuple[float, float]], further: int, difference: float
) -> None:
    """What-if and real pairs are worth the same."""
    added = counted([*pairs, *[(max(difference, 0.0), max(-difference, 0.0))] * further], margin=0.1)
    assert counted(pairs, margin=0.1).log_evidence(further, difference) == pytest.approx(added.log_evidence())


@given(
    st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=4), st.sampled_from((0.0, 0.1))
)
def test_a_candidate_that_is_not_better_has_no_expected_evidence(
    chances: list[tuple[float, float]], margin: float
) -> None:
    """Over all outcomes of a round, whatever each item's chances on both sides, the mean is at most 1.

    ``chances`` are probabilities of solving an item; the candidate's are lowered until the mean difference
    is at most the margin.
    """
    surplus = sum(new - old for new, old in chances) - margin * len(chances)
    scale = 1.0 if surplus <= 0 else 1 - surplus / sum(new for new, _ in chances)
    chances = [(max(0.0, new * scale), old) for new, old in chances]
    expected = 0.0
    for outcome in itertools.product((0.0, 1.0), repeat=2 * len(chances)):
        pairs = list(zip(outcome[::2], outcome[1::2], strict=True))
        probability = math.prod(
            (p if new else 1 - p) * (q if old else 1 - q)
            for (new, old), (p, q) in zip(pairs, chances, strict=True)
        )
        expected += probability * math.exp(counted(pairs, margin=margin).log_evidence())
    assert expected <= 1 + 1e-9
