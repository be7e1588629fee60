"""Models of providers that are not OpenAI-compatible, through pydantic-ai.

The client writes its requests as chat completions. This module passes them on as pydantic-ai's
messages, and returns the answer's text. So every mode, cap and repeated reply works as with other
endpoints.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from pydantic_ai.exceptions import ModelAPIError, ModelHTTPError, UnexpectedModelBehavior, UserError
from pydantic_ai.messages import (
    ModelMessage,
    ModelRequest,
    ModelResponse,
    SystemPromptPart,
    TextPart,
    ToolCallPart,
    UserPromptPart,
)
from pydantic_ai.models import Model, ModelRequestParameters, infer_model
from pydantic_ai.output import OutputObjectDefinition
from pydantic_ai.providers import infer_provider_class
from pydantic_ai.settings import ModelSettings
from pydantic_ai.tools import ToolDefinition

from reflact.config.models import ModelConfig
from reflact.errors import ConfigError
from reflact.llm.completions import AnswerFault
from reflact.messages import AgentAnswer

# Fields of a chat completion's request that pydantic-ai has under the same name.
SETTINGS = ("temperature", "top_p", "max_tokens", "seed")


class PydanticAIModel:
    """Answers requests of the client by a model of pydantic-ai; without a ``key``, the provider
    reads its own environment variable.

    Raises:
        ConfigError: The name is unknown, or the provider's package or key is missing.
    """

    def __init__(self, config: ModelConfig, role: str, key: str | None) -> None:
        try:
            self._model = _open_model(config, key)
        except (UserError, ImportError, ValueError) as error:
            raise ConfigError(
                f"models.{role}.model: {config.model} cannot be opened: {error}"
            ) from None

    async def answer(self, content: bytes) -> AgentAnswer:
        """Answer one request, a chat completion's body in JSON."""
        body = json.loads(content)
        settings = cast("ModelSettings", {name: body[name] for name in SETTINGS if name in body})
        parameters = _write_parameters(self._model, body.get("response_format"))
        try:
            response = await self._model.request(
                _write_messages(body["messages"]), settings, parameters
            )
        except ModelHTTPError:
            raise
        except ModelAPIError as error:
            raise ConnectionError(str(error)) from error
        except UnexpectedModelBehavior as error:
            raise AnswerFault(str(error), "unusable") from error
        counts = response.usage
        return AgentAnswer.from_counts(
            _read_text(response),
            counts.input_tokens,
            counts.output_tokens,
            counts.cache_read_tokens,
            truncated=response.finish_reason == "length",
        )


def _open_model(config: ModelConfig, key: str | None) -> Model:
    if config.open_model is not None:
        opened = config.open_model()
        if not isinstance(opened, Model):
            raise ValueError(
                f"open_model returned a value of type {type(opened).__name__}, and no model of "
                "pydantic-ai"
            )
        return opened
    if key is None:
        return infer_model(config.model)
    return infer_model(config.model, lambda name: infer_provider_class(name)(api_key=key))  # type: ignore[call-arg]


def _write_messages(messages: Sequence[Mapping[str, str]]) -> list[ModelMessage]:
    """Return chat messages as pydantic-ai's; neighbours of one side are one message."""
    written: list[ModelMessage] = []
    for message in messages:
        text = message.get("content") or ""
        if message["role"] == "assistant":
            written.append(ModelResponse(parts=[TextPart(text)]))
            continue
        part = SystemPromptPart(text) if message["role"] == "system" else UserPromptPart(text)
        if written and isinstance(written[-1], ModelRequest):
            written[-1] = ModelRequest(parts=[*written[-1].parts, part])
        else:
            written.append(ModelRequest(parts=[part]))
    return written


def _write_parameters(model: Model, wanted: Mapping[str, Any] | None) -> ModelRequestParameters:
    """Return how to ask for a typed reply: by a schema, or else by a tool that must be called."""
    if wanted is None:
        return ModelRequestParameters()
    named = wanted["json_schema"]
    if model.profile.get("supports_json_schema_output"):
        return ModelRequestParameters(
            output_mode="native",
            output_object=OutputObjectDefinition(json_schema=named["schema"], name=named["name"]),
        )
    tool = ToolDefinition(
        name=named["name"],
        description="Gives the reply.",
        parameters_json_schema=named["schema"],
        kind="output",
    )
    return ModelRequestParameters(output_mode="tool", output_tools=[tool], allow_text_output=False)


def _read_text(response: ModelResponse) -> str:
    """Return the arguments of the first tool call, or else the text."""
    for part in response.parts:
        if isinstance(part, ToolCallPart):
            return part.args_as_json_str()
    return "".join(part.content for part in response.parts if isinstance(part, TextPart))
