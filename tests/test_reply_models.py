"""Replies of the optimizer: each kind of malformed reply is sent back, and a missing reply is logged."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from pydantic import Field

from doubles import PROMPT, Endpoint, call_id, completion, config, connected, open_context, opened
from reflact.config.training import UpdateConfig
from reflact.errors import ContextOverflow, ProviderDown, ReplyError
from reflact.messages import CallId, NoReply, RenderedPrompt, ReplyModel
from reflact.records import Usage
from reflact.stages.aggregate import aggregate
from reflact.stages.reflect import reflect
from reflact.stages.select import select
from reflact.testing import InMemoryRunStore, ScriptedLLM
from reflact.testing.llm import ScriptedAnswer
from reflact.types import (
    AggregateResult,
    AnalystReport,
    Edit,
    Item,
    Operation,
    Patch,
    Rollout,
    Score,
    SelectResult,
    Skill,
)

DOCUMENT = "Answer in one word.\nNever guess.\nAnswer in English."


class Pick(ReplyModel):
    """A reply with an anchor in a document, numbers of proposals and a weight."""

    anchor: str = Field(description="Text that occurs once in the document.")
    numbers: list[int] = Field(description="Numbers of the chosen proposals.")
    weight: float = Field(ge=0, le=1, description="How sure you are.")


GOOD = Pick(anchor="Never guess.", numbers=[2, 1], weight=0.5)


def fits(pick: Pick) -> None:
    """Refuse what contradicts the document or the three proposals."""
    if DOCUMENT.count(pick.anchor) != 1:
        raise ValueError(f"the anchor {pick.anchor!r} occurs {DOCUMENT.count(pick.anchor)} times")
    if len(set(pick.numbers)) != len(pick.numbers):
        raise ValueError("a number occurs twice")
    if not set(pick.numbers) <= {1, 2, 3}:
        raise ValueError("there are proposals 1 to 3")


def text(**changed: Any) -> str:
    """Return a good reply's JSON with some fields changed."""
    return json.dumps(GOOD.model_dump() | changed)


KINDS: dict[str, tuple[str, str]] = {
    "open fence": (f"```json\n{text()}", "Invalid JSON"),
    "prose around": (f"Here it is: {text()} I hope that helps.", "Invalid JSON"),
    "trailing comma": (text()[:-1] + ",}", "Invalid JSON"),
    "wrong type": (text(weight="high"), "weight: Input should be a valid number"),
    "missing field": (json.dumps({"anchor": "Never guess.", "numbers": [1]}), "weight: Field required"),
    "extra object": (text() + text(), "Invalid JSON"),
    "truncated": (text()[:30], "cut off"),
    "refusal": ("", "it was a refusal: I would rather not."),
    "empty": ("", "Invalid JSON"),
    "not a number": (text(weight=float("nan")), "weight: Input should be a finite number"),
    "huge integer": (text(numbers=[1]).replace("[1]", f"[{'9' * 5000}]"), ""),
    "deep nesting": (text(numbers=[1]).replace("[1]", "[" * 3000 + "]" * 3000), ""),
    "wrong anchor": (text(anchor="Answer in"), "the anchor 'Answer in' occurs 2 times"),
    "duplicate index": (text(numbers=[1, 1]), "a number occurs twice"),
    "index out of range": (text(numbers=[1, 4]), "there are proposals 1 to 3"),
}


def bad(kind: str, mode: str) -> httpx.Response:
    """Return the malformed answer of one kind, where this mode looks for it."""
    if kind == "refusal":
        return completion(None, refusal="I would rather not.")
    finish = "length" if kind == "truncated" else "stop"
    return answer(KINDS[kind][0], mode, finish)


def answer(content: str, mode: str, finish: str = "stop") -> httpx.Response:
    """Return an answer in the shape of a mode."""
    if mode == "tools":
        return completion(None, arguments=content, finish=finish)
    return completion(content, finish=finish)


MODES = ("json_schema", "tools")
EACH = [(kind, mode) for kind in KINDS for mode in MODES]


async def test_a_malformed_reply_is_mended_by_asking_again() -> None:
    usage = Usage(calls=2, input_tokens=20, cached_tokens=8, output_tokens=6)
    replies = {}
    for kind, mode in EACH:
        async with connected(Endpoint(bad(kind, mode), answer(text(), mode)), config(mode=mode)) as client:
            reply = await client.ask(PROMPT, Pick, call_id=call_id(), check=fits)
        replies[kind, mode] = (type(reply.value), reply.value, reply.attempts, reply.usage)
    assert {case: found for case, found in replies.items() if found != (Pick, GOOD, 2, usage)} == {}


async def test_a_reply_that_stays_malformed_is_an_error_with_every_reason() -> None:
    for kind, mode in EACH:
        endpoint = Endpoint(bad(kind, mode))
        async with connected(endpoint, config(mode=mode)) as client:
            with pytest.raises(ReplyError) as refused:
                await client.ask(PROMPT, Pick, call_id=call_id(), check=fits)
        assert len(refused.value.reasons) == len(endpoint.requests) == 3, (kind, mode)
        expected = "" if (mode, kind) == ("tools", "empty") else KINDS[kind][1]
        assert all(reason and expected in reason for reason in refused.value.reasons), (kind, mode)
        assert "in 3 attempts (merge in step 1); the last reason: " in str(refused.value)


@pytest.mark.parametrize("mode", MODES)
async def test_the_model_is_told_what_was_wrong(mode: str) -> None:
    endpoint = Endpoint(bad("wrong anchor", mode), answer(text(), mode))
    async with connected(endpoint, config(mode=mode)) as client:
        await client.ask(PROMPT, Pick, call_id=call_id(), check=fits)
    first, second = (body["messages"] for body in endpoint.bodies)
    assert second[: len(first)] == first
    said, told = second[len(first) :]
    written = said["tool_calls"][0]["function"]["arguments"] if mode == "tools" else said["content"]
    assert (said["role"], written) == ("assistant", KINDS["wrong anchor"][0])
    assert told["role"] == ("tool" if mode == "tools" else "user")
    assert KINDS["wrong anchor"][1] in told["content"]
    assert told.get("tool_call_id") == ("c1" if mode == "tools" else None)


SKILL = Skill(text=DOCUMENT)
OPERATIONS: tuple[Operation, ...] = ("append", "insert_after", "replace", "delete")
ITEM = Item(id="q1", input="What?", reference="this")
FAILED = Rollout(key="k1", item_id="q1", skill_hash=SKILL.hash, answer="that", score=Score.of(0))
SOLVED = Rollout(key="k1", item_id="q1", skill_hash=SKILL.hash, answer="this", score=Score.of(1))


def edit(
    content: str = "Name the unit.", target: str = "", op: str = "append", **more: Any
) -> dict[str, Any]:
    """Return an edit as an analyst writes it, or with ``sources`` as a merge does."""
    return {"op": op, "target": target, "content": content} | (more or {"evidence": "Case 1."})


PATTERN = {"type": "unit", "cases": [1], "description": "The unit is missing."}
WRONG_PLACE: dict[str, Any] = {"op": "replace", "target": "Answer in"}
WRONG = edit(**WRONG_PLACE)
REASONS = {"reasoning": "It names no unit."}
ANALYSIS = REASONS | {"patterns": [PATTERN], "edits": [edit()]}
PRAISE = REASONS | {"edits": []}
MERGE = REASONS | {"edits": [edit(sources=[1, 2])]}
RANK = {"reasoning": "The first matters most.", "selected": [1]}

FITTING: dict[str, list[tuple[str, Any, str]]] = {
    "analyst_failure": [
        ("wrong anchor", ANALYSIS | {"edits": [WRONG]}, "edit 1 (replace)"),
        ("case out of range", ANALYSIS | {"patterns": [PATTERN | {"cases": [2]}]}, "less than or equal to 1"),
        (
            "an answer",
            ANALYSIS | {"edits": [edit("What? Answer: this.")]},
            "edit 1 records the answer of case 1",
        ),
        ("too many edits", ANALYSIS | {"edits": [edit("a"), edit("b"), edit("c")]}, "at most 2"),
    ],
    "analyst_success": [
        ("wrong anchor", PRAISE | {"edits": [WRONG]}, "edit 1 (replace)"),
        ("too many edits", PRAISE | {"edits": [edit("a"), edit("b"), edit("c")]}, "at most 2"),
    ],
    "merge": [
        ("wrong anchor", MERGE | {"edits": [edit(**WRONG_PLACE, sources=[1])]}, "edit 1 (replace)"),
        ("no index", MERGE | {"edits": [edit(sources=[])]}, "at least 1 item"),
        ("index out of range", MERGE | {"edits": [edit(sources=[3])]}, "less than or equal to 2"),
    ],
    "ranking": [
        ("duplicate index", RANK | {"selected": [1, 1]}, "at most 1"),
        ("index out of range", RANK | {"selected": [4]}, "less than or equal to 3"),
        ("index zero", RANK | {"selected": [0]}, "greater than or equal to 1"),
    ],
}
"""Well-formed replies of each stage that do not fit its data, and what the refusal says."""

PROPER = {"analyst_failure": ANALYSIS, "analyst_success": PRAISE, "merge": MERGE, "ranking": RANK}

CASES = [
    *((s, kind, json.dumps(reply), words) for s, cases in FITTING.items() for kind, reply, words in cases),
    *((s, "refusal", "", "I would rather not.") for s in FITTING),
]


def replied(kind: str, written: str) -> httpx.Response:
    """Return a defective answer."""
    return completion(None, refusal="I would rather not.") if kind == "refusal" else completion(written)


def edits(*contents: str) -> tuple[Edit, ...]:
    """Return additions with these contents, the last with the highest support."""
    return tuple(Edit(op="append", content=c, support_count=n) for n, c in enumerate(contents, 1))


async def outcome(stage: str, endpoint: Endpoint) -> AnalystReport | AggregateResult | SelectResult:
    """Run one stage in front of an endpoint, on data that needs exactly one model call."""
    async with connected(endpoint) as llm:
        context = await open_context(llm)
        if stage.startswith("analyst"):
            rollout = FAILED if stage == "analyst_failure" else SOLVED
            update = UpdateConfig(operations=OPERATIONS)
            (report,) = await reflect([rollout], [ITEM], SKILL, context=context, update=update, max_edits=2)
            return report
        if stage == "merge":
            reports = [
                AnalystReport(
                    source_type="failure", index=n, item_ids=("q1",), patch=Patch(edits=edits(word))
                )
                for n, word in enumerate(("a", "b"))
            ]
            return await aggregate(reports, SKILL, context=context, operations=OPERATIONS)
        pool = AggregateResult(patch=Patch(edits=edits("a", "b", "c")))
        return await select(pool, SKILL, context=context, budget=1)


async def test_every_stage_mends_every_kind() -> None:
    for stage, kind, written, words in CASES:
        good = completion(json.dumps(PROPER[stage]))
        endpoint = Endpoint(replied(kind, written), good)
        mended = await outcome(stage, endpoint)
        assert mended == await outcome(stage, Endpoint(good)), (stage, kind)
        assert len(endpoint.requests) == 2, (stage, kind)
        assert words in endpoint.bodies[1]["messages"][-1]["content"], (stage, kind)
        if isinstance(mended, AnalystReport):
            assert mended.no_reply_reason is None, (stage, kind)
        else:
            assert mended.fallbacks == (), (stage, kind)


async def test_no_stage_loses_a_missing_reply() -> None:
    for stage, kind, written, words in CASES:
        endpoint = Endpoint(replied(kind, written))
        result = await outcome(stage, endpoint)
        assert len(endpoint.requests) == 3, (stage, kind)
        if isinstance(result, AnalystReport):
            reason = result.no_reply_reason
            assert (result.patch, result.item_ids) == (Patch(), ("q1",)), (stage, kind)
        else:
            (fallback,) = result.fallbacks
            reason = fallback.reason
            assert fallback.replacement
            contents = [e.content for e in result.patch.edits]
            assert contents == (["c"] if stage == "ranking" else ["a", "b"]), (stage, kind)
        assert reason is not None, (stage, kind)
        assert words in reason, (stage, kind)
        assert "in 3 attempts" in reason, (stage, kind)


class Word(ReplyModel):
    """One word."""

    word: str


async def ask_word(
    llm: ScriptedLLM, store: InMemoryRunStore, *, shorter: bool = False, part: str = ""
) -> Word | NoReply:
    """Ask for a word other than ``bad``, with a long prompt and maybe a short one in reserve."""

    def check(reply: Word) -> None:
        if reply.word == "bad":
            raise ValueError("not that word")

    return await (await open_context(llm, store)).ask_or_fallback(
        "rewrite",
        {"document": "LONG", "attempts": "", "proposals": ""},
        Word,
        part=part,
        check=check,
        shorten=(lambda: {"document": "SHORT"}) if shorter else None,
    )


def scripted(long: ScriptedAnswer, short: ScriptedAnswer = None) -> ScriptedLLM:
    """Return a model that gives one answer to the long prompt and one to the short."""

    def answer(prompt: RenderedPrompt, reply_type: type[ReplyModel], call_id: CallId) -> ScriptedAnswer:
        return long if "LONG" in prompt.messages[-1].content else short

    return ScriptedLLM(answer)


def shown_prompts(llm: ScriptedLLM) -> list[str]:
    """Return the prompts that were sent, attempts of one call once."""
    texts = [call.prompt.messages[-1].content for call in llm.calls if call.call_id.attempt == 0]
    return ["long" if "LONG" in text else "short" for text in texts]


async def test_a_valid_reply_leaves_no_note_and_a_missing_one_is_final() -> None:
    """No valid reply is logged with the reason; after a restart the model is not asked again."""
    store = await opened()
    assert await ask_word(scripted({"word": "yes"}), store) == Word(word="yes")
    assert not await store._database.fetch_rows("SELECT * FROM decision_log")
    missing = await ask_word(scripted({"word": "bad"}), store)
    assert isinstance(missing, NoReply)
    assert "not that word" in missing.reason
    better = scripted({"word": "yes"})
    assert await ask_word(better, store) == missing
    assert better.calls == []
    assert await ask_word(better, store, part="b") == Word(word="yes")


@pytest.mark.parametrize(
    ("short", "shorter", "reason", "shown"),
    [
        (None, False, "too long", ["long"]),
        (ContextOverflow("still too long"), True, "still too long", ["long", "short"]),
        ({"word": "bad"}, True, "not that word", ["long", "short"]),
    ],
)
async def test_a_prompt_that_is_too_long_is_shortened_once(
    short: ScriptedAnswer, shorter: bool, reason: str, shown: list[str]
) -> None:
    llm = scripted(ContextOverflow("too long"), short)
    missing = await ask_word(llm, await opened(), shorter=shorter)
    assert isinstance(missing, NoReply)
    assert reason in missing.reason
    assert shown_prompts(llm) == shown


async def test_a_restart_asks_with_the_same_prompt() -> None:
    """Once it was shortened a prompt stays so, even for a model with more room."""
    store = await opened()
    first = scripted(ContextOverflow("too long"), {"word": "short"})
    assert await ask_word(first, store, shorter=True) == Word(word="short")
    second = scripted({"word": "long"}, {"word": "short"})
    assert await ask_word(second, store, shorter=True) == Word(word="short")
    assert (shown_prompts(first), shown_prompts(second)) == (["long", "short"], ["short"])


async def test_a_provider_that_fails_is_no_missing_reply() -> None:
    """An endpoint that cannot be reached has decided nothing: the error is passed on, nothing is noted."""
    store = await opened()
    with pytest.raises(ProviderDown, match="gone"):
        await ask_word(scripted(ProviderDown("gone")), store, shorter=True)
    assert not await store._database.fetch_rows("SELECT * FROM decision_log")
    assert await ask_word(scripted({"word": "yes"}), store) == Word(word="yes")
