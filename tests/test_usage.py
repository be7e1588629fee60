"""What a calibration consumed: every reply counts, whoever asked and whatever became of it."""

from __future__ import annotations

import re
from collections.abc import Callable

import anyio
import anyio.lowlevel
import pytest

from calibration_memory import ListMemory
from flattered_world import PURPOSE, answer, flattered_traces, name_traces, record_flattered, unscored
from reflact import Calibrator, Critic
from reflact.calibration.config import CalibratorSettings
from reflact.calibration.critic import CriticReply
from reflact.calibration.events import CalibrationEvent, CalibratorStopped
from reflact.calibration.labeled_steps import MAX_FIRST_FAILURES
from reflact.calibration.report import CalibrationReport
from reflact.errors import ReplyError, RunFailed
from reflact.messages import CallId, RenderedPrompt, ReplyModel
from reflact.records import Usage
from reflact.testing import ScriptedLLM
from reflact.testing.llm import ScriptedAnswer

SETTINGS = CalibratorSettings(pairs_per_step=2, concurrency=2, max_rounds=1)


async def test_the_calls_of_a_critic_that_is_passed_in_count_and_wait_for_a_slot() -> None:
    """They are in the report by purpose, refused ones too, and no more than allowed are in flight."""
    flying = most = refused = 0

    async def script(prompt: RenderedPrompt, reply_type: type[ReplyModel], call_id: CallId) -> ScriptedAnswer:
        nonlocal flying, most, refused
        flying += 1
        most = max(most, flying)
        await anyio.lowlevel.checkpoint()
        flying -= 1
        if reply_type is CriticReply and call_id.attempt == 0:
            refused += 1
            return "?"
        return answer(prompt, reply_type)

    llm = ScriptedLLM(script)
    critic = Critic(llm)
    calibrator = Calibrator(llm, ListMemory(), critic=critic, settings=SETTINGS)
    learn = [record_flattered(f"t{n}", n) for n in range(3)]
    held_out = [record_flattered(f"h{n}", n) for n in range(20)]
    await critic.score(learn[0].events[0].transition, purpose=PURPOSE)
    assert calibrator.usage == Usage()
    outside, refused = len(llm.calls), 0
    report = await calibrator.calibrate(learn, heldout=held_out)
    assert report.n_questions >= 20
    assert report.n_invalid == refused > 0
    assert report.usage == calibrator.usage
    assert report.usage.calls == len(llm.calls) - outside
    assert most == 2


def muted(mute: Callable[[CallId], bool]) -> ScriptedLLM:
    def script(prompt: RenderedPrompt, reply_type: type[ReplyModel], call_id: CallId) -> ScriptedAnswer:
        return ReplyError("better: [b]neither[/b]") if mute(call_id) else answer(prompt, reply_type)

    return ScriptedLLM(script)


async def calibrate(llm: ScriptedLLM) -> CalibrationReport:
    calibrator = Calibrator(llm, ListMemory(), settings=SETTINGS)
    return await calibrator.calibrate(flattered_traces("learn", 4), heldout=flattered_traces("held out", 20))


async def test_without_a_valid_score_it_ends_with_the_last_reason() -> None:
    words = r"any of the first 10 questions.*neither.*models\.critic"
    llm = muted(lambda call_id: call_id.role == "critic")
    with pytest.raises(RunFailed, match=words):
        await calibrate(llm)
    assert MAX_FIRST_FAILURES <= len({call.call_id.label for call in llm.calls}) <= MAX_FIRST_FAILURES + 2
    events: list[CalibrationEvent] = []
    async with Calibrator(llm, ListMemory(), settings=SETTINGS, on_event=events.append) as calibrator:
        for n, name in enumerate(name_traces("learn", 2 * MAX_FIRST_FAILURES)):
            calibrator.submit(unscored(record_flattered(name, n)))
        await calibrator.wait_until_idle()
    (reason,) = [event.reason for event in events if isinstance(event, CalibratorStopped)]
    assert re.search(words, reason)


@pytest.mark.parametrize(("role", "reason"), [("contrast", "bad_reply"), ("judge", "judged_wrong")])
async def test_a_mute_writer_or_judge_costs_candidates_and_ends_nothing(role: str, reason: str) -> None:
    report = await calibrate(muted(lambda call_id: call_id.role == role))
    assert {drop.reason for drop in report.dropped} == {reason}
    assert report.n_promoted > 0
