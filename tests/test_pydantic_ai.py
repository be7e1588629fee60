"""Recorded runs of pydantic-ai agents: each call of a tool is a transition."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import anyio
import pytest
from pydantic_ai import Agent, RunContext
from pydantic_ai.exceptions import CallDeferred, ModelRetry
from pydantic_ai.messages import ModelMessage, ModelResponse, TextPart, ToolCallPart
from pydantic_ai.models.function import AgentInfo, FunctionModel
from pydantic_ai.tools import DeferredToolRequests

from reflact.errors import DataError
from reflact.integrations.pydantic_ai import record_tools
from reflact.memory.models import Action, Transition


@dataclass
class Shop:
    """What the agent works on."""

    paid: bool = False
    shipped: list[str] = field(default_factory=list)

    def state(self) -> Any:
        return self.__dict__


def agent(*turns: list[ToolCallPart]) -> Agent[Shop, Any]:
    """Return an agent whose model calls these tools, turn by turn, and then stops."""
    script = iter(turns)

    def model(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
        return ModelResponse(parts=next(script, [TextPart("Done.")]))

    made = Agent(FunctionModel(model), deps_type=Shop, output_type=[str, DeferredToolRequests], retries=1)

    @made.tool
    async def pay(ctx: RunContext[Shop]) -> str:
        ctx.deps.paid = True
        return "paid"

    @made.tool
    async def ship(ctx: RunContext[Shop], item: str) -> str:
        ctx.deps.shipped.append(f"packing {item}")
        await anyio.wait_all_tasks_blocked()
        ctx.deps.shipped[-1] = item
        return "shipped"

    @made.tool
    async def fail(ctx: RunContext[Shop]) -> str:
        ctx.deps.shipped.append("half")
        raise ModelRetry("again")

    @made.tool
    async def later(ctx: RunContext[Shop]) -> str:
        raise CallDeferred

    return made


async def test_each_call_of_a_tool_is_a_transition() -> None:
    """Name, arguments and the states around it are there, in order; later changes do not reach them."""
    shop = Shop()
    with record_tools(Shop.state) as recorder:
        worker = agent([ToolCallPart("pay", {})], [ToolCallPart("ship", '{"item": "lamp"}')])
        await worker.run("Go.", deps=shop, capabilities=[recorder])
    shop.shipped.append("more")
    new, paid, done = ({"paid": p, "shipped": s} for p, s in ((False, []), (True, []), (True, ["lamp"])))
    assert recorder.transitions == (
        Transition(before=new, action=Action(name="pay", arguments={}), after=paid),
        Transition(before=paid, action=Action(name="ship", arguments={"item": "lamp"}), after=done),
    )


async def test_tools_of_one_turn_do_not_mix() -> None:
    """Tools that the model calls at once run one after another: each state before is the last one after."""
    calls = [ToolCallPart("ship", {"item": item}) for item in ("lamp", "desk", "chair")]
    with record_tools(Shop.state) as recorder:
        await agent(calls).run("Go.", deps=Shop(), capabilities=[recorder])
    states = [(step.before["shipped"], step.after["shipped"]) for step in recorder.transitions]  # type: ignore[index, call-overload]
    shipped = (["lamp"], ["lamp", "desk"], ["lamp", "desk", "chair"])
    assert states == [*zip(([], *shipped), shipped, strict=False)]


async def test_a_failed_call_is_recorded_and_a_deferred_call_is_not() -> None:
    with record_tools(Shop.state) as recorder:
        failed = await agent([ToolCallPart("fail", {})]).run("Go.", deps=Shop(), capabilities=[recorder])
        deferred = await agent([ToolCallPart("later", {})]).run("Go.", deps=Shop(), capabilities=[recorder])
    (step,) = recorder.transitions
    assert (step.action.name, step.after) == ("fail", {"paid": False, "shipped": ["half"]})
    assert failed.output == "Done."
    assert isinstance(deferred.output, DeferredToolRequests)


async def test_a_state_that_is_no_json_is_one_sentence() -> None:
    """If a state is rendered as something else, the error names the tool and the remedy."""
    with (
        record_tools(lambda shop: {"shop": shop}) as recorder,
        pytest.raises(DataError, match="around pay is neither"),
    ):
        await agent([ToolCallPart("pay", {})]).run("Go.", deps=Shop(), capabilities=[recorder])
