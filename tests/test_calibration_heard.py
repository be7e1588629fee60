"""A critic whose replies are all invalid ends a calibration early, with the last reason."""

from __future__ import annotations

from itertools import count
from pathlib import Path

import pytest

from calibration_memory import ListMemory
from flattered_world import PURPOSE, answer, transition
from reflact import Calibrator, Trace
from reflact.calibration.call_policies import FAIL_FAST_CALLS
from reflact.calibration.config import CalibratorSettings, PairSettings
from reflact.calibration.critic import CriticReply
from reflact.calibration.events import CalibrationEvent, CalibratorStopped
from reflact.errors import ReplyError, RunFailed
from reflact.messages import CallId, RenderedPrompt, ReplyModel
from reflact.testing import ScriptedLLM
from reflact.testing.llm import ScriptedAnswer
from test_calibrate_cli import configured, flattering, record, reflact
from test_calibrator import names
from test_cost_estimate import traces

pytestmark = pytest.mark.anyio

PLACES = 2
SETTINGS = CalibratorSettings(contrast=PairSettings(n_judges=0, candidates_per_event=1), concurrency=PLACES)


def silent(until: int | None = None) -> ScriptedLLM:
    """Return the flattered model, which gives no valid score, or none in so many first questions."""
    numbers = count()

    def script(prompt: RenderedPrompt, reply_type: type[ReplyModel], call_id: CallId) -> ScriptedAnswer:
        if reply_type is CriticReply and (until is None or next(numbers) < until):
            return ReplyError("phi_after: 11 is above 10")
        return answer(prompt, reply_type)

    return ScriptedLLM(script)


async def test_it_ends_with_the_last_reason() -> None:
    """Ten questions without a valid score are enough; nothing more is asked than what was in flight."""
    llm = silent()
    with pytest.raises(RunFailed, match=r"any of the first 10 questions.*phi_after: 11 is above 10.*models"):
        await Calibrator(llm, ListMemory(), settings=SETTINGS).calibrate(
            traces("learn", 4), heldout=traces("held out", 20)
        )
    assert FAIL_FAST_CALLS <= len(llm.calls) <= FAIL_FAST_CALLS + PLACES


async def test_one_valid_score_is_enough_to_go_on() -> None:
    """A critic that is often silent is no wrong model: its silence is counted instead."""
    report = await Calibrator(silent(FAIL_FAST_CALLS - 1), ListMemory(), settings=SETTINGS).calibrate(
        traces("learn", 4), heldout=traces("held out", 20)
    )
    assert report.held_out.n_unscored == FAIL_FAST_CALLS - 1


async def test_beside_an_agent_it_stops() -> None:
    """Nothing is raised into the agent; the calibrator says why it takes no further trace."""
    told: list[CalibrationEvent] = []
    async with Calibrator(silent(), ListMemory(), settings=SETTINGS, on_event=told.append) as calibrator:
        for number, name in enumerate(names("learn", 2 * FAIL_FAST_CALLS)):
            trace = Trace(PURPOSE, id=name)
            trace.record(transition(name, number, number + 1, claims=True))
            calibrator.submit(trace)
        await calibrator.wait_until_idle()
    (stopped,) = [event for event in told if isinstance(event, CalibratorStopped)]
    assert "no valid score" in stopped.reason


def test_the_command_ends_with_code_1(tmp_path: Path) -> None:
    """A model that answers in another form is told after a few calls, in one sentence."""
    record(tmp_path / "learn", 6)
    record(tmp_path / "held out", 24)
    with flattering(first="What a lovely day.") as (url, asked):
        path = configured(tmp_path, url)
        result = reflact(path, "--set", "models.critic.reasks=0", "--show", "quiet")
    assert result.exit_code == 1
    kept, error = result.stderr.splitlines()
    assert kept.startswith("stopped before the first round")
    assert error.startswith("error: the critic gave no valid score of any of the first 10 questions")
    assert len(asked) <= FAIL_FAST_CALLS + 8
