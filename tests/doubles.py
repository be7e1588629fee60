"""An endpoint that plays a script, and the client in front of it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx

from reflact.config.models import ModelConfig
from reflact.config.training import BudgetConfig
from reflact.llm.budget import Account, Budget
from reflact.llm.client import Client
from reflact.messages import CallId, Message, RenderedPrompt
from reflact.prompts import load_prompts
from reflact.protocols import LLM, DecisionLog, EventCallback, ResponseStore
from reflact.stages.context import StageContext
from reflact.testing import InMemoryRunStore

RUN = "r0"
URL = "http://endpoint.test/v1"

PROMPT = RenderedPrompt(
    name="pick",
    version=1,
    messages=(Message(role="system", content="Pick."), Message(role="user", content="From these.")),
)


def call_id(part: str = "", *, purpose: str = "merge", attempt: int = 0) -> CallId:
    """Return a place in a plan."""
    return CallId(role="optimizer", purpose=purpose, step=1, part=part, attempt=attempt)


def config(**settings: Any) -> ModelConfig:
    """Return settings for the scripted endpoint, which needs no key."""
    return ModelConfig(
        **{"model": "m", "base_url": URL, "api_key_env": None, "mode": "json_schema"} | settings
    )


def completion(
    content: str | None,
    *,
    finish: str = "stop",
    refusal: str | None = None,
    arguments: str | None = None,
    tokens: tuple[int, int, int] = (10, 4, 3),
) -> httpx.Response:
    """Return an answer as providers give it; ``tokens`` are input, cached and output."""
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": refusal}
    if arguments is not None:
        call = {"id": "c1", "type": "function", "function": {"name": "Pick", "arguments": arguments}}
        message["tool_calls"] = [call]
    usage = {
        "prompt_tokens": tokens[0],
        "completion_tokens": tokens[2],
        "total_tokens": tokens[0] + tokens[2],
        "prompt_tokens_details": {"cached_tokens": tokens[1]},
    }
    choice = {"index": 0, "finish_reason": finish, "message": message}
    body = {"id": "x", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
    return httpx.Response(200, json={**body, "usage": usage})


class Endpoint(httpx.AsyncBaseTransport):
    """Answers the n-th request with the n-th answer (the last one from then on) and keeps what was sent."""

    def __init__(self, *answers: httpx.Response | Exception | Callable[[Any], httpx.Response]) -> None:
        self._answers = answers
        self.requests: list[httpx.Request] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Give the next answer of the script."""
        await request.aread()
        answer = self._answers[min(len(self.requests), len(self._answers) - 1)]
        self.requests.append(request)
        if isinstance(answer, Exception):
            raise answer
        if callable(answer):
            return answer(json.loads(request.content))
        return httpx.Response(answer.status_code, headers=answer.headers, content=answer.content)

    @property
    def bodies(self) -> Sequence[Any]:
        """The JSON bodies that arrived, in order."""
        return [json.loads(request.content) for request in self.requests]


async def open_context(llm: LLM, store: InMemoryRunStore | None = None, *, step: int = 1) -> StageContext:
    """Return the context of a step with the packaged prompts, in a new store or an open one."""
    store = await opened() if store is None else store
    return StageContext(llm=llm, prompts=load_prompts(), decision_log=store.decision_log(RUN), step=step)


async def opened() -> InMemoryRunStore:
    """Return a store in which the run is open."""
    store = InMemoryRunStore()
    await store.open_run(RUN, {}, {})
    return store


@asynccontextmanager
async def connected(
    transport: httpx.AsyncBaseTransport,
    settings: ModelConfig | None = None,
    *,
    store: InMemoryRunStore | None = None,
    responses: ResponseStore | None = None,
    journal: DecisionLog | None = None,
    budget: Budget | None = None,
    emit: EventCallback | None = None,
) -> AsyncIterator[Client]:
    """Enter a client of the optimizer's role in front of a transport."""
    store = store or await opened()
    journal = journal or store.decision_log(RUN)
    account = Account(RUN, responses or store, journal, budget or Budget(BudgetConfig()))
    async with Client(
        settings or config(), "optimizer", account, transport=transport, on_event=emit
    ) as client:
        yield client
