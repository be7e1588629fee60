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
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import anyio
import h11
from anyio.abc import SocketAttribute, SocketStream

from reflact.agents import anthropic_messages, responses
from reflact.agents.dialects import CHAT, Dialect
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

# How much of a refused request is still received, and how long, so that the agent reads the
# refusal.
SKIPPED_BYTES = 2**20
SKIPPED_SECONDS = 1.0

# The dialects of agents by the paths of their requests.
DIALECTS = {
    "/v1/chat/completions": CHAT,
    "/v1/responses": responses.DIALECT,
    "/v1/messages": anthropic_messages.DIALECT,
    "/v1/messages/count_tokens": anthropic_messages.COUNTING,
}

# What reading a body or a completion of a wrong shape raises.
WRONG_SHAPE = (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError)

# Answers the body of a chat completion's request with a chat completion, in JSON.
Answer = Callable[[dict[str, Any]], Awaitable[str]]


class GatewayAddress(NamedTuple):
    """Where an agent asks its model during one rollout."""

    base_url: str
    token: str

    @property
    def root_url(self) -> str:
        """The address without ``/v1``, which clients of the Messages API add."""
        return self.base_url.removesuffix("/v1")


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


class _Refusal(Exception):
    """A request gets an error as its answer; the rollout ends if it is fatal."""

    def __init__(self, status: int, reason: str, *, is_fatal: bool = True) -> None:
        super().__init__(reason)
        self.status = status
        self.is_fatal = is_fatal


class _Connection:
    """One connection of an agent."""

    def __init__(self, stream: SocketStream, gateway: _Gateway) -> None:
        self._stream = stream
        self._gateway = gateway
        self._n_bytes = 0
        self._protocol = h11.Connection(h11.SERVER)

    async def serve(self) -> None:
        """Answer requests until the agent closes the connection or breaks the protocol."""
        ends = (anyio.BrokenResourceError, anyio.EndOfStream, anyio.ClosedResourceError)
        with suppress(h11.RemoteProtocolError, *ends):
            try:
                while isinstance(request := await self._read_event(), h11.Request):
                    await self._answer(request)
                    if self._protocol.their_state is h11.SEND_BODY:
                        await self._skip_body()
                        return
                    if self._protocol.our_state is not h11.DONE:
                        return
                    self._protocol.start_next_cycle()
            finally:
                self._release()

    async def _answer(self, request: h11.Request) -> None:
        status = 200
        try:
            kind, body = await self._respond(request)
        except _Refusal as refusal:
            status = refusal.status
            kind = "application/json"
            body = _write_error(refusal)
            if refusal.is_fatal:
                self._gateway.on_refusal(str(refusal))
        self._release()
        headers = [("content-type", kind), ("content-length", str(len(body)))]
        await self._send(h11.Response(status_code=status, headers=headers))
        if request.method != b"HEAD":
            await self._send(h11.Data(data=body))
        await self._send(h11.EndOfMessage())

    async def _respond(self, request: h11.Request) -> tuple[str, bytes]:
        """Return the type and the text of the answer to a request."""
        headers = dict(request.headers)
        sent = headers.get(b"x-api-key") or headers.get(b"authorization", b"")
        token = sent.removeprefix(b"Bearer ")
        if not hmac.compare_digest(token, self._gateway.token.encode("ascii")):
            raise _Refusal(401, "the token of this rollout is missing", is_fatal=False)
        content = await self._read_body(int(headers.get(b"content-length", b"0")))
        path = request.target.decode("ascii", "replace").partition("?")[0]
        if request.method == b"HEAD":
            return "text/plain", b""
        if path == "/v1/models" and request.method == b"GET":
            model = {"id": self._gateway.model, "object": "model", "created": 0}
            listed = {"object": "list", "data": [{**model, "owned_by": "reflact"}]}
            return "application/json", json.dumps(listed).encode()
        if path not in DIALECTS or request.method != b"POST":
            reason = f"the gateway has no {path}; it has {', '.join(DIALECTS)}"
            is_fatal = request.method == b"POST" and path.startswith("/v1/")
            raise _Refusal(404, reason, is_fatal=is_fatal)
        if headers.get(b"content-encoding", b"identity") != b"identity":
            raise _Refusal(400, "the body is compressed: turn that off in the agent")
        return await self._ask(DIALECTS[path], content)

    async def _ask(self, dialect: Dialect, content: bytes) -> tuple[str, bytes]:
        """Return the answer to a request for a model."""
        work = partial(_read_request, dialect, content)
        try:
            body, request = work() if len(content) <= INLINE_BYTES else await run_beside_loop(work)
        except ConfigError as error:
            raise _Refusal(400, str(error), is_fatal=dialect.asks_model) from None
        completion = "{}"
        if dialect.asks_model:
            try:
                completion = await self._gateway.answer(request)
            except ReflactError as error:
                raise _Refusal(500, str(error), is_fatal=False) from None
        try:
            answer = dialect.write(json.loads(completion), body)
            if not body.get("stream"):
                return "application/json", json.dumps(answer).encode()
            events = "".join(map(_write_event, dialect.split(answer)))
            return "text/event-stream", f"{events}{dialect.end}".encode()
        except WRONG_SHAPE as error:
            reason = f"the model's answer is none to {dialect.name}: it has no {error}"
            raise _Refusal(500, reason) from None

    async def _read_body(self, announced: int) -> bytes:
        """Return the body of a request, unless all requests together become too large."""
        parts: list[bytes] = []
        while max(announced, self._gateway.n_bytes) <= MAX_REQUEST_BYTES:
            event = await self._read_event()
            if isinstance(event, h11.EndOfMessage):
                return b"".join(parts)
            parts.append(bytes(event.data))
            self._n_bytes += len(event.data)
            self._gateway.n_bytes += len(event.data)
        reason = f"the agent's requests have more than {MAX_REQUEST_BYTES:,} bytes at a time"
        raise _Refusal(413, reason)

    async def _skip_body(self) -> None:
        """Receive a bounded part of a body that is not read."""
        await self._stream.send_eof()
        size = 0
        with anyio.move_on_after(SKIPPED_SECONDS):
            while size <= SKIPPED_BYTES and isinstance(event := await self._read_event(), h11.Data):
                size += len(event.data)

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

    async def _send(self, event: h11.Event) -> None:
        if data := self._protocol.send(event):
            await self._stream.send(data)


def _write_error(refusal: _Refusal) -> bytes:
    """Return an error in the form that the clients of all dialects read."""
    kind = "api_error" if refusal.status == 500 else "invalid_request_error"
    error = {"type": kind, "message": str(refusal), "param": None, "code": None}
    return json.dumps({"type": "error", "error": error}).encode()


def _write_event(event: Mapping[str, Any]) -> str:
    name = f"event: {event['type']}\n" if "type" in event else ""
    return f"{name}data: {json.dumps(event)}\n\n"


def _read_request(dialect: Dialect, content: bytes) -> tuple[Mapping[str, Any], dict[str, Any]]:
    """Return a body, and the request of a chat completion that it means."""
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
        request["messages"] = _clean_messages(request["messages"], dialect)
    except WRONG_SHAPE as error:
        raise ConfigError(f"the body is no request of {dialect.name}") from error
    return body, request


def _clean_messages(messages: Any, dialect: Dialect) -> list[Any]:
    """Return messages without volatile texts; raise TypeError or the like if they are malformed."""
    if not isinstance(messages, list):
        raise TypeError
    cleaned = []
    for message in messages:
        calls = message.get("tool_calls") or []
        is_sound = isinstance(message.get("role", ""), str) and isinstance(calls, list)
        if not (is_sound and isinstance(message.get("content"), str | list | None)):
            raise TypeError
        if not all(isinstance(call["function"], dict) for call in calls):
            raise TypeError
        # Of a chat completion only the instructions, since its tasks come as they are.
        if dialect is CHAT and message.get("role") != "system":
            cleaned.append(message)
        else:
            cleaned.append(_clean(message, dialect.volatile))
    return cleaned


def _clean(value: Any, volatile: re.Pattern[str]) -> Any:
    """Return a message, its content or a part of it without volatile texts."""
    match value:
        case str():
            return volatile.sub("", value)
        case list():
            return [_clean(part, volatile) if isinstance(part, dict) else part for part in value]
        case {"text": text}:
            return {**value, "text": _clean(text, volatile)}
        case {"content": content}:
            return {**value, "content": _clean(content, volatile)}
    return value
