"""How many calls a calibration takes at least and at most, said before anything is asked."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from calibration_memory import ListMemory
from flattered_world import answer, flattered_traces
from reflact import Calibrator, Trace
from reflact.calibration.config import CalibratorSettings
from reflact.calibration.report import CalibrationCostEstimate
from reflact.messages import CallId, RenderedPrompt, ReplyModel
from reflact.testing import ScriptedLLM
from reflact.testing.llm import Script, ScriptedAnswer, ScriptedCall


def settings(*, asked: int = 8, rounds: int = 1) -> CalibratorSettings:
    return CalibratorSettings(pairs_per_step=4, max_asked=asked, max_rounds=rounds)


def obliging(prompt: RenderedPrompt, reply_type: type[ReplyModel], call_id: CallId) -> ScriptedAnswer:
    return answer(prompt, reply_type)


def different(calls: list[ScriptedCall]) -> Counter[str]:
    asked = {json.dumps([c.call_id.purpose, c.call_id.label, str(c.prompt.messages)]) for c in calls}
    return Counter(json.loads(one)[0] for one in asked)


async def taken(
    how: CalibratorSettings, learn: list[Trace], held_out: list[Trace], script: Script = obliging
) -> tuple[CalibrationCostEstimate, list[ScriptedCall]]:
    llm = ScriptedLLM(script)
    calibrator = Calibrator(llm, ListMemory(), settings=how)
    estimate = await calibrator.estimate_cost(learn, heldout=held_out)
    assert llm.calls == []
    await calibrator.calibrate(learn, heldout=held_out, allow_untested=True)
    return estimate, llm.calls


@pytest.mark.parametrize(("asked", "rounds"), [(0, 1), (8, 3)])
async def test_a_calibration_stays_between_its_bounds(asked: int, rounds: int) -> None:
    """What a store of calls pays for is at least the low count; all that is asked is at most the high one."""
    how = settings(asked=asked, rounds=rounds)
    estimate, calls = await taken(how, flattered_traces("learn", 8), flattered_traces("held out", 20))
    assert estimate.min_calls <= different(calls).total()
    assert len(calls) <= estimate.max_calls


def stubborn(prompt: RenderedPrompt, reply_type: type[ReplyModel], call_id: CallId) -> ScriptedAnswer:
    return answer(prompt, reply_type) if call_id.attempt == 2 else "?"


async def test_the_most_is_a_bound() -> None:
    learn = flattered_traces("learn", 5)
    estimate, calls = await taken(settings(rounds=2), learn, flattered_traces("held out", 20), stubborn)
    assert estimate.min_calls <= len(calls) <= estimate.max_calls
