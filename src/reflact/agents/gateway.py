"""A gateway on this machine between an agent in a process of its own and the run's model.

Each rollout has its own address and token. The agent's requests go through the run: stored,
limited, charged, recorded and replayed. Those of the Responses API and the Messages API are
translated to chat completions. The agent never sees the provider's key.
"""

from __future__ import annotations

import hmac
import json
import re
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import anyio
import h11
from anyio.abc import SocketAttribute, SocketStream

from reflact.agents import anthropic_messages, responses
from reflact.concurrency import open_task_group, run_beside_loop
from reflact.errors import ConfigError, ReflactError
from reflact.jsonutil import parse_foreign

# The most bytes of an agent's request, and of all that a gateway has at a time.
MAX_REQUEST_BYTES = 2**25

# The most texts, commas and opening brackets of a body, and the most levels: each may take 100
# bytes when it is read.
MAX_PARTS = 2**18
MAX_DEPTH = 200

PART = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?+|[\[{,]|[\]}]', re.DOTALL)
LEVELS = dict(zip(b"[{]}", (1, 1, -1, -1), strict=True))

# A body of more bytes is read on a worker thread, so that the event loop does not wait for it.
INLINE_BYTES = 2**14

# Bytes that are read from a connection at a time.
READ_BYTES = 2**16

JSON = b"application/json"

# How much of a refused request is still received, and how long, so that the agent reads the
# refusal.
SKIPPED_BYTES = 2**20
SKIPPED_SECONDS = 1.0

# The date that opencode writes into texts.
VOLATILE = re.compile(r"^ +Today's date: [^\n]*\n(?=</env>)", re.MULTILINE)


class GatewayAddress(NamedTuple):
    """Where an agent asks its model during one rollout."""

    base_url: str
    token: str

    @property
    def root_url(self) -> str:
        """The address without ``/v1``, which clients of the Messages API add."""
        return self.base_url.removesuffix("/v1")


class Dialect(NamedTuple):
    """One way in which agents ask their models, translated to that of chat completions and back.

    Attributes:
        name: What a request is called.
        read: Returns a request as that of a chat completion; its ``ConfigError`` says what it
            cannot be.
        write: Returns a chat completion as the answer to a request.
        split: Yields an answer as the events of a stream.
        end: Follows the events.
    """

    name: str
    read: Callable[[Mapping[str, Any]], dict[str, Any]]
    write: Callable[[Mapping[str, Any], Mapping[str, Any]], Mapping[str, Any]]
    split: Callable[[Mapping[str, Any]], Iterator[Mapping[str, Any]]]
    end: str = ""


# Answers the body of a chat completion's request with a chat completion, in JSON.
Answer = Callable[[dict[str, Any]], Awaitable[str]]


@asynccontextmanager
async def open_gateway(
    answer: Answer,
    *,
    model: str,
    on_refusal: Callable[[str], None] = lambda reason: None,
    host: str = "127.0.0.1",
) -> AsyncIterator[GatewayAddress]:
    """Listen on this machine until the block ends, for whoever has the token.

    ``on_refusal`` gets the reason of each request for a model that the gateway itself refuses.
    """
    gateway = _Gateway(answer, secrets.token_urlsafe(24), model, on_refusal)
    listener = await anyio.create_tcp_listener(local_host=host, local_port=0)
    port = listener.extra(SocketAttribute.local_port)  # noqa: S610 - no Django

    async def serve(stream: SocketStream) -> None:
        async with stream:
            await _Connection(stream, gateway).serve()

    async with listener, open_task_group() as group:
        group.start_soon(listener.serve, serve)
        try:
            yield GatewayAddress(f"http://{host}:{port}/v1", gateway.token)
        finally:
            group.cancel_scope.cancel()


@dataclass
class _Gateway:
    """What the connections of a gateway share; ``n_bytes`` are those of its requests."""

    answer: Answer
    token: str
    model: str
    on_refusal: Callable[[str], None]
    n_bytes: int = 0


class _Connection:
    """One connection of an agent."""

    def __init__(self, stream: SocketStream, gateway: _Gateway) -> None:
        self._stream = stream
        self._gateway = gateway
        self._n_bytes = 0
        self._is_head = False
        self._protocol = h11.Connection(h11.SERVER)

    async def serve(self) -> None:
        """Answer requests until the agent closes the connection or breaks the protocol."""
        ends = (anyio.BrokenResourceError, anyio.EndOfStream, anyio.ClosedResourceError)
        with suppress(h11.RemoteProtocolError, *ends):
            try:
                while isinstance(request := await self._read_event(), h11.Request):
                    body = await self._read_body(request)
                    if body is None:
                        return
                    await self._respond(request, body)
                    if self._protocol.our_state is not h11.DONE:
                        return
                    self._protocol.start_next_cycle()
                    self._release()
            finally:
                self._release()

    def _release(self) -> None:
        self._gateway.n_bytes -= self._n_bytes
        self._n_bytes = 0

    async def _read_event(self) -> Any:
        """Return the next event of the protocol, for which it may wait."""
        while (event := self._protocol.next_event()) is h11.NEED_DATA:
            if self._protocol.they_are_waiting_for_100_continue:
                await self._send(h11.InformationalResponse(status_code=100, headers=[]))
            try:
                self._protocol.receive_data(await self._stream.receive(READ_BYTES))
            except anyio.EndOfStream:
                self._protocol.receive_data(b"")
        return event

    async def _read_body(self, request: h11.Request) -> bytes | None:
        """Return the body of a request; None if the agent is gone, or is refused before."""
        headers = dict(request.headers)
        self._is_head = request.method == b"HEAD"
        sent = headers.get(b"x-api-key") or headers.get(b"authorization", b"")
        token = sent.removeprefix(b"Bearer ")
        if not hmac.compare_digest(token, self._gateway.token.encode("ascii")):
            await self._refuse_unread(401, "the token of this rollout is missing")
            return None
        parts: list[bytes] = []
        announced = int(headers.get(b"content-length", b"0"))
        while max(announced, self._gateway.n_bytes) <= MAX_REQUEST_BYTES:
            event = await self._read_event()
            if isinstance(event, h11.EndOfMessage):
                return b"".join(parts)
            if not isinstance(event, h11.Data):
                return None
            parts.append(bytes(event.data))
            self._n_bytes += len(event.data)
            self._gateway.n_bytes += len(event.data)
        reason = f"the agent's requests have more than {MAX_REQUEST_BYTES:,} bytes at a time"
        self._gateway.on_refusal(reason)
        parts.clear()
        self._release()
        await self._refuse_unread(413, reason)
        return None

    async def _refuse_unread(self, status: int, reason: str) -> None:
        """Answer a request whose body is not read, and receive a bounded part of it."""
        await self._send_error(status, reason)
        await self._stream.send_eof()
        size = 0
        with anyio.move_on_after(SKIPPED_SECONDS):
            while size <= SKIPPED_BYTES and isinstance(event := await self._read_event(), h11.Data):
                size += len(event.data)

    async def _respond(self, request: h11.Request, content: bytes) -> None:
        path = request.target.decode("ascii", "replace").partition("?")[0]
        is_post = request.method == b"POST"
        if self._is_head:
            await self._send_body(200, b"text/plain", b"")
        elif path == "/v1/models" and request.method == b"GET":
            model = {"id": self._gateway.model, "object": "model", "created": 0}
            listed = {"object": "list", "data": [{**model, "owned_by": "reflact"}]}
            await self._send_body(200, JSON, json.dumps(listed).encode())
        elif is_post and path in DIALECTS:
            encoding = dict(request.headers).get(b"content-encoding", b"identity")
            await self._ask(DIALECTS[path], encoding, content)
        elif is_post and path == "/v1/messages/count_tokens":
            await self._ask(COUNTING, b"identity", content)
        else:
            reason = (
                f"the gateway has no {path}; it speaks chat completions, responses and messages"
            )
            await self._refuse(404, reason, is_fatal=is_post and path.startswith("/v1/"))

    async def _ask(self, dialect: Dialect, encoding: bytes, content: bytes) -> None:
        """Answer a request for a model."""
        try:
            if encoding != b"identity":
                raise ConfigError(
                    "the body is compressed, which the gateway does not read: turn it off in the "
                    "agent"
                )
            body, request = await _read(dialect, content)
        except ConfigError as error:
            await self._refuse(400, str(error), is_fatal=dialect is not COUNTING)
            return
        try:
            completion = "{}" if dialect is COUNTING else await self._gateway.answer(request)
        except ReflactError as error:
            await self._send_error(500, str(error))
            return
        try:
            kind, data = _write(dialect, completion, body)
        except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
            await self._refuse(
                500, f"the model's answer is none to {dialect.name}: it has no {error}"
            )
            return
        await self._send_body(200, kind, data)

    async def _refuse(self, status: int, reason: str, *, is_fatal: bool = True) -> None:
        """Answer a request with an error, which ends the rollout if it is fatal."""
        if is_fatal:
            self._gateway.on_refusal(reason)
        await self._send_error(status, reason)

    async def _send_error(self, status: int, reason: str) -> None:
        """Send an error in the form that the clients of all dialects read."""
        kind = "api_error" if status == 500 else "invalid_request_error"
        error = {"type": kind, "message": reason, "param": None, "code": None}
        await self._send_body(status, JSON, json.dumps({"type": "error", "error": error}).encode())

    async def _send_body(self, status: int, kind: bytes, body: bytes) -> None:
        headers = [(b"content-type", kind), (b"content-length", str(len(body)).encode("ascii"))]
        await self._send(h11.Response(status_code=status, headers=headers))
        if not self._is_head:
            await self._send(h11.Data(data=body))
        await self._send(h11.EndOfMessage())

    async def _send(self, event: h11.Event) -> None:
        data = self._protocol.send(event)
        if data:
            await self._stream.send(data)


def _write(dialect: Dialect, completion: str, body: Mapping[str, Any]) -> tuple[bytes, bytes]:
    """Return the type and the text of the answer to a request."""
    answer = dialect.write(json.loads(completion), body)
    if not body.get("stream"):
        return JSON, json.dumps(answer).encode()
    events = "".join(map(_write_event, dialect.split(answer)))
    return b"text/event-stream", f"{events}{dialect.end}".encode()


async def _read(dialect: Dialect, content: bytes) -> tuple[Mapping[str, Any], dict[str, Any]]:
    """Return a body, and the request of a chat completion that it means."""
    work = partial(_parse, dialect, content)
    return work() if len(content) <= INLINE_BYTES else await run_beside_loop(work)


def _parse(dialect: Dialect, content: bytes) -> tuple[Mapping[str, Any], dict[str, Any]]:
    depth = 0
    for number, part in enumerate(PART.finditer(content)):
        depth += LEVELS.get(content[part.start()], 0)
        if number == MAX_PARTS or depth > MAX_DEPTH:
            raise ConfigError(
                f"the body is no request of {dialect.name}: it has more than {MAX_PARTS:,} texts, "
                f"commas and brackets, or more than {MAX_DEPTH} levels"
            )
    try:
        body = parse_foreign(content)
        request = dialect.read(body)
        _check_messages(request["messages"])
    except (ValueError, RecursionError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise ConfigError(f"the body is no request of {dialect.name}") from error
    return body, request


def _check_messages(messages: list[Any]) -> None:
    """Raise TypeError or the like if what the run itself reads of messages is wrong."""
    for message in messages:
        if not isinstance(message.get("role", ""), str):
            raise TypeError
        if not isinstance(message.get("content"), str | list | None):
            raise TypeError
        calls = message.get("tool_calls") or []
        if not isinstance(calls, list):
            raise TypeError
        for call in calls:
            if not isinstance(call["function"], dict):
                raise TypeError


def _write_event(event: Mapping[str, Any]) -> str:
    name = f"event: {event['type']}\n" if "type" in event else ""
    return f"{name}data: {json.dumps(event)}\n\n"


def _read_completion(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return a request without the date that opencode writes into its instructions."""
    messages = body["messages"]
    if not isinstance(messages, list):
        raise TypeError
    cleaned = []
    for message in messages:
        text = message.get("content")
        if message.get("role") == "system" and isinstance(text, str):
            cleaned.append({**message, "content": VOLATILE.sub("", text)})
        else:
            cleaned.append(message)
    return {**body, "messages": cleaned}


def _write_completion(completion: Mapping[str, Any], body: Mapping[str, Any]) -> Mapping[str, Any]:
    return completion


def _split_completion(completion: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a whole completion as the chunks of a stream."""
    choice = completion["choices"][0]
    message = {name: value for name, value in choice["message"].items() if value is not None}
    calls = [{"index": n, **call} for n, call in enumerate(message.pop("tool_calls", ()))]
    delta = {**message, **({"tool_calls": calls} if calls else {})}
    frame = {
        "id": completion.get("id", ""),
        "object": "chat.completion.chunk",
        "created": 0,
        "model": completion["model"],
    }
    yield {**frame, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
    yield {
        **frame,
        "choices": [{"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}],
    }
    if "usage" in completion:
        yield {**frame, "choices": [], "usage": completion["usage"]}


# The dialects of agents by the paths of their requests.
DIALECTS = {
    "/v1/chat/completions": Dialect(
        "a chat completion",
        _read_completion,
        _write_completion,
        _split_completion,
        end="data: [DONE]\n\n",
    ),
    "/v1/responses": Dialect(
        "the Responses API",
        responses.read_request,
        responses.write_response,
        responses.split_response,
    ),
    "/v1/messages": Dialect(
        "the Messages API",
        anthropic_messages.read_request,
        anthropic_messages.write_message,
        anthropic_messages.split_message,
    ),
}

# An estimate of a request's tokens, for which no model is asked.
COUNTING = DIALECTS["/v1/messages"]._replace(write=anthropic_messages.count_tokens)
