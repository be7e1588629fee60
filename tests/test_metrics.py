"""What a critic's scores are worth: errors, orders, confidences, each with an interval by trace."""

from __future__ import annotations

import math
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from calibration_memory import ListMemory
from flattered_world import flattered, flattered_traces
from profiles import cases
from reflact import Calibrator, Trace
from reflact.calibration.config import CalibratorSettings
from reflact.calibration.metrics import (
    CriticMetrics,
    ScoredStep,
    compute_metrics,
)
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
    )


def measure(*steps: ScoredStep) -> CriticMetrics:
    """Return what a critic's scores are worth."""
    found = compute_metrics(steps)
    assert found is not None
    return found


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
    ),
    min_size=1,
    max_size=12,
)


@pytest.mark.parametrize(
    ("steps", "found"),
    [
        ([scored("a", 0, (0, 4), (3, 3))], 0.5),
        ([scored("a", 0, (4, 4), (3, 9))], None),
        ([scored("a", 0, (0, 4), (5, 3))], 0),
        ([scored("a", 0, (1, 1), (9, 9)), scored("b", 0, (9, 9), (1, 1))], None),
        ([scored("a", 0, (2, 2), (2, 4), wrong=(5, 9))], 0.5),
    ],
    ids=["a tie counts half", "equal states", "wrong order", "two traces", "nearer to a wrong evaluation"],
)
def test_pairwise_accuracy_is_over_states_of_one_trace_that_differ(
    steps: list[ScoredStep], found: float | None
) -> None:
    """States that are correctly equal, or of two traces, are no pair; the critic should stand nearer to right."""
    accuracy = measure(*steps).accuracy
    assert (None if accuracy is None else accuracy.value) == found


def test_order_consistency_compares_one_call_with_two() -> None:
    """A state above the one before it in one call and below it across calls is inconsistent."""
    steps = [
        scored("a", 0, (0, 2), (0, 5)),
        scored("a", 1, (2, 4), (2, 4)),
        scored("a", 2, (4, 6), (4, 6)),
        scored("a", 5, (6, 8), (8, 6)),
    ]
    found = measure(*steps).consistency
    assert found.value == 0.5
    perturbed = measure(*steps, scored("a", 1, (2, 2), (9, 9)))
    assert perturbed.consistency is None, "a step that stands twice succeeds nothing"


def test_confidence_that_knows_has_no_error() -> None:
    """Sure where right and unsure where wrong is perfect; the other way round is as bad as can be."""
    right, wrong = ((0.0, 2.0), (0.0, 2.0)), ((0.0, 2.0), (0.0, 9.0))
    knows = measure(scored("a", 0, *right, confidence=1), scored("a", 1, *wrong, confidence=0))
    boasts = measure(scored("a", 0, *right, confidence=0), scored("a", 1, *wrong, confidence=1))
    assert (knows.brier.value, knows.calibration.value) == (0, 0)
    assert (boasts.brier.value, boasts.calibration.value) == (1, 1)
    assert [(b.low, b.confidence, b.right_share) for b in boasts.reliability] == [(0.0, 0, 1), (0.9, 1, 0)]


def test_intervals_are_resampled_by_trace() -> None:
    """A hundred equal steps of a trace are no more evidence than one."""
    once = measure(*(scored(f"t{n}", 0, (0, 2), (0, 2 + n)) for n in range(8)))
    often = measure(*(scored(f"t{n}", s, (0, 2), (0, 2 + n)) for n in range(8) for s in range(100)))
    assert often.error == once.error
    assert once.error.low < 2.5
    assert once.error.high > 4.5


@cases(60, 10)
@given(STEPS)
def test_measures_are_in_range_and_deterministic(steps: list[ScoredStep]) -> None:
    """Every number lies in its range and its interval in the same; equal steps give equal measures."""
    found = measure(*steps)
    assert found == measure(*steps)
    for each in (found.accuracy, found.consistency, found.brier, found.calibration):
        assert each is None or 0 <= each.low <= each.high <= 1
    assert 0 <= found.error.low <= found.error.high <= 10
    assert abs(found.bias.value) <= found.error.value + 1e-9
    assert math.isclose(found.error.value, sum(abs(s.error) for s in steps) / len(steps), abs_tol=1e-9)
    assert sum(each.n_transitions for each in found.reliability) == len(steps)


def reached(phi: float) -> Label:
    """Return what a check of the state after found."""
    return Label(progress_after=phi, source="program")


def logged(name: str, number: int, *, labels: Literal["all", "last", "none"]) -> list[Trace]:
    """Return runs that no critic saw; a program checked all states, the last one, or none."""
    runs = []
    for scored in flattered_traces(name, number):
        runs.append(Trace(scored.purpose, id=scored.id))
        for event in scored.events:
            last = reached(event.label.progress_after) if labels == "last" and event.step == 1 else None
            runs[-1].record(event.transition, label=event.label if labels == "all" else last)
    return runs


async def test_a_check_of_the_last_state_alone_is_enough_to_test() -> None:
    """Held-out runs with an outcome and nothing else promote what helps; the estimate says that they can."""
    learn, held_out = logged("learn", 12, labels="all"), logged("held out", 60, labels="last")
    calibrator = Calibrator(flattered(), ListMemory(), settings=CalibratorSettings(max_asked=0))
    estimate = await calibrator.estimate_cost(learn, heldout=held_out)
    report = await calibrator.calibrate(learn, heldout=held_out)
    before, after = report.held_out.before, report.held_out.after
    assert (before.n_traces, after.error.value) == (60, 0)
    assert before.error.value > 1
    assert report.n_promoted > 0
    assert estimate.missing_reason is None
