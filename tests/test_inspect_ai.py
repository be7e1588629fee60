"""The environment of an Inspect task: its scores are those of Inspect for the same replies."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest

from doubles import completion
from filled_schema import fill_schema
from reflact import Trainer
from reflact.config.models import ModelConfig
from reflact.errors import ConfigError, EnvironmentFailure
from reflact.integrations.inspect_ai import InspectEnvironment, InspectSession, InspectTarget
from reflact.messages import CallId
from reflact.stages.null_answers import ConstantTarget
from reflact.types import Skill, Split, Turn

INSTALLED = find_spec("inspect_ai") is not None
needs_package = pytest.mark.skipif(not INSTALLED, reason="inspect-ai brings 350 MB")
SIZES = {"train": 2, "val": 2, "test": 2}


Script = Callable[[Sequence[tuple[str, str]]], tuple[str, Sequence[tuple[str, Any]]]]
"""Returns the next reply of a conversation: its text, and calls of tools with their arguments."""


class Says:
    """A session that answers each question as a table says, and keeps what it was sent."""

    def __init__(self, answer: str) -> None:
        self.answer, self.sent = answer, ""
        self.turns: tuple[Turn, ...] = ()

    async def reply(self, message: str) -> str:
        self.sent = message
        return self.answer


def make_task(name: str) -> Any:
    """Return a task of samples that Inspect brings, with a solver and a scorer of Inspect."""
    from inspect_ai import Task
    from inspect_ai.dataset import FieldSpec, example_dataset
    from inspect_ai.scorer import choice, f1, includes
    from inspect_ai.solver import chain_of_thought, generate, multiple_choice, system_message

    solver, scorer = {
        "theory_of_mind": ([chain_of_thought(), generate()], includes()),
        "security_guide": ([system_message("You guard."), generate()], f1()),
        "biology_qa": ([generate()], includes()),
        "choices": (multiple_choice(), choice()),
    }[name]
    if name == "choices":
        from inspect_ai.dataset import Sample

        dataset: Any = [Sample(input=f"{n}?", choices=["one", "two"], target="AB"[n % 2]) for n in range(6)]
    else:
        fields = FieldSpec(input="question", target="answer") if name == "biology_qa" else None
        dataset = example_dataset(name, fields)[:6]
    return Task(dataset=dataset, solver=solver, scorer=scorer)


@needs_package
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["theory_of_mind", "security_guide", "biology_qa", "choices"])
def test_scores_are_those_of_inspect(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The adapter and Inspect's own evaluation give every sample the same score for the same reply."""
    from inspect_ai import eval as evaluate
    from inspect_ai.model import ModelOutput, ModelUsage, get_model
    from inspect_ai.scorer import value_to_float

    monkeypatch.setenv("INSPECT_DISPLAY", "none")
    environment = InspectEnvironment(make_task(name), **SIZES)
    items = {item.id: item for split in Split for item in environment.items(split)}
    samples = list(make_task(name).dataset)
    replies = [
        f"ANSWER: {sample.target}" if number % 2 else "ANSWER: A garden"
        for number, sample in enumerate(samples)
    ]
    outputs = [ModelOutput.from_content("mockllm/model", reply) for reply in replies]
    for output in outputs:
        output.usage = ModelUsage()
    model = get_model("mockllm/model", custom_outputs=outputs)
    (log,) = evaluate(make_task(name), model=model, log_dir=str(tmp_path), max_samples=1, max_connections=1)
    assert log.status == "success"
    theirs = {
        str(sample.id): value_to_float()(next(iter((sample.scores or {}).values())).value)
        for sample in log.samples or []
    }
    told = {str(sample.id): sample.output.completion for sample in log.samples or []}

    async def run() -> dict[str, float]:
        return {
            text: (await environment.run(item, Says(told[text]), seed=0)).score.hard
            for text, item in items.items()
        }

    assert asyncio.run(run()) == pytest.approx(theirs)
    assert len(set(theirs.values())) > 1


class Provider:
    """Stands in for a run: answers chat completions as a script says, and keeps their bodies."""

    identity = "provider"

    def __init__(self, script: Script) -> None:
        self.script = script
        self.bodies: list[dict[str, Any]] = []

    async def forward(self, body: Any, *, call_id: CallId) -> str:
        """Answer a chat completion."""
        self.bodies.append(body)
        text, calls = self.script([(m["role"], str(m.get("content") or "")) for m in body["messages"]])
        written = [
            {
                "id": f"c{n}",
                "type": "function",
                "function": {"name": name, "arguments": json.dumps(arguments)},
            }
            for n, (name, arguments) in enumerate(calls)
        ]
        message = {"role": "assistant", "content": text, "tool_calls": written or None}
        choice = {"index": 0, "finish_reason": "tool_calls" if calls else "stop", "message": message}
        return json.dumps({"model": "m", "choices": [choice]})

    async def send(self, body: Any, *, call_id: CallId, answer: Any) -> str:
        """Refuse; solvers only forward."""
        raise AssertionError


def start(provider: Provider, skill: str = "") -> InspectSession:
    """Return a session of the target."""
    return InspectTarget().connect(provider, ModelConfig(model="m")).session(Skill(text=skill), rollout="r")


@needs_package
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("own_model", [False, True])
def test_a_target_that_cannot_solve_a_task_is_unmeasured(own_model: bool) -> None:
    """Tools and several conversations cannot go through the session of a target; a constant is graded anyway."""
    from inspect_ai.solver import chain, generate, self_critique, use_tools
    from inspect_ai.tool import think

    task = make_task("biology_qa")
    task.solver = chain([generate(), self_critique()] if own_model else [use_tools(think()), generate()])
    environment = InspectEnvironment(task, **SIZES)
    item = environment.items(Split.val)[0]
    with pytest.raises(EnvironmentFailure, match=r"set target\.kind to .*InspectTarget"):
        asyncio.run(environment.run(item, Says("1"), seed=0))
    constant = ConstantTarget(str(item.reference)).session(Skill(text=""), rollout="r")
    assert asyncio.run(environment.run(item, constant, seed=0)).score.hard == 1


@needs_package
@pytest.mark.filterwarnings("ignore")
def test_a_role_that_is_not_named_is_not_played_by_the_target() -> None:
    """A task that asks for a model in a role says which one to name, and failures of models are never swallowed."""
    from inspect_ai.model import get_model
    from inspect_ai.solver import solver

    @solver
    def ask_user() -> Any:
        async def solve(state: Any, generate: Any) -> Any:
            for _ in range(3):
                try:
                    await get_model(role="user").generate("Who is there?")
                except Exception:  # noqa: BLE001  # as solvers of others do
                    continue
            return state

        return solve

    task = make_task("biology_qa")
    task.solver = ask_user()
    environment = InspectEnvironment(task, **SIZES)
    provider = Provider(lambda messages: ("Nobody", ()))
    with pytest.raises(EnvironmentFailure, match=r"in the role 'user': name it in `models`"):
        asyncio.run(environment.run(environment.items(Split.val)[0], start(provider), seed=0))
    assert provider.bodies == []


class Endpoint(httpx.AsyncBaseTransport):
    """A provider over HTTP: a model that looks up the price if its instructions say so, and an optimizer."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Answer a chat completion."""
        body = json.loads(await request.aread())
        self.bodies.append(body)
        if "response_format" in body:
            schema = body["response_format"]["json_schema"]["schema"]
            return completion(json.dumps(fill_schema(schema, "Look it up.")))
        text = await Provider(self.play).forward(body, call_id=CallId(role="target", purpose="rollout"))
        return httpx.Response(200, text=text, headers={"content-type": "application/json"})

    def play(self, messages: Sequence[tuple[str, str]]) -> tuple[str, Sequence[Any]]:
        """Play the target."""
        role, last = messages[-1]
        if role == "tool":
            return last, ()
        return ("", [("price", {"product": last})]) if "Look it up." in messages[0][1] else ("About 5.", ())


def shop() -> Any:
    """Return a task whose solver has a tool."""
    from inspect_ai import Task
    from inspect_ai.dataset import Sample
    from inspect_ai.scorer import exact
    from inspect_ai.solver import generate, system_message, use_tools
    from inspect_ai.tool import tool

    @tool
    def price() -> Any:
        async def execute(product: str) -> str:
            """Return the price.

            Args:
                product: The product.
            """
            return str(7 + len(product))

        return execute

    return Task(
        dataset=[Sample(input="a" * n, target=str(7 + n)) for n in range(1, 4)],
        solver=[system_message("You sell."), use_tools(price()), generate()],
        scorer=exact(),
    )


@needs_package
@pytest.mark.filterwarnings("ignore")
def test_a_solver_with_tools_is_trained(tmp_path: Path) -> None:
    """A configuration is enough; each request is counted once, and a second start asks nothing."""
    module = "reflact.integrations.inspect_ai"
    config = {
        "out_dir": str(tmp_path),
        "environment": {
            "name": f"{module}:InspectEnvironment",
            "options": {"task": f"{__name__}:shop", "train": 1, "val": 1, "test": 1},
        },
        "target": {"kind": f"{module}:InspectTarget"},
        "models": {
            "target": {
                "model": "m",
                "base_url": "http://127.0.0.1:9/v1",
                "api_key_env": None,
                "mode": "json_schema",
            }
        },
        "search": {"sources": ["edits"]},
        "train": {"num_epochs": 1},
        "gate": {"policy": "strict"},
    }
    endpoint = Endpoint()
    summary = asyncio.run(Trainer(config, transport=endpoint).train())
    asked = len(endpoint.bodies)
    assert (summary.status, summary.best.score) == ("completed", 1.0)
    assert sum(spend.usage.calls for spend in summary.spend) == asked
    assert (asyncio.run(Trainer(config, transport=endpoint).train())).best == summary.best
    assert len(endpoint.bodies) == asked
    tools = [body["tools"][0]["function"]["name"] for body in endpoint.bodies if "tools" in body]
    assert set(tools) == {"price"}


@pytest.mark.skipif(INSTALLED, reason="inspect-ai is installed")
def test_the_missing_package_is_named() -> None:
    """Without inspect-ai, the error says what to install."""
    with pytest.raises(ConfigError, match=r"pip install 'reflact\[inspect\]'"):
        InspectEnvironment("tasks:mine", **SIZES)
