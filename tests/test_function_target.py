"""Functions as targets: agents of any framework in this process, whose model calls go through the run's gateway."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from reflact import Trainer, read_run
from reflact.agents.function import RunAgent
from reflact.config.models import ModelConfig
from reflact.errors import ConfigError, EnvironmentFailure, ModelError
from reflact.messages import CallId
from reflact.targets import AgentRollout, FunctionTarget
from reflact.types import Skill
from test_command_target import RULE, Endpoint, Sender, assert_trained_and_resumed, describe_run, train


def build_request(rollout: AgentRollout, instructions: str) -> dict[str, Any]:
    """Return the arguments of a POST that asks the model of a rollout."""
    messages = [{"role": "system", "content": instructions}, {"role": "user", "content": rollout.task}]
    return {
        "url": f"{rollout.base_url}/chat/completions",
        "json": {"model": rollout.model, "messages": messages},
        "headers": {"Authorization": f"Bearer {rollout.token}"},
        "timeout": 60,
    }


def read(response: httpx.Response) -> str:
    response.raise_for_status()
    return str(response.json()["choices"][0]["message"]["content"])


async def ask(rollout: AgentRollout, instructions: str | None = None) -> str:
    async with httpx.AsyncClient() as client:
        given = rollout.skill if instructions is None else instructions
        return read(await client.post(**build_request(rollout, given)))


def ask_in_thread(rollout: AgentRollout) -> str:
    return read(httpx.post(**build_request(rollout, rollout.skill)))


class Callable:
    """An agent that is an object."""

    async def __call__(self, rollout: AgentRollout) -> str:
        return await ask(rollout)


def start(run_agent: RunAgent, skill: str = RULE, sender: Any = None, **options: Any) -> Any:
    target = FunctionTarget(run_agent, **options).connect(sender or Sender(), ModelConfig(model="m"))
    return target.session(Skill(text=skill), rollout="r")


async def test_an_agent_is_trained_and_resumed(tmp_path: Path) -> None:
    await assert_trained_and_resumed(tmp_path, FunctionTarget(ask))


@pytest.mark.parametrize("run_agent", [ask, ask_in_thread, partial(ask, instructions=None), Callable()])
async def test_functions_of_all_kinds_run(run_agent: RunAgent) -> None:
    """A function may be async or not, a partial, or an object; the conversation begins with the task."""
    session = start(run_agent)
    assert await session.reply("Say red") == "RED"
    assert [turn.content for turn in session.turns] == ["Say red"]


async def test_an_agent_without_the_skill_is_unmeasured() -> None:
    """An agent that asks nothing, leaves out its instructions, or returns no text leaves no score, with the reason."""

    async def say(rollout: AgentRollout) -> str:
        return "red"

    async def count(rollout: AgentRollout) -> Any:
        return len(await ask(rollout))

    async def fail(rollout: AgentRollout) -> str:
        raise KeyError("no such tool")

    setups: list[tuple[RunAgent, str]] = [
        (say, "the agent sent no request to the gateway, so the skill had no effect"),
        (partial(ask, instructions="Be calm."), "no request of the agent had the skill, word for word"),
        (count, "the function of the target returned int; it must return the answer as text"),
        (fail, "the agent failed: KeyError: 'no such tool'"),
    ]
    for run_agent, words in setups:
        with pytest.raises(EnvironmentFailure, match=words):
            await start(run_agent).reply("Say red")
    session = start(ask)
    await session.reply("Say red")
    with pytest.raises(EnvironmentFailure, match="answers one message"):
        await session.reply("Say green")


async def test_a_failure_of_the_model_ends_the_agent() -> None:
    class Down(Sender):
        async def forward(self, body: Any, *, call_id: CallId) -> str:
            raise ModelError("the model is gone")

    async def insist(rollout: AgentRollout) -> str:
        for _ in range(3):
            with pytest.raises(httpx.HTTPStatusError):
                await ask(rollout)
        return "red"

    with pytest.raises(ModelError, match="the model is gone"):
        await start(insist, sender=Down()).reply("Say red")


def test_a_target_is_its_function_and_its_settings() -> None:
    """Stored rollouts are not reused if one changes; outside of a run, there is no gateway."""
    targets = [
        FunctionTarget(ask),
        FunctionTarget(ask_in_thread),
        FunctionTarget(Callable()),
        FunctionTarget(ask, version="2"),
        FunctionTarget(ask, seconds=1),
    ]
    assert len({target.identity for target in targets}) == len(targets)
    with pytest.raises(ConfigError, match="works only in a run"):
        FunctionTarget(ask).session(Skill(text=RULE), rollout="r")
    with pytest.raises(ConfigError, match=r"models\.target\.model is required"):
        FunctionTarget(ask).describe_model(ModelConfig())


async def test_half_a_surrogate_pair_of_an_agent_does_not_break_a_run(tmp_path: Path) -> None:
    """It is stored with U+FFFD in its place."""

    async def halve(rollout: AgentRollout) -> str:
        return f"{await ask(rollout)} \ud83d"

    await train(tmp_path, Endpoint(), FunctionTarget(halve, preflight=False))
    [item] = (await read_run(tmp_path, items=True)).items
    assert item.best.rollouts[0].answer.endswith(" \ufffd")


async def test_an_agent_that_hangs_in_the_test_of_the_skill_costs_its_limit_once(tmp_path: Path) -> None:
    started: list[str] = []

    async def hang(rollout: AgentRollout) -> str:
        started.append(rollout.task)
        await anyio.sleep_forever()
        raise AssertionError

    summary = await train(tmp_path, Endpoint(), FunctionTarget(hang, seconds=0.05))
    assert (summary.status, len(started)) == ("failed", 1)
    assert "(`seconds`); the agent sent no request" in str(summary.reason)


async def test_the_test_of_the_skill_is_made_once(tmp_path: Path) -> None:
    """A resumed run has made it; an evaluation makes it, too, unless the run has done so."""
    probed: list[str] = []

    async def run_agent(rollout: AgentRollout) -> str:
        probed.extend(["probe"] * ("This line tests" in rollout.skill))
        return await ask(rollout)

    endpoint = Endpoint()
    target = FunctionTarget(run_agent)
    stopped = await train(tmp_path / "a", endpoint, target, budget={"max_calls": 3})
    resumed = await train(tmp_path / "a", endpoint, target)
    assert (stopped.status, resumed.status) == ("budget", "completed")
    config, environment = describe_run(tmp_path / "a")
    trainer = Trainer(config, environment=environment, target=target, transport=endpoint)
    await trainer.evaluate(Skill(text=RULE))
    assert probed == ["probe"]
    asked = len(endpoint.bodies)
    config, _ = describe_run(tmp_path / "b")
    ignoring = FunctionTarget(partial(ask, instructions="Be helpful."))
    trainer = Trainer(config, environment=environment, target=ignoring, transport=endpoint)
    with pytest.raises(EnvironmentFailure, match="the skill had no effect"):
        await trainer.evaluate(Skill(text=RULE))
    assert len(endpoint.bodies) == asked


async def test_an_agent_that_breaks_at_an_answer_without_text_is_told_so() -> None:
    """Its exception is quoted, and the sentence says that the model's answer had no text."""

    class Silent(Sender):
        async def forward(self, body: Any, *, call_id: CallId) -> str:
            completion = json.loads(await super().forward(body, call_id=call_id))
            del completion["choices"][0]["message"]["content"]
            return json.dumps(completion, separators=(",", ":"))

    async def strip(rollout: AgentRollout) -> str:
        async with httpx.AsyncClient() as client:
            response = await client.post(**build_request(rollout, rollout.skill))
        content = response.json()["choices"][0]["message"].get("content")
        return str(content.strip())

    with pytest.raises(EnvironmentFailure, match=r"AttributeError: 'NoneType'.*content is null"):
        await start(strip, sender=Silent()).reply("What is it?")
    with pytest.raises(EnvironmentFailure, match=r"^the agent failed: ValueError: mine$"):
        await start(fail_after_answer).reply("What is it?")


async def fail_after_answer(rollout: AgentRollout) -> str:
    await ask(rollout)
    raise ValueError("mine")
