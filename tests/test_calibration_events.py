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
    CALIBRATION_EVENT_ADAPTER,
    CalibrationEvent,
    CalibrationFinished,
    CalibrationStarted,
    CriticMeasured,
    PairBatchTested,
    PairsGenerated,
    RoundStarted,
    summarize_scores,
)
from reflact.calibration.metrics import ScoredStep
from reflact.memory.models import Evaluation, Label

pytestmark = pytest.mark.anyio

PAGE = Path(__file__).parents[1] / "docs" / "calibration.md"


def trace(name: str, number: int) -> Trace:
    """Return a trace of one step whose critic was flattered."""
    made = Trace(PURPOSE, id=f"{name} {number}")
    ((step, gold),) = steps(made.id, number, count=1, claims=[True])
    reasoning = "The agent says that all is finished."
    said = Evaluation(
        progress_before=0, progress_after=gold.progress_after + 3, reasoning=reasoning, evidence=("filed",)
    )
    made.record(step, said, label=gold)
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
    settings = CalibratorSettings(
        contrast=PairSettings(n_judges=0, candidates_per_event=2, write_other_purposes=False)
    )
    calibrator = Calibrator(flattered(), ListMemory(), settings=settings, on_event=told.append)
    learn, held_out = [trace("t", n) for n in range(3)], [trace("h", n) for n in range(20)]
    report = await calibrator.calibrate(learn, heldout=held_out)
    first, before, began, *made, tested = told[:7]
    assert first == CalibrationStarted(
        n_training_traces=3, n_held_out_traces=20, n_held_out_steps=20, n_anchor_steps=0
    )
    assert isinstance(before, CriticMeasured)
    assert report.held_out.before is not None
    assert (before.when, before.held_out.n_steps, before.usage.calls) == ("before", 20, 20)
    assert before.held_out.error == pytest.approx(report.held_out.before.error.value)
    assert isinstance(began, RoundStarted)
    assert (began.number, began.n_traces) == (1, 3)
    assert all(isinstance(event, PairsGenerated) for event in made)
    for event in made:
        assert isinstance(event, PairsGenerated)
        assert event.n_candidates == event.n_pairs + sum(drop.n_candidates for drop in event.dropped) == 2
    assert isinstance(tested, PairBatchTested)
    assert tested.evidence == report.tests[0]
    after, last = told[-2:]
    assert isinstance(after, CriticMeasured)
    assert report.held_out.after is not None
    assert (after.when, after.usage) == ("after", report.usage)
    assert after.held_out.error == pytest.approx(report.held_out.after.error.value)
    assert last == CalibrationFinished(report=report)
    spent = [
        event.usage.calls
        for event in told
        if isinstance(event, PairsGenerated | PairBatchTested | RoundStarted)
    ]
    assert spent == sorted(spent)
    assert [CALIBRATION_EVENT_ADAPTER.validate_json(event.model_dump_json()) for event in told] == told


def test_figures_leave_out_what_was_not_scored() -> None:
    """Steps without a valid score are counted apart; without any there is neither error nor accuracy."""
    said = Evaluation(progress_before=2, progress_after=7, reasoning="Chapters.")
    one = ScoredStep(
        trace_id="t",
        step=0,
        label=Label(progress_before=2, progress_after=4, source="human"),
        evaluation=said,
    )
    figures = summarize_scores([one, None])
    assert (figures.n_steps, figures.n_unscored, figures.error, figures.accuracy) == (1, 1, 3, 1)
    nothing = summarize_scores([None])
    assert (nothing.n_steps, nothing.n_unscored, nothing.error, nothing.accuracy) == (0, 1, None, None)
