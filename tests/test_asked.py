"""Mistakes that a model is asked to write: what it is told, what is valid, and what the judge keeps."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from critic_world import PURPOSE, KnowingJudge, event, mistaken
from doubles import Endpoint, completion, config, connected
from reflact.calibration.asked import (
    KNOWN_MISTAKES,
    AskedMistake,
    DroppedCandidate,
    MistakenReply,
    ask_for_pair,
    compute_reach,
)
from reflact.calibration.pairs import StepToContrast, find_reference
from reflact.errors import ContextOverflow, ProviderDown
from reflact.memory.models import ContrastPair, Label
from reflact.messages import CallId, RenderedPrompt, ReplyModel
from reflact.prompts import load_prompts
from reflact.protocols import LLM
from reflact.testing import ScriptedLLM
from reflact.testing.llm import ScriptedAnswer

INFLATED = KNOWN_MISTAKES[1]
PROMPTS = load_prompts()


RIGHT = "Two of the three chapters are there."
DONE = "The report is as good as done."
GOOD = {"mistake": "inflated_score", "reasoning": DONE, "phi_after": 9, "why": "A chapter is missing."}
"""A valid mistake beside the right score of 6; the room is 7 to 10."""


def text(**changed: Any) -> str:
    return json.dumps(GOOD | changed)


BAD: dict[str, tuple[str | None, str]] = {
    "missing field": (json.dumps({k: v for k, v in GOOD.items() if k != "why"}), "why: Field required"),
    "not a number": (text(phi_after=float("nan")), "phi_after"),
    "above the scale": (text(phi_after=42), "less than or equal to 10"),
    "equal to what is right": (text(phi_after=6), "phi_after must be from 7 to 10"),
    "nearer than the margin": (text(phi_after=6.9), "phi_after must be from 7 to 10"),
    "the other direction": (text(phi_after=1), "phi_after must be from 7 to 10"),
    "a score in words": (text(phi_after="9/10"), "phi_after"),
    "blank reasoning": (text(reasoning=" .\n"), "must hold words"),
    "the right reasoning": (text(reasoning=f"  {RIGHT.upper()} "), "that of the right evaluation"),
    "an unknown mistake": (text(mistake="sycophancy"), "mistake"),
    "another known mistake": (text(mistake="ignored_evidence"), "mistake"),
    "no JSON": ("I give it a nine, since it is nearly done.", "Invalid JSON"),
    "cut off": (text()[:40], "cut off"),
    "a refusal": (None, "it was a refusal"),
}


def bad(kind: str) -> httpx.Response:
    content = BAD[kind][0]
    if content is None:
        return completion(None, refusal="I would rather not.")
    return completion(content, finish="length" if kind == "cut off" else "stop")


EVENT = event().model_copy(
    update={"label": Label(progress_before=2, progress_after=6, source="human", reasoning=RIGHT)}
)


async def ask(llm: LLM, *, round_number: int = 1) -> ContrastPair | DroppedCandidate:
    right = find_reference(EVENT)
    assert right is not None
    step = StepToContrast(EVENT, right, PURPOSE, "t")
    reach = compute_reach(INFLATED, step)
    assert reach is not None
    asked = AskedMistake(step, INFLATED, reach, round_number)
    return await ask_for_pair(asked, llm=llm, prompts=PROMPTS)


def play(judge: KnowingJudge) -> ScriptedLLM:
    def script(prompt: RenderedPrompt, reply_type: type[ReplyModel], call_id: CallId) -> ScriptedAnswer:
        is_writer = issubclass(reply_type, MistakenReply)
        return (mistaken if is_writer else judge)(prompt, reply_type, call_id)

    return ScriptedLLM(script)


async def test_a_pair_that_the_judge_finds_in_both_orders_is_kept() -> None:
    llm = play(KnowingJudge())
    pair = await ask(llm, round_number=2)
    assert isinstance(pair, ContrastPair)
    assert (pair.construction, pair.mistake, pair.label_source) == ("asked", "inflated_score", "human")
    assert pair.right.progress_after == 6
    assert (pair.provenance.trace_id, pair.provenance.prompt) == ("t", "contrast@2")
    written, *judged = [call.prompt.messages for call in llm.calls]
    assert "hard to notice" in written[0].content
    assert "<right>\n6: " in written[1].content
    assert "Right before the action: 2." in written[1].content
    positions = [one[1].content.index(RIGHT) < one[1].content.index(pair.wrong.reasoning) for one in judged]
    assert positions == [True, False]


@pytest.mark.parametrize("always", ["first", "second"])
async def test_a_judge_that_looks_at_the_order_keeps_nothing(always: str) -> None:
    """It is asked no further once it was wrong."""
    llm = play(KnowingJudge(always=always))
    drop = await ask(llm)
    assert isinstance(drop, DroppedCandidate)
    assert drop.reason == "judged_wrong"
    assert len(llm.calls) == (3 if always == "first" else 2)


async def test_what_could_not_be_asked_is_told_from_what_was_not_answered() -> None:
    """A prompt that is too long is a drop; a dead provider is an error."""
    drop = await ask(ScriptedLLM(lambda *_: ContextOverflow("too long")))
    assert isinstance(drop, DroppedCandidate)
    assert drop.reason == "too_long"
    with pytest.raises(ProviderDown):
        await ask(ScriptedLLM(lambda *_: ProviderDown("the endpoint is gone")))


JUDGED = [
    completion(json.dumps({"reasoning": "By the states.", "better": better}))
    for better in ("first", "second")
]


@pytest.mark.parametrize("kind", BAD)
async def test_a_bad_reply_costs_one_more_call_and_one_that_stays_bad_is_a_drop(kind: str) -> None:
    endpoint = Endpoint(bad(kind), completion(text()), *JUDGED)
    async with connected(endpoint, config(reasks=1)) as llm:
        pair = await ask(llm)
    assert isinstance(pair, ContrastPair)
    assert BAD[kind][1] in endpoint.bodies[1]["messages"][-1]["content"]
    assert (pair.right.progress_after, pair.wrong.progress_after) == (6, 9)
    assert pair.wrong.reasoning == GOOD["reasoning"]
    stubborn = Endpoint(bad(kind))
    async with connected(stubborn, config(reasks=1)) as llm:
        drop = await ask(llm)
    assert isinstance(drop, DroppedCandidate)
    assert (drop.reason, len(stubborn.requests)) == ("bad_reply", 2)
    assert BAD[kind][1] in drop.explanation
