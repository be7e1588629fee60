"""The target that is a pydantic-ai agent: the skill takes the place of its literal instructions.

    target = PydanticAITarget(agent, deps=lambda item: Shop(customer=item.metadata["customer"]))
    summary = await Trainer("run.yaml", target=target).train()

Tools, dependencies, instruction functions, system prompts, toolsets and output types stay. In a
run, each request of the agent is stored, limited, charged, recorded and replayed like any other.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, replace
from functools import partial
from typing import Any, Generic, TypeVar, cast

from pydantic import JsonValue, TypeAdapter
from pydantic_ai.agent import AbstractAgent
from pydantic_ai.capabilities import AbstractCapability, WrapModelRequestHandler
from pydantic_ai.exceptions import (
    ModelAPIError,
    ModelHTTPError,
    UnexpectedModelBehavior,
    UsageLimitExceeded,
    UserError,
)
from pydantic_ai.messages import (
    AgentInstructionSource,
    InstructionPart,
    ModelMessage,
    ModelMessagesTypeAdapter,
    ModelResponse,
    RetryPromptPart,
    TextPart,
    ToolCallPart,
    ToolReturnPart,
    UserPromptPart,
)
from pydantic_ai.models import Model, ModelRequestContext, infer_model
from pydantic_ai.models.function import AgentInfo, FunctionModel
from pydantic_ai.settings import ModelSettings
from pydantic_ai.tools import RunContext, ToolDefinition
from pydantic_ai.toolsets import AbstractToolset, FunctionToolset
from pydantic_ai.usage import UsageLimits

from reflact.config.models import ModelConfig
from reflact.errors import ConfigError, EnvironmentFailure, ReflactError, ReplyError
from reflact.messages import AgentAnswer, CallId
from reflact.protocols import RequestSender
from reflact.types import Item, Skill, Turn, canonical_json

D = TypeVar("D")
Out = TypeVar("Out")

# Makes the dependencies of one rollout from its item.
MakeDeps = Callable[[Item], D | Awaitable[D]]

# Version of the request format, part of every rollout's key; raise it if the format changes.
REQUEST_VERSION = 1

# Fields of messages and parts that differ between equal runs, and that a model does not read.
UNSTABLE_FIELDS = frozenset(
    {"timestamp", "run_id", "conversation_id", "usage", "provider_details", "provider_response_id"}
    | {"metadata", "instructions"}
)

# Settings that may hold a key, or that no reply depends on.
PRIVATE_SETTINGS = frozenset({"extra_headers", "timeout"})

ANYTHING: TypeAdapter[Any] = TypeAdapter(Any)

# A section of a skill that describes a tool: up to the next heading of level 1 or 2, or a protected
# region.
TOOL_SECTION = re.compile(
    r"^##[ \t]+Tool:[ \t]*`?([\w.-]+)`?[ \t]*\r?$(.*?)"
    r"(?=^\#{1,2}[ \t]|<!--[ \t]*(?:EXAMPLES_START|SLOW_UPDATE_START|APPENDIX_START|SKILL_FILE)\b"
    r"|\Z)",
    re.MULTILINE | re.DOTALL,
)

TOOLS_ARE_TRAINED = (
    "The document may describe tools too: a section under the heading '## Tool: NAME' replaces the "
    "description of that tool, and is no part of the instructions. It ends at the next heading of "
    "level 1 or 2, so put other rules above the first such section, or under a heading of their "
    "own. A tool without a section keeps the description above."
)


@dataclass(eq=False, repr=False)
class PydanticAITarget(Generic[D, Out]):
    """A pydantic-ai agent under training.

    Args:
        agent: The agent. It is not changed; concurrent rollouts under different skills do not mix.
        deps: A function of the item, async or not, that returns the dependencies of its rollout. It
            must not use the item's reference.
        usage_limits: Limits of one rollout. A rollout that reaches one scores 0.
        version: Part of the target's identity. Change it with what the agent's own functions do,
            so that stored rollouts of the old agent are not reused.
        train_tools: Train the descriptions of tools too: a section ``## Tool: NAME`` of the skill
            replaces the description of that tool.
    """

    agent: AbstractAgent[D, Out]
    _: KW_ONLY
    deps: MakeDeps[D] | None = None
    usage_limits: UsageLimits | None = None
    version: str = "1"
    train_tools: bool = False

    def __post_init__(self) -> None:
        """Find the agent's model."""
        own = self.agent.model
        self.model = _resolve_model(own)
        self.model_name = own if isinstance(own, str) else self.model.model_id
        self.settings: ModelSettings = {}
        self.sender: RequestSender | None = None
        self._identity: str | None = None

    @property
    def identity(self) -> str:
        """The agent's model, settings in force, tools, prompts, output and limits, as JSON."""
        return self._identity or self._describe()

    def _describe(self) -> str:
        agent = self.agent
        toolsets: list[JsonValue] = []
        for toolset in _list_toolsets(agent):
            tools = [_dump_tool(tool) for tool in _list_tools(toolset)]
            toolsets.append([type(toolset).__name__, toolset.id, *tools])
        return canonical_json(
            {
                "target": "pydantic_ai",
                "version": [REQUEST_VERSION, self.version],
                "agent": agent.name,
                "model": self.model_name,
                "settings": _dump_settings({**self._own_settings, **self.settings}),
                "system_prompts": list(getattr(agent, "_system_prompts", ())),
                "output": agent.output_json_schema(),
                "toolsets": toolsets,
                "limits": None if self.usage_limits is None else _dump(asdict(self.usage_limits)),
                "train_tools": self.train_tools,
            }
        )

    @property
    def instructions(self) -> str:
        """The literal instructions of the agent, with which a training may begin."""
        own = getattr(getattr(self.agent, "wrapped", self.agent), "_instructions", ())
        return "\n\n".join(each.instruction for each in own if isinstance(each.instruction, str))

    @property
    def _own_settings(self) -> Mapping[str, Any]:
        """The settings of the agent and its model that no function makes."""
        chosen = getattr(self.agent, "model_settings", None)
        return {**(self.model.settings or {}), **(chosen if isinstance(chosen, Mapping) else {})}

    @property
    def description(self) -> str:
        """The agent's tools, for the optimizer, and how the document may describe them."""
        lines = []
        for toolset in _list_toolsets(self.agent):
            for tool in _list_tools(toolset):
                names = ", ".join(tool.parameters_json_schema.get("properties", {}))
                text = " ".join((tool.description or "no description").split())
                lines.append(f"- {tool.name}({names}): {text}")
        if lines:
            lines.insert(0, "The agent has these tools:")
        if self.train_tools:
            lines.append(TOOLS_ARE_TRAINED)
        return "\n".join(lines)

    def describe_model(self, config: ModelConfig) -> ModelConfig:
        """Return the settings of ``models.target`` with the agent's model and endpoint."""
        if config.model:
            raise ConfigError(
                "models.target.model has no effect on a pydantic-ai agent, which has its own "
                "model: remove the key, and set the model in the agent"
            )
        host = re.match(r"https?://[^/?#@\s]+", self.model.base_url or "")
        system = re.sub("[^a-z0-9-]", "-", self.model.system.lower())
        changes = {
            "model": self.model_name,
            "base_url": f"https://{system}.invalid" if host is None else host[0],
            "api": "pydantic_ai",
            "api_key_env": None,
            "key": None,
            "open_model": lambda: self.model,
            "max_tokens": config.max_tokens or self._own_settings.get("max_tokens"),
        }
        return config.model_copy(update=changes)

    def connect(self, sender: RequestSender, config: ModelConfig) -> PydanticAITarget[D, Out]:
        """Return the same target in a run, under the settings of ``models.target``."""
        connected = copy.copy(self)
        connected.sender = sender
        connected.settings = {}
        if config.temperature is not None:
            connected.settings["temperature"] = config.temperature
        if config.max_tokens is not None:
            connected.settings["max_tokens"] = config.max_tokens
        connected._identity = connected._describe()
        return connected

    def session(self, skill: Skill, *, rollout: str) -> AgentSession[D, Out]:
        """Start a run of an agent without dependencies; ``rollout`` is the rollout's key."""
        if self.deps is not None:
            raise ConfigError("the agent's deps need an item: start its sessions with session_for")
        return self.session_for(Item(id=rollout, input=""), skill, rollout=rollout)

    def session_for(self, item: Item, skill: Skill, *, rollout: str) -> AgentSession[D, Out]:
        """Start a run of the agent on an item, under a skill; ``rollout`` is the rollout's key."""
        return AgentSession(self, item, skill, rollout)


class AgentSession(AbstractCapability[D], Generic[D, Out]):
    """A conversation with the agent about one item; the agent remembers it.

    As a capability of the agent's runs it puts the skill in place of literal instructions, and
    sends requests through the run.
    """

    def __init__(
        self, target: PydanticAITarget[D, Out], item: Item, skill: Skill, rollout: str
    ) -> None:
        self._target = target
        self._item = item
        self._rollout = rollout
        self._skill = skill.text
        self._tools: Mapping[str, str] = {}
        if target.train_tools:
            self._skill, self._tools = _split_tools(skill.text)
        self._deps: list[D] = []
        self._messages: list[ModelMessage] = []

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The messages, tool calls, observations and answers so far, without instructions."""
        return tuple(_list_turns(self._messages))

    async def reply(self, message: str) -> str:
        """Run the agent on a message after all earlier ones; return its output, as text or as JSON.

        Raises:
            ReplyError: It gave no valid output, or reached a limit; its rollout scores 0.
            EnvironmentFailure: A tool, an instruction function or ``deps`` raised an error.
        """
        target = self._target
        try:
            if not self._deps:
                deps: Any = None if target.deps is None else target.deps(self._item)
                if inspect.isawaitable(deps):
                    deps = await deps
                self._deps.append(deps)
            result = await target.agent.run(
                message,
                deps=self._deps[0],
                model=target.model,
                model_settings=target.settings or None,
                message_history=list(self._messages) or None,
                usage_limits=target.usage_limits,
                capabilities=[self],
            )
        except ReflactError:
            raise
        except (UsageLimitExceeded, UnexpectedModelBehavior) as error:
            raise ReplyError(f"the agent gave up: {error}", reasons=(str(error),)) from error
        except Exception as error:
            reason = f"the agent failed on item {self._item.id}: {type(error).__name__}: {error}"
            raise EnvironmentFailure(reason) from error
        self._messages = list(result.all_messages())
        return result.output if isinstance(result.output, str) else _write_json(result.output)

    async def prepare_tools(
        self, ctx: RunContext[D], tool_defs: list[ToolDefinition]
    ) -> list[ToolDefinition]:
        """Replace the descriptions of tools that the skill describes."""
        return [
            replace(tool, description=self._tools.get(tool.name, tool.description))
            for tool in tool_defs
        ]

    async def before_model_request(
        self, ctx: RunContext[D], request_context: ModelRequestContext
    ) -> ModelRequestContext:
        """Replace the literal instructions; those of functions and toolsets stay."""
        self._messages = list(request_context.messages)
        parameters = request_context.model_request_parameters
        others = [part for part in parameters.instruction_parts or () if not _is_literal(part)]
        skill = [InstructionPart(content=self._skill.strip("\n"))] if self._skill.strip() else []
        return replace(
            request_context,
            model_request_parameters=replace(parameters, instruction_parts=[*skill, *others]),
        )

    async def wrap_model_request(
        self,
        ctx: RunContext[D],
        *,
        request_context: ModelRequestContext,
        handler: WrapModelRequestHandler,
    ) -> ModelResponse:
        """Return the stored answer, or ask the model and store its answer."""
        sender = self._target.sender
        messages = request_context.messages
        if sender is None:
            response = await handler(request_context)
        else:
            number = sum(isinstance(message, ModelResponse) for message in messages)
            text = await sender.send(
                {"model": self._target.model_name, **_write_request(request_context)},
                call_id=CallId(
                    role="target", purpose="rollout", rollout=self._rollout, number=number
                ),
                answer=partial(_ask_model, handler, request_context),
            )
            (message,) = ModelMessagesTypeAdapter.validate_json(text)
            assert isinstance(message, ModelResponse)
            response = message
        self._messages = [*messages, response]
        return response


async def _ask_model(
    handler: WrapModelRequestHandler, request_context: ModelRequestContext
) -> AgentAnswer:
    """Ask an agent's model once."""
    try:
        response = await handler(request_context)
    except ModelHTTPError:
        raise
    except ModelAPIError as error:
        raise ConnectionError(str(error)) from error
    text = ModelMessagesTypeAdapter.dump_json([response]).decode("utf-8")
    counts = response.usage
    return AgentAnswer.from_counts(
        text, counts.input_tokens, counts.output_tokens, counts.cache_read_tokens
    )


def _write_request(request_context: ModelRequestContext) -> dict[str, JsonValue]:
    """Return all that an answer depends on, without what differs between equal runs."""
    parameters = request_context.model_request_parameters
    settings = _dump_settings(request_context.model_settings)
    tools = (*parameters.function_tools, *parameters.output_tools)
    schema = parameters.output_object
    request: dict[str, JsonValue] = {
        "settings": settings,
        "instructions": InstructionPart.join(parameters.instruction_parts or ()),
        "messages": _dump_messages(request_context.messages),
        "tools": [_dump_tool(tool) for tool in tools],
        "output": {
            "mode": parameters.output_mode,
            "text": parameters.allow_text_output,
            "schema": None if schema is None else _dump(schema.json_schema),
            "native_tools": [_dump(tool) for tool in parameters.native_tools],
        },
    }
    if settings.get("max_tokens") is not None:
        request["max_tokens"] = settings["max_tokens"]
    return request


def _dump_messages(messages: list[ModelMessage]) -> JsonValue:
    """Return messages without unstable fields; arguments and results of tools stay whole."""
    dumped: list[dict[str, Any]] = ModelMessagesTypeAdapter.dump_python(messages, mode="json")
    for message in dumped:
        for entry in (message, *message["parts"]):
            for name in UNSTABLE_FIELDS & entry.keys():
                del entry[name]
    return cast("JsonValue", dumped)


def _dump_tool(tool: ToolDefinition) -> JsonValue:
    return {
        "name": tool.name,
        "description": tool.description,
        "parameters": _dump(tool.parameters_json_schema),
        "strict": tool.strict,
    }


def _dump_settings(settings: Mapping[str, Any] | None) -> dict[str, JsonValue]:
    return {
        name: _dump(value)
        for name, value in sorted((settings or {}).items())
        if name not in PRIVATE_SETTINGS
    }


def _dump(value: Any) -> JsonValue:
    """Return a value as JSON; what JSON cannot express becomes its text."""
    dumped: JsonValue = ANYTHING.dump_python(value, mode="json", fallback=str)
    return dumped


def _write_json(value: Any) -> str:
    return ANYTHING.dump_json(value, fallback=str).decode("utf-8")


def _is_literal(part: InstructionPart) -> bool:
    """Whether an instruction is one of the texts that the agent was made with."""
    return (
        part.id is not None
        and isinstance(part.id.source, AgentInstructionSource)
        and not part.dynamic
    )


def _split_tools(text: str) -> tuple[str, Mapping[str, str]]:
    """Return a skill without its sections on tools, and their texts by the tools' names."""
    described: dict[str, str] = {}
    for name, section in TOOL_SECTION.findall(text):
        if section.strip():
            before = [described[name]] if name in described else []
            described[name] = "\n\n".join([*before, section.strip()])
    return TOOL_SECTION.sub("", text), described


def _list_toolsets(agent: AbstractAgent[Any, Any]) -> Sequence[AbstractToolset[Any]]:
    leaves: list[AbstractToolset[Any]] = []
    for toolset in agent.toolsets:
        toolset.apply(leaves.append)
    return leaves


def _list_tools(toolset: AbstractToolset[Any]) -> Sequence[ToolDefinition]:
    """Return the tools of a toolset that are known before a run."""
    if not isinstance(toolset, FunctionToolset):
        return ()
    return [tool.tool_def for tool in toolset.tools.values()]


def _list_turns(messages: Sequence[ModelMessage]) -> Iterator[Turn]:
    """Yield messages as turns; calls of tools are the assistant's, results the tool's."""
    for message in messages:
        for part in message.parts:
            match part:
                case UserPromptPart(content=content):
                    text = content if isinstance(content, str) else _write_json(content)
                    yield Turn(role="user", content=text)
                case TextPart(content=text) if text:
                    yield Turn(role="assistant", content=text)
                case ToolCallPart(tool_name=name):
                    text = f"calls {name}({part.args_as_json_str()})"
                    yield Turn(role="assistant", content=text)
                case ToolReturnPart(tool_name=name):
                    yield Turn(role="tool", content=f"{name}: {part.model_response_str()}")
                case RetryPromptPart(tool_name=name):
                    text = f"{name or 'output'}: {part.model_response()}"
                    yield Turn(role="tool", content=text)


def _resolve_model(model: Model | str | None) -> Model:
    """Return an agent's model; one that cannot be connected raises its error when it is asked.

    A replayed run asks no model, and so needs no key.
    """
    if model is None:
        raise ConfigError("the pydantic-ai agent has no model: set one in the agent")
    try:
        return infer_model(model)
    except (UserError, ImportError) as error:
        reason = str(error)

    def refuse(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
        raise ConfigError(f"the agent's model {model} cannot be asked: {reason}")

    return FunctionModel(refuse, model_name=str(model))
