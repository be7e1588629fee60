"""The corpus of hostile replies (fixtures/hostile), and a network that plays them byte by byte.

A case has these fields:

- ``name``, and ``why``: where such a reply was seen, or why it can be;
- ``status`` (default 200), ``headers`` (default: the content type of JSON) and ``body``, or ``wire``: all bytes of the
  connection. A content length is added. ``pieces`` is the size of the pieces that arrive;
- one of ``reads``: the text of the answer; ``fails``: the kind of the fault, which is retried; ``refused``: the error,
  without a retry. ``ends`` is the error after all retries, if it is not ``ProviderDown``;
- ``counts``: the tokens that are booked: input, cached, output, or ``most``: those of the worst case; nothing: none.

A text is written as it is, or in parts: ``{hex: ...}``, ``{repeat: ..., times: ...}``, ``{gzip: ...}``, ``{zlib: ...}``,
``{encoding: ..., text: ...}``. ``${text}`` stands for the right reply, as the inside of a JSON text.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import anyio.lowlevel
import httpcore
import httpx
import yaml
from pydantic import Field

from reflact.types import FrozenModel

CORPUS = Path(__file__).parent.parent / "fixtures" / "hostile"
PIECE_BYTES = 2**16
REPLY = "${text}"

Part = Any
"""A text, a mapping that makes bytes, or a list of parts."""


class Case(FrozenModel):
    """A hostile reply, and what must come of it."""

    name: str
    why: str = Field(min_length=5)
    status: int = 200
    headers: Part = {"content-type": "application/json"}
    body: Part = None
    wire: Part = None
    pieces: int = PIECE_BYTES
    reads: Part = None
    fails: str | None = None
    refused: str | None = None
    ends: str = "ProviderDown"
    counts: Part = None

    @property
    def charged(self) -> bool:
        """Whether a provider may charge for this answer: any but one with an error status."""
        return (self.wire is not None and self.refused is None) or self.status < 300

    @property
    def delivers(self) -> bool:
        """Whether the right reply arrives."""
        return self.reads == REPLY

    def text(self, reply: str) -> str:
        """Return the text of the answer if the right reply is this one."""
        return reply if self.delivers else _render(self.reads, "").decode("utf-8")

    def render(self, reply: str) -> list[bytes]:
        """Return the bytes of the connection in pieces; ``reply`` is the right one."""
        if self.wire is not None:
            raw = _render(self.wire, reply)
        else:
            body = _render(self.body, reply)
            pairs = self.headers.items() if isinstance(self.headers, dict) else self.headers
            headers = [f"{name}: ".encode() + _render(value, reply) for name, value in pairs]
            lines = [f"HTTP/1.1 {self.status} X".encode(), *headers, f"content-length: {len(body)}".encode()]
            raw = b"\r\n".join([*lines, b"", b""]) + (b"" if self.status in {204, 304} else body)
        return [raw[at : at + self.pieces] for at in range(0, len(raw), self.pieces)]


def _render(part: Part, reply: str) -> bytes:
    raw = b""
    match part:
        case str():
            raw = part.replace(REPLY, json.dumps(reply)[1:-1]).encode("utf-8")
        case list():
            raw = b"".join(_render(each, reply) for each in part)
        case {"hex": digits}:
            raw = bytes.fromhex(digits)
        case {"repeat": each, "times": times}:
            raw = _render(each, reply) * times
        case {"gzip": inner}:
            raw = gzip.compress(_render(inner, reply), 6, mtime=0)
        case {"zlib": inner}:
            raw = zlib.compress(_render(inner, reply))
        case {"encoding": encoding, "text": inner}:
            raw = _render(inner, reply).decode("utf-8").encode(encoding)
        case _:
            raise ValueError(part)
    return raw


@cache
def load_cases() -> tuple[Case, ...]:
    """Return all cases, named by file and name."""
    return tuple(
        Case.model_validate({**plain, "name": f"{path.stem}: {plain['name']}"})
        for path in sorted(CORPUS.glob("*.yaml"))
        for plain in yaml.load(path.read_text(encoding="utf-8"), yaml.CSafeLoader)
    )


class _Connection(httpcore.AsyncNetworkStream):
    def __init__(self, pieces: Iterable[bytes]) -> None:
        self._pieces = iter(pieces)

    async def read(self, *_: Any, **__: Any) -> bytes:
        await anyio.lowlevel.checkpoint()
        return next(self._pieces, b"")

    async def write(self, *_: Any, **__: Any) -> None:
        await anyio.lowlevel.checkpoint()

    async def aclose(self) -> None:
        pass

    def get_extra_info(self, info: str) -> Any:
        return None


class _Wires(httpcore.AsyncNetworkBackend):
    def __init__(self, pieces: Iterable[bytes]) -> None:
        self._pieces = pieces

    async def connect_tcp(self, *_: Any, **__: Any) -> httpcore.AsyncNetworkStream:
        return _Connection(self._pieces)


class HostileNetwork(httpx.AsyncHTTPTransport):
    """Answers each request with the bytes of a connection, which httpx reads as it reads those of a socket.

    Args:
        answer: Returns the pieces of the connection for a request.
    """

    def __init__(self, answer: Callable[[httpx.Request], Iterable[bytes]]) -> None:
        self._answer = answer

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        await request.aread()
        self._pool = httpcore.AsyncConnectionPool(network_backend=_Wires(self._answer(request)))
        return await super().handle_async_request(request)

    async def aclose(self) -> None:
        pass
