"""Judges and writers whose replies are all invalid: a calibration ends, or goes on without the writer."""

from __future__ import annotations

from collections.abc import Callable
from io import StringIO
from itertools import count

import pytest
from rich.console import Console

from calibration_memory import ListMemory
from flattered_world import answer
from reflact import Calibrator
from reflact.calibration.config import CalibratorSettings, PairSettings
from reflact.calibration.curriculum import CurriculumSettings
from reflact.calibration.events import CalibrationEvent, Stopped
from reflact.calibration.limited import FIRST
from reflact.calibration.results import CalibrationReport
from reflact.calls import CallId, RenderedPrompt, ReplyModel
from reflact.cli.calibrated import print_calibration
from reflact.errors import ProviderDown, ReplyError, RunFailed
from reflact.pages.calibration import calibration_page
from reflact.testing import ScriptedLLM
from reflact.testing.llm import ScriptedAnswer
from test_calibrator import names, recorded
from test_cost_estimate import traces

pytestmark = pytest.mark.anyio

Mute = Callable[[CallId], bool]


def settings(*, judges: int = 0, places: int = 2, rounds: int = 1) -> CalibratorSettings:
    """Return settings of a calibration that needs a judge, or a writer for some of its pairs."""
    return CalibratorSettings(
        contrast=PairSettings(judges=judges, per_event=8),
        curriculum=CurriculumSettings(rounds=rounds, patience=rounds),
        concurrency=places,
    )


def muted(mute: Mute, *, stops: int | None = None) -> ScriptedLLM:
    """Return the flattered model, mute where that says so, and out of reach after so many questions."""
    numbers = count()

    def script(prompt: RenderedPrompt, reply_type: type[ReplyModel], call_id: CallId) -> ScriptedAnswer:
        if stops is not None and next(numbers) >= stops:
            return ProviderDown("gone")
        return ReplyError("better: [b]neither[/b]") if mute(call_id) else answer(prompt, reply_type)

    return ScriptedLLM(script)


def judging(call_id: CallId) -> bool:
    """Whether a judge is asked."""
    return call_id.role == "judge"


def writing(call_id: CallId) -> bool:
    """Whether a writer is asked."""
    return call_id.role == "contrast"


def asked(llm: ScriptedLLM, who: Mute) -> set[str]:
    """Return the different questions that somebody was asked."""
    return {call.call_id.label for call in llm.calls if who(call.call_id)}


async def calibrated(
    llm: ScriptedLLM, how: CalibratorSettings, *, learn: int = 4, memory: ListMemory | None = None
) -> CalibrationReport:
    """Return the report of a calibration over so many traces."""
    calibrator = Calibrator(llm, ListMemory() if memory is None else memory, settings=how)
    return await calibrator.calibrate(traces("learn", learn), heldout=traces("held out", 20))


# --------------------------------------------------------------------------------------------------- judges


async def test_a_mute_judge_ends_it_with_the_last_reason() -> None:
    """Ten comparisons without a valid reply are enough; but for what waits already no more is asked."""
    llm = muted(judging)
    with pytest.raises(RunFailed, match=r"any of the first 10 comparisons.*neither.*contrast\.judges: 0"):
        await calibrated(llm, settings(judges=3), learn=2 * FIRST)
    assert FIRST <= len(asked(llm, judging)) < 4 * FIRST


async def test_one_valid_comparison_is_enough_to_go_on() -> None:
    """A judge that is often silent loses pairs, and ends nothing."""
    numbers = count(1)
    llm = muted(lambda call_id: judging(call_id) and next(numbers) != FIRST)
    report = await calibrated(llm, settings(judges=3))
    assert len(asked(llm, judging)) > FIRST
    assert {drop.reason for drop in report.drops} >= {"judged_wrong"}


async def test_beside_an_agent_a_mute_judge_stops_it() -> None:
    """Nothing is raised into the agent; the calibrator says why it takes no further trace."""
    told: list[CalibrationEvent] = []
    how = settings(judges=3)
    async with Calibrator(muted(judging), ListMemory(), settings=how, tell=told.append) as calibrator:
        for number, name in enumerate(names("learn", 2 * FIRST)):
            calibrator.submit(recorded(name, number))
        await calibrator.idle()
    (stopped,) = [event for event in told if isinstance(event, Stopped)]
    assert "no valid reply to any of the first 10 comparisons" in stopped.reason


# -------------------------------------------------------------------------------------------------- writers


async def test_a_mute_writer_is_asked_no_more() -> None:
    """It is asked of the first ten traces, and in no later round; what needs no writer is made and tested."""
    few, many = muted(writing), muted(writing)
    await calibrated(few, settings(), learn=FIRST)
    report = await calibrated(many, settings(rounds=3), learn=3 * FIRST)
    assert len(asked(many, writing)) >= FIRST
    assert asked(many, writing) == asked(few, writing)
    assert report.rounds > 1
    assert report.promoted > 0
    lost = {drop.reason: drop.candidates for drop in report.drops}
    assert lost["bad_reply"] > len(asked(many, writing))


async def test_the_report_says_that_it_was_given_up() -> None:
    """With the last reason, letter by letter, and with nothing else about its questions."""
    report = await calibrated(muted(writing), settings(), learn=FIRST)
    out = StringIO()
    print_calibration(Console(file=out, width=400), report)
    (said,) = [line for line in out.getvalue().splitlines() if "no valid reply to any" in line]
    assert said.startswith("The writer gave no valid reply")
    assert said.endswith("; the last one: better: [b]neither[/b].")
    assert "None of the" not in out.getvalue()
    assert "<p>The writer gave no valid reply" in calibration_page(report)


async def test_a_writer_that_was_heard_once_is_asked_on() -> None:
    """One valid reply among the first traces is enough."""
    mute = muted(writing)
    await calibrated(mute, settings(), learn=FIRST)
    valid = min(asked(mute, writing))
    llm = muted(lambda call_id: writing(call_id) and call_id.label != valid)
    report = await calibrated(llm, settings(), learn=2 * FIRST)
    assert report.writer_given_up is None
    assert len(asked(llm, writing)) > len(asked(mute, writing))


@pytest.mark.slow
@pytest.mark.parametrize("places", [1, 3, 16])
async def test_how_many_are_asked_at_a_time_makes_no_difference(places: int) -> None:
    """That a writer is given up follows from what was said, not from when."""
    one, several = muted(writing), muted(writing)
    alone = await calibrated(one, settings(rounds=2), learn=2 * FIRST)
    together = await calibrated(several, settings(rounds=2, places=places), learn=2 * FIRST)
    assert asked(several, writing) == asked(one, writing)
    assert together == alone


@pytest.mark.slow
@pytest.mark.parametrize("stops", [60, 110, 150])
async def test_cut_off_it_gives_the_writer_up_at_the_same_place(stops: int) -> None:
    """The report of a calibration that went on is that of one that was never stopped."""
    whole = await calibrated(muted(writing), settings(rounds=2), learn=2 * FIRST)
    memory = ListMemory()
    with pytest.raises(ProviderDown):
        await calibrated(muted(writing, stops=stops), settings(rounds=2), learn=2 * FIRST, memory=memory)
    again = await calibrated(muted(writing), settings(rounds=2), learn=2 * FIRST, memory=memory)
    assert again == whole


async def test_beside_an_agent_a_mute_writer_is_asked_no_more() -> None:
    """Once ten questions of finished traces had no valid reply; the calibrator goes on with the rest."""
    llm, told = muted(writing), list[CalibrationEvent]()
    async with Calibrator(llm, ListMemory(), settings=settings(), tell=told.append) as calibrator:
        for number, name in enumerate(names("learn", 3 * FIRST)):
            calibrator.submit(recorded(name, number))
        await calibrator.idle()
    assert FIRST <= len(asked(llm, writing)) < FIRST + 4
    assert not [event for event in told if isinstance(event, Stopped)]
