"""The curriculum: weak kinds get more, contrasts get subtler, a plateau ends it."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reflact.calibration.curriculum import (
    RoundMeasurement,
    RoundPlan,
    deal_mistakes,
    has_plateaued,
    plan_next_round,
)
from reflact.calibration.pairs import DistanceBand
from reflact.memory.models import MISTAKE_KINDS


def plan_after(*history: RoundMeasurement, max_rounds: int = 9) -> RoundPlan | None:
    """Return the round after measurements."""
    return plan_next_round(history, MISTAKE_KINDS, max_rounds=max_rounds)


def measured(accuracy: float, error: float = 1, **n_wrong: int) -> RoundMeasurement:
    """Return a measurement: of each kind so many of twenty steps are wrong."""
    return RoundMeasurement(accuracy, error, {kind: (n, 20) for kind, n in n_wrong.items()})


def test_the_weakest_kind_gets_most_and_every_kind_something() -> None:
    """Without a measurement all are equal; later half goes to where errors are certain, in proportion."""
    first = plan_after()
    assert set(first.shares.values()) == {0.25}
    assert (first.number, first.band) == (1, DistanceBand(1, 10))
    shares = plan_after(measured(0.5, inflated_score=16, ignored_evidence=0, credit_for_intention=6)).shares
    assert max(shares, key=lambda kind: shares[kind]) == "inflated_score"
    assert shares["ignored_evidence"] == shares["scale_inconsistency"] == 0.125
    assert sum(shares.values()) == pytest.approx(1)


@pytest.mark.parametrize(
    ("accuracies", "errors", "is_over"),
    [
        ([], [], False),
        ([0.5], [1], False),
        ([0.5, 0.6], [1, 1], False),
        ([0.5, 0.505], [1, 1], True),
        ([0.5, 0.4], [1, 1], True),
        ([0.5, 0.6, 0.6], [1, 1, 1], True),
        ([1, 1], [4, 2], False),
        ([1, 1], [4, 3.95], True),
        ([1, 1, 1], [4, 2, 2], True),
    ],
)
def test_a_plateau_of_accuracy_and_error_ends_the_rounds(
    accuracies: list[float], errors: list[float], is_over: bool
) -> None:
    """A critic that inflates evenly orders all states rightly, and still learns until its error stays."""
    history = [measured(*figures) for figures in zip(accuracies, errors, strict=True)]
    assert has_plateaued(history) is is_over
    assert (plan_after(*history) is None) is is_over


WEIGHTS = st.lists(st.integers(1, 20), min_size=1, max_size=6)


@given(weights=WEIGHTS, n_events=st.integers(0, 20), per_event=st.integers(1, 6))
def test_what_is_dealt_has_the_shares(weights: list[int], n_events: int, per_event: int) -> None:
    """Every event gets as many, every kind its share but for one, and kinds repeat only where they must."""
    shares = {f"k{n}": weight / sum(weights) for n, weight in enumerate(weights)}
    plan = RoundPlan(1, shares, DistanceBand(1, 2))
    hands = deal_mistakes(plan, trace_id="t", n_events=n_events, per_event=per_event)
    assert [len(hand) for hand in hands] == [per_event] * n_events
    counts = Counter(kind for hand in hands for kind in hand)
    for kind, share in shares.items():
        assert abs(counts[kind] - share * n_events * per_event) < 1 + 1e-6
        often = -(-counts[kind] // n_events) if n_events else 0
        assert all(hand.count(kind) <= often for hand in hands)
