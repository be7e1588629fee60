"""An endpoint that plays a script, in whole answers or streams of events, and the client in front of it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import anyio.lowlevel
import httpx

from reflact.concurrency import open_task_group
from reflact.config.models import ModelConfig
from reflact.config.training import BudgetConfig
from reflact.llm.budget import Account, Budget
from reflact.llm.client import Client
from reflact.messages import (
    CallId,
    CallReservation,
    Message,
    RenderedPrompt,
    Reply,
    ReplyModel,
    StoredResponse,
)
from reflact.prompts import load_prompts
from reflact.protocols import LLM, EventCallback
from reflact.stages.context import StageContext
from reflact.testing import InMemoryRunStore

R = TypeVar("R", bound=ReplyModel)
Result = TypeVar("Result")

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


COUNTS = {
    "prompt_tokens": 10,
    "completion_tokens": 3,
    "total_tokens": 13,
    "prompt_tokens_details": {"cached_tokens": 4},
}


def chunk(delta: dict[str, Any] | None = None, *, finish: str | None = None, **extra: Any) -> bytes:
    """Return one event; without a delta, one without choices."""
    choices = [] if delta is None else [{"index": 0, "delta": delta, "finish_reason": finish}]
    body = {"id": "x", "object": "chat.completion.chunk", "created": 0, "model": "m", "choices": choices}
    return f"data: {json.dumps({**body, **extra})}\n\n".encode()


def stream(
    text: str,
    *,
    tools: bool = False,
    size: int = 4,
    finish: str | None = "stop",
    usage: dict[str, Any] | None = COUNTS,
    done: bool = True,
) -> list[bytes]:
    """Return a reply as a stream of events, ``size`` characters in each."""

    def delta(part: str, number: int) -> dict[str, Any]:
        if not tools:
            return {"content": part}
        function = {"arguments": part} if number else {"name": "Pick", "arguments": part}
        call = {"index": 0, "function": function}
        return {"tool_calls": [call if number else {"id": "c1", "type": "function", **call}]}

    parts = [text[at : at + size] for at in range(0, len(text), size)]
    events = [chunk({"role": "assistant", "content": None if tools else ""})]
    events += [chunk(delta(part, number)) for number, part in enumerate(parts)]
    events += [chunk({}, finish=finish)] if finish is not None else []
    events += [chunk(usage=usage)] if usage is not None else []
    return [*events, b"data: [DONE]\n\n"] if done else events


class Body(httpx.AsyncByteStream):
    """Pieces that arrive one after the other; an exception among them is raised in its place."""

    def __init__(self, pieces: Sequence[bytes | Exception]) -> None:
        self._pieces = pieces

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in self._pieces:
            await anyio.lowlevel.checkpoint()
            if isinstance(piece, Exception):
                raise piece
            yield piece


Answer = Sequence[bytes | Exception] | httpx.Response | Exception | Callable[[Any], httpx.Response]


def streamed(pieces: Sequence[bytes | Exception]) -> httpx.Response:
    """Return an answer as a stream of events."""
    return httpx.Response(200, headers={"content-type": "text/event-stream"}, stream=Body(pieces))


class Endpoint(httpx.AsyncBaseTransport):
    """Answers the n-th request with the n-th answer (the last one from then on) and keeps what was sent.

    Pieces are a stream of events, an exception is raised, and a function gets the body.
    """

    def __init__(self, *answers: Answer) -> None:
        self._answers = answers
        self.requests: list[httpx.Request] = []
        self.times: list[float] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Give the next answer of the script."""
        await request.aread()
        answer = self._answers[min(len(self.requests), len(self._answers) - 1)]
        self.requests.append(request)
        self.times.append(anyio.current_time())
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, httpx.Response):
            return httpx.Response(answer.status_code, headers=answer.headers, content=answer.content)
        return answer(json.loads(request.content)) if callable(answer) else streamed(answer)

    @property
    def bodies(self) -> Sequence[Any]:
        """The JSON bodies that arrived, in order."""
        return [json.loads(request.content) for request in self.requests]


class Watched(InMemoryRunStore):
    """A store that keeps what happens to it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.reservations: list[CallReservation] = []
        self.replies: list[StoredResponse] = []

    async def reserve(self, reservation: CallReservation) -> None:
        """Reserve, and keep it."""
        self.seen.append("reserved")
        self.reservations.append(reservation)
        await super().reserve(reservation)

    async def store_response(self, response: StoredResponse, reservation: CallReservation) -> None:
        """Store it, and keep it."""
        await super().store_response(response, reservation)
        self.replies.append(response)
        self.seen.append("stored")


async def watched() -> Watched:
    """Return a watched store in which the run is open."""
    store = Watched()
    await store.open_run(RUN, {}, {})
    return store


async def opened() -> InMemoryRunStore:
    """Return a store in which the run is open."""
    store = InMemoryRunStore()
    await store.open_run(RUN, {}, {})
    return store


async def open_context(llm: LLM, store: InMemoryRunStore | None = None, *, step: int = 1) -> StageContext:
    """Return the context of a step with the packaged prompts, in a new store or an open one."""
    store = await opened() if store is None else store
    return StageContext(llm=llm, prompts=load_prompts(), decision_log=store.decision_log(RUN), step=step)


@asynccontextmanager
async def connected(
    transport: httpx.AsyncBaseTransport,
    settings: ModelConfig | None = None,
    *,
    store: InMemoryRunStore | None = None,
    budget: Budget | None = None,
    emit: EventCallback | None = None,
    role: str = "optimizer",
) -> AsyncIterator[Client]:
    """Enter a client of a role in front of a transport."""
    store = store or await opened()
    account = Account(RUN, store, store.decision_log(RUN), budget or Budget(BudgetConfig()))
    async with Client(settings or config(), role, account, transport=transport, on_event=emit) as client:
        yield client


async def ask(
    reply_type: type[R],
    transport: httpx.AsyncBaseTransport,
    settings: ModelConfig | None = None,
    *,
    part: str = "",
    check: Callable[[R], None] | None = None,
    **about: Any,
) -> Reply[R]:
    """Return the reply of a client that is asked once."""
    async with connected(transport, settings, **about) as client:
        return await client.ask(PROMPT, reply_type, call_id=call_id(part), check=check)


async def check_beside_loop(work: Callable[[], Awaitable[Result]]) -> Result:
    """Check that the event loop is free during work, and return its result."""
    looked = anyio.Event()

    async def look() -> None:
        for _ in range(5):
            await anyio.lowlevel.checkpoint()
        looked.set()

    async with open_task_group() as tasks:
        tasks.start_soon(look)
        try:
            return await work()
        finally:
            assert looked.is_set()
