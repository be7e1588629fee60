"""A chat endpoint in its own process, for benchmarks: it allows so many requests a second and takes its time.

    python benchmarks/chat_server.py RATE SAYS MILLISECONDS

RATE counts requests of the last second (0: any number); what is beyond it is answered 429, with
``Retry-After`` in whole seconds where SAYS is ``seconds``, and without where it is ``nothing``. An answer
takes MILLISECONDS. The port is printed; the process ends with its standard input.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

REPLY = {"reasoning": "It is the only one.", "selected": [1]}
MESSAGE = {"role": "assistant", "content": json.dumps(REPLY)}
COMPLETION = {
    "id": "1",
    "object": "chat.completion",
    "created": 1,
    "model": "m",
    "choices": [{"index": 0, "finish_reason": "stop", "message": MESSAGE}],
    "usage": {"prompt_tokens": 9, "completion_tokens": 9, "total_tokens": 18},
}


@contextmanager
def running(rate: int, says: str, milliseconds: int) -> Iterator[str]:
    """Run the server for the length of the block; gives the root of its API."""
    arguments = [sys.executable, __file__, str(rate), says, str(milliseconds)]
    with subprocess.Popen(
        arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}/v1"
        process.stdin.close()


class Connection(asyncio.Protocol):
    """One client's connection: requests come one after the other, bodies whole."""

    def __init__(self, rate: int, says: str, seconds: float, served: deque[float]) -> None:
        self._rate, self._says, self._seconds, self._served = rate, says, seconds, served
        self._heard = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._heard += data
        head, end, body = self._heard.partition(b"\r\n\r\n")
        if not end:
            return
        length = next(
            int(line[15:])
            for line in head.lower().split(b"\r\n")
            if line.startswith(b"content-length:")
        )
        if len(body) < length:
            return
        self._heard = body[length:]
        loop = asyncio.get_running_loop()
        if self._allowed(loop.time()):
            loop.call_later(self._seconds, self._answer, "200 OK", json.dumps(COMPLETION).encode())
        else:
            after = "\r\nRetry-After: 1" if self._says == "seconds" else ""
            self._answer(f"429 Too Many Requests{after}", b"{}")

    def _allowed(self, now: float) -> bool:
        while self._served and self._served[0] <= now - 1.0:
            self._served.popleft()
        if self._rate and len(self._served) >= self._rate:
            return False
        self._served.append(now)
        return True

    def _answer(self, status: str, body: bytes) -> None:
        head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        self._transport.write(head.encode() + body)


async def serve(rate: int, says: str, seconds: float) -> None:
    """Answer until the standard input ends."""
    served: deque[float] = deque()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(
        lambda: Connection(rate, says, seconds, served), "127.0.0.1", 0, backlog=2000
    )
    print(server.sockets[0].getsockname()[1], flush=True)
    await loop.run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]) / 1000))
