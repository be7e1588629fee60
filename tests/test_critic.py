"""The critic: what it asks, what it makes of the replies, what it keeps, what it is pinned to."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest

from critic_world import pair, store_of
from doubles import Endpoint, completion, config, connected
from reflact import Calibrator, Critic
from reflact.calibration.critic import CRITIC_SCOPE, CriticReply
from reflact.calibration.transition_view import estimate_tokens
from reflact.config.critic import CriticSettings
from reflact.errors import ConfigError, ReplyError
from reflact.llm import ModelConfig
from reflact.memory.models import Action, Scope, Transition
from reflact.memory.store import MemoryStore
from reflact.testing import ScriptedLLM

PAID = Transition(
    before={"status": "open", "mails": 0},
    action=Action(name="pay", arguments={"amount": 3}),
    after={"status": "paid", "mails": 0},
)
PURPOSE = "The order is paid."


def reply(**fields: Any) -> dict[str, Any]:
    usual = {
        "reasoning": "It is paid.",
        "evidence": ["status: paid"],
        "phi_before": 2,
        "phi_after": 5,
        "confidence": 0.9,
    }
    return usual | fields


def answering(*replies: Any) -> ScriptedLLM:
    given = [*replies]
    return ScriptedLLM(lambda *_: given.pop(0) if len(given) > 1 else given[0])


@pytest.mark.parametrize(
    "bad",
    [
        '{"reasoning": "r", "evidence": ["paid"], "phi_before": 2, "phi_after": NaN, "confidence": 1}',
        '{"reasoning": "r", "evidence": ["paid"], "phi_before": 2, "phi_after": Infinity, "confidence": 1}',
        reply(phi_after=10.5),
        reply(phi_before=None),
        reply(phi_after="7/10"),
        reply(confidence=1.2),
        reply(reasoning=None),
        "It went well: 9 of 10.",
    ],
)
async def test_what_is_no_evaluation_is_refused(bad: Any) -> None:
    """NaN, numbers off the scale, text for numbers and empty reasoning are asked again, and never a score."""
    llm = answering(bad)
    with pytest.raises(ReplyError):
        await Critic(llm).score(PAID, purpose=PURPOSE)
    assert len(llm.calls) == 3
    mended = await Critic(answering(bad, reply())).score(PAID, purpose=PURPOSE)
    assert mended.raw == CriticReply.model_validate(reply()).evaluation


async def test_invented_evidence_is_asked_again_and_then_counts_nothing() -> None:
    """The model is told which quote is not there; if it stays with it, there is no credit."""
    endpoint = Endpoint(completion(json.dumps(reply(evidence=["all tests pass"]))))
    async with connected(endpoint, config(reasks=1)) as client:
        score = await Critic(client).score(PAID, purpose=PURPOSE)
    assert (
        "'all tests pass' stands neither in the state after" in endpoint.bodies[1]["messages"][-1]["content"]
    )
    assert (score.evaluation.delta, score.evaluation.confidence) == (0, 0.2)
    assert score.applied_guards == ("invented_evidence",)
    assert score.raw.delta == 3


async def test_the_median_of_several_samples_counts() -> None:
    llm = answering(*(reply(phi_after=phi, reasoning=f"{phi}") for phi in (6, 3, 5)))
    score = await Critic(llm, settings=CriticSettings(n_samples=3)).score(PAID, purpose=PURPOSE)
    assert (score.evaluation.progress_after, score.evaluation.reasoning) == (5, "5")
    assert (score.n_samples, score.spread, score.applied_guards) == (3, 3, ("spread",))
    assert score.evaluation.confidence == pytest.approx(0.7)
    assert len({call.call_id.label for call in llm.calls}) == 3


async def test_equal_questions_are_asked_once_and_others_anew() -> None:
    llm = ScriptedLLM(lambda prompt, *_: reply(phi_after=9 if "Pay" in prompt.messages[1].content else 2))
    critic = Critic(llm)
    first = await critic.score(PAID, purpose="Pay.")
    same = Transition(before={"mails": 0, "status": "open"}, action=PAID.action, after=PAID.after)
    assert await critic.score(same, purpose="Pay.") == first
    assert (await critic.score(PAID, purpose="Ship.")).evaluation.progress_after == 2
    assert await critic.score(PAID, purpose="Pay.") == first
    assert first.evaluation.progress_after == 9
    await critic.score(PAID, purpose="Pay.", pairs=[pair(Random(1))])
    await critic.score(PAID.model_copy(update={"action": Action(name="wait")}), purpose="Pay.")
    asked, other_purpose, shown, _ = (call.call_id for call in llm.calls)
    assert asked == shown != other_purpose
    assert (asked.role, asked.purpose, asked.step, asked.rollout) == ("critic", "score", None, None)


@pytest.mark.parametrize("part", ["after", "action"])
async def test_what_is_cut_is_marked(part: str) -> None:
    """A text that is too long keeps both ends and says between them how much is missing."""
    long = "start " + "\u5b8c\u6210 word \U0001f389 " * 3000 + " end"
    fields: dict[str, Any] = {"before": "b", "after": "a", "action": Action(name="do")}
    fields |= {"action": Action(name="do", arguments=long)} if part == "action" else {part: long}
    purpose = fields.pop("purpose", PURPOSE)
    llm = answering(reply(phi_after=2))
    await Critic(llm).score(Transition(**fields), purpose=purpose)
    content = llm.calls[0].prompt.messages[1].content
    shown = content.split(f"<{part}>\n")[1].split(f"\n</{part}>")[0]
    assert estimate_tokens(shown) <= 2000
    assert "start" in shown
    assert shown.endswith("end")
    assert "characters cut ...]" in shown
    assert "a mark says that characters were cut" in llm.calls[0].prompt.messages[0].content


async def test_a_pinned_critic_does_not_follow_the_memory() -> None:
    first, second, foreign = (pair(Random(n)).model_copy(update={"scope": CRITIC_SCOPE}) for n in range(3))
    foreign = foreign.model_copy(update={"scope": Scope(roles=("coder",))})
    memory = store_of(first)
    pinned = await Critic(answering(reply()), memory=memory).pin()
    memory.stored.extend(store_of(second).stored)
    assert (await pinned.score(PAID, purpose=PURPOSE)).pair_ids == (first.id,)
    assert (await (await pinned.pin()).score(PAID, purpose=PURPOSE)).pair_ids == (first.id,)
    assert (await pinned.pin_to([foreign]).score(PAID, purpose=PURPOSE)).pair_ids == ()
    assert len(memory.asked) == 1


@pytest.mark.parametrize("model", [None, ModelConfig(model="m")])
async def test_a_model_has_to_be_connected(tmp_path: Path, model: Any) -> None:
    async with MemoryStore(tmp_path / "memory.db") as memory:
        with pytest.raises(ConfigError, match="a critic needs a connected model"):
            Critic(model)
        with pytest.raises(ConfigError, match="a calibrator needs a connected model"):
            Calibrator(model, memory)
