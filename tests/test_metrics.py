"""What a critic's scores are worth: errors, orders, confidences, each with an interval by trace."""

from __future__ import annotations

import math
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from profiles import cases
from reflact.calibration.metrics import (
    MIN_LABEL_DIFFERENCE,
    ScoredStep,
    bootstrap_mean,
    compute_metrics,
    pairwise_accuracy,
)
from reflact.data import make_rng
from reflact.memory.models import Evaluation, Label

PHI = st.floats(0, 10)


def scored(
    trace: str,
    step: int,
    gold: tuple[float, float],
    said: tuple[float, float],
    *,
    confidence: float = 0.5,
    wrong: tuple[float, ...] = (),
    mistakes: tuple[str, ...] = (),
    difficulty: float | None = None,
) -> ScoredStep:
    """Return a scored step."""
    return ScoredStep(
        trace_id=trace,
        step=step,
        label=Label(progress_before=gold[0], progress_after=gold[1], source="program"),
        evaluation=Evaluation(
            progress_before=said[0], progress_after=said[1], reasoning="r", confidence=confidence
        ),
        wrong_progress=wrong,
        mistakes=mistakes,
        difficulty=difficulty,
    )


STEPS = st.lists(
    st.builds(
        scored,
        st.sampled_from("abcd"),
        st.integers(0, 5),
        st.tuples(PHI, PHI),
        st.tuples(PHI, PHI),
        confidence=st.floats(0, 1),
        wrong=st.lists(PHI, max_size=2).map(tuple),
        mistakes=st.sampled_from([(), ("inflated_score",)]),
        difficulty=st.sampled_from([None, 0.0, 0.2, 0.4]),
    ),
    min_size=1,
    max_size=12,
)


def test_nothing_scored_is_no_measure() -> None:
    """Without steps there is no number at all."""
    assert compute_metrics([]) is None


def test_error_and_bias() -> None:
    """Errors are absolute, the bias keeps its sign, and the constant predictor says the median."""
    steps = [
        scored("a", 0, (0, 2), (0, 5)),
        scored("a", 1, (2, 4), (5, 3)),
        scored("b", 0, (0, 0), (0, 1)),
    ]
    found = compute_metrics(steps)
    assert found is not None
    assert (found.n_traces, found.n_transitions) == (2, 3)
    assert found.error.value == pytest.approx(5 / 3)
    assert found.bias.value == pytest.approx(1.0)
    assert found.constant.progress == 2
    assert found.constant.error == pytest.approx(4 / 3)


def test_pairwise_accuracy_counts_ties_half_and_forgets_equal_states() -> None:
    """States that are correctly equal are no pair; an order that is not seen counts half."""
    tied = compute_metrics([scored("a", 0, (0, 4), (3, 3))])
    equal = compute_metrics([scored("a", 0, (4, 4), (3, 9))])
    wrong = compute_metrics([scored("a", 0, (0, 4), (5, 3))])
    assert tied is not None
    assert tied.accuracy is not None
    assert tied.accuracy.value == 0.5
    assert equal is not None
    assert equal.accuracy is None
    assert wrong is not None
    assert wrong.accuracy is not None
    assert wrong.accuracy.value == 0


@cases(200, 10)
@given(
    st.lists(
        st.tuples(PHI | st.sampled_from([0.0, 0.5, 1.0, 4.0]), PHI | st.sampled_from([1.0, 2.0])), max_size=9
    )
)
def test_pairwise_accuracy_is_what_comparing_every_two_states_gives(said: list[tuple[float, float]]) -> None:
    """Sorting finds what a comparison of all pairs finds, ties and near states included."""
    decided = [
        0.5 if a[1] == b[1] else float((a[1] < b[1]) == (a[0] < b[0]))
        for a, b in combinations(said, 2)
        if abs(a[0] - b[0]) >= MIN_LABEL_DIFFERENCE
    ]
    steps = [scored("t", n, (gold, gold), (phi, phi)) for n, (gold, phi) in enumerate(said)]
    assert pairwise_accuracy(steps) == (sum(decided) / len(decided) if decided else None)


def test_pairwise_accuracy_compares_states_of_one_trace_alone() -> None:
    """Phi of different purposes are not ordered against each other."""
    found = compute_metrics([scored("a", 0, (1, 1), (9, 9)), scored("b", 0, (9, 9), (1, 1))])
    assert found is not None
    assert found.accuracy is None


def test_a_wrong_evaluation_nearer_to_the_critic_costs_accuracy() -> None:
    """Of a contrast pair the critic should stand nearer to the right side."""
    found = compute_metrics([scored("a", 0, (2, 2), (2, 4), wrong=(5, 9))])
    assert found is not None
    assert found.accuracy is not None
    assert found.accuracy.value == 0.5


def test_order_consistency_compares_one_call_with_two() -> None:
    """A state above the one before it in one call and below it across calls is inconsistent."""
    steps = [
        scored("a", 0, (0, 2), (0, 5)),
        scored("a", 1, (2, 4), (2, 4)),
        scored("a", 2, (4, 6), (4, 6)),
        scored("a", 5, (6, 8), (8, 6)),
    ]
    found = compute_metrics(steps)
    assert found is not None
    assert found.consistency is not None
    assert found.consistency.value == 0.5
    perturbed = compute_metrics([*steps, scored("a", 1, (2, 2), (9, 9))])
    assert perturbed is not None
    assert perturbed.consistency is None, "a step that stands twice succeeds nothing"


def test_confidence_that_knows_has_no_error() -> None:
    """Sure where right and unsure where wrong is perfect; the other way round is as bad as can be."""
    right, wrong = ((0.0, 2.0), (0.0, 2.0)), ((0.0, 2.0), (0.0, 9.0))
    knows = compute_metrics([scored("a", 0, *right, confidence=1), scored("a", 1, *wrong, confidence=0)])
    boasts = compute_metrics([scored("a", 0, *right, confidence=0), scored("a", 1, *wrong, confidence=1)])
    assert knows is not None
    assert boasts is not None
    assert (knows.brier.value, knows.calibration.value) == (0, 0)
    assert (boasts.brier.value, boasts.calibration.value) == (1, 1)
    assert [(b.low, b.confidence, b.right_share) for b in boasts.reliability] == [(0.0, 0, 1), (0.9, 1, 0)]


def test_kinds_and_difficulties_are_measured_apart() -> None:
    """A step counts with each kind of mistake that it invites, and in the band of its difficulty."""
    steps = [
        scored("a", 0, (0, 2), (0, 5), mistakes=("inflated_score", "mine"), difficulty=0.0),
        scored("b", 0, (0, 2), (0, 3), mistakes=("mine",), difficulty=0.4),
        scored("c", 0, (0, 2), (0, 2)),
    ]
    found = compute_metrics(steps)
    assert found is not None
    kinds = [(g.name, g.n_transitions, g.error.value) for g in found.by_mistake]
    assert kinds == [("inflated_score", 1, 3), ("mine", 2, 2)]
    assert [(g.name, g.error.value) for g in found.by_difficulty] == [("easy", 3), ("hard", 1)]


def test_one_trace_says_nothing_about_others() -> None:
    """The interval of a single trace is the whole range, however many steps it has."""
    found = compute_metrics([scored("a", n, (0, 2), (0, 3)) for n in range(50)])
    assert found is not None
    assert (found.error.low, found.error.high) == (0, 10)
    assert bootstrap_mean([0.25], low=-10, high=10, stream_name="x").high == 10


def test_intervals_are_resampled_by_trace() -> None:
    """A hundred equal steps of a trace are no more evidence than one."""
    once = compute_metrics([scored(f"t{n}", 0, (0, 2), (0, 2 + n)) for n in range(8)])
    often = compute_metrics([scored(f"t{n}", s, (0, 2), (0, 2 + n)) for n in range(8) for s in range(100)])
    assert once is not None
    assert often is not None
    assert often.error == once.error
    assert once.error.low < 2.5
    assert once.error.high > 4.5


def test_the_interval_of_a_mean_covers_as_often_as_it_says() -> None:
    """Of 200 means of 40 draws, about 95% have the true one in their interval."""
    hits = 0
    for number in range(200):
        draw = make_rng(7, f"covers/{number}").random
        found = bootstrap_mean([draw() for _ in range(40)], low=0, high=1, stream_name=str(number))
        hits += found.low <= 0.5 <= found.high
    assert 180 <= hits <= 199


@cases(60, 10)
@given(STEPS)
def test_measures_are_in_range_and_deterministic(steps: list[ScoredStep]) -> None:
    """Every number lies in its range and its interval in the same; equal steps give equal measures."""
    found = compute_metrics(steps)
    assert found is not None
    assert found == compute_metrics(steps)
    for each in (found.accuracy, found.consistency, found.brier, found.calibration):
        assert each is None or 0 <= each.low <= each.high <= 1
    assert 0 <= found.error.low <= found.error.high <= 10
    assert abs(found.bias.value) <= found.error.value + 1e-9
    assert math.isclose(found.error.value, sum(abs(s.error) for s in steps) / len(steps), abs_tol=1e-9)
    assert sum(each.n_transitions for each in found.reliability) == len(steps)
