"""A test that was opened and never closed, since its process was killed in between."""

from __future__ import annotations

from pathlib import Path

import pytest

from flattered_world import PURPOSE, answer, steps
from reflact import Calibrator, MemoryStore, Trace
from reflact.calibration.config import CalibratorSettings, PairSettings
from reflact.calibration.report import CalibrationReport
from reflact.memory import Evaluation
from reflact.memory.models import PromotionEvidence
from reflact.testing import ScriptedLLM

pytestmark = pytest.mark.anyio

SETTINGS = CalibratorSettings(contrast=PairSettings(n_judges=0, candidates_per_event=2))


class Killed(Exception):
    """Stands for the end of a process."""


class Dying(MemoryStore):
    """A memory whose process is killed where it would close a test."""

    async def close_test(self, number: int, evidence: PromotionEvidence) -> None:
        """End."""
        raise Killed


class Overtaken(MemoryStore):
    """A memory in which another process closes each test first."""

    async def close_test(self, number: int, evidence: PromotionEvidence) -> None:
        """Close it twice."""
        await super().close_test(number, evidence)
        await super().close_test(number, evidence)


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


async def calibrated(store: MemoryStore) -> CalibrationReport:
    """Calibrate on traces that are always the same."""
    learn, held_out = [recorded(f"t{n}", n) for n in range(3)], [recorded(f"h{n}", n) for n in range(20)]
    llm = ScriptedLLM(lambda prompt, reply, call_id: answer(prompt, reply))
    return await Calibrator(llm, store, settings=SETTINGS).calibrate(learn, heldout=held_out)


async def test_it_is_ended_by_the_next_start(tmp_path: Path) -> None:
    """The report and the books are those of a calibration that nothing stopped: no level is spent twice."""
    async with MemoryStore(tmp_path / "whole.db") as whole:
        wanted, tests = await calibrated(whole), await whole.tests()
    assert [test.n_earlier_tests for test in tests] == [*range(len(tests))]
    async with Dying(tmp_path / "memory.db") as dying:
        with pytest.raises(Killed):
            await calibrated(dying)
        (opened,) = await dying.tests()
        assert opened.evidence is None
    async with MemoryStore(tmp_path / "memory.db") as store:
        assert await calibrated(store) == wanted
        assert [test.evidence for test in await store.tests()] == [test.evidence for test in tests]


async def test_it_is_left_where_the_batch_was_edited_since(tmp_path: Path) -> None:
    """What a test was opened for is not there any more, so another one is opened, and counts it."""
    async with Dying(tmp_path / "memory.db") as dying:
        with pytest.raises(Killed):
            await calibrated(dying)
        (opened,) = await dying.tests()
        card, _ = await dying.cards(opened.unit_ids[0])
        await dying.edit(card.id, strategy="Look at what is filed.")
    async with MemoryStore(tmp_path / "memory.db") as store:
        await calibrated(store)
        first, second, *_ = await store.tests()
        assert (first.evidence, second.n_earlier_tests) == (None, 1)


async def test_a_test_that_another_process_closed_first_is_said_to_be_over(tmp_path: Path) -> None:
    """Of two processes that end one test one stores the evidence, and the other goes on without."""
    async with Overtaken(tmp_path / "memory.db") as store:
        report = await calibrated(store)
        assert report.tests == ()
        assert report.not_tested_reason is not None
        assert "another process" in report.not_tested_reason
        assert [test.evidence is not None for test in await store.tests()] == [True]
