"""Records the tool calls of a pydantic-ai agent as transitions.

    with record_tools(lambda deps: deps.shop.state()) as recorder:
        await agent.run(task, deps=deps, capabilities=[recorder])
    for transition in recorder.transitions:
        trace.record(transition, await critic.score(transition, purpose=task))

Recording calls no model. The agent only waits while its state is rendered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any, TypeVar

from pydantic import JsonValue, ValidationError
from pydantic_ai import Agent, RunContext
from pydantic_ai.capabilities import AbstractCapability, ValidatedToolArgs, WrapToolExecuteHandler
from pydantic_ai.exceptions import ApprovalRequired, CallDeferred, SkipToolExecution
from pydantic_ai.messages import ToolCallPart
from pydantic_ai.tools import ToolDefinition

from reflact.errors import DataError
from reflact.memory.models import Action, Transition

D = TypeVar("D")

_NOT_EXECUTED = (CallDeferred, ApprovalRequired, SkipToolExecution)


class ToolRecorder(AbstractCapability[D]):
    """A capability that records the state before and after each tool call; see ``record_tools``."""

    def __init__(self, state: Callable[[D], JsonValue]) -> None:
        self._state = state
        self._transitions: list[Transition] = []

    @property
    def transitions(self) -> tuple[Transition, ...]:
        """The recorded transitions, in the order of the calls."""
        return tuple(self._transitions)

    async def wrap_tool_execute(
        self,
        ctx: RunContext[D],
        *,
        call: ToolCallPart,
        tool_def: ToolDefinition,
        args: ValidatedToolArgs,
        handler: WrapToolExecuteHandler,
    ) -> Any:
        """Run the tool and record the transition, unless the call is deferred."""
        before = deepcopy(self._state(ctx.deps))
        try:
            result = await handler(args)
        except _NOT_EXECUTED:
            raise
        except Exception:  # the tool may have changed the state before it failed
            self._record_transition(before, call, ctx.deps)
            raise
        self._record_transition(before, call, ctx.deps)
        return result

    def _record_transition(self, before: JsonValue, call: ToolCallPart, deps: D) -> None:
        action = Action(name=call.tool_name, arguments=call.args_as_dict())
        try:
            transition = Transition(before=before, action=action, after=deepcopy(self._state(deps)))
        except ValidationError as error:
            raise DataError(
                f"the state around {call.tool_name} is neither text nor JSON: "
                f"{error.errors()[0]['msg']}; return a JSON value from `state`"
            ) from None
        self._transitions.append(transition)


@contextmanager
def record_tools(state: Callable[[D], JsonValue]) -> Iterator[ToolRecorder[D]]:
    """Record runs of an agent inside the block that get the recorder as a capability.

    Inside the block tools run one at a time, so that each change of the state belongs to one call.

    Args:
        state: Renders the agent's state from the run's ``deps`` as text or JSON; it is copied.

    Raises:
        DataError: In the run, if the rendered state is neither text nor JSON.
    """
    with Agent.parallel_tool_call_execution_mode("sequential"):
        yield ToolRecorder(state)
