"""Events, promotions and reports of a calibration show themselves in one short line."""

from __future__ import annotations

import pytest
from pydantic import BaseModel

from calibration_reports import everything, evidence
from reflact.calibration.events import (
    CalibrationFinished,
    CalibratorStopped,
    CriticMeasured,
    PairBatchTested,
    PairsGenerated,
    ScoreSummary,
    TraceFailed,
)
from reflact.calibration.report import DropCount
from reflact.records import Usage
from reflact.types import ShortReprModel

SHORT = 300


class Some(ShortReprModel):
    """A value with fields of all sorts."""

    number: float = 1.0
    text: str = ""
    many: tuple[str, ...] = ()
    inner: Usage | None = None


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (Some(), "Some()"),
        (Some(number=0.123456), "Some(number=0.123)"),
        (Some(text="x" * 61), f"Some(text='{'x' * 57}...')"),
        (Some(text="two\nlines"), "Some(text='two\\nlines')"),
        (Some(many=("a",)), "Some(many=('a',))"),
        (Some(many=("a", "b", "c", "d") * 300), "Some(many=<1,200>)"),
        (Some(inner=Usage(calls=3)), "Some(inner=Usage(calls=3))"),
    ],
)
def test_fields_are_shortened(value: BaseModel, shown: str) -> None:
    """Figures have three digits, texts are cut, long lists are counted; what is as by default is left out."""
    assert repr(value) == str(value) == shown


def test_a_promotion_is_one_line() -> None:
    """Its pairs are counted, its figures rounded, and the critic's identity is cut."""
    said = repr(evidence(1, 0.61234, promoted=True, outcome="better"))
    assert said.startswith(
        "PromotionEvidence(pair_ids=<4>, passed_test=True, n_traces=24, n_transitions=72, n_earlier_tests=0, "
    )
    assert "effect=0.612, low=0.362, high=0.862, p_value=0.0021, alpha=0.0152" in said
    assert len(said) <= SHORT
    assert "\n" not in said


@pytest.mark.parametrize(
    "event",
    [
        PairBatchTested(
            evidence=evidence(2, -0.4, promoted=False, outcome="not_shown"), usage=Usage(calls=12)
        ),
        CalibrationFinished(report=everything()),
        CriticMeasured(
            when="before", held_out=ScoreSummary(n_steps=20, error=1.5), anchors=ScoreSummary(n_steps=0)
        ),
        TraceFailed(trace_id="t", error="StoreError", message="the disk is full\n" * 100),
        PairsGenerated(
            trace_id="t",
            n_candidates=9,
            n_pairs=2,
            n_quarantined=0,
            dropped=(DropCount(reason="bad_reply", n_candidates=7),),
        ),
    ],
    ids=lambda event: event.kind,
)
def test_an_event_is_one_line(event: ShortReprModel) -> None:
    """Also with a report in it, a long message, or many pairs."""
    assert "\n" not in str(event)
    assert len(str(event)) <= SHORT + 60


def test_why_a_calibrator_stopped_can_be_read() -> None:
    """An error of usual length is whole: the key to set stands at its end."""
    reason = "budget.max_calls is 100: 100 are taken, and the next call may take 1; set a larger one to go on"
    assert reason in str(CalibratorStopped(reason=reason))


def test_a_report_names_its_outcome() -> None:
    """What was made, tested and promoted, and the error before and after."""
    assert repr(everything()) == (
        "CalibrationReport(rounds=3, candidates=41, pairs=32, tests=3, promoted=4, error=2 -> 0.5, "
        "calls=1234)"
    )
