"""Streams of events made by hand, in the form that providers send, and an endpoint that sends them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import anyio.lowlevel
import httpx

from reflact.messages import CallReservation, StoredResponse
from reflact.testing import InMemoryRunStore

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


Answer = Sequence[bytes | Exception] | httpx.Response | Callable[[Any], httpx.Response]


class Streaming(httpx.AsyncBaseTransport):
    """Answers the n-th request with the n-th answer (the last one from then on); keeps what was asked."""

    def __init__(self, *answers: Answer) -> None:
        self._answers = answers
        self.bodies: list[Any] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Give the next answer of the script; a sequence of pieces is a stream of events."""
        body = json.loads(await request.aread())
        answer = self._answers[min(len(self.bodies), len(self._answers) - 1)]
        self.bodies.append(body)
        if isinstance(answer, httpx.Response):
            return httpx.Response(answer.status_code, headers=answer.headers, content=answer.content)
        if callable(answer):
            return answer(body)
        return httpx.Response(200, headers={"content-type": "text/event-stream"}, stream=Body(answer))


class Kept(InMemoryRunStore):
    """Keeps the replies that are stored."""

    def __init__(self) -> None:
        super().__init__()
        self.replies: list[StoredResponse] = []

    async def store_response(self, response: StoredResponse, reservation: CallReservation) -> None:
        """Store it, and keep it."""
        self.replies.append(response)
        await super().store_response(response, reservation)
