"""A service that trains: clients start a run, follow its events, and cancel it when they leave.

    python examples/service.py                        # the recorded demo, at http://127.0.0.1:8000
    python examples/service.py support=support.yaml   # configurations of your own, each under a name

Its pages are those of `reflact serve`. docs/service.md explains cancelling and reconnecting.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx
import uvicorn
from anyio.abc import TaskGroup
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.types import Receive, Scope, Send

from reflact import ReflactError, Stream, Trainer, TrainerConfig, read_run
from reflact.errors import UsageError
from reflact.events import Event
from reflact.llm import ReplayTransport, read_cassette
from reflact.reporting import create_run_pages
from reflact.testing import find_data_folder

HOSTS = ["127.0.0.1", "localhost"]
BEAT_SECONDS = 15.0
"""Seconds between comments, which keep proxies open and detect clients that have gone."""

PATIENCE_SECONDS = 60.0
"""Seconds that a run waits for a client that reads nothing; then the client counts as gone."""


# --------------------------------------------------------------------------------------------- runs


class Start:
    """One start of a run, with its viewers."""

    def __init__(self, stream: Stream[Event]) -> None:
        self.stream = stream
        self.viewers = 0
        self.over = anyio.Event()
        self.failure: str | None = None
        self._scope = anyio.CancelScope()

    async def go(self) -> None:
        """Run to the end, or until it is cancelled; viewers read views of the stream."""
        try:
            with self._scope:
                async with self.stream as stream:
                    async for _ in stream:
                        pass
        except ReflactError as error:
            self.failure = str(error)
        except Exception:
            logging.getLogger(__name__).exception("a run failed")
            self.failure = "the run failed unexpectedly; the service's log says more"
        finally:
            self.over.set()

    async def end(self) -> None:
        """Cancel the run, and return when its folder is free."""
        self._scope.cancel()
        await self.over.wait()


class Run:
    """A configured run: it runs while it has viewers, and can be resumed.

    Args:
        trainer: Starts it.
        log: Its database.
    """

    def __init__(self, trainer: Trainer, log: Path) -> None:
        self.log = log
        self._trainer = trainer
        self._turn = anyio.Lock()
        self._start: Start | None = None

    @asynccontextmanager
    async def watch(self, tasks: TaskGroup) -> AsyncIterator[Start]:
        """Join the active start, or begin one in ``tasks``; the last viewer ends it."""
        async with self._turn:
            if self._start is None or self._start.over.is_set():
                self._start = Start(self._trainer.stream())
                tasks.start_soon(self._start.go)
            start = self._start
            start.viewers += 1
        try:
            yield start
        finally:
            with anyio.CancelScope(shield=True):
                async with self._turn:
                    start.viewers -= 1
                    if not start.viewers:
                        await start.end()

    async def read_log(self) -> tuple[Event, ...]:
        """Return the durable events of all starts so far, in order."""
        try:
            return (await read_run(self.log, self._trainer.run_id)).events
        except UsageError:  # the run has no database yet, or is not in it
            return ()


# --------------------------------------------------------------------------- server-sent events


class EventStream(Response):
    """The events of a run as server-sent events.

    Args:
        run: The run.
        tasks: Holds the run, which may outlive this request.
        after: The id of the last durable event that the client has; the stored ones after it come first.
        latest: If true, a newer live event replaces a waiting one about the same subject.
    """

    def __init__(self, run: Run, tasks: TaskGroup, *, after: str | None, latest: bool) -> None:
        super().__init__()
        self._run = run
        self._tasks = tasks
        self._after = after
        self._latest = latest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-store")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        async with anyio.create_task_group() as connection:
            client = Client(send, connection.cancel_scope)
            connection.start_soon(client.wait_for_disconnect, receive)
            connection.start_soon(client.send_comments)
            async with self._run.watch(self._tasks) as start:
                await self._send_events(client, start)
            connection.cancel_scope.cancel()
        if not client.gone:
            await send({"type": "http.response.body", "body": b""})

    async def _send_events(self, client: Client, start: Start) -> None:
        # The view is opened first, so that an event that is stored meanwhile is in the view, in the log or in both.
        async with start.stream.subscribe(latest_only=self._latest) as view:
            try:
                logged = await self._run.read_log()
            except ReflactError as error:
                await client.send_text(format_event("failed", json.dumps(str(error))))
                return
            ids = [event.id for event in logged]
            missed = ids.index(self._after) + 1 if self._after in ids else 0
            for event in logged[missed:]:
                await client.send_event(event)
            known = set(ids)
            async for event in view:
                if not (event.durable and event.id in known):
                    await client.send_event(event)
        await start.over.wait()
        if start.failure is not None:
            await client.send_text(format_event("failed", json.dumps(start.failure)))


class Client:
    """A client; ``connection`` is cancelled when it has gone."""

    def __init__(self, send: Send, connection: anyio.CancelScope) -> None:
        self._send = send
        self._connection = connection
        self.gone = False

    async def send_event(self, event: Event) -> None:
        """Send an event; a durable one with its id, which the client names when it comes back."""
        text = event.model_dump_json(ensure_ascii=True)
        await self.send_text(format_event(event.kind, text, event.id if event.durable else None))

    async def send_text(self, text: str) -> None:
        """Send text, waiting for a slow client for a limited time."""
        with anyio.move_on_after(PATIENCE_SECONDS) as patience:
            await self._send(
                {"type": "http.response.body", "body": text.encode(), "more_body": True}
            )
        if patience.cancelled_caught:
            self._leave()

    async def send_comments(self) -> None:
        """Send comments, which clients ignore."""
        while True:
            await self.send_text(": the run is active\n\n")
            await anyio.sleep(BEAT_SECONDS)

    async def wait_for_disconnect(self, receive: Receive) -> None:
        """Wait until the client closes the connection."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self._leave()

    def _leave(self) -> None:
        self.gone = True
        self._connection.cancel()


def format_event(kind: str, data: str, event_id: str | None = None) -> str:
    """Return one server-sent event; ``data`` is JSON, which has no line breaks."""
    head = "" if event_id is None else f"id: {event_id}\n"
    return f"{head}event: {kind}\ndata: {data}\n\n"


# ------------------------------------------------------------------------------------------ the service


class Service:
    """Answers requests for the names of the runs and their events."""

    _tasks: TaskGroup

    def __init__(self, runs: Mapping[str, Run]) -> None:
        self._runs = runs

    @asynccontextmanager
    async def open(self, _: Starlette) -> AsyncIterator[None]:
        """Hold the active runs; they are cancelled when the service ends."""
        async with anyio.create_task_group() as self._tasks:
            yield
            self._tasks.cancel_scope.cancel()

    async def names(self, _: Request) -> Response:
        """Return the names of the configured runs."""
        return JSONResponse(list(self._runs))

    async def events(self, request: Request) -> Response:
        """Return the events of a run; start it if it is not active."""
        if request.headers.get("sec-fetch-site", "none") not in {"same-origin", "none"}:
            raise HTTPException(403, "pages of other sites cannot start runs")
        run = self._runs.get(request.path_params["name"])
        if run is None:
            raise HTTPException(404, "there is no run of this name")
        latest = request.query_params.get("view") == "latest"
        return EventStream(
            run, self._tasks, after=request.headers.get("last-event-id"), latest=latest
        )


def create_application(runs: Mapping[str, Run]) -> Starlette:
    """Return the service of some runs, by name."""
    service = Service(runs)
    routes = [
        Route("/trainers", service.names),
        Route("/trainers/{name}/events", service.events),
        Mount("/", create_run_pages(os.path.commonpath([run.log.parent for run in runs.values()]))),
    ]
    hosts = Middleware(TrustedHostMiddleware, allowed_hosts=HOSTS)
    return Starlette(routes=routes, middleware=[hosts], lifespan=service.open)


# ------------------------------------------------------------------------------------------- the demo


class PacedReplay(httpx.AsyncBaseTransport):
    """Answers from a recording as a provider would: piece by piece if a stream is requested."""

    def __init__(self, cassette: Path, delay: float) -> None:
        self._recorded = ReplayTransport(cassette, read_cassette(cassette))
        self._delay = delay

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Return the recorded answer."""
        answer = await self._recorded.handle_async_request(request)
        await answer.aread()
        if not json.loads(request.content).get("stream"):
            return answer
        whole = _read_whole(answer.text)
        return httpx.Response(
            200, headers={"content-type": "text/event-stream"}, content=self._pieces(whole)
        )

    async def _pieces(self, whole: Any) -> AsyncIterator[bytes]:
        (choice,) = whole["choices"]
        text, end = choice["message"]["content"], choice["finish_reason"]
        pieces = [({"content": text[at : at + 8]}, None) for at in range(0, len(text), 8)]
        for delta, reason in (*pieces, ({}, end)):
            part = {"index": 0, "delta": delta, "finish_reason": reason}
            yield _format_chunk(
                {**whole, "object": "chat.completion.chunk", "choices": [part], "usage": None}
            )
            await anyio.sleep(self._delay)
        yield _format_chunk({**whole, "object": "chat.completion.chunk", "choices": []})
        yield b"data: [DONE]\n\n"


def _read_whole(text: str) -> Any:
    """Return a recorded completion, also if it was recorded as a stream."""
    if not text.startswith("data: "):
        return json.loads(text)
    *chunks, last = (
        json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")
    )
    parts = [choice for chunk in chunks for choice in chunk["choices"]]
    content = "".join(part["delta"].get("content", "") for part in parts)
    choice = {
        "index": 0,
        "message": {"content": content},
        "finish_reason": parts[-1]["finish_reason"],
    }
    return {**last, "choices": [choice]}


def _format_chunk(chunk: Any) -> bytes:
    return f"data: {json.dumps(chunk)}\n\n".encode()


def create_demo_run(delay: float) -> Run:
    """Return the recorded demo, which needs no key and no network."""
    folder = find_data_folder("demo")
    config = Trainer(folder / "demo.yaml").config
    config = config.model_copy(
        update={"replay": config.replay.model_copy(update={"cassette": None})}
    )
    return Run(
        Trainer(config, transport=PacedReplay(folder / "cassette.jsonl", delay)),
        find_database(config),
    )


def create_run(path: str) -> Run:
    """Return the run of a configuration file."""
    trainer = Trainer(path)
    return Run(trainer, find_database(trainer.config))


def find_database(config: TrainerConfig) -> Path:
    """Return the database of a run."""
    return (config.store or config.out_dir / "run.db").absolute()


def main() -> None:
    """Serve the runs that the command line names."""
    parser = argparse.ArgumentParser(description="Serve training runs to browsers on this machine.")
    parser.add_argument(
        "runs", nargs="*", metavar="NAME=CONFIG", help="a run; without any, the recorded demo"
    )
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument(
        "--delay", type=float, default=0.02, help="seconds between the pieces of a demo's draft"
    )
    arguments = parser.parse_args()
    named = (text.partition("=") for text in arguments.runs)
    runs = {name: create_run(path) for name, _, path in named} or {
        "demo": create_demo_run(arguments.delay)
    }
    uvicorn.run(
        create_application(runs), host="127.0.0.1", port=arguments.port, timeout_graceful_shutdown=1
    )


if __name__ == "__main__":
    main()
