"""Bad contrast replies, through the real client: sent back once, else a drop with its reason."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from contrast_world import PURPOSE, event, round_of
from doubles import Endpoint, completion, config, connected, opened
from reflact.calibration.contrast import ContrastSettings, GenerationResult, generate_contrast_pairs
from reflact.memory.models import Label, ScoreEvent

pytestmark = pytest.mark.anyio

RIGHT = "Two of the three chapters are there."
GOOD = {
    "mistake": "inflated_score",
    "reasoning": "The report is as good as done.",
    "phi_after": 9,
    "why": "A chapter is missing.",
}
"""A valid mistake beside the right score of 6; the room is 7 to 10."""


def text(**changed: Any) -> str:
    """Return the good reply's JSON with some fields changed."""
    return json.dumps(GOOD | changed)


BAD: dict[str, tuple[str | None, str]] = {
    "missing field": (json.dumps({k: v for k, v in GOOD.items() if k != "why"}), "why: Field required"),
    "not a number": (text(phi_after=float("nan")), "phi_after"),
    "infinite": (text(phi_after=float("inf")), "phi_after"),
    "above the scale": (text(phi_after=42), "less than or equal to 10"),
    "below the scale": (text(phi_after=-7), "greater than or equal to 0"),
    "equal to what is right": (text(phi_after=6), "phi_after must be from 7 to 10"),
    "nearer than the margin": (text(phi_after=6.9), "phi_after must be from 7 to 10"),
    "the other direction": (text(phi_after=1), "phi_after must be from 7 to 10"),
    "a score in words": (text(phi_after="9/10"), "phi_after"),
    "no score": (text(phi_after=None), "phi_after"),
    "no reasoning": (text(reasoning=""), "reasoning"),
    "blank reasoning": (text(reasoning=" .\n"), "must hold words"),
    "reasoning that is null": (text(reasoning=None), "reasoning"),
    "the right reasoning": (text(reasoning=f"  {RIGHT.upper()} "), "that of the right evaluation"),
    "an unknown mistake": (text(mistake="sycophancy"), "mistake"),
    "another known mistake": (text(mistake="ignored_evidence"), "mistake"),
    "no JSON": ("I give it a nine, since it is nearly done.", "Invalid JSON"),
    "cut off": (text()[:40], "cut off"),
    "a refusal": (None, "it was a refusal"),
    "a fence": (f"```json\n{text()}\n```", "Invalid JSON"),
    "prose around": (f"Here it is: {text()}", "Invalid JSON"),
    "null": ("null", ""),
    "a list": (f"[{text()}]", ""),
    "empty": ("", "Invalid JSON"),
}
kinds = pytest.mark.parametrize("kind", BAD)


def bad(kind: str) -> httpx.Response:
    """Return the answer of one kind."""
    content = BAD[kind][0]
    if content is None:
        return completion(None, refusal="I would rather not.")
    return completion(content, finish="length" if kind == "cut off" else "stop")


def step() -> ScoreEvent:
    """Return a step of which only a model can make an inflated score."""
    gold = Label(progress_before=2, progress_after=6, source="human", reasoning=RIGHT)
    return event().model_copy(update={"label": gold})


async def made(endpoint: Endpoint, *, each: int = 1, store: Any = None) -> GenerationResult:
    """Make pairs of the step in front of an endpoint."""
    async with connected(endpoint, config(reasks=1), store=store) as llm:
        return await generate_contrast_pairs(
            [step()],
            purpose=PURPOSE,
            trace_id="t",
            round_plan=round_of("inflated_score"),
            llm=llm,
            settings=ContrastSettings(candidates_per_event=each),
        )


@kinds
async def test_a_bad_reply_costs_one_more_call(kind: str) -> None:
    """The second reply makes the pair, as if the first had not been; the model was told what was wrong."""
    endpoint = Endpoint(bad(kind), completion(text()))
    result = await made(endpoint)
    assert len(endpoint.requests) == 2
    assert BAD[kind][1] in endpoint.bodies[1]["messages"][-1]["content"]
    assert (result.n_candidates, result.dropped) == (1, ())
    (pair,) = result.pairs
    assert (pair.right.progress_after, pair.wrong.progress_after) == (6, 9)
    assert pair.wrong.reasoning == GOOD["reasoning"]
    assert result == await made(Endpoint(completion(text())))


@kinds
async def test_a_reply_that_stays_bad_is_a_drop_with_its_reason(kind: str) -> None:
    """No pair, no half of one: each candidate is counted, with the reason in words."""
    endpoint = Endpoint(bad(kind))
    result = await made(endpoint, each=3)
    assert result.pairs == ()
    assert result.n_candidates == 3
    assert [(drop.reason, drop.construction) for drop in result.dropped] == [("bad_reply", "asked")] * 3
    assert all(BAD[kind][1] in drop.explanation for drop in result.dropped)
    assert len(endpoint.requests) == 6


async def test_bad_candidates_leave_the_good_ones_alone() -> None:
    """Among three candidates one that stays bad is dropped and two are kept."""
    answers = [completion(text(reasoning=f"Variation {n}.")) for n in range(2)]
    result = await made(Endpoint(*answers, bad("no JSON")), each=3)
    assert (result.n_candidates, len(result.pairs), [d.reason for d in result.dropped]) == (
        3,
        2,
        ["bad_reply"],
    )


async def test_a_round_made_again_repeats_no_call() -> None:
    """Over the same store a second making sends nothing, bad replies included, and comes out the same."""
    store = await opened()
    endpoint = Endpoint(bad("no JSON"), completion(text()), bad("null"))
    first = await made(endpoint, each=3, store=store)
    sent = len(endpoint.requests)
    assert await made(endpoint, each=3, store=store) == first
    assert len(endpoint.requests) == sent
    assert first.dropped


def test_there_are_twelve_kinds_at_least() -> None:
    """The kinds are those that the documents promise, and more."""
    assert len(BAD) >= 12
