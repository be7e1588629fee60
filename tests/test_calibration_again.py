"""A calibration that is over: what starting it again does, and what it says of further tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from calibration_memory import ListMemory
from flattered_world import flattered
from reflact import Calibrator
from reflact.calibration.config import CalibratorSettings, PairSettings
from reflact.memory.cards import compute_alpha
from test_calibrate_cli import configured, flattering, one_line, record, reflact
from test_cost_estimate import traces

pytestmark = pytest.mark.anyio

SETTINGS = CalibratorSettings(contrast=PairSettings(n_judges=0, candidates_per_event=1))


async def test_nothing_is_asked_made_or_tested_while_nothing_has_changed() -> None:
    """The report is the stored one, marked as such; neither calls nor pairs nor tests come about."""
    llm, memory = flattered(), ListMemory()
    learn, held_out = traces("learn", 4), traces("held out", 20)
    first = await Calibrator(llm, memory, settings=SETTINGS).calibrate(learn, heldout=held_out)
    assert first.n_tests is not None
    calls, pairs = len(llm.calls), len(memory.stored)
    calibrator = Calibrator(llm, memory, settings=SETTINGS)
    estimate = await calibrator.estimate_cost(learn, heldout=held_out)
    second = await calibrator.calibrate(learn, heldout=held_out)
    assert (estimate.is_finished, estimate.n_earlier_tests) == (True, first.n_tests)
    assert second == first.model_copy(update={"is_earlier_result": True})
    assert (len(llm.calls), len(memory.stored), len(memory.booked)) == (calls, pairs, first.n_tests)


async def test_again_opens_another_test_at_the_level_that_is_left() -> None:
    """Further pairs of the same traces are made and tested as the next batch on these traces."""
    memory, calibrator = ListMemory(), None
    learn, held_out = traces("learn", 4), traces("held out", 20)
    calibrator = Calibrator(flattered(), memory, settings=SETTINGS)
    first = await calibrator.calibrate(learn, heldout=held_out)
    second = await calibrator.calibrate(learn, heldout=held_out, ignore_finished=True)
    assert first.n_tests is not None
    assert not second.is_earlier_result
    assert second.tests[0].n_earlier_tests == first.n_tests
    assert second.tests[0].alpha == pytest.approx(compute_alpha(first.n_tests))
    assert (await calibrator.calibrate(learn, heldout=held_out)).tests == second.tests


@pytest.mark.slow
@pytest.mark.parametrize("change", ["traces", "held out", "settings", "memory"])
async def test_what_has_changed_is_calibrated(change: str) -> None:
    """Another trace, another setting, or a promoted pair that was taken back make it another calibration."""
    memory, settings = ListMemory(), SETTINGS
    learn, held_out = traces("learn", 4), traces("held out", 20)
    await Calibrator(flattered(), memory, settings=settings).calibrate(learn, heldout=held_out)
    if change == "traces":
        learn = traces("learn", 5)
    elif change == "held out":
        held_out = traces("held out", 21)
    elif change == "settings":
        settings = settings.model_copy(update={"contrast": PairSettings(n_judges=0, candidates_per_event=2)})
    else:
        name, one = next((name, one) for name, one in memory.stored.items() if one.status == "promoted")
        memory.stored[name] = one.model_copy(update={"status": "quarantined", "reason": "measured harm"})
    report = await Calibrator(flattered(), memory, settings=settings).calibrate(learn, heldout=held_out)
    assert not report.is_earlier_result
    assert report.n_candidates > 0


def test_the_command_says_so_before_and_after(tmp_path: Path) -> None:
    """A dry run names the tests that were made and what is left; the report names it too."""
    record(tmp_path / "learn", 6)
    record(tmp_path / "held out", 24)
    with flattering() as (url, asked):
        path = configured(tmp_path, url)
        fresh = one_line(reflact(path, "--dry-run").stdout)
        first = one_line(reflact(path).stdout)
        paid = len(asked)
        estimate = one_line(reflact(path, "--dry-run").stdout)
        second = reflact(path)
        assert len(asked) == paid
    left = f"1 batch was tested on these held-out traces: another one passes at p of at most {compute_alpha(1):.2g}"
    assert left not in fresh
    assert left in first
    assert left in estimate
    assert "the command asks nothing, opens no test" in estimate
    assert second.exit_code == 0
    assert one_line(second.stdout).startswith("Nothing has changed since this calibration was made")
    assert "--again makes further pairs" in one_line(second.stdout)
    assert second.stderr == ""
