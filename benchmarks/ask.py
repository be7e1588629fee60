"""What one question costs beside the client library that carries it.

Both sides answer the same request from memory, in the same process, one after the other in turns: the bare
openai client, and reflact's client with its store, decision log, checks and typed reply. Printed is the
processor time for each call and the ratio; run it on a quiet machine.

    python benchmarks/ask.py
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from pathlib import Path

import anyio
import httpx
import openai

from reflact.config.models import ModelConfig
from reflact.llm.budget import Account
from reflact.llm.client import Client
from reflact.messages import CallId, Message, RenderedPrompt
from reflact.stages.reply_models import RankReply
from reflact.store.runs import open_store

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


async def bare(calls: int) -> float:
    """Processor seconds for a number of calls of the openai client."""
    http = httpx.AsyncClient(transport=httpx.MockTransport(answer))
    client = openai.AsyncOpenAI(base_url="http://model/v1", api_key="k", http_client=http)  # type: ignore[arg-type]
    started = time.process_time()
    for _ in range(calls):
        await client.chat.completions.create(model="m", messages=MESSAGES)  # type: ignore[arg-type]
    used = time.process_time() - started
    await http.aclose()
    return used


async def through_the_door(calls: int, folder: Path) -> float:
    """Processor seconds for a number of questions through the whole stack, each stored before it is used."""
    config = ModelConfig(model="m", base_url="http://model/v1", api_key_env=None, mode="json_schema")
    prompt = RenderedPrompt(
        name="ranking", version=1, messages=(Message(role="user", content="Choose one."),)
    )
    async with open_store(folder / "run.db") as store:
        await store.open_run("r", {}, None)
        account = Account("r", store, store.decision_log("r"))
        async with Client(config, "optimizer", account, transport=httpx.MockTransport(answer)) as client:
            started = time.process_time()
            for step in range(calls):
                call_id = CallId(role="optimizer", purpose="ranking", step=step)
                await client.ask(prompt, RankReply, call_id=call_id)
            return time.process_time() - started


async def main() -> None:
    """Measure in turns and print medians."""
    ours, theirs = [], []
    for _ in range(ROUNDS):
        theirs.append(await bare(CALLS) / CALLS)
        with tempfile.TemporaryDirectory() as folder:
            ours.append(await through_the_door(CALLS, Path(folder)) / CALLS)
    low, high = statistics.median(theirs), statistics.median(ours)
    print(f"openai client alone   {low * 1e3:6.2f} ms of processor time a call")
    print(f"reflact, stored       {high * 1e3:6.2f} ms of processor time a call")
    print(f"ratio                 {high / low:6.2f}")


if __name__ == "__main__":
    anyio.run(main)
