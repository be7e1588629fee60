"""What a calibration tells while it goes on, and the page that names it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest

from calibration_memory import ListMemory
from flattered_world import PURPOSE, flattered, steps
from reflact import Calibrator, Trace
from reflact.calibration.config import CalibratorSettings, PairSettings
from reflact.calibration.events import (
    CALIBRATION_EVENT,
    BatchTested,
    Began,
    Calibrated,
    CalibrationEvent,
    CriticMeasured,
    PairsMade,
    RoundBegan,
    figures_of,
)
from reflact.calibration.metrics import Scored
from reflact.memory import Evaluation, Gold

pytestmark = pytest.mark.anyio

PAGE = Path(__file__).parents[1] / "docs" / "calibration.md"


def trace(name: str, number: int) -> Trace:
    """Return a trace of one step whose critic was flattered."""
    made = Trace(PURPOSE, id=f"{name} {number}")
    ((step, gold),) = steps(made.id, number, count=1, claims=[True])
    reasoning = "The agent says that all is finished."
    said = Evaluation(phi_before=0, phi_after=gold.phi_after + 3, reasoning=reasoning, evidence=("filed",))
    made.record(step, said, gold=gold)
    return made


def test_the_page_names_every_event() -> None:
    """The table of events has a row for each kind, and for nothing else."""
    union = get_args(get_args(CalibrationEvent)[0])
    kinds = {kind.model_fields["kind"].default for kind in union}
    table = PAGE.read_text(encoding="utf-8").partition("\n## Events\n")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| `(\w+)`", table, re.MULTILINE)) == kinds


async def test_a_calibration_is_told_from_its_beginning_to_its_report() -> None:
    """Its events come in order, each with what was consumed until then, and survive JSON."""
    told: list[CalibrationEvent] = []
    settings = CalibratorSettings(contrast=PairSettings(judges=0, per_event=2, near_misses=False))
    calibrator = Calibrator(flattered(), ListMemory(), settings=settings, tell=told.append)
    learn, held_out = [trace("t", n) for n in range(3)], [trace("h", n) for n in range(20)]
    report = await calibrator.calibrate(learn, heldout=held_out)
    first, before, began, *made, tested = told[:7]
    assert first == Began(learn=3, held_out=20, steps=20, anchors=0)
    assert isinstance(before, CriticMeasured)
    assert report.held_out.before is not None
    assert (before.when, before.held_out.steps, before.usage.calls) == ("before", 20, 20)
    assert before.held_out.error == pytest.approx(report.held_out.before.error.value)
    assert isinstance(began, RoundBegan)
    assert (began.number, began.traces) == (1, 3)
    assert all(isinstance(event, PairsMade) for event in made)
    for event in made:
        assert isinstance(event, PairsMade)
        assert event.candidates == event.kept + sum(drop.candidates for drop in event.drops) == 2
    assert isinstance(tested, BatchTested)
    assert tested.evidence == report.tests[0]
    after, last = told[-2:]
    assert isinstance(after, CriticMeasured)
    assert report.held_out.after is not None
    assert (after.when, after.usage) == ("after", report.usage)
    assert after.held_out.error == pytest.approx(report.held_out.after.error.value)
    assert last == Calibrated(report=report)
    spent = [event.usage.calls for event in told if isinstance(event, PairsMade | BatchTested | RoundBegan)]
    assert spent == sorted(spent)
    assert [CALIBRATION_EVENT.validate_json(event.model_dump_json()) for event in told] == told


def test_figures_leave_out_what_was_not_scored() -> None:
    """Steps without a valid score are counted apart; without any there is neither error nor accuracy."""
    said = Evaluation(phi_before=2, phi_after=7, reasoning="Chapters.")
    one = Scored(trace_id="t", step=0, gold=Gold(phi_before=2, phi_after=4, source="human"), evaluation=said)
    figures = figures_of([one, None])
    assert (figures.steps, figures.unscored, figures.error, figures.accuracy) == (1, 1, 3, 1)
    nothing = figures_of([None])
    assert (nothing.steps, nothing.unscored, nothing.error, nothing.accuracy) == (0, 1, None, None)
