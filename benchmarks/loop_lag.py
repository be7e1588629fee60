"""How long the event loop is kept from other work while a thousand calls are in flight.

Both sides ask the same server, in a process of its own, which takes a minute for an answer; a thousand
workers ask one question after the other, so about seventeen calls begin and end in each second (more would be
too much for the network library that both sides use: its cost for a call grows with the open connections).
Beside them a task sleeps for five milliseconds at a time, and how much later it wakes is the lag. The bare
openai client and reflact's client (with its store, decision log, limits, budget and typed reply) take turns. Printed
is the 95th percentile of the lag of each, and their ratio.

    python benchmarks/loop_lag.py
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio
import httpx
import openai
from chat_server import running

from reflact.concurrency import open_task_group
from reflact.config.models import ModelConfig
from reflact.llm.budget import Account
from reflact.llm.client import Client
from reflact.messages import CallId, Message, RenderedPrompt
from reflact.stages.reply_models import RankReply
from reflact.store.runs import open_store

WORKERS, ANSWER_SECONDS, SECONDS, ROUNDS = 1000, 60, 30, 2
MESSAGES = [{"role": "user", "content": "Choose one."}]
LAG_RATIO = 2.0

Ask = Callable[[int], Awaitable[object]]


async def lag_of(ask: Ask) -> tuple[float, float]:
    """Return the 95th percentile of the loop's lag in seconds, and the calls answered a second.

    Workers begin evenly over the time of one answer; what is measured begins when all of them have.
    """
    answered, lags = 0, list[float]()
    start = time.monotonic()
    warm, stop = start + ANSWER_SECONDS, start + ANSWER_SECONDS + SECONDS

    async def worker(number: int) -> None:
        nonlocal answered
        await anyio.sleep(ANSWER_SECONDS * number / WORKERS)
        while time.monotonic() < stop:
            await ask(number)
            answered += warm <= time.monotonic() < stop

    async def watch() -> None:
        while (before := time.monotonic()) < stop:
            await anyio.sleep(0.005)
            if before >= warm:
                lags.append(time.monotonic() - before - 0.005)

    async with open_task_group() as tasks:
        for number in range(WORKERS):
            tasks.start_soon(worker, number)
        await watch()
        tasks.cancel_scope.cancel()
    return statistics.quantiles(lags, n=20)[-1], answered / SECONDS


async def bare(url: str) -> tuple[float, float]:
    """Measure the openai client alone."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(limits=limits, timeout=120) as http:
        client = openai.AsyncOpenAI(base_url=url, api_key="k", max_retries=0, http_client=http)  # type: ignore[arg-type]

        async def ask(_: int) -> object:
            return await client.chat.completions.create(model="m", messages=MESSAGES)  # type: ignore[arg-type]

        return await lag_of(ask)


async def through_reflact(url: str, folder: Path, name: str) -> tuple[float, float]:
    """Measure the whole stack; every answer is stored before it is used."""
    config = ModelConfig(
        model="m", base_url=url, api_key_env=None, mode="json_schema", concurrency=WORKERS, max_tokens=100
    )
    prompt = RenderedPrompt(
        name="ranking", version=1, messages=(Message(role="user", content="Choose one."),)
    )
    async with open_store(folder / name) as store:
        await store.open_run("r", {}, None)
        asked = 0
        async with Client(config, "optimizer", Account("r", store, store.decision_log("r"))) as client:

            async def ask(number: int) -> object:
                nonlocal asked
                asked += 1
                call_id = CallId(role="optimizer", purpose="ranking", step=asked, part=str(number))
                return await client.ask(prompt, RankReply, call_id=call_id)

            return await lag_of(ask)


def main() -> None:
    """Measure in turns and print the medians."""
    theirs, ours = list[tuple[float, float]](), list[tuple[float, float]]()
    with running(0, "nothing", 1000 * ANSWER_SECONDS) as url, tempfile.TemporaryDirectory() as folder:
        for number in range(ROUNDS):
            theirs.append(anyio.run(bare, url))
            ours.append(anyio.run(through_reflact, url, Path(folder), f"{number}.db"))
    low, high = (statistics.median(lag for lag, _ in side) for side in (theirs, ours))
    slow, fast = (statistics.median(rate for _, rate in side) for side in (theirs, ours))
    print(f"openai client alone   {low * 1e3:7.2f} ms lag (95th percentile) at {slow:5.1f} calls a second")
    print(f"reflact, stored       {high * 1e3:7.2f} ms lag (95th percentile) at {fast:5.1f} calls a second")
    print(f"ratio                 {high / low:7.2f}    (below {LAG_RATIO:g} is wanted)")
    if high >= LAG_RATIO * low:
        raise SystemExit("the loop lags more than it may")


if __name__ == "__main__":
    main()
