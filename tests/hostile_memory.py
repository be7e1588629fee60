"""Two programs: a server of huge answers, and a process that asks it for eight at once and prints its peak of memory.

The server takes the kind of its answers from the model's name; see ``ANSWERS``.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import zlib
from collections.abc import Iterator
from itertools import chain, repeat
from pathlib import Path
from typing import NamedTuple

import anyio

from doubles import PROMPT, RUN, call_id, config, opened
from reflact.concurrency import fan_out
from reflact.config.training import BudgetConfig
from reflact.errors import ReflactError
from reflact.events import Event
from reflact.llm.budget import Account, Budget
from reflact.llm.client import Client
from reflact.llm.redaction import DEFAULT_MAX_BYTES
from reflact.messages import ReplyModel, Text

MEBIBYTE = 2**20
HUGE = 300 * MEBIBYTE
BELOW = DEFAULT_MAX_BYTES - MEBIBYTE
"""Almost as much as a client takes."""

ASKED = 8
OBJECT, STREAM = "application/json", "text/event-stream"
TEXT, END = b'{"choices":[{"message":{"content":"', b'"}}]}'
EVENT = b'data: {"choices":[{"delta":{"content":"%s"}}]}\n\n'
LAST = EVENT % b"hi" + b"data: [DONE]\n\n"


class Word(ReplyModel):
    """A typed reply."""

    word: str


class Answer(NamedTuple):
    """A huge answer: a part that is repeated up to a size, between a start and an end, and may be compressed."""

    content_type: str
    start: bytes
    part: bytes
    end: bytes
    size: int = HUGE
    status: str = "200 OK"
    encoding: str = "identity"

    def write(self) -> Iterator[bytes]:
        headers = (self.status, "Content-Type: " + self.content_type, "Content-Encoding: " + self.encoding)
        yield "HTTP/1.1 {}\r\n{}\r\n{}\r\nConnection: close\r\n\r\n".format(*headers).encode()
        piece = self.part * (MEBIBYTE // len(self.part))
        pieces = chain([self.start], repeat(piece, self.size // len(piece)), [self.end])
        if self.encoding == "identity":
            yield from pieces
            return
        packer = zlib.compressobj(wbits=zlib.MAX_WBITS | 16)
        yield from map(packer.compress, pieces)
        yield packer.flush()


ANSWERS = {
    "text": Answer(OBJECT, TEXT, b"x", END),
    "bomb": Answer(OBJECT, TEXT, b" ", END, encoding="gzip"),
    "error": Answer(OBJECT, b"", b"no ", b"", status="400 Bad"),
    "events": Answer(STREAM, b"", EVENT % (b"x" * 1000), LAST),
    "event": Answer(STREAM, b"data: ", b"x", LAST),
    "objects": Answer(OBJECT, b'{"x":[', b"{},", b"0]," + TEXT[1:] + END, BELOW),
    "escapes": Answer(OBJECT, TEXT, b"\\u00e9", END, BELOW),
    "ticks": Answer(STREAM, b"", b"data: {}\n\n", LAST, BELOW),
    "tokens": Answer(STREAM, b"", EVENT % b"x", LAST, BELOW),
}


async def serve() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            length = int(head.partition("content-length:")[2].split()[0])
            kind = json.loads(await reader.readexactly(length))["model"]
            for piece in ANSWERS[kind].write():
                writer.write(piece)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)  # noqa: T201 - how the parent learns the port
    await server.serve_forever()


async def ask(port: str, kinds: list[str]) -> None:
    store = await opened()
    account = Account(RUN, store, store.decision_log(RUN), Budget(BudgetConfig()))

    async def take(_: Event) -> None:
        pass

    async def ask_one(number: int) -> str:
        settings = config(
            model=kinds[number % len(kinds)], base_url=f"http://127.0.0.1:{port}/v1", max_retries=0, reasks=0
        )
        async with Client(settings, "optimizer", account, on_event=take) as client:
            try:
                await client.ask(PROMPT, Word if number % 2 else Text, call_id=call_id(str(number)))
            except ReflactError as error:
                return type(error).__name__
            return "reply"

    outcomes = await fan_out(ask_one, range(ASKED))
    print(json.dumps({"outcomes": sorted(outcomes), "peak": read_peak()}), flush=True)  # noqa: T201 - for the parent


def read_peak() -> float:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(re.findall(r"VmHWM:\s*(\d+) kB", status)[0]) / 1024


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        anyio.run(serve)
    else:
        anyio.run(ask, sys.argv[2], sys.argv[3:])
