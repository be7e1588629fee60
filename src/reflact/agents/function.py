"""The target that is a function: runs an agent of any framework, behind a gateway.

Example::

    async def run_agent(rollout):
        model = MyModel(rollout.model, base_url=rollout.base_url, api_key=rollout.token)
        return await MyAgent(model, instructions=rollout.skill).run(rollout.task)


    target = FunctionTarget(run_agent)
    summary = await Trainer("run.yaml", target=target).train()
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any

import anyio

from reflact.agents.gateway_session import GatewaySession, GatewayTarget
from reflact.agents.skill_test import count_text
from reflact.errors import EnvironmentFailure, ReflactError, ReplyError
from reflact.types import FrozenModel, Skill, canonical_json

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


@dataclass(eq=False)
class FunctionTarget(GatewayTarget):
    """An agent of any Python framework, run by a function once for each rollout.

    The function gives the agent ``rollout.skill`` as its instructions, and ``rollout.base_url``
    with ``rollout.token`` as the address and the key of its model. There, a gateway on 127.0.0.1
    forwards requests to ``models.target``.

    Args:
        run_agent: The function. Concurrent rollouts call it at the same time.
        version: Part of the target's identity. Change it with what the agent does, so that stored
            rollouts of the old agent are not reused.
        seconds: The most time of a rollout.
        preflight: Whether a training begins with a test that the agent's requests have the skill.
            Switch it off if only later requests have it, as after a hand-over.
        description: What the optimizer should know of the agent, for example its tools.
    """

    run_agent: RunAgent
    _: KW_ONLY
    version: str = "1"
    seconds: float = 300.0
    preflight: bool = True
    description: str = ""

    skill_advice = "look at how the function gives `rollout.skill` to the agent"

    @property
    def identity(self) -> str:
        """The function's name, the settings and, in a run, the model, as canonical JSON."""
        function: Any = self.run_agent
        if not hasattr(function, "__qualname__"):
            function = type(function)
        return canonical_json(
            {
                "target": "function",
                "version": [FUNCTION_TARGET_VERSION, self.version],
                "function": f"{function.__module__}.{function.__qualname__}",
                "seconds": self.seconds,
                "llm": self.sender_identity,
            }
        )

    def session(self, skill: Skill, *, rollout: str) -> FunctionSession:
        """Start a rollout; ``rollout`` is its key."""
        return FunctionSession(self, skill, rollout)


class FunctionSession(GatewaySession):
    """One run of the function."""

    _target: FunctionTarget
    _has_skill = False

    async def reply(self, message: str) -> str:
        """Run the agent on a task and return its answer.

        Raises:
            ReplyError: It reached its limit of time; its rollout scores 0.
            EnvironmentFailure: The function raised an error, no request of the agent had the skill,
                or it got a second message.
        """
        answer: object = None
        self._has_skill = not self.skill.text.strip()
        with anyio.move_on_after(self._target.seconds) as scope:
            async with self._serve_task(message) as address:
                rollout = AgentRollout(
                    skill=self.skill.text,
                    task=message,
                    model=self._target.model,
                    **address._asdict(),
                )
                try:
                    answer = await _call(self._target.run_agent, rollout)
                except ReflactError:
                    raise
                except Exception as error:
                    raise self._failure or EnvironmentFailure(
                        f"the agent failed: {type(error).__name__}: {error}{self._explain_null()}"
                    ) from error
        if self._failure is not None:
            raise self._failure
        if scope.cancelled_caught:
            seconds = self._target.seconds
            raise ReplyError(
                f"the agent was ended after {seconds:g} seconds (`seconds`)", reasons=()
            )
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
        if not isinstance(answer, str):
            kind = type(answer).__name__
            raise EnvironmentFailure(
                f"the function of the target returned {kind}; it must return the answer as text"
            )
        return answer

    async def _answer(self, body: dict[str, Any]) -> str:
        """Answer one request of the agent, and note whether it has the skill."""
        if not self._has_skill:
            self._has_skill = count_text(body["messages"], self.skill.text.strip()) > 0
        return await super()._answer(body)


async def _call(run_agent: RunAgent, rollout: AgentRollout) -> object:
    if inspect.iscoroutinefunction(run_agent):
        return await run_agent(rollout)
    answer = await anyio.to_thread.run_sync(
        partial(run_agent, rollout), abandon_on_cancel=True, limiter=anyio.CapacityLimiter(1)
    )
    return await answer if inspect.isawaitable(answer) else answer
