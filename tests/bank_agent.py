"""The support agent of pydantic-ai's documentation, with a model that knows what its instructions say."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
from pydantic import BaseModel, Field
from pydantic_ai import Agent, RunContext
from pydantic_ai.messages import ModelMessage, ModelResponse, ToolCallPart, ToolReturnPart
from pydantic_ai.models.function import AgentInfo, FunctionModel
from pydantic_ai.usage import RequestUsage

from reflact import Trainer
from reflact.testing import ScriptedLLM, append_reply
from reflact.types import Item

RULE = "Always include pending transactions."
ACCOUNTS = {1: ("John", "100.00", "123.45"), 2: ("Ann", "7.00", "7.50"), 3: ("Bob", "1.00", "2.50")}
ITEMS = [
    Item(id=f"c{n}", input=f"What is the balance of customer {n}?", reference=ACCOUNTS[n][2])
    for n in ACCOUNTS
]


@dataclass
class SupportDependencies:
    """What the agent works with."""

    customer_id: int


class SupportOutput(BaseModel):
    """What the agent returns."""

    support_advice: str = Field(description="Advice returned to the customer")


@dataclass
class BankModel:
    """A model that includes pending transactions if its instructions or its tool say so; notes what it was asked."""

    instructions: list[str] = field(default_factory=list)
    descriptions: list[str] = field(default_factory=list)
    fail: Callable[[int], None] | None = None

    async def __call__(self, messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
        text, description = info.instructions or "", info.function_tools[0].description or ""
        self.instructions.append(text)
        self.descriptions.append(description)
        if self.fail is not None:
            self.fail(len(self.instructions))
        await anyio.lowlevel.checkpoint()
        usage = RequestUsage(input_tokens=50, output_tokens=5)
        last = messages[-1].parts[-1]
        if isinstance(last, ToolReturnPart) and last.tool_name == "customer_balance":
            made = ToolCallPart(info.output_tools[0].name, {"support_advice": str(last.content)})
        else:
            made = ToolCallPart("customer_balance", {"include_pending": RULE in text + description})
        return ModelResponse(parts=[made], usage=usage)


def make_agent(model: BankModel) -> Agent[SupportDependencies, SupportOutput]:
    agent = Agent(
        FunctionModel(model),
        deps_type=SupportDependencies,
        output_type=SupportOutput,
        instructions="You are a support agent in our bank, give the customer support.",
        name="support",
    )

    @agent.instructions
    async def add_customer_name(ctx: RunContext[SupportDependencies]) -> str:
        return f"The customer's name is {ACCOUNTS[ctx.deps.customer_id][0]}"

    @agent.tool
    async def customer_balance(ctx: RunContext[SupportDependencies], include_pending: bool) -> str:
        """Returns the customer's current account balance."""
        return ACCOUNTS[ctx.deps.customer_id][2 if include_pending else 1]

    return agent


def make_deps(item: Item) -> SupportDependencies:
    return SupportDependencies(customer_id=int(item.id[1:]))


def grade(item: Item, answer: str) -> bool:
    return bool(answer) and json.loads(answer)["support_advice"] == item.reference


def make_trainer(target: Any, folder: Path, **config: Any) -> Trainer:
    """Return a trainer of an agent on three customers, with a scripted optimizer that knows the rule."""
    optimizer = ScriptedLLM(lambda prompt, reply_type, call_id: append_reply(reply_type, RULE))
    return Trainer.from_items(
        train=ITEMS[:1],
        val=ITEMS[1:2],
        test=ITEMS[2:],
        grade=grade,
        target=target,
        optimizer=config.pop("optimizer", optimizer),
        out_dir=str(folder),
        search__sources=["edits"],
        train__num_epochs=1,
        **config,
    )
