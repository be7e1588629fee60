"""What a critic's scores are worth: errors, orders, confidences, each with an interval by trace."""

from __future__ import annotations

import math
from typing import Literal

from hypothesis import given
from hypothesis import strategies as st

from calibration_memory import ListMemory
from flattered_world import flattered, flattered_traces
from profiles import cases
from reflact import Calibrator, Trace
from reflact.calibration.config import CalibratorSettings
from reflact.calibration.metrics import CriticMetrics, ScoredStep, compute_metrics
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


def test_intervals_are_resampled_by_trace() -> None:
    once = measure(*(scored(f"t{n}", 0, (0, 2), (0, 2 + n)) for n in range(8)))
    often = measure(*(scored(f"t{n}", s, (0, 2), (0, 2 + n)) for n in range(8) for s in range(100)))
    assert often.error == once.error
    assert once.error.low < 2.5
    assert once.error.high > 4.5


@cases(60, 10)
@given(STEPS)
def test_measures_are_in_range_and_deterministic(steps: list[ScoredStep]) -> None:
    found = measure(*steps)
    assert found == measure(*steps)
    for each in (found.accuracy, found.consistency, found.brier, found.calibration):
        assert each is None or 0 <= each.low <= each.high <= 1
    assert 0 <= found.error.low <= found.error.high <= 10
    assert abs(found.bias.value) <= found.error.value + 1e-9
    assert math.isclose(found.error.value, sum(abs(s.error) for s in steps) / len(steps), abs_tol=1e-9)
    assert sum(each.n_transitions for each in found.reliability) == len(steps)


def reached(phi: float) -> Label:
    return Label(progress_after=phi, source="program")


def logged(name: str, number: int, *, labels: Literal["all", "last", "none"]) -> list[Trace]:
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
