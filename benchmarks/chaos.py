"""A training run against a provider that fails, beside the same run against one that does not.

The provider is llmock (https://pypi.org/project/llmock/), in its own process and with its own random 429s,
500s and 503s. A small proxy in front of it does what llmock cannot do to answers that are not streamed:
it resets connections, breaks answers off, and garbles them; and it has llmock delay answers until the client
gives up. Streamed calls go straight to llmock, which breaks streams by itself.

What llmock says depends on nothing but the request, so both runs must end alike, however different their
faults. It echoes some of its prompts, and whatever its optimizer proposes holds one and the same text: an
item is solved once the skill holds that text and llmock echoes it.

Run it with ``python benchmarks/chaos.py``, and with ``--short`` for the form that the tests run. There the
client's waits are shorter than it thinks, so llmock's own verdict on its patience is left out.

That verdict is printed and decides nothing: llmock also judges by errors that it sent, after a delay, to a
client that had given up waiting and never saw them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import re
import selectors
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import httpx

from reflact import Trainer
from reflact.concurrency import open_task_group
from reflact.config.models import ModelConfig
from reflact.llm.budget import Account
from reflact.llm.client import Client
from reflact.messages import CallId
from reflact.records import FaultCount, RunSummary
from reflact.testing import InMemoryRunStore

MODEL = "gpt-4o"
SEED = 4
RETRIES = 12
"""With the usual 5, one call in 1,400 would be lost at this share of faults."""

LLMOCK = (
    sys.executable,
    "-c",
    "from llmock.cli import app; app()",
    "serve",
    "--log-level",
    "error",
)
STATUSES = {429: 0.07, 500: 0.05, 503: 0.03}
STREAMS = {"truncate": 0.1, "disconnect": 0.1, "malformed": 0.1, "stall": 0.02}
DECK = ("reset", "truncated", "malformed", "timeout", *["none"] * 16)
"""What the proxy does to requests: each kind once in 20 of them, in an order of chance."""

HEAD = re.compile(rb"^HTTP/1\.1 (\d+) .*?\r\n\r\n", re.DOTALL)


class Size(NamedTuple):
    """Items of each split, epochs, streamed calls, the client's patience in seconds, its hurry."""

    items: Mapping[str, int]
    epochs: int
    streams: int
    timeout: float
    hurry: int


FULL = Size({"train": 16, "val": 20, "test": 10}, epochs=2, streams=100, timeout=2.0, hurry=1)
SHORT = Size({"train": 4, "val": 8, "test": 3}, epochs=1, streams=20, timeout=0.8, hurry=12)


class HurriedLoop(asyncio.SelectorEventLoop):
    """An event loop on which time passes a number of times faster than it does."""

    def __init__(self, hurry: int) -> None:
        super().__init__(_Hurried(hurry))
        self._hurry = hurry

    def time(self) -> float:
        """Return a time that passes faster."""
        return super().time() * self._hurry


class _Hurried(selectors.DefaultSelector):
    def __init__(self, hurry: int) -> None:
        super().__init__()
        self._hurry = hurry

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        return super().select(None if timeout is None else timeout / self._hurry)


# ------------------------------------------------------------------------------------------- the provider


@contextmanager
def llmock(size: Size, *, faulty: bool) -> Iterator[str]:
    """Serve llmock in its own process and yield its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [*LLMOCK, "--port", str(port)]
    if faulty:
        command += [f"--error-rate={status}={rate}" for status, rate in STATUSES.items()]
        command += [f"--stream-fault={kind}={rate}" for kind, rate in STREAMS.items()]
        command += [f"--stream-stall-seconds={2 * size.timeout}"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            _await_health(f"http://127.0.0.1:{port}", process)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()


def _await_health(url: str, process: subprocess.Popen[bytes]) -> None:
    for _ in range(300):
        if process.poll() is not None:
            break
        try:
            httpx.get(f"{url}/health").raise_for_status()
        except httpx.HTTPError:
            time.sleep(0.1)
        else:
            return
    raise SystemExit("llmock does not start; is it installed? pip install --group dev")


class Proxy:
    """Hands requests on, one a connection, and breaks some of them and of their answers.

    Args:
        size: How long the client waits, and how much faster its time passes.

    Attributes:
        upstream: The address that requests are handed on to.
        faulty: Whether anything is broken.
        asked: Requests that arrived.
        dealt: What their senders got to see, by kind of fault.
    """

    def __init__(self, size: Size) -> None:
        self._size = size
        self._chance = random.Random(SEED)
        self._deck: list[str] = []
        self.upstream = ""
        self.faulty = False
        self.asked = 0
        self.dealt: Counter[str] = Counter()

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        """Listen on a free port and yield the address."""
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0, backlog=200)
        async with server:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            server.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"(?i)content-length: *(\d+)", head)
            body = await reader.readexactly(int(length[1]) if length else 0)
            self.asked += 1
            await self._serve(head + body, reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def _serve(
        self, request: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        fault = self._draw()
        if fault == "reset":
            self.dealt["reset"] += 1
            linger = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            return
        if fault == "timeout":
            await self._delay_next()
        try:
            answer = await asyncio.wait_for(
                self._forward(request), self._size.timeout * self._size.hurry
            )
        except TimeoutError:
            self.dealt["timeout"] += 1
            self._put_back(fault)
            await reader.read()  # until the client gives up
            return
        writer.write(self._broken(answer, fault))
        await writer.drain()

    def _draw(self) -> str:
        if not self.faulty:
            return "none"
        if not self._deck:
            self._deck = self._chance.sample(DECK, len(DECK))
        return self._deck.pop()

    def _put_back(self, fault: str) -> None:
        """Keep a fault for the next request, if this one's answer cannot be broken."""
        if fault in {"truncated", "malformed"}:
            self._deck.append(fault)

    async def _delay_next(self) -> None:
        """Have llmock delay the next request that it gets, longer than the client waits."""
        delay = {"type": "delay", "seconds": 2 * self._size.timeout}
        async with httpx.AsyncClient(timeout=None) as client:
            await client.post(f"{self.upstream}/_llmock/scenario", json={"behaviors": [delay]})

    async def _forward(self, request: bytes) -> bytes:
        host, _, port = self.upstream.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            request = re.sub(rb"(?i)\r\nconnection: [^\r]*", b"", request, count=1)
            writer.write(request.replace(b"\r\n", b"\r\nConnection: close\r\n", 1))
            return await reader.read(-1)
        finally:
            writer.close()

    def _broken(self, answer: bytes, fault: str) -> bytes:
        found = HEAD.match(answer)
        if found is None:
            raise ConnectionError("llmock hung up")
        status, middle = int(found[1]), (found.end() + len(answer)) // 2
        if status != 200:
            self.dealt["5xx" if status >= 500 else str(status)] += 1
            self._put_back(fault)
        elif fault == "truncated":
            self.dealt[fault] += 1
            return answer[:middle]
        elif fault == "malformed":
            self.dealt[fault] += 1
            return answer[:middle] + b"#" * (len(answer) - middle)
        return answer


# ----------------------------------------------------------------------------------------------- the runs


def write_world(folder: Path, size: Size) -> None:
    """Write items that are solved by an answer which holds the text that llmock's optimizer proposes."""
    numbers = iter(range(1000))
    for split, count in size.items.items():
        items = [
            {
                "id": f"{split}-{n}",
                "input": f"Question {next(numbers)}",
                "reference": ".*mock-content(?s:.*)",
            }
            for n in range(count)
        ]
        (folder / split).mkdir(parents=True)
        lines = "".join(json.dumps(item) + "\n" for item in items)
        (folder / split / "items.jsonl").write_text(lines, encoding="utf-8")


def settings(world: Path, out_dir: Path, url: str, size: Size) -> dict[str, Any]:
    """Return the configuration of a run."""
    model = {
        "model": MODEL,
        "base_url": f"{url}/v1",
        "api_key_env": None,
        "timeout": size.timeout * size.hurry,
        "max_retries": RETRIES,
    }
    return {
        "out_dir": str(out_dir),
        "data": {"path": str(world)},
        "environment": {"grader": "regex"},
        "models": {"target": model, "optimizer": model},
        "search": {"sources": ["edits"]},
        "train": {"num_epochs": size.epochs, "batch_size": 8},
        "reflect": {"minibatch_size": 2},
    }


def alike(summary: RunSummary) -> str:
    """Return all of a summary that must not depend on faults."""
    differing = {"seconds", "stages", "step_costs", "faults", "spend", "reused", "config"}
    return summary.model_dump_json(exclude=differing)


class Chaos(NamedTuple):
    """What came of both runs and of the streamed calls.

    ``asked`` counts requests; ``dealt`` says what was done to them, as the proxy and llmock tell it.
    """

    calm: RunSummary
    chaos: RunSummary
    asked: int
    dealt: Counter[str]
    calm_texts: list[str]
    chaos_texts: list[str]
    streamed: tuple[FaultCount, ...]
    streams_dealt: Counter[str]
    verdict: str


async def measure(size: Size, folder: Path) -> Chaos:
    """Train and stream without faults and with them; the runs are kept in ``folder``."""
    write_world(folder / "world", size)
    proxy = Proxy(size)
    with llmock(size, faulty=False) as steady, llmock(size, faulty=True) as faulty:
        async with proxy.listening() as url:
            proxy.upstream = steady
            calm = await Trainer(settings(folder / "world", folder / "calm", url, size)).train()
            proxy.upstream, proxy.faulty, proxy.asked = faulty, True, 0
            chaos = await Trainer(settings(folder / "world", folder / "chaos", url, size)).train()
        async with httpx.AsyncClient(base_url=f"{faulty}/_llmock", timeout=None) as control:
            verdict = (await control.get("/verdict?format=text")).text
            await control.post("/reset")
        calm_texts, _ = await streamed(steady, size)
        chaos_texts, counted = await streamed(faulty, size)
        async with httpx.AsyncClient(base_url=f"{faulty}/_llmock", timeout=None) as control:
            streams_dealt = count_requests((await control.get("/requests")).json()["requests"])
    return Chaos(
        calm,
        chaos,
        proxy.asked,
        proxy.dealt,
        calm_texts,
        chaos_texts,
        counted,
        streams_dealt,
        verdict,
    )


# -------------------------------------------------------------------------------------------- the streams


async def streamed(url: str, size: Size) -> tuple[list[str], tuple[FaultCount, ...]]:
    """Return the texts of streamed calls, by way of a role's client, and the faults that were counted."""
    config = ModelConfig(
        model=MODEL,
        base_url=f"{url}/v1",
        api_key_env=None,
        timeout=size.timeout * size.hurry,
        max_retries=RETRIES,
    )
    store, texts = InMemoryRunStore(), [""] * size.streams
    account = Account("streams", store, store.decision_log("streams"))
    async with (
        httpx.AsyncHTTPTransport() as network,
        Client(config, "target", account, transport=network) as client,
    ):

        async def ask(n: int) -> None:
            body = {"messages": [{"role": "user", "content": f"Question {n}"}], "stream": True}
            call_id = CallId(role="target", purpose="stream", part=str(n))
            answer = json.loads(await client.forward(body, call_id=call_id))
            texts[n] = answer["choices"][0]["message"]["content"]

        async with open_task_group() as tasks:
            for n in range(size.streams):
                tasks.start_soon(ask, n)
    return texts, await store.faults("streams")


def count_requests(requests: Sequence[dict[str, Any]]) -> Counter[str]:
    """Return the faults that llmock says it injected, by the kinds that a client should see."""
    dealt: Counter[str] = Counter()
    for request in requests:
        fault = request["fault"] or ""
        if fault.startswith("chaos:"):
            status = int(fault.removeprefix("chaos:"))
            dealt["5xx" if status >= 500 else str(status)] += 1
        elif fault.startswith("stream:"):
            dealt["timeout" if "stall" in fault else "broken stream"] += 1
    return dealt


# --------------------------------------------------------------------------------------------- what is told


def uncounted(dealt: Counter[str], faults: tuple[FaultCount, ...]) -> Counter[str]:
    """Return the faults that were dealt and not counted, or counted and not dealt.

    A client that is slower than its own patience counts a time-out that nobody dealt, in place of whatever
    came too late.
    """
    counted = Counter({fault.kind: fault.count for fault in faults})
    missing, more = dealt - counted, counted - dealt
    own = more.pop("timeout", 0)
    return missing + more if own < missing.total() or more else Counter()


def table(dealt: Counter[str], faults: tuple[FaultCount, ...]) -> None:
    """Print faults by kind: as injected, and as counted."""
    counted = {fault.kind: fault.count for fault in faults}
    print("| fault | injected | counted |\n|---|---|---|")
    for kind in sorted({*dealt, *counted}):
        print(f"| {kind} | {dealt[kind]} | {counted.get(kind, 0)} |")  # type: ignore[call-overload]
    print(f"| all | {dealt.total()} | {sum(counted.values())} |\n")


def main() -> None:
    """Measure, and print what came of it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--short", action="store_true", help="the form that the tests run")
    size = SHORT if parser.parse_args().short else FULL
    with tempfile.TemporaryDirectory() as folder:
        hurried = {"loop_factory": lambda: HurriedLoop(size.hurry)}
        told = anyio.run(measure, size, Path(folder), backend_options=hurried)
    for name, summary in (("calm", told.calm), ("chaos", told.chaos)):
        scores = ", ".join(
            f"{s.name} {s.split} {math.nan if s.hard is None else s.hard:.3f}"
            for s in summary.scores
        )
        print(
            f"{name}: {summary.status} after {summary.steps} steps in {summary.seconds:.1f} s; {scores}"
        )
    share = sum(fault.count for fault in told.chaos.faults) / told.asked
    print(f"\n{told.asked} requests of the run, {share:.1%} of them failed:\n")
    table(told.dealt, told.chaos.faults)
    print(f"{len(told.chaos_texts)} streamed calls:\n")
    table(told.streams_dealt, told.streamed)
    if size.hurry == 1:
        print(told.verdict)
    failures = [
        *(["the runs differ"] if alike(told.calm) != alike(told.chaos) else []),
        *(["the streams differ"] if told.calm_texts != told.chaos_texts else []),
        *(["faults went uncounted"] if uncounted(told.dealt, told.chaos.faults) else []),
        *(
            ["faults of streams went uncounted"]
            if uncounted(told.streams_dealt, told.streamed)
            else []
        ),
    ]
    if failures:
        raise SystemExit("; ".join(failures))


if __name__ == "__main__":
    main()
