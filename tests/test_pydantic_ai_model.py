"""Models through pydantic-ai: any role asks a provider that is not OpenAI-compatible, as it asks any endpoint."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
from pydantic_ai.exceptions import ModelHTTPError, UnexpectedModelBehavior
from pydantic_ai.messages import (
    ModelMessage,
    ModelResponse,
    SystemPromptPart,
    TextPart,
    ToolCallPart,
    UserPromptPart,
)
from pydantic_ai.models.function import AgentInfo, FunctionModel
from pydantic_ai.usage import RequestUsage

from filled_schema import fill_schema
from reflact import Trainer
from reflact.errors import ConfigError
from reflact.llm import read_cassette
from reflact.testing import TOY_RULES, ToyEnvironment
from virtual_time import NEVER, HurriedLoop

LINES = [rule.line for rule in TOY_RULES.values()]


def make_model(
    *, native: bool, asked: list[Any] | None = None, spoil: Callable[[int], None] | None = None
) -> Any:
    """Return a model that fills in any schema, by a schema of the provider or by a tool."""
    n = 0

    async def answer(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
        nonlocal n
        n += 1
        if asked is not None:
            asked.append((messages, info))
        if spoil is not None:
            spoil(n)
        usage = RequestUsage(input_tokens=100, output_tokens=10)
        parameters = info.model_request_parameters
        if parameters.output_tools:
            (tool,) = parameters.output_tools
            return ModelResponse(
                parts=[ToolCallPart(tool.name, fill_schema(tool.parameters_json_schema, LINES[0]))],
                usage=usage,
            )
        if parameters.output_object is None:
            return ModelResponse(parts=[TextPart("7")], usage=usage)
        text = json.dumps(fill_schema(parameters.output_object.json_schema, LINES[0]))
        return ModelResponse(parts=[TextPart(text)], usage=usage)

    return FunctionModel(answer, model_name="f", profile={"supports_json_schema_output": native})


async def train(folder: Path, model: Any, **config: Any) -> Any:
    """Return the summary of a toy run whose both roles ask a model of pydantic-ai."""
    role = {"api": "pydantic_ai", "model": "function:f", "open_model": lambda: model, "timeout": NEVER}
    settings = {
        "out_dir": str(folder),
        "models": {"target": role, "optimizer": role},
        "search": {"sources": ["edits"]},
        "train": {"num_epochs": 1, "batch_size": 4},
        **config,
    }
    return await Trainer(settings, environment=ToyEnvironment(train=4, val=2, test=2)).train()


@pytest.mark.parametrize("native", [True, False])
async def test_every_role_asks_it(tmp_path: Path, native: bool) -> None:
    """Typed replies come by the provider's schema or by a tool that must be called; the spend is what was counted."""
    asked: list[Any] = []
    summary = await train(tmp_path, make_model(native=native, asked=asked))
    assert summary.status == "completed"
    assert sum(spend.usage.calls for spend in summary.spend) == len(asked)
    assert sum(spend.usage.input_tokens for spend in summary.spend) == 100 * len(asked)
    typed = [info.model_request_parameters for _, info in asked if not info.allow_text_output or native]
    assert any(bool(parameters.output_tools) != native for parameters in typed)
    messages = asked[-1][0]
    assert {type(part) for message in messages for part in message.parts} <= {
        SystemPromptPart,
        UserPromptPart,
    }


async def test_a_recording_replays_without_it(tmp_path: Path) -> None:
    cassette = tmp_path / "cassette.jsonl"
    recorded = await train(
        tmp_path / "a", make_model(native=True), replay={"cassette": str(cassette), "mode": "record"}
    )
    replayed = await train(tmp_path / "b", None, replay={"cassette": str(cassette)})
    assert replayed.best == recorded.best
    assert {line.path for line in read_cassette(cassette) if line.call_id} == {"/chat/completions"}


def test_failures_are_repeated(tmp_path: Path) -> None:

    def spoil(n: int) -> None:
        if n == 1:
            raise ModelHTTPError(429, "f", "slow down", headers={"retry-after": "0"})
        if n == 2:
            raise UnexpectedModelBehavior("no parts")

    work = partial(train, tmp_path, make_model(native=True, spoil=spoil))
    summary = anyio.run(work, backend_options={"loop_factory": HurriedLoop})
    assert summary.status == "completed"
    assert {fault.kind for fault in summary.faults} == {"429", "unusable"}


@pytest.mark.parametrize("model", ["nobody:m", "m", "mistral:mistral-large-latest"])
async def test_a_model_that_cannot_be_opened_is_one_sentence(tmp_path: Path, model: str) -> None:
    settings = {
        "out_dir": str(tmp_path),
        "models": {"target": {"api": "pydantic_ai", "model": model}, "optimizer": {"model": "m"}},
    }
    with pytest.raises(ConfigError, match=rf"models\.target\.model: {model} cannot be opened: "):
        await Trainer(settings, environment=ToyEnvironment(train=4, val=2, test=2)).train()
