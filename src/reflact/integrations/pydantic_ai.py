"""Records what a pydantic-ai agent does: each call of a tool as one transition.

    with recording(lambda deps: deps.shop.state()) as recorder:
        await agent.run(task, deps=deps, capabilities=[recorder])
    for transition in recorder.transitions:
        trace.record(transition, await critic.score(transition, purpose=task))

Nothing is asked of a model here, and the agent waits for nothing but the rendering of its state.
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
    """A capability that notes the state before and after each call of a tool; made by ``recording``."""

    def __init__(
        self, state: Callable[[D], JsonValue], on_transition: Callable[[Transition], None] | None
    ) -> None:
        self._state = state
        self._on_transition = on_transition
        self._transitions: list[Transition] = []

    @property
    def transitions(self) -> tuple[Transition, ...]:
        """What was recorded so far, in the order in which the tools ran."""
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
        """Run the tool and note what it changed; a tool that fails has run, one that is put off has not."""
        before = deepcopy(self._state(ctx.deps))
        try:
            result = await handler(args)
        except _NOT_EXECUTED:
            raise
        except Exception:  # whatever it is, the tool has acted; it goes on to the agent
            self._record_transition(before, call, ctx.deps)
            raise
        self._record_transition(before, call, ctx.deps)
        return result

    def _record_transition(self, before: JsonValue, call: ToolCallPart, deps: D) -> None:
        after = deepcopy(self._state(deps))
        action = Action(name=call.tool_name, arguments=call.args_as_dict())
        try:
            transition = Transition(before=before, action=action, after=after)
        except ValidationError as error:
            problem = error.errors(include_url=False)[0]
            raise DataError(
                f"the state around {call.tool_name} is neither text nor JSON: {problem['msg']}; "
                "render it as a value that JSON has"
            ) from None
        self._transitions.append(transition)
        if self._on_transition is not None:
            self._on_transition(transition)


@contextmanager
def record_tools(
    state: Callable[[D], JsonValue], *, on_transition: Callable[[Transition], None] | None = None
) -> Iterator[ToolRecorder[D]]:
    """Record runs of an agent that are made within the block and given the recorder as a capability.

    Tools are called one at a time within the block: where two run at once nobody can say which of them
    changed what.

    Args:
        state: Renders the agent's state, from the run's ``deps``, as text or JSON. It is copied.
        on_transition: Is told of each transition as it happens; the agent waits for it, so it hands over and returns.

    Raises:
        DataError: In the run: what was rendered is neither text nor JSON.
    """
    with Agent.parallel_tool_call_execution_mode("sequential"):
        yield ToolRecorder(state, on_transition)
