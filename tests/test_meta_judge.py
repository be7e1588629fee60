"""Judging the judge: five bounded numbers, an overall that is computed, cards for what stands out."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from contrast_world import PURPOSE, event
from reflact.calibration.meta_judge import (
    MetaJudgeResult,
    MetaJudgeSettings,
    MetaReply,
    judge_evaluations,
    rate_evaluation,
)
from reflact.errors import ConfigError
from reflact.testing import ScriptedLLM

pytestmark = pytest.mark.anyio

NAMES = ("accuracy", "evidence", "consistency", "calibration", "usefulness")
CRITIC = ScriptedLLM(lambda *call: None, identity="critic")


def reply(*points: Any, **more: Any) -> dict[str, Any]:
    """Return a reply with these five numbers."""
    return dict(zip(NAMES, points, strict=True)) | {"feedback": "It looks at the state."} | more


async def judged(*replies: Any, **settings: Any) -> tuple[MetaJudgeResult, ...]:
    """Judge as many evaluations as there are replies, each with its own."""
    events = [event(n) for n in range(len(replies))]

    def answer(prompt: Any, reply_type: Any, call_id: Any) -> Any:
        text = prompt.messages[1].content
        return replies[next(n for n in range(len(replies)) if f"Step {n} was scored." in text)]

    judge = ScriptedLLM(answer, identity="judge")
    return await judge_evaluations(
        events,
        purpose=PURPOSE,
        trace_id="t",
        judge=judge,
        critic=CRITIC,
        settings=MetaJudgeSettings(**settings),
    )


async def test_what_stands_out_becomes_a_card() -> None:
    """Good evaluations are candidates for calibration, poor ones failure patterns, middling ones nothing."""
    results = await judged(reply(8, 8, 7, 7, 8), reply(2, 1, 5, 5, 2), reply(5, 5, 5, 5, 5))
    assert [one.quality for one in results] == ["good", "poor", "middling"]
    good, poor, middling = (one.card for one in results)
    assert good is not None
    assert poor is not None
    assert middling is None
    assert (good.kind, poor.kind) == ("critic_calibration", "failure_pattern")
    for card in (good, poor):
        assert card.status == "candidate"
        assert card.scope.roles == ("critic",)
        assert card.provenance.prompt == "meta_judge@1"
        assert "chapters" in card.content
        assert card.strategy == "It looks at the state."


@given(st.lists(st.integers(0, 10), min_size=5, max_size=5))
def test_the_overall_score_follows_from_the_components(points: list[int]) -> None:
    """It is their mean; one poor component keeps an evaluation from being good."""
    said = MetaReply.model_validate(reply(*points))
    standing = rate_evaluation(said, MetaJudgeSettings())
    assert said.overall == sum(points) / 5
    assert (standing == "good") == (sum(points) >= 35 and min(points) >= 4)
    assert (standing == "poor") == (sum(points) < 20)


@pytest.mark.parametrize(
    "broken",
    [
        reply(0, 0, 0, 0, 0, overall=8),
        reply(95, 9, 9, 9, 9),
        reply(-1, 9, 9, 9, 9),
        reply("8/10", 9, 9, 9, 9),
        reply("8", 9, 9, 9, 9),
        reply(7.5, 9, 9, 9, 9),
        reply(None, 9, 9, 9, 9),
        reply(9, 9, 9, 9, 9, feedback=" "),
    ],
)
async def test_a_reply_that_claims_or_exceeds_is_unread(broken: dict[str, Any]) -> None:
    """An overall of its own, numbers off the scale and words instead of numbers never become a card."""
    with pytest.raises(ValidationError):
        MetaReply.model_validate(broken)
    (result,) = await judged(broken)
    assert (result.quality, result.overall, result.card) == ("unread", None, None)
    assert result.feedback


async def test_the_critic_does_not_judge_itself() -> None:
    """The same model is refused before any call, unless that is what was asked for."""
    same = ScriptedLLM(lambda *call: reply(8, 8, 8, 8, 8), identity="critic")
    with pytest.raises(ConfigError, match="same_model"):
        await judge_evaluations([event()], purpose=PURPOSE, trace_id="t", judge=same, critic=CRITIC)
    assert same.calls == []
    allowed = MetaJudgeSettings(allow_same_model=True)
    (result,) = await judge_evaluations(
        [event()], purpose=PURPOSE, trace_id="t", judge=same, critic=CRITIC, settings=allowed
    )
    assert result.quality == "good"


def test_limits_must_be_in_order() -> None:
    """What is poor lies below what is good."""
    with pytest.raises(ValidationError, match="must not exceed"):
        MetaJudgeSettings(good_threshold=3, poor_threshold=4)
