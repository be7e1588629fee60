"""A calibration that was stopped, or whose tests another process closed, goes on as if it had not been."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from calibrate_command import Hold, configured, flattering, record, reflact
from flattered_world import PURPOSE, answer, record_flattered, steps
from reflact import Calibrator, MemoryStore, Trace
from reflact.calibration.config import CalibratorSettings
from reflact.calibration.events import (
    CALIBRATION_EVENT_ADAPTER,
    CalibrationEvent,
    CalibrationFinished,
    CalibrationStarted,
    PairBatchTested,
)
from reflact.calibration.report import CalibrationReport
from reflact.memory.models import PromotionEvidence
from reflact.testing import ScriptedLLM
from served import reflact_process

PLACES = 2


class World:
    """An endpoint, traces, and memories that begin empty."""

    def __init__(self, folder: Path, hold: Hold, url: str, asked: list[bytes]) -> None:
        self.folder, self.hold, self.url, self.asked = folder, hold, url, asked

    def configured(self, name: str) -> Path:
        limits = {"concurrency": PLACES, "pairs_per_step": 2, "max_rounds": 3}
        return configured(self.folder, self.url, name=name, **limits)

    def run(self, path: Path) -> list[CalibrationEvent]:
        result = reflact(path, "--show", "json")
        assert result.exit_code == 0, result.output
        return [CALIBRATION_EVENT_ADAPTER.validate_json(line) for line in result.stdout.splitlines()]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    record(tmp_path / "learn", 4)
    for n in range(4):
        trace = Trace(PURPOSE, id=f"bare {n}", path=tmp_path / "learn" / f"bare {n:03}.jsonl")
        ((step, _),) = steps(trace.id, n, count=1, claims=[n % 2 == 0])
        trace.record(step)
        trace.finish()
    record(tmp_path / "held out", 20)
    hold = Hold()
    with flattering(hold, excess=1) as (url, asked):
        yield World(tmp_path, hold, url, asked)
        hold.go_on.set()


def batches(told: list[CalibrationEvent]) -> list[PairBatchTested]:
    return [event for event in told if isinstance(event, PairBatchTested)]


@pytest.mark.slow
@pytest.mark.parametrize("beyond", [1, 20], ids=["at once", "later"])
def test_killed_after_a_promotion_it_goes_on_exactly(world: World, beyond: int) -> None:
    """The rerun asks nothing that was answered, and its report is that of a calibration never stopped."""
    whole = world.run(world.configured("whole"))
    first, *further = batches(whole)
    assert first.evidence.passed_test
    assert further
    everything = Counter(world.asked)
    world.asked.clear()
    world.hold.after = first.usage.calls + beyond
    path = world.configured("killed")
    with reflact_process("calibrate", path) as process:
        world.hold.until_held(PLACES)
        process.kill()
    answered = Counter(world.asked[: world.hold.after])
    world.hold.after = 1_000_000
    world.hold.go_on.set()
    world.asked.clear()
    again = world.run(path)
    asked = Counter(world.asked)
    assert not answered & asked
    assert answered + asked == everything
    assert isinstance(again[0], CalibrationStarted)
    assert again[0].resumed
    assert isinstance(again[-1], CalibrationFinished)
    assert again[-1] == whole[-1]
    assert [test.evidence for test in batches(again)] == [test.evidence for test in batches(whole)]


SETTINGS = CalibratorSettings(max_asked=0, pairs_per_step=2)


class Killed(Exception):
    """Stands for the end of a process."""


class DiesClosing(MemoryStore):
    """A memory whose process is killed where it would close a test."""

    async def close_test(self, number: int, evidence: PromotionEvidence) -> None:
        raise Killed


class Overtaken(MemoryStore):
    """A memory in which another process closes each test first."""

    async def close_test(self, number: int, evidence: PromotionEvidence) -> None:
        await super().close_test(number, evidence)
        await super().close_test(number, evidence)


async def calibrated(store: MemoryStore) -> CalibrationReport:
    learn = [record_flattered(f"t{n}", n) for n in range(3)]
    held_out = [record_flattered(f"h{n}", n) for n in range(20)]
    llm = ScriptedLLM(lambda prompt, reply, call_id: answer(prompt, reply), identity="one")
    return await Calibrator(llm, store, settings=SETTINGS).calibrate(learn, heldout=held_out)


async def killed(store: MemoryStore) -> None:
    async with store:
        with pytest.raises(Killed):
            await calibrated(store)


async def test_an_open_test_is_ended_by_the_next_start(tmp_path: Path) -> None:
    """The report and the books are those of a calibration that nothing stopped: no level is spent twice."""
    async with MemoryStore(tmp_path / "whole.db") as whole:
        wanted, tests = await calibrated(whole), await whole.tests()
    assert [test.n_earlier_tests for test in tests] == [*range(len(tests))]
    await killed(DiesClosing(tmp_path / "memory.db"))
    async with MemoryStore(tmp_path / "memory.db") as store:
        assert [test.evidence for test in await store.tests()] == [None]
        assert await calibrated(store) == wanted
        assert [test.evidence for test in await store.tests()] == [test.evidence for test in tests]


async def test_an_open_test_is_left_if_the_batch_has_changed_since(tmp_path: Path) -> None:
    await killed(DiesClosing(tmp_path / "memory.db"))
    async with MemoryStore(tmp_path / "memory.db") as store:
        (opened,) = await store.tests()
        await store.move(opened.pair_ids[:1], "archived", reason="old")
        await calibrated(store)
        first, second, *_ = await store.tests()
        assert (first.evidence, second.n_earlier_tests) == (None, 1)


async def test_a_test_that_another_process_closed_first_is_said_to_be_over(tmp_path: Path) -> None:
    async with Overtaken(tmp_path / "memory.db") as store:
        report = await calibrated(store)
        assert report.tests == ()
        assert "another process" in report.not_tested_reason
        assert [test.evidence is not None for test in await store.tests()] == [True]
