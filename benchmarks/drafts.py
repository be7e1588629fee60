"""What a streamed reply costs with its drafts, for replies of 2 to 64 kilobytes.

Each reply arrives in pieces of four characters, as tokens do. Measured is the processor time of a whole call:
reading the stream, telling all drafts as events in JSON, and validating the reply; beside it instructor's
``create_partial``, which reads the whole text anew with each piece, over the same network. It fails where a
kilobyte of the longest reply costs more than ``BOUND`` times what one of the shortest costs; run it on a
quiet machine.

    python benchmarks/drafts.py
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import AsyncIterator

import anyio
import httpx
import instructor
import openai
from pydantic import Field

from reflact.config.models import ModelConfig
from reflact.events import DraftUpdated, Event
from reflact.llm.budget import Account
from reflact.llm.client import Client
from reflact.messages import CallId, Message, RenderedPrompt, ReplyModel
from reflact.testing import InMemoryRunStore
from reflact.types import FrozenModel

SIZES = (2, 4, 8, 16, 32, 64)
ROUNDS = 3
PROMPT = RenderedPrompt(name="merge", version=1, messages=(Message(role="user", content="Change it."),))
BOUND = 1.5


class Change(FrozenModel):
    """One change."""

    target: str = Field(description="Where.")
    content: str = Field(description="What.")


class Changes(ReplyModel):
    """A text and changes."""

    reasoning: str = Field(description="Why.")
    changes: list[Change] = Field(description="The changes.")


def reply(kilobytes: int) -> Changes:
    """Return a reply of a length, one half of it a text, the other changes of 250 characters."""
    change = Change(target="the second rule ", content='Say "when", and where.\n' * 9)
    count = kilobytes * 1024 // 2 // len(change.model_dump_json())
    return Changes(reasoning="because of this " * (kilobytes * 32), changes=[change] * count)


def pieces_of(value: Changes) -> list[bytes]:
    """Return the stream that brings a reply, four characters at a time."""
    text = value.model_dump_json()
    said = [{"content": text[at : at + 4]} for at in range(0, len(text), 4)]
    about = {"id": "x", "object": "chat.completion.chunk", "created": 0, "model": "m"}
    events = [{**about, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in said]
    events.append({**about, "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    usage = {"prompt_tokens": 9, "completion_tokens": len(said), "total_tokens": len(said) + 9}
    events.append({**about, "choices": [], "usage": usage})
    return [f"data: {json.dumps(event)}\n\n".encode() for event in events] + [b"data: [DONE]\n\n"]


class _Body(httpx.AsyncByteStream):
    def __init__(self, pieces: list[bytes]) -> None:
        self._pieces = pieces

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in self._pieces:
            yield piece


def network(pieces: list[bytes]) -> httpx.MockTransport:
    """Return a network that answers with a stream."""
    headers = {"content-type": "text/event-stream"}
    return httpx.MockTransport(lambda _: httpx.Response(200, headers=headers, stream=_Body(pieces)))


async def ours(pieces: list[bytes]) -> tuple[float, int]:
    """Return the processor seconds of a call whose drafts are told, and how many there were."""
    count = 0

    async def emit(event: Event) -> None:
        nonlocal count
        event.model_dump_json()
        count += isinstance(event, DraftUpdated)

    store = InMemoryRunStore()
    await store.open_run("r", {}, {})
    settings = ModelConfig(model="m", base_url="http://model/v1", api_key_env=None, mode="json_schema")
    account = Account("r", store, store.decision_log("r"))
    async with Client(settings, "optimizer", account, transport=network(pieces), on_event=emit) as client:
        started = time.process_time()
        await client.ask(PROMPT, Changes, call_id=CallId(role="optimizer", purpose="merge", step=1))
        return time.process_time() - started, count


async def theirs(pieces: list[bytes]) -> tuple[float, int]:
    """Return the processor seconds that instructor takes for its partial objects, and how many there were."""
    async with httpx.AsyncClient(transport=network(pieces)) as http:
        client = openai.AsyncOpenAI(base_url="http://model/v1", api_key="k", http_client=http)  # type: ignore[arg-type]
        asking = instructor.from_openai(client, mode=instructor.Mode.JSON_SCHEMA)
        started, count = time.process_time(), 0
        async for _ in asking.create_partial(
            model="m", response_model=Changes, messages=[{"role": "user", "content": "Change it."}]
        ):
            count += 1
        return time.process_time() - started, count


async def main() -> bool:
    """Measure, print, and return whether the cost of a kilobyte stays the same."""
    print("reply    drafts                       instructor's create_partial")
    per_kilobyte = []
    for size in SIZES:
        pieces = pieces_of(reply(size))
        seconds, count = min([await ours(pieces) for _ in range(ROUNDS)])
        per_kilobyte.append(seconds / size)
        line = f"{size:3} KB  {count:4} in {seconds * 1e3:6.1f} ms, {seconds / size * 1e3:5.2f} a KB"
        slow, objects = await theirs(pieces)
        print(f"{line}  {objects:5} in {slow * 1e3:7.1f} ms, {slow / size * 1e3:6.1f} a KB")
    ratio = per_kilobyte[-1] / per_kilobyte[0]
    print(f"\na KB of {SIZES[-1]} costs {ratio:.2f} times one of {SIZES[0]}; at most {BOUND} is accepted")
    return ratio <= BOUND


if __name__ == "__main__":
    sys.exit(0 if anyio.run(main) else 1)
