"""Targets whose agent asks its model through a gateway, and their rollouts."""

from __future__ import annotations

import copy
import json
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Self

import anyio

from reflact.agents.gateway import GatewayAddress, open_gateway
from reflact.agents.skill_test import count_text, run_skill_test
from reflact.concurrency import run_in_thread
from reflact.config.models import ModelConfig
from reflact.errors import ConfigError, EnvironmentFailure, ReflactError
from reflact.jsonutil import replace_surrogates
from reflact.messages import CallId
from reflact.protocols import Environment, RequestForwarder
from reflact.types import Item, Skill, Turn, digest_json

# Fields that the run sets itself, that differ between equal rollouts, or that ask for several
# answers.
DROPPED_FIELDS = frozenset(
    {"model", "n", "stream", "stream_options", "user", "prompt_cache_key", "safety_identifier"}
)

# What a model sees instead of the folder of a rollout, whose name differs between equal rollouts.
SHOWN_FOLDER = "/reflact-rollout"


class GatewayTarget:
    """Base of the targets whose agent asks its model through a gateway.

    Attributes:
        seconds: The most time of a rollout.
        skill_name: The name of a skill that the agent loads if it seems useful; its requests may
            have this name alone.
        skill_advice: Where the agent gets the skill, and what to change if it does not.
        seed: The text in the agent's requests that the skill replaces, if any.
        side_call: A text in the first message of requests that are no part of the task.
        model: The name of the model, in a run; a framework asks for it.
    """

    seconds: float
    skill_name: str | None = None
    skill_advice: str
    seed: str | None = None
    side_call: str | None = None
    model = ""
    _sender: RequestForwarder | None = None

    def describe_model(self, config: ModelConfig) -> ModelConfig:
        """Return the settings of ``models.target``, which must name the model."""
        if not config.model:
            raise ConfigError("models.target.model is required: name the model that the agent asks")
        return config

    def connect(self, sender: RequestForwarder, config: ModelConfig) -> Self:
        """Return the same target with its agent's requests going through a run."""
        connected = copy.copy(self)
        connected._sender = sender
        connected.model = config.model
        return connected

    async def test_skill(
        self, environment: Environment, items: Sequence[Item], skill: Skill, config: ModelConfig
    ) -> str | None:
        """Run the agent without its model; see ``adapters.TargetAdapter.test_skill``."""
        return await run_skill_test(
            lambda probe: self.connect(probe, config),
            environment,
            items,
            skill,
            advice=self.skill_advice,
            name=self.skill_name,
            seconds=self.seconds,
        )

    @property
    def sender_identity(self) -> str | None:
        """The model and its settings; None outside of a run."""
        return None if self._sender is None else self._sender.identity

    def require_sender(self) -> RequestForwarder:
        """Return the run that answers the agent's requests; ConfigError if there is none."""
        if self._sender is None:
            raise ConfigError(
                f"a {type(self).__name__} works only in a run, which has the model behind its "
                "gateway: pass it to a Trainer"
            )
        return self._sender


class GatewaySession:
    """One rollout of an agent that asks its model through a gateway; subclasses run the agent.

    ``rollout`` is the rollout's key.
    """

    def __init__(self, target: GatewayTarget, skill: Skill, rollout: str) -> None:
        self.skill = skill
        self.rollout = rollout
        self._target = target
        self._sender = target.require_sender()
        self._task: str | None = None
        self._last: list[Mapping[str, Any]] = []
        self._adopted: tuple[Turn, ...] | None = None
        self._asked: Counter[str] = Counter()
        self._failure: ReflactError | None = None
        self._is_textless = False
        self._stop: Callable[[], None] = lambda: None
        self._folder = SHOWN_FOLDER

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The agent's longest conversation with its model, without instructions."""
        if self._adopted is not None:
            return self._adopted
        task = () if self._task is None else (Turn(role="user", content=self._task),)
        spoken = [turn for message in self._last for turn in _read_turns(message)]
        begin = next((n for n, turn in enumerate(spoken, 1) if turn.content == self._task), 0)
        return (*task, *spoken[begin:])

    def adopt(self, turns: tuple[Turn, ...]) -> None:
        """Take the turns of this session's copy in a worker."""
        self._adopted = turns

    async def forward(
        self, request: Mapping[str, Any], *, purpose: str, number: int, part: str
    ) -> str:
        """Pass on a request, also one of this session's copy in a worker."""
        call_id = CallId(
            role="target", purpose=purpose, rollout=self.rollout, number=number, part=part
        )
        return await self._sender.forward(request, call_id=call_id)

    @asynccontextmanager
    async def _serve_task(self, message: str) -> AsyncIterator[GatewayAddress]:
        """Take the environment's only message, and answer the agent's requests inside the block.

        The first failure of a request ends the block, and is raised at its end.
        """
        if self._task is not None:
            raise EnvironmentFailure(
                "an agent behind a gateway answers one message; use an environment with one turn"
            )
        self._task = replace_surrogates(message)
        try:
            with anyio.CancelScope() as scope:
                self._stop = scope.cancel
                model = self._target.model
                async with open_gateway(
                    self._answer, model=model, on_refusal=self._refuse
                ) as address:
                    yield address
        except Exception:
            if self._failure is None:
                raise
        if self._failure is not None:
            raise self._failure

    def _explain_null(self) -> str:
        """Return what to say of an agent that failed after an answer without text."""
        if not self._is_textless:
            return ""
        return (
            "; the last answer of models.target had no text (its content is null), which the agent "
            "may not expect; raise models.target.max_tokens if the model thinks first"
        )

    def _refuse(self, reason: str) -> None:
        """End the agent, which asks for something that the gateway does not have."""
        self._fail(EnvironmentFailure(f"the gateway refused a request of the agent: {reason}"))

    def _fail(self, error: ReflactError) -> None:
        """End the agent; the first reason counts."""
        self._failure = self._failure or error
        self._stop()

    async def _answer(self, body: dict[str, Any]) -> str:
        """Answer one request of the agent; a failure ends the agent."""
        try:
            request, is_side, digest = await run_in_thread(lambda: self._prepare(body), body)
            if not is_side:
                self._last = max(self._last, request["messages"], key=len)
            number = self._asked[digest]
            self._asked[digest] += 1
            purpose = "side_call" if is_side else "rollout"
            completion = await self.forward(
                request, purpose=purpose, number=number, part=digest[:16]
            )
        except ReflactError as error:
            self._fail(error)
            raise
        self._is_textless = not any(
            f'"{name}":' in completion for name in ("content", "tool_calls")
        )
        completion = completion.replace(SHOWN_FOLDER, self._folder)
        return completion.replace(_flatten(SHOWN_FOLDER), _flatten(self._folder))

    def _prepare(self, body: dict[str, Any]) -> tuple[dict[str, Any], bool, str]:
        """Return a request as the run sends it, whether it is a side call, and its digest."""
        body = json.loads(self._hide_folder(json.dumps(body, ensure_ascii=False)))
        request = {name: value for name, value in body.items() if name not in DROPPED_FIELDS}
        seed = self._target.seed
        side_call = self._target.side_call
        is_side = side_call is not None and count_text(request["messages"][:1], side_call) > 0
        if seed is not None and not is_side:
            count = count_text(request["messages"], seed)
            if count != 1:
                raise EnvironmentFailure(
                    f"a request of the agent has the seed {count} times instead of once; give a "
                    "longer or shorter part of its instructions as seed"
                )
            request["messages"] = _replace_text(request["messages"], seed, self.skill.text)
        return request, is_side, digest_json(request)

    def _hide_folder(self, text: str) -> str:
        """Return a text with the name that all rollouts' folders have."""
        text = text.replace(self._folder, SHOWN_FOLDER)
        return text.replace(_flatten(self._folder), _flatten(SHOWN_FOLDER))


def _replace_text(value: Any, old: str, new: str) -> Any:
    """Return a JSON value with a text replaced in all of its strings."""
    if isinstance(value, str):
        return value.replace(old, new)
    if isinstance(value, list):
        return [_replace_text(part, old, new) for part in value]
    if isinstance(value, dict):
        return {name: _replace_text(part, old, new) for name, part in value.items()}
    return value


def _flatten(path: str) -> str:
    """Return a path as a single name, as Claude Code writes it into texts."""
    return re.sub(r"[^A-Za-z0-9]", "-", path)


def _read_turns(message: Mapping[str, Any]) -> list[Turn]:
    """Return a chat message as turns; instructions are none."""
    role = message.get("role")
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    turns = []
    if content and role in {"user", "assistant", "tool"}:
        turns.append(Turn(role=role, content=str(content)))
    for call in message.get("tool_calls") or ():
        function = call["function"]
        text = f"calls {function.get('name')}({function.get('arguments')})"
        turns.append(Turn(role="assistant", content=text))
    return turns
