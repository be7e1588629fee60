"""Pydantic-ai agents as targets: unchanged, under a skill, through the run's budget, store and recordings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anyio
import pytest
from pydantic_ai import Agent
from pydantic_ai.exceptions import ModelAPIError, ModelHTTPError
from pydantic_ai.messages import ModelResponse, TextPart
from pydantic_ai.models.function import FunctionModel
from pydantic_ai.usage import UsageLimits

from bank_agent import ITEMS, RULE, BankModel, grade, make_agent, make_deps, make_trainer
from filled_schema import fill_schema
from pure_world import PureNetwork
from reflact import Trainer
from reflact.config.models import ModelConfig
from reflact.data import DataSet
from reflact.environments import DatasetEnvironment
from reflact.errors import ConfigError, EnvironmentFailure, ReplyError
from reflact.llm import ReplayTransport, read_cassette
from reflact.llm.pricing import usd_of
from reflact.records import RunSummary, Usage
from reflact.targets import PydanticAITarget
from reflact.testing import ScriptedLLM, append_reply
from reflact.types import Item, Skill
from virtual_time import NEVER, HurriedLoop


def make_target(model: BankModel, **arguments: Any) -> PydanticAITarget[Any, Any]:
    return PydanticAITarget(make_agent(model), deps=make_deps, **arguments)


async def test_an_agent_is_trained_without_a_change(tmp_path: Path) -> None:
    """Training begins with the literal instructions; instruction functions, tools, deps and output stay.

    Calls and tokens are those that the agent's model counted; a restart asks it nothing.
    """
    model = BankModel()
    agent = make_agent(model)
    summary = await make_trainer(PydanticAITarget(agent, deps=make_deps), tmp_path).train()
    assert (summary.status, summary.best.score) == ("completed", 1.0)
    own = "You are a support agent in our bank, give the customer support."
    assert {
        *(f"{own}\n\nThe customer's name is {name}" for name in ("John", "Ann", "Bob")),
        *(f"{own}\n\n{RULE}\n\nThe customer's name is {name}" for name in ("Ann", "Bob")),
    } <= set(model.instructions)
    placebo = {text for text in model.instructions if "teapot" in text}
    assert placebo
    assert not any(own in text for text in placebo)
    (spend,) = summary.spend
    n = len(model.instructions)
    assert (spend.usage.calls, spend.usage.input_tokens, spend.usage.output_tokens) == (n, 50 * n, 5 * n)
    again = await make_trainer(make_target(model), tmp_path).train()
    assert (again.best, len(model.instructions)) == (summary.best, n)
    with agent.override(deps=make_deps(ITEMS[0])):
        await agent.run("Hello")
    assert "You are a support agent" in model.instructions[-1]


async def test_a_limit_on_calls_holds(tmp_path: Path) -> None:
    """The budget ends the run before the agent's model is asked more often; a larger one completes it."""

    def optimize(body: dict[str, Any], call_id: str) -> str:
        return json.dumps(fill_schema(body["response_format"]["json_schema"]["schema"], RULE))

    model, network = BankModel(), PureNetwork(optimize)
    splits = {"train": tuple(ITEMS[:1]), "val": tuple(ITEMS[1:2]), "test": tuple(ITEMS[2:])}

    async def train(most: int) -> RunSummary:
        config = {
            "out_dir": str(tmp_path),
            "models": {"optimizer": {"model": "m", "api_key_env": None, "call_id_header": "x-sample"}},
            "search": {"sources": ["edits"]},
            "train": {"num_epochs": 1},
            "budget": {"max_calls": most},
        }
        environment = DatasetEnvironment(DataSet(**splits), grade=grade)
        return await Trainer(
            config, environment=environment, target=make_target(model), transport=network
        ).train()

    summary = await train(5)
    assert (summary.status, len(model.instructions), len(network.samples)) == ("budget", 4, 1)
    summary = await train(100)
    assert (summary.status, summary.best.score) == ("completed", 1.0)
    usage = {spend.role: spend.usage.calls for spend in summary.spend}
    assert usage == {"target": len(model.instructions), "optimizer": len(network.samples)}


async def test_analysts_see_tools_calls_and_observations(tmp_path: Path) -> None:
    asked: list[str] = []

    def answer(prompt: Any, reply_type: Any, call_id: Any) -> Any:
        asked.append(prompt.messages[-1].content)
        return append_reply(reply_type, RULE)

    await make_trainer(make_target(BankModel()), tmp_path, optimizer=ScriptedLLM(answer)).train()
    assert "- customer_balance(include_pending): Returns the customer's current account balance." in asked[0]
    assert (
        'assistant: calls customer_balance({"include_pending":false})\ntool: customer_balance: 100.00'
        in asked[0]
    )


async def test_descriptions_of_tools_are_trained(tmp_path: Path) -> None:
    asked: list[str] = []

    def answer(prompt: Any, reply_type: Any, call_id: Any) -> Any:
        asked.append(prompt.messages[-1].content)
        return append_reply(reply_type, f"## Tool: customer_balance\n\n{RULE}")

    model = BankModel()
    target = make_target(model, train_tools=True)
    summary = await make_trainer(target, tmp_path, optimizer=ScriptedLLM(answer)).train()
    assert (summary.status, summary.best.score) == ("completed", 1.0)
    assert "a section under the heading '## Tool: NAME' replaces the description of that tool" in asked[0]
    assert not any("Tool:" in text or RULE in text for text in model.instructions)
    assert set(model.descriptions) == {PLAIN, RULE}
    assert target.identity != make_target(model).identity


PLAIN = "Returns the customer's current account balance."
REGION = "<!-- APPENDIX_START -->\nX\n<!-- APPENDIX_END -->"
TOOL = "## Tool: customer_balance\n"


@pytest.mark.parametrize(
    ("text", "instructions", "description"),
    [
        (
            f"Be kind.\n\n{TOOL}\nOne.\n\n### More\nTwo.\n\n## T\nX",
            "Be kind.\n\n## T\nX",
            "One.\n\n### More\nTwo.",
        ),
        (f"## Tool: `customer_balance`\r\nOne.\r\n{REGION}", REGION, "One."),
        (f"{TOOL}\n# Rules\nBe kind.", "# Rules\nBe kind.", PLAIN),
    ],
)
async def test_a_section_of_a_tool_ends_at_the_next_heading(
    text: str, instructions: str, description: str
) -> None:
    """Subheadings belong to a section, a protected region does not; an empty section changes nothing."""
    model = BankModel()
    await make_target(model, train_tools=True).session_for(ITEMS[0], Skill(text=text), rollout="r").reply("?")
    assert model.instructions[0].removesuffix("The customer's name is John").strip() == instructions
    assert model.descriptions[0] == description


async def test_an_agent_is_recorded_and_replayed(tmp_path: Path) -> None:
    cassette = tmp_path / "cassette.jsonl"
    recorded = await make_trainer(
        make_target(BankModel()), tmp_path / "a", replay__cassette=str(cassette), replay__mode="record"
    ).train()

    def refuse(n: int) -> None:
        raise AssertionError("a replay must not ask the model")

    model = BankModel(fail=refuse)
    trainer = make_trainer(make_target(model), tmp_path / "b", replay__cassette=str(cassette))
    assert (await trainer.train()).best == recorded.best
    assert {line.path for line in read_cassette(cassette) if line.call_id} == {"/agent"}
    assert ReplayTransport(cassette, read_cassette(cassette))


def test_failures_of_the_provider_are_repeated(tmp_path: Path) -> None:
    """Refused and broken requests are asked again and counted, and change no score."""

    def fail(n: int) -> None:
        if n == 2:
            raise ModelHTTPError(429, "m", {"message": "slow down"}, headers={"retry-after": "0"})
        if n == 4:
            raise ModelAPIError("m", "Connection error.")

    trainer = make_trainer(make_target(BankModel(fail=fail)), tmp_path, models__target__timeout=NEVER)
    summary = anyio.run(trainer.train, backend_options={"loop_factory": HurriedLoop})
    assert summary.best is not None
    assert (summary.status, summary.best.score) == ("completed", 1.0)
    assert {(fault.kind, fault.count) for fault in summary.faults} == {("429", 1), ("reset", 1)}


async def test_an_agent_that_reaches_its_limits_scores_nothing(tmp_path: Path) -> None:
    target = make_target(BankModel(), usage_limits=UsageLimits(request_limit=1))
    with pytest.raises(ReplyError, match="the agent gave up"):
        await target.session_for(ITEMS[0], Skill(text=""), rollout="r").reply("Hello")
    summary = await make_trainer(target, tmp_path).train()
    assert (summary.status, summary.best.score) == ("completed", 0.0)


async def test_an_error_of_a_tool_leaves_the_item_unmeasured() -> None:
    def explode(item: Item) -> Any:
        raise KeyError(item.id)

    target = PydanticAITarget(make_agent(BankModel()), deps=explode)
    with pytest.raises(EnvironmentFailure, match="the agent failed on item c1: KeyError: 'c1'"):
        await target.session_for(ITEMS[0], Skill(text=""), rollout="r").reply("Hello")


async def test_an_agent_remembers_its_conversation() -> None:
    """A second message comes after the first one and its answer."""

    async def count(messages: Any, info: Any) -> ModelResponse:
        return ModelResponse(parts=[TextPart(f"{len(messages)} messages")])

    session = PydanticAITarget(Agent(FunctionModel(count))).session_for(ITEMS[0], Skill(text=""), rollout="r")
    assert [await session.reply("a"), await session.reply("b")] == ["1 messages", "3 messages"]
    assert [turn.content for turn in session.turns] == ["a", "1 messages", "b", "3 messages"]


def test_what_an_agent_is_decides_its_identity() -> None:
    """Another tool, limit, version or setting makes another target; instructions do not."""
    plain = make_target(BankModel()).identity
    assert make_target(BankModel()).identity == plain
    more, other = make_agent(BankModel()), make_agent(BankModel())

    @more.tool_plain
    def find_branch(city: str) -> str:
        """Return the address of a branch."""
        return city

    @other.instructions
    def greet() -> str:
        return "Be kind."

    identities = {
        PydanticAITarget(more, deps=make_deps).identity,
        make_target(BankModel(), version="2").identity,
        make_target(BankModel(), usage_limits=UsageLimits(request_limit=3)).identity,
    }
    assert len(identities - {plain}) == 3
    assert PydanticAITarget(other, deps=make_deps).identity == plain


def test_an_agent_brings_its_model(tmp_path: Path) -> None:
    """Its list price is found by its provider; none, or another one in the configuration, is refused."""
    with pytest.raises(ConfigError, match="has no model"):
        PydanticAITarget(Agent())
    target = PydanticAITarget(Agent("openai:gpt-5", defer_model_check=True))
    assert usd_of(Usage(calls=1, input_tokens=10**6), target.describe_model(ModelConfig())) is not None
    with pytest.raises(ConfigError, match=r"models\.target\.model has no effect"):
        make_trainer(make_target(BankModel()), tmp_path, models__target__model="m")


async def test_a_model_without_a_key_can_be_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    target = PydanticAITarget(Agent("openai:gpt-5", defer_model_check=True))
    assert '"openai:gpt-5"' in target.identity
    with pytest.raises(ConfigError, match="the agent's model openai:gpt-5 cannot be asked"):
        await target.session_for(ITEMS[0], Skill(text=""), rollout="r").reply("Hello")
