"""The cost of a model call over HTTP, beside the client libraries that carry it.

All ask the same server, a process of its own, with the same body, with 8, 50 or 500 calls in flight: the bare openai
client, instructor with the same typed reply, and reflact's client with its store, decision log, limits, budget and
typed reply, which then reads the same replies back. They take turns, and the figures are medians of the processor time
of this process, with all its threads. The openai client and instructor use reflact's pools of one connection; the openai
client is measured with its own pool too.

Then the wall time of 1,000 calls in flight on one loop, each of which takes the server a second, and how much later
than it should a task beside them wakes. The bare openai client does the same.

All clients run with the threshold of the garbage collector that the commands of reflact set.

    python benchmarks/calls.py
    python benchmarks/calls.py --rounds 1 --calls 200
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import httpx
import instructor
import openai
from chat_server import running
from harness import describe_machine, take_turns, write_results

from reflact.cli import GARBAGE_THRESHOLD
from reflact.concurrency import fan_out, open_task_group
from reflact.config.models import ModelConfig
from reflact.llm.budget import Account
from reflact.llm.client import Client
from reflact.llm.connection_pool import PooledTransport
from reflact.llm.structured import Conversation
from reflact.messages import CallId, Message, RenderedPrompt
from reflact.stages.reply_models import ReasonedRankReply
from reflact.store.runs import SQLiteRunStore, open_store

IN_FLIGHT, CALLS, ROUNDS = (8, 50, 500), 600, 5
MANY, SECONDS = 1_000, 1.0
"""Calls in flight on one loop, and how long the server takes for each."""

PROMPT = RenderedPrompt(
    name="ranking",
    version=1,
    messages=(Message(role="user", content="Choose the best of these edits. " * 60),),
)
BODY: Mapping[str, Any] = {
    "model": "m",
    "max_tokens": 100,
    **Conversation(PROMPT.messages, ReasonedRankReply, "json_schema").body,
}

Ask = Callable[[int], Awaitable[object]]


async def measure(ask: Ask, in_flight: int, calls: int) -> float:
    """Return the processor milliseconds of a call; the first calls open the connections."""
    await fan_out(ask, range(-in_flight, 0), limit=in_flight)
    started = time.process_time()
    await fan_out(ask, range(calls), limit=in_flight)
    return 1e3 * (time.process_time() - started) / calls


async def measure_lag(ask: Ask) -> dict[str, float]:
    """Return the wall seconds of all calls at once, and the loop's lag in milliseconds meanwhile."""
    lags = list[float]()

    async def watch() -> None:
        while True:
            before = time.perf_counter()
            await anyio.sleep(0.005)
            lags.append(1e3 * (time.perf_counter() - before - 0.005))

    await fan_out(ask, range(-MANY, 0))  # opens the connections
    started, used = time.perf_counter(), time.process_time()
    async with open_task_group() as tasks:
        tasks.start_soon(watch)
        await fan_out(ask, range(MANY))
        tasks.cancel_scope.cancel()
    return {
        "wall": time.perf_counter() - started,
        "processor": time.process_time() - used,
        "lag": statistics.quantiles(lags, n=20)[-1],
        "longest lag": max(lags),
    }


def connect(url: str, *, own_pool: bool = False) -> openai.AsyncOpenAI:
    """Return an openai client with as many connections as calls."""
    if own_pool:
        return openai.AsyncOpenAI(base_url=url, api_key="k", max_retries=0)
    http = httpx.AsyncClient(transport=PooledTransport(), timeout=120)
    return openai.AsyncOpenAI(base_url=url, api_key="k", max_retries=0, http_client=http)  # type: ignore[arg-type]


async def bare(url: str, work: Callable[[Ask], Awaitable[Any]], *, own_pool: bool = False) -> Any:
    """Do some work with the openai client alone."""
    async with connect(url, own_pool=own_pool) as client:
        return await work(lambda _: client.chat.completions.create(**BODY))


async def typed(url: str, work: Callable[[Ask], Awaitable[Any]]) -> Any:
    """Do some work with instructor alone."""
    async with connect(url) as client:
        ask = instructor.from_openai(
            client, mode=instructor.Mode.JSON_SCHEMA
        ).chat.completions.create
        own = {"model": "m", "max_tokens": 100, "messages": BODY["messages"]}
        return await work(lambda _: ask(**own, response_model=ReasonedRankReply))


async def through_reflact(
    url: str, work: Callable[[Ask], Awaitable[Any]], *, store: SQLiteRunStore
) -> Any:
    """Do some work with the whole stack; every reply is stored before it is used, or found in the store."""
    config = ModelConfig(
        model="m",
        base_url=url,
        api_key_env=None,
        mode="json_schema",
        concurrency=MANY,
        max_tokens=100,
    )
    async with Client(config, "optimizer", Account("r", store, store.decision_log("r"))) as client:

        async def ask(number: int) -> object:
            call_id = CallId(role="optimizer", purpose="ranking", step=0, part=f"{number}")
            return await client.ask(PROMPT, ReasonedRankReply, call_id=call_id)

        return await work(ask)


async def in_new_store(work: Callable[[SQLiteRunStore], Awaitable[Any]]) -> Any:
    """Do some work with a store in a file."""
    with tempfile.TemporaryDirectory() as folder:
        async with open_store(Path(folder) / "run.db") as store:
            await store.open_run("r", {}, None)
            return await work(store)


def compare(url: str, in_flight: int, calls: int, n_rounds: int) -> dict[str, float]:
    """Return the processor milliseconds of a call for each client."""

    async def work(ask: Ask) -> float:
        return await measure(ask, in_flight, calls)

    async def both(store: SQLiteRunStore) -> dict[str, float]:
        stored = await through_reflact(url, work, store=store)
        return {
            "reflact": stored,
            "reflact, read back": await through_reflact(url, work, store=store),
        }

    cases = {
        "openai": lambda: {"openai": anyio.run(bare, url, work)},
        "own pool": lambda: {
            "openai, its own pool": anyio.run(partial(bare, own_pool=True), url, work)
        },
        "instructor": lambda: {"instructor": anyio.run(typed, url, work)},
        "reflact": lambda: anyio.run(in_new_store, both),
    }
    rounds = take_turns(cases, n_rounds)
    return {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}


def compare_lag(url: str, n_rounds: int) -> dict[str, dict[str, float]]:
    """Return wall time and lag of a thousand calls at once for each client, medians."""
    cases = {
        "openai": lambda: {"openai": anyio.run(bare, url, measure_lag)},
        "reflact": lambda: {
            "reflact": anyio.run(
                in_new_store, lambda store: through_reflact(url, measure_lag, store=store)
            )
        },
    }
    rounds = take_turns(cases, n_rounds)
    return {
        name: {
            key: statistics.median(each[name][key] for each in rounds) for key in rounds[0][name]
        }
        for name in rounds[0]
    }


def main() -> None:
    """Measure, print and write the results."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--calls", type=int, default=CALLS)
    arguments = parser.parse_args()
    costs, machine = {}, describe_machine()
    gc.set_threshold(GARBAGE_THRESHOLD)
    with running(0, "nothing", 20) as url:
        for in_flight in IN_FLIGHT:
            costs[in_flight] = found = compare(url, in_flight, arguments.calls, arguments.rounds)
            cells = (
                f"{name} {took:.2f} ms ({took / found['openai']:.2f})"
                for name, took in found.items()
            )
            print(in_flight, *cells, sep=" | ", flush=True)
    with running(0, "nothing", int(1000 * SECONDS)) as url:
        lag = compare_lag(url, arguments.rounds)
    print(json.dumps(lag, indent=1))
    about = {"machine": [machine, describe_machine()], "rounds": arguments.rounds}
    write_results(
        "calls", {**about, "milliseconds of processor time": costs, "1,000 calls at once": lag}
    )


if __name__ == "__main__":
    main()
