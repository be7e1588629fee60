"""A calibration that goes on takes no other critic's tests for its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from flattered_world import PURPOSE, answer, steps
from reflact import Calibrator, MemoryStore, Trace
from reflact.calibration.config import CalibratorSettings, PairSettings
from reflact.calibration.curriculum import CurriculumSettings
from reflact.calibration.report import CalibrationReport
from reflact.memory import Evaluation
from reflact.testing import ScriptedLLM

pytestmark = pytest.mark.anyio

SETTINGS = CalibratorSettings(
    contrast=PairSettings(n_judges=0, candidates_per_event=2), curriculum=CurriculumSettings(max_rounds=1)
)


class Killed(Exception):
    """Stands for the end of a process."""


class Dying(MemoryStore):
    """A memory whose process is killed where it would open a test."""

    async def open_test(self, *arguments: object, **named: object) -> None:  # type: ignore[override]
        """End."""
        raise Killed


def recorded(name: str, number: int) -> Trace:
    """Return a trace of one flattered step."""
    trace = Trace(PURPOSE, id=name)
    ((step, gold),) = steps(name, number, count=1, claims=[True])
    said = Evaluation(
        progress_before=0,
        progress_after=gold.progress_after + 3,
        reasoning="It says so.",
        evidence=("filed",),
    )
    trace.record(step, said, label=gold)
    return trace


async def calibrated(store: MemoryStore, model: str) -> CalibrationReport:
    """Calibrate a model's critic on traces that are always the same."""
    learn, held_out = [recorded(f"t{n}", n) for n in range(3)], [recorded(f"h{n}", n) for n in range(20)]
    llm = ScriptedLLM(lambda prompt, reply, call_id: answer(prompt, reply), identity=model)
    return await Calibrator(llm, store, settings=SETTINGS).calibrate(learn, heldout=held_out)


async def test_a_report_holds_its_own_critics_tests_only(tmp_path: Path) -> None:
    """Pairs of a calibration that was killed are tested with another model; its own report says so."""
    path = tmp_path / "memory.db"
    async with Dying(path) as memory:
        with pytest.raises(Killed):
            await calibrated(memory, "first")
    async with MemoryStore(path) as memory:
        other = await calibrated(memory, "second")
        report = await calibrated(memory, "first")
    assert [test.passed_test for test in other.tests] == [True]
    assert report.tests == ()
    assert report.not_tested_reason == "all pairs were tested before, or wait for somebody to look at them"
