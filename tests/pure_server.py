"""A chat endpoint in its own process, whose every answer is a function of the request's body and sample.

Items look like ``alpha 3``; the right answer is ``alpha:3``, and the target gives it where the skill holds
the line ``- rule alpha.``. A skill with the line ``- hush.`` answers nothing rightly, and an item of the
rule ``coin`` is answered as its sample says. The analysts propose rules and, for coins, the harmful line.

Some first replies are malformed, and the merges of one step are malformed for good.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import sys
from typing import Any, NamedTuple

SPOILED_STEP = 4
"""The step whose merges are never valid."""

SLOWEST_SECONDS = 0.012

CASE = re.compile(r"<(case_\d+_*)>\n(.*?)\n</\1>", re.DOTALL)
TASK = re.compile(r"\b(alpha|beta|gamma|delta|coin) \d")
PROPOSAL = re.compile(r"<(proposal_(\d+)_*)>\n(.*?)\n</\1>", re.DOTALL)


class Logged(NamedTuple):
    """A request as it arrived: the hash of its body, and its sample."""

    body: str
    sample: str


def answer(body: dict[str, Any], sample: str) -> str:
    """Return what the model says."""
    messages = body["messages"]
    asked = next(m["content"] for m in messages if m["role"] == "user")
    system = "\n".join(m["content"] for m in messages if m["role"] == "system")
    if sample.startswith("target/"):
        return _target(system, asked, sample)
    first_attempt = sample.endswith("attempt=0")
    if first_attempt and "part=0" in sample and int(_digits(sample), 16) % 2:
        return "Let me think about that first."
    if f"/merge/step={SPOILED_STEP}/" in sample:
        return '{"edits": ['
    schema = body["response_format"]["json_schema"]
    return json.dumps(_reply(schema["name"], schema["schema"]["properties"], asked))


def _target(skill: str, asked: str, sample: str) -> str:
    name, _, number = asked.partition(" ")
    if name == "coin":
        return f"coin:{_digits(sample)}"
    known = f"- rule {name}." in skill.splitlines() and "- hush." not in skill.splitlines()
    return f"{name}:{number}" if known else "unknown"


def _reply(kind: str, properties: dict[str, Any], asked: str) -> dict[str, Any]:
    if kind == "RankReply":
        shown = len(PROPOSAL.findall(asked))
        budget = properties["selected"]["minItems"]
        return {"reasoning": "The last ones first.", "selected": [shown - n for n in range(budget)]}
    fields = properties["edits"]["items"]["properties"]
    most = properties["edits"]["maxItems"]
    if kind == "MergeReply":
        proposals = {number: _content(text) for _, number, text in PROPOSAL.findall(asked)}
        return {"edits": [_edit(fields, text, [int(n)]) for n, text in proposals.items()]}
    names = [TASK.findall(text)[0] for _, text in CASE.findall(asked)]
    distinct = list(dict.fromkeys(names))
    if kind == "SuccessReply":
        return {"strengths": "As told.", "edits": [_edit(fields, f"- keep {n}.") for n in distinct[:1]]}
    lines = ["- hush." if n == "coin" else f"- rule {n}." for n in distinct]
    patterns = [{"type": n, "count": names.count(n), "description": f"No {n}."} for n in distinct[:3]]
    return {"patterns": patterns, "edits": [_edit(fields, line) for line in lines[:most]]}


def _edit(fields: dict[str, Any], line: str, sources: list[int] | None = None) -> dict[str, Any]:
    whole = {"op": "append", "target": "", "content": line, "sources": sources}
    return {name: whole[name] for name in fields}


def _content(proposal: str) -> str:
    return proposal.rpartition("content: ")[2]


def _digits(sample: str) -> str:
    return hashlib.sha256(sample.encode()).hexdigest()[:8]


def completion(body: dict[str, Any], text: str) -> dict[str, Any]:
    """Return the whole answer to a request, its token counts included."""
    given, written = len(json.dumps(body)) // 4, len(text) // 4
    message = {"role": "assistant", "content": text}
    return {
        "id": "pure",
        "object": "chat.completion",
        "created": 1,
        "model": body["model"],
        "choices": [{"index": 0, "finish_reason": "stop", "message": message}],
        "usage": {"prompt_tokens": given, "completion_tokens": written, "total_tokens": given + written},
    }


class Server:
    """Counts what arrives and answers it; ``GET /wait/N`` waits for N requests, ``GET /forget`` begins anew.

    Both answer with the requests so far.
    """

    def __init__(self) -> None:
        self._log: list[Logged] = []
        self._arrived = asyncio.Condition()

    async def serve(self) -> None:
        """Listen on a free port, print it, and answer until the process is ended."""
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0, backlog=200)
        print(server.sockets[0].getsockname()[1], flush=True)  # noqa: T201 - how the parent learns the port
        await server.serve_forever()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := (await reader.readline()).decode():
                method, path, _ = line.split(" ", 2)
                headers = await _headers(reader)
                sent = await reader.readexactly(int(headers.get("content-length", "0")))
                text = json.dumps(await self._answered(method, path, headers, sent)).encode()
                head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(text)}"
                writer.write(head.encode() + b"\r\n\r\n" + text)
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def _answered(self, method: str, path: str, headers: dict[str, str], sent: bytes) -> Any:
        if method == "POST":
            return await self._chat(json.loads(sent), headers["x-sample"])
        if path == "/forget":
            forgotten, self._log = self._log, []
            return forgotten
        if path.startswith("/wait/"):
            async with self._arrived:
                await self._arrived.wait_for(lambda: len(self._log) >= int(path.rpartition("/")[2]))
        return self._log

    async def _chat(self, body: dict[str, Any], sample: str) -> dict[str, Any]:
        fingerprint = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
        async with self._arrived:
            self._log.append(Logged(fingerprint, sample))
            self._arrived.notify_all()
        share = int(hashlib.sha256((fingerprint + sample).encode()).hexdigest()[:4], 16) / 0xFFFF
        await asyncio.sleep(share * SLOWEST_SECONDS)
        return completion(body, answer(body, sample))


async def _headers(reader: asyncio.StreamReader) -> dict[str, str]:
    headers = {}
    while line := (await reader.readline()).decode().strip():
        name, _, value = line.partition(":")
        headers[name.lower()] = value.strip()
    return headers


if __name__ == "__main__":
    sys.exit(asyncio.run(Server().serve()))
