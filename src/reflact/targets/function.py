"""The target that is a function: runs an agent of any framework, which asks its model through a
gateway.

Example::

    async def run_agent(rollout):
        model = MyModel(rollout.model, base_url=rollout.base_url, api_key=rollout.token)
        return await MyAgent(model, instructions=rollout.skill).run(rollout.task)


    target = FunctionTarget(run_agent)
    summary = await Trainer("run.yaml", target=target).train()
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import anyio

from reflact.config.models import ModelConfig
from reflact.errors import ConfigError, EnvironmentFailure, ReflactError, ReplyError
from reflact.protocols import Environment, RequestSender
from reflact.targets.gateway import open_gateway
from reflact.targets.gateway_session import GatewaySession, has_text, test_skill
from reflact.types import FrozenModel, Item, Skill, canonical_json

# Version of what a function gets, part of every rollout's key; raise it if that changes.
FUNCTION_TARGET_VERSION = 2


class AgentRollout(FrozenModel):
    """What a function gets to run its agent once.

    Attributes:
        skill: The agent's instructions.
        task: The task.
        base_url: Where the agent asks its model, by Chat Completions, the Responses API or the
            Messages API.
        token: The key for this address; it is valid during the rollout.
        model: The model's name, which a framework asks for.
    """

    skill: str
    task: str
    base_url: str
    token: str
    model: str


# Runs an agent and returns its answer; a function that is not async runs in a thread of its own.
RunAgent = Callable[[AgentRollout], str | Awaitable[str]]


class FunctionTarget:
    """An agent of any Python framework, run by a function once for each rollout.

    The function gives the agent ``rollout.skill`` as its instructions, and ``rollout.base_url``
    with ``rollout.token`` as the address and the key of its model. There, a gateway on 127.0.0.1
    forwards requests to ``models.target``.

    Args:
        run_agent: The function. Concurrent rollouts call it at the same time.
        version: Part of the target's identity. Change it if the function or its agent changes what
            the agent does, so that stored rollouts of the old agent are not reused.
        seconds: The most time of a rollout.
        preflight: Whether a training begins with a test that the agent's requests have the skill.
            Switch it off if only later requests have it, for example those of an agent to which
            another one hands over.
        description: What the optimizer should know of the agent, for example its tools.
    """

    def __init__(
        self,
        run_agent: RunAgent,
        *,
        version: str = "1",
        seconds: float = 300.0,
        preflight: bool = True,
        description: str = "",
    ) -> None:
        self.run_agent = run_agent
        self.seconds = seconds
        self.description = description
        self.preflight = preflight
        self._version = version
        self._sender: RequestSender | None = None
        self._model = ""

    @property
    def identity(self) -> str:
        """The function's module and name, its version and limit and, in a run, its model, as
        canonical JSON.
        """
        return canonical_json(
            {
                "target": "function",
                "version": [FUNCTION_TARGET_VERSION, self._version],
                "function": _name(self.run_agent),
                "seconds": self.seconds,
                "llm": None if self._sender is None else self._sender.identity,
            }
        )

    def describe_model(self, config: ModelConfig) -> ModelConfig:
        """Return the settings of ``models.target``, which must name the model behind the
        gateway.
        """
        if not config.model:
            raise ConfigError("models.target.model is required: name the model that the agent asks")
        return config

    def connect(self, sender: RequestSender, config: ModelConfig) -> FunctionTarget:
        """Return the same target with its agent's requests going through a run."""
        connected = copy.copy(self)
        connected._sender = sender
        connected._model = config.model
        return connected

    async def test_skill(
        self, environment: Environment, items: Sequence[Item], skill: Skill, config: ModelConfig
    ) -> str | None:
        """Run the function without its model; see ``adapters.TargetAdapter.test_skill``."""
        place = "look at how the function gives `rollout.skill` to the agent"
        return await test_skill(
            self, environment, items, skill, config, place=place, name=None, seconds=self.seconds
        )

    def session(self, skill: Skill, *, rollout: str) -> FunctionSession:
        """Start a rollout; ``rollout`` is its key.

        Raises:
            ConfigError: The target is not part of a run.
        """
        if self._sender is None:
            raise ConfigError(
                "a FunctionTarget works only in a run, which has the model behind its gateway: "
                "pass it to a Trainer"
            )
        return FunctionSession(self, self._sender, self._model, skill, rollout)


class FunctionSession(GatewaySession):
    """One run of the function."""

    def __init__(
        self, target: FunctionTarget, sender: RequestSender, model: str, skill: Skill, rollout: str
    ) -> None:
        super().__init__(sender, skill, rollout, seed=None)
        self._target = target
        self._model = model
        self._has_skill = not skill.text.strip()

    async def reply(self, message: str) -> str:
        """Run the agent on a task and return its answer.

        Raises:
            ReplyError: It reached its limit of time; its rollout scores 0.
            ModelError, BudgetSpent: Its model gave no answer.
            EnvironmentFailure: The function raised an error, no request of the agent had the skill,
                or it got a second message.
        """
        if self._task is not None:
            raise EnvironmentFailure(
                "a FunctionTarget answers one message; use an environment with one turn"
            )
        self._task = message
        answer: object = None
        with anyio.move_on_after(self._target.seconds) as scope:
            self._stop = scope.cancel
            async with open_gateway(
                self._answer, model=self._model, on_refusal=self._refuse
            ) as address:
                rollout = AgentRollout(
                    skill=self.skill.text, task=message, model=self._model, **address._asdict()
                )
                try:
                    answer = await _call(self._target.run_agent, rollout)
                except ReflactError:
                    raise
                except Exception as error:
                    raise self._failure or EnvironmentFailure(
                        f"the agent failed: {type(error).__name__}: {error}"
                    ) from error
        if self._failure is not None:
            raise self._failure
        if scope.cancelled_caught:
            raise ReplyError(
                f"the agent was ended after {self._target.seconds:g} seconds (`seconds`)",
                reasons=(),
            )
        self._require_skill()
        if not isinstance(answer, str):
            raise EnvironmentFailure(
                f"the function of the target returned {type(answer).__name__}; it must return the "
                "answer as text"
            )
        return answer

    async def _answer(self, body: dict[str, Any]) -> str:
        """Answer one request of the agent, and note whether it has the skill."""
        self._has_skill = self._has_skill or has_text(body["messages"], self.skill.text.strip())
        return await super()._answer(body)

    def _require_skill(self) -> None:
        if not self._asked:
            raise EnvironmentFailure(
                "the agent sent no request to the gateway, so the skill had no effect: give the "
                "agent's model the rollout's base_url and token"
            )
        if not self._has_skill:
            raise EnvironmentFailure(
                "no request of the agent had the skill, word for word, so the skill had no effect: "
                "give the agent the rollout's skill as its instructions"
            )


def _name(function: object) -> str:
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"


async def _call(run_agent: RunAgent, rollout: AgentRollout) -> object:
    if inspect.iscoroutinefunction(run_agent):
        return await run_agent(rollout)
    own = anyio.CapacityLimiter(1)
    answer = await anyio.to_thread.run_sync(
        partial(run_agent, rollout), abandon_on_cancel=True, limiter=own
    )
    return await answer if inspect.isawaitable(answer) else answer
