"""The environment of an Inspect task: its scores are those of Inspect for the same replies."""

from __future__ import annotations

import asyncio
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest

from doubles import Endpoint, completion
from filled_schema import fill_schema
from reflact import Trainer
from reflact.errors import ConfigError
from reflact.integrations.inspect_ai import InspectEnvironment
from reflact.types import Split, Turn

INSTALLED = find_spec("inspect_ai") is not None
needs_package = pytest.mark.skipif(not INSTALLED, reason="inspect-ai brings 350 MB")
SIZES = {"train": 2, "val": 2, "test": 2}


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
    from inspect_ai.dataset import Sample, example_dataset
    from inspect_ai.scorer import choice, includes
    from inspect_ai.solver import chain_of_thought, generate, multiple_choice

    solver, scorer = {
        "theory_of_mind": ([chain_of_thought(), generate()], includes()),
        "choices": (multiple_choice(), choice()),
    }[name]
    if name == "choices":
        dataset: Any = [Sample(input=f"{n}?", choices=["one", "two"], target="AB"[n % 2]) for n in range(6)]
    else:
        dataset = example_dataset(name)[:6]
    return Task(dataset=dataset, solver=solver, scorer=scorer)


@needs_package
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["theory_of_mind", "choices"])
def test_scores_are_those_of_inspect(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def answer(body: dict[str, Any]) -> httpx.Response:
    """Play a model that looks up the price if its instructions say so, and an optimizer."""
    if "response_format" in body:
        schema = body["response_format"]["json_schema"]["schema"]
        return completion(json.dumps(fill_schema(schema, "Look it up.")))
    last = body["messages"][-1]
    if last["role"] == "tool":
        return completion(str(last["content"]))
    if "Look it up." not in str(body["messages"][0]["content"]):
        return completion("About 5.")
    function = {"name": "price", "arguments": json.dumps({"product": str(last["content"])})}
    calls = [{"id": "c0", "type": "function", "function": function}]
    message = {"role": "assistant", "content": "", "tool_calls": calls}
    choice = {"index": 0, "finish_reason": "tool_calls", "message": message}
    return httpx.Response(200, json={"model": "m", "choices": [choice]})


def shop() -> Any:
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
    endpoint = Endpoint(answer)
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
