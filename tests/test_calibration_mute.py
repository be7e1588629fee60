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
from reflact.calibration.call_policies import FAIL_FAST_CALLS
from reflact.calibration.config import CalibratorSettings, PairSettings
from reflact.calibration.curriculum import CurriculumSettings
from reflact.calibration.events import CalibrationEvent, CalibratorStopped
from reflact.calibration.report import CalibrationReport
from reflact.cli.calibrate_output import print_calibration
from reflact.errors import ProviderDown, ReplyError, RunFailed
from reflact.messages import CallId, RenderedPrompt, ReplyModel
from reflact.reporting.html.calibration import render_calibration_page
from reflact.testing import ScriptedLLM
from reflact.testing.llm import ScriptedAnswer
from test_calibrator import names, recorded
from test_cost_estimate import traces

pytestmark = pytest.mark.anyio

Mute = Callable[[CallId], bool]


def settings(*, judges: int = 0, places: int = 2, rounds: int = 1) -> CalibratorSettings:
    """Return settings of a calibration that needs a judge, or a writer for some of its pairs."""
    return CalibratorSettings(
        contrast=PairSettings(n_judges=judges, candidates_per_event=8),
        curriculum=CurriculumSettings(max_rounds=rounds, patience=rounds),
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
    with pytest.raises(RunFailed, match=r"any of the first 10 comparisons.*neither.*contrast\.n_judges: 0"):
        await calibrated(llm, settings(judges=3), learn=2 * FAIL_FAST_CALLS)
    assert FAIL_FAST_CALLS <= len(asked(llm, judging)) < 4 * FAIL_FAST_CALLS


async def test_one_valid_comparison_is_enough_to_go_on() -> None:
    """A judge that is often silent loses pairs, and ends nothing."""
    numbers = count(1)
    llm = muted(lambda call_id: judging(call_id) and next(numbers) != FAIL_FAST_CALLS)
    report = await calibrated(llm, settings(judges=3))
    assert len(asked(llm, judging)) > FAIL_FAST_CALLS
    assert {drop.reason for drop in report.dropped} >= {"judged_wrong"}


async def test_beside_an_agent_a_mute_judge_stops_it() -> None:
    """Nothing is raised into the agent; the calibrator says why it takes no further trace."""
    told: list[CalibrationEvent] = []
    how = settings(judges=3)
    async with Calibrator(muted(judging), ListMemory(), settings=how, on_event=told.append) as calibrator:
        for number, name in enumerate(names("learn", 2 * FAIL_FAST_CALLS)):
            calibrator.submit(recorded(name, number))
        await calibrator.wait_until_idle()
    (stopped,) = [event for event in told if isinstance(event, CalibratorStopped)]
    assert "no valid reply to any of the first 10 comparisons" in stopped.reason


# -------------------------------------------------------------------------------------------------- writers


async def test_a_mute_writer_is_asked_no_more() -> None:
    """It is asked of the first ten traces, and in no later round; what needs no writer is made and tested."""
    few, many = muted(writing), muted(writing)
    await calibrated(few, settings(), learn=FAIL_FAST_CALLS)
    report = await calibrated(many, settings(rounds=3), learn=3 * FAIL_FAST_CALLS)
    assert len(asked(many, writing)) >= FAIL_FAST_CALLS
    assert asked(many, writing) == asked(few, writing)
    assert report.n_rounds > 1
    assert report.n_promoted > 0
    lost = {drop.reason: drop.n_candidates for drop in report.dropped}
    assert lost["bad_reply"] > len(asked(many, writing))


async def test_the_report_says_that_it_was_given_up() -> None:
    """With the last reason, letter by letter, and with nothing else about its questions."""
    report = await calibrated(muted(writing), settings(), learn=FAIL_FAST_CALLS)
    out = StringIO()
    print_calibration(Console(file=out, width=400), report)
    (said,) = [line for line in out.getvalue().splitlines() if "no valid reply to any" in line]
    assert said.startswith("The writer gave no valid reply")
    assert said.endswith("; the last one: better: [b]neither[/b].")
    assert "None of the" not in out.getvalue()
    assert "<p>The writer gave no valid reply" in render_calibration_page(report)


async def test_a_writer_that_was_heard_once_is_asked_on() -> None:
    """One valid reply among the first traces is enough."""
    mute = muted(writing)
    await calibrated(mute, settings(), learn=FAIL_FAST_CALLS)
    valid = min(asked(mute, writing))
    llm = muted(lambda call_id: writing(call_id) and call_id.label != valid)
    report = await calibrated(llm, settings(), learn=2 * FAIL_FAST_CALLS)
    assert report.writer_stop_reason is None
    assert len(asked(llm, writing)) > len(asked(mute, writing))


@pytest.mark.slow
@pytest.mark.parametrize("places", [1, 3, 16])
async def test_how_many_are_asked_at_a_time_makes_no_difference(places: int) -> None:
    """That a writer is given up follows from what was said, not from when."""
    one, several = muted(writing), muted(writing)
    alone = await calibrated(one, settings(rounds=2), learn=2 * FAIL_FAST_CALLS)
    together = await calibrated(several, settings(rounds=2, places=places), learn=2 * FAIL_FAST_CALLS)
    assert asked(several, writing) == asked(one, writing)
    assert together == alone


@pytest.mark.slow
@pytest.mark.parametrize("stops", [60, 110, 150])
async def test_cut_off_it_gives_the_writer_up_at_the_same_place(stops: int) -> None:
    """The report of a calibration that went on is that of one that was never stopped."""
    whole = await calibrated(muted(writing), settings(rounds=2), learn=2 * FAIL_FAST_CALLS)
    memory = ListMemory()
    with pytest.raises(ProviderDown):
        await calibrated(
            muted(writing, stops=stops), settings(rounds=2), learn=2 * FAIL_FAST_CALLS, memory=memory
        )
    again = await calibrated(muted(writing), settings(rounds=2), learn=2 * FAIL_FAST_CALLS, memory=memory)
    assert again == whole


async def test_beside_an_agent_a_mute_writer_is_asked_no_more() -> None:
    """Once ten questions of finished traces had no valid reply; the calibrator goes on with the rest."""
    llm, told = muted(writing), list[CalibrationEvent]()
    async with Calibrator(llm, ListMemory(), settings=settings(), on_event=told.append) as calibrator:
        for number, name in enumerate(names("learn", 3 * FAIL_FAST_CALLS)):
            calibrator.submit(recorded(name, number))
        await calibrator.wait_until_idle()
    assert FAIL_FAST_CALLS <= len(asked(llm, writing)) < FAIL_FAST_CALLS + 4
    assert not [event for event in told if isinstance(event, CalibratorStopped)]
