"""The stand-ins for tests: a scripted model, a toy world, a store in memory and a failing network."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import httpx
import pytest
from anyio.lowlevel import checkpoint
from pydantic import Field, JsonValue

from reflact import Trainer
from reflact.data import DataSet, check_dataset
from reflact.errors import ProviderDown, ReplyError, StoreError
from reflact.messages import CallId, Message, RenderedPrompt, ReplyModel, Text
from reflact.protocols import LLM, Environment, Target
from reflact.records import Usage
from reflact.testing import (
    TOY_RULES,
    Fault,
    FaultyTransport,
    InMemoryRunStore,
    ScriptedLLM,
    ToyEnvironment,
    ToyTarget,
    toy_optimizer,
)
from reflact.types import Item, Skill, Split

PROMPT = RenderedPrompt(name="p", version=1, messages=(Message(role="user", content="?"),))
SAMPLE = CallId(role="optimizer", purpose="test", step=1)


class Number(ReplyModel):
    """A reply with a rule of its own."""

    version: ClassVar[int] = 1
    value: int = Field(ge=0)


@pytest.mark.parametrize("answer", [Number(value=3), {"value": 3}, '{"value": 3}'], ids=str)
@pytest.mark.parametrize("is_async", [True, False])
async def test_a_script_may_answer_in_several_forms(answer: JsonValue | ReplyModel, is_async: bool) -> None:
    """A value, its JSON and its JSON text all become the same reply; a text that is asked for is not read."""

    async def wait(*_: object) -> JsonValue | ReplyModel:
        await checkpoint()
        return answer

    reply = await ScriptedLLM(wait if is_async else lambda *_: answer).ask(PROMPT, Number, call_id=SAMPLE)
    assert (reply.value, reply.attempts, reply.usage) == (Number(value=3), 1, Usage(calls=1))
    llm: LLM = ScriptedLLM(lambda *_: '{"text": 1}')
    assert (await llm.ask(PROMPT, Text, call_id=SAMPLE)).value == Text(text='{"text": 1}')


async def test_an_invalid_answer_is_asked_for_again() -> None:
    """Each attempt has its number, all are recorded and counted, and the first valid one stands."""

    def odd(reply: Number) -> None:
        if reply.value % 2 == 0:
            raise ValueError(f"{reply.value} is even")

    llm = ScriptedLLM(lambda prompt, reply_type, call_id: {"value": call_id.attempt - 1}, reasks=3)
    reply = await llm.ask(PROMPT, Number, call_id=SAMPLE, check=odd)
    assert (reply.value.value, reply.attempts, reply.usage.calls) == (1, 3, 3)
    assert [call.call_id for call in llm.calls] == [
        SAMPLE.model_copy(update={"attempt": attempt}) for attempt in range(3)
    ]


async def test_a_model_that_never_gets_it_right() -> None:
    """When no attempt is valid the error holds the reason of each; nothing is guessed from another type."""
    answers: list[JsonValue | ReplyModel] = [
        {"value": -1}, '{"value": ', {"value": 1, "more": 2}, Text(text="3"), [3], None, '{"value": NaN}', "3"
    ]  # fmt: skip
    llm = ScriptedLLM(lambda prompt, reply_type, call_id: answers[call_id.attempt], reasks=7)
    with pytest.raises(ReplyError, match="gave no valid reply in 8 attempts") as caught:
        await llm.ask(PROMPT, Number, call_id=SAMPLE)
    reasons = [reason.split(":")[0] for reason in caught.value.reasons]
    assert reasons[:3] == ["value", "Invalid JSON", "more"]


async def test_an_exception_is_raised_as_the_provider_would() -> None:
    """A returned exception is raised without a further attempt; a reply type that no stage has is an error."""
    llm = ScriptedLLM(lambda *_: ProviderDown("gone", status=503))
    with pytest.raises(ProviderDown, match="gone"):
        await llm.ask(PROMPT, Number, call_id=SAMPLE)
    assert len(llm.calls) == 1
    with pytest.raises(TypeError, match="Number"):
        await ScriptedLLM(toy_optimizer()).ask(PROMPT, Number, call_id=SAMPLE)


@pytest.mark.parametrize("rules", range(1, len(TOY_RULES) + 1))
def test_a_toy_world_is_fit_for_training(rules: int) -> None:
    """Splits have the sizes asked for, inputs do not repeat, every split needs every rule; there are 1 to 6."""
    environment: Environment = ToyEnvironment(train=12, val=7, test=6, rules=rules)
    splits = {split.value: tuple(environment.items(split)) for split in Split}
    check_dataset(DataSet.model_validate(splits))
    assert [len(items) for items in splits.values()] == [12, 7, 6]
    for items in splits.values():
        assert {item.task_type for item in items} == set(list(TOY_RULES)[:rules])
    with pytest.raises(ValueError, match="rules"):
        ToyEnvironment(rules=0 if rules < len(TOY_RULES) else rules + 1)


async def _solved(environment: Environment, target: Target, skill: Skill) -> set[str]:
    solved = set()
    for item in environment.items(Split.val):
        graded = await environment.run(item, target.session(skill, rollout=item.id), seed=0)
        if graded.score.hard == 1:
            solved.add(item.id)
        assert (graded.feedback is None) == (graded.score.hard == 1)
    return solved


@pytest.mark.parametrize("known", [(), ("square",), ("double", "length"), tuple(TOY_RULES)], ids=str)
async def test_a_skill_is_worth_the_rules_in_it(known: tuple[str, ...]) -> None:
    """Without noise an item is solved exactly when the skill holds its rule's whole line."""
    environment = ToyEnvironment(val=12, rules=6)
    skill = Skill(text="\n".join(["# Rules", *(TOY_RULES[name].line for name in known)]))
    needed = {item.id for item in environment.items(Split.val) if item.task_type in known}
    assert await _solved(environment, ToyTarget(), skill) == needed
    garbled = Skill(text=skill.text.replace("answer", "reply"))
    assert await _solved(environment, ToyTarget(), garbled) == set()


async def test_noise_is_drawn_from_seed_and_rollout() -> None:
    """Equal seeds give equal answers, others other ones; the share is about the one asked for, and in the identity."""
    environment = ToyEnvironment(val=400, rules=1)
    full = Skill(text=TOY_RULES["double"].line)
    first = await _solved(environment, ToyTarget(noise=0.25, seed=1), full)
    assert first == await _solved(environment, ToyTarget(noise=0.25, seed=1), full)
    assert first != await _solved(environment, ToyTarget(noise=0.25, seed=2), full)
    assert 260 < len(first) < 340
    assert len(await _solved(environment, ToyTarget(noise=0.25), Skill(text=""))) > 60
    assert len(await _solved(environment, ToyTarget(noise=1), full)) == 0
    item = Item(id="q", input="double 4", reference="8", task_type="double")
    target = ToyTarget(noise=0.5)
    answers = {await target.session(full, rollout=str(trial)).reply(str(item.input)) for trial in range(20)}
    assert answers == {"8", "unknown"}
    assert len({other.identity for other in (ToyTarget(), ToyTarget(seed=1), ToyTarget(noise=0.1))}) == 3


@pytest.mark.parametrize("budget", [1, 2])
async def test_a_toy_run_learns_every_rule(tmp_path: Path, budget: int) -> None:
    """With the toy optimizer a run ends with all rules, each of which the gate accepted."""
    optimizer = ScriptedLLM(toy_optimizer(edits=budget))
    trainer = Trainer(
        {
            "out_dir": tmp_path,
            "search": {"sources": ["edits"]},
            "train": {"batch_size": 12, "num_epochs": 6},
            "reflect": {"minibatch_size": 4},
            "select": {"max_edits": budget, "min_edits": budget},
        },
        environment=ToyEnvironment(train=12, rules=5),
        target=ToyTarget(),
        optimizer=optimizer,
    )
    summary = await trainer.train()
    assert summary.status == "completed"
    assert summary.best.score == 1
    document = (tmp_path / "best_skill.md").read_text(encoding="utf-8")
    assert all(rule.line in document for rule in list(TOY_RULES.values())[:5])
    asked = {call.reply_type.__name__ for call in optimizer.calls}
    reasoned = {f"Reasoned{part}Reply" for part in ("Analyst", "Success", "Merge", "Rank")}
    assert asked == reasoned | {"GuidanceReply", "MemoryReply"}


async def test_the_memory_store_is_the_database_without_a_file() -> None:
    """Two stores share nothing, and what the database refuses is refused."""
    one, other = InMemoryRunStore(), InMemoryRunStore()
    await one.open_run("r", {"seed": 1}, None)
    await one.decision_log("r").put(1, "merge", {"a": [1]})
    assert await one.decision_log("r").get(1, "merge") == {"a": [1]}
    with pytest.raises(StoreError, match="contradicts what is stored"):
        await other.decision_log("r").put(1, "merge", {"a": [1]})
    assert await other.decision_log("r").get(1, "merge") is None


def _client(*faults: Fault | None) -> tuple[httpx.AsyncClient, list[str]]:
    """Return a client with faults for its first requests, and the paths that the server will see."""
    served: list[str] = []

    def serve(request: httpx.Request) -> httpx.Response:
        served.append(request.url.path)
        return httpx.Response(200, json={"served": request.url.path})

    plan = [*faults, *(None for _ in range(9))]
    transport = FaultyTransport(httpx.MockTransport(serve), lambda request, number: plan[number])
    return httpx.AsyncClient(transport=transport, base_url="http://test"), served


async def test_a_fault_is_for_one_request() -> None:
    """An error status is served instead of the answer, for the request it is meant for alone."""
    refusal = httpx.Response(429, headers={"retry-after": "2"}, text="slow")
    client, served = _client(None, refusal)
    async with client:
        assert (await client.get("/a")).json() == {"served": "/a"}
        refused = await client.get("/b")
        assert (refused.status_code, refused.headers["retry-after"], refused.text) == (429, "2", "slow")
        assert (await client.get("/c")).status_code == 200
    assert served == ["/a", "/c"]


@pytest.mark.parametrize(
    ("fault", "error", "arrives"),
    [
        (httpx.ConnectError("injected"), httpx.ConnectError, False),
        (httpx.ReadTimeout("injected"), httpx.ReadTimeout, True),
    ],
    ids=str,
)
async def test_broken_connections(fault: Fault, error: type[httpx.HTTPError], arrives: bool) -> None:
    """Each fault raises what httpx raises in its place; only a late or broken answer was worked for."""
    client, served = _client(fault)
    async with client:
        with pytest.raises(error, match="injected") as caught:
            await client.get("/a")
        assert caught.value.request.url.path == "/a"
        assert (await client.get("/b")).status_code == 200
    assert served == (["/a", "/b"] if arrives else ["/b"])
