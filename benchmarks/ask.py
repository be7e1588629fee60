"""What one question costs beside the client libraries that carry it.

All answer the same request from memory, in the same process, one after the other in turns: the bare openai client,
instructor with the same typed reply, and reflact's client with its store, decision log, checks and typed reply, which
then reads the same replies back. Printed is the processor time for each call, the least of some rounds, and its ratio
to that of the openai client.

    python benchmarks/ask.py
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path

import anyio
import httpx
import instructor
import openai

from reflact.config.models import ModelConfig
from reflact.llm.budget import Account
from reflact.llm.client import Client
from reflact.messages import CallId, Message, RenderedPrompt
from reflact.stages.reply_models import RankReply
from reflact.store.runs import SQLiteRunStore, open_store

CALLS, ROUNDS = 200, 5
MESSAGES = [{"role": "user", "content": "Choose one."}]


def answer(request: httpx.Request) -> httpx.Response:
    """The same valid reply to everything."""
    content = json.dumps({"reasoning": "It is the only one.", "selected": [1]})
    message = {"role": "assistant", "content": content}
    return httpx.Response(
        200,
        json={
            "id": "1",
            "object": "chat.completion",
            "created": 1,
            "model": "m",
            "choices": [{"index": 0, "finish_reason": "stop", "message": message}],
            "usage": {"prompt_tokens": 9, "completion_tokens": 9, "total_tokens": 18},
        },
    )


def connect() -> openai.AsyncOpenAI:
    """Return an openai client whose network is the function above."""
    http = httpx.AsyncClient(transport=httpx.MockTransport(answer))
    return openai.AsyncOpenAI(base_url="http://model/v1", api_key="k", http_client=http)  # type: ignore[arg-type]


async def ask_openai() -> float:
    """Processor seconds of a call of the openai client."""
    client = connect()
    started = time.process_time()
    for _ in range(CALLS):
        await client.chat.completions.create(model="m", messages=MESSAGES)  # type: ignore[arg-type]
    used = time.process_time() - started
    await client.close()
    return used / CALLS


async def ask_instructor() -> float:
    """Processor seconds of a typed reply by instructor alone."""
    client = connect()
    typed = instructor.from_openai(client, mode=instructor.Mode.JSON_SCHEMA)
    started = time.process_time()
    for _ in range(CALLS):
        await typed.chat.completions.create(model="m", messages=MESSAGES, response_model=RankReply)  # type: ignore[type-var]
    used = time.process_time() - started
    await client.close()
    return used / CALLS


async def ask_reflact(store: SQLiteRunStore) -> float:
    """Processor seconds of a question through the whole stack, whose reply is stored or read back."""
    config = ModelConfig(model="m", base_url="http://model/v1", api_key_env=None, mode="json_schema")
    prompt = RenderedPrompt(
        name="ranking", version=1, messages=(Message(role="user", content="Choose one."),)
    )
    account = Account("r", store, store.decision_log("r"))
    async with Client(config, "optimizer", account, transport=httpx.MockTransport(answer)) as client:
        started = time.process_time()
        for step in range(CALLS):
            call_id = CallId(role="optimizer", purpose="ranking", step=step)
            await client.ask(prompt, RankReply, call_id=call_id)
        return (time.process_time() - started) / CALLS


async def main() -> None:
    """Measure in turns and print the least of each."""
    names = ("openai client alone", "instructor alone", "reflact, stored", "reflact, read back")
    rounds: list[tuple[float, ...]] = []
    for _ in range(ROUNDS):
        with tempfile.TemporaryDirectory() as folder:
            async with open_store(Path(folder) / "run.db") as store:
                await store.open_run("r", {}, None)
                both = (await ask_reflact(store), await ask_reflact(store))
        rounds.append((await ask_openai(), await ask_instructor(), *both))
    least = [min(column) for column in zip(*rounds, strict=True)]
    for name, took in zip(names, least, strict=True):
        print(f"{name:20} {took * 1e3:6.2f} ms of processor time a call  {took / least[0]:5.2f}")


if __name__ == "__main__":
    anyio.run(main)
