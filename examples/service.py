"""A service that trains: a page starts a run, shows it while it goes on, and cancels it by leaving.

    python examples/service.py                        # the recorded demo, at http://127.0.0.1:8000
    python examples/service.py support=support.yaml   # configurations of your own, each under a name

docs/service.md tells how cancelling and reconnecting work.
"""

from __future__ import annotations

import argparse
import json
import logging
import secrets
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
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from reflact import ReflactError, Trainer, TrainerConfig
from reflact.concurrency import Stream
from reflact.config.loading import load_config
from reflact.events import Event
from reflact.llm.cassettes import ReplayTransport, read_cassette
from reflact.prompts import find_data_folder
from reflact.store.runs import open_store

PAGE = Path(__file__).with_name("service.html")
HOSTS = ["127.0.0.1", "localhost"]
POLICY = (
    "default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; img-src data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'"
)
BEAT_SECONDS = 15.0
"""How often a comment goes out, so that proxies see life and a client that has gone is noticed."""

PATIENCE_SECONDS = 60.0
"""How long a run waits for a client that takes nothing; then the client counts as gone."""


# --------------------------------------------------------------------------------------------- runs


class Start:
    """One start of a run, with everyone who watches it."""

    def __init__(self, stream: Stream[Event]) -> None:
        self.stream = stream
        self.viewers = 0
        self.over = anyio.Event()
        self.failure: str | None = None
        self._scope = anyio.CancelScope()

    async def go(self) -> None:
        """Run to the end, or until it is ended; what viewers see, they see through views of the stream."""
        try:
            with self._scope:
                async with self.stream as happenings:
                    async for _ in happenings:
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
    """A configured run: it goes on for as long as somebody watches it, and can be started again.

    Args:
        trainer: Starts it.
        log: The database that keeps it.
    """

    def __init__(self, trainer: Trainer, log: Path) -> None:
        self._trainer = trainer
        self._log = log
        self._turn = anyio.Lock()
        self._start: Start | None = None

    @asynccontextmanager
    async def watched(self, tasks: TaskGroup) -> AsyncIterator[Start]:
        """Join the start under way, or begin one in ``tasks``; whoever leaves last ends it."""
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

    async def told(self) -> tuple[Event, ...]:
        """Return the durable events of all starts so far, in order."""
        if not self._log.exists():
            return ()
        async with open_store(self._log) as store:
            return await store.events(self._trainer.run_id)


# --------------------------------------------------------------------------- server-sent events


class EventStream(Response):
    """The events of a run as server-sent events, for as long as the client stays.

    Args:
        run: The run.
        tasks: Where the run goes on, beyond this request.
        after: The id of the last durable event that the client has; the stored ones after it come first.
        latest: Whether a slow client is spared live events that a newer one has made old.
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
            connection.start_soon(client.leaves, receive)
            connection.start_soon(client.beat)
            async with self._run.watched(self._tasks) as start:
                await self._tell(client, start)
            connection.cancel_scope.cancel()
        if not client.gone:
            await send({"type": "http.response.body", "body": b""})

    async def _tell(self, client: Client, start: Start) -> None:
        # The view comes first: what is stored while the log is read is then in one of the two, or in both.
        async with start.stream.subscribe(latest_only=self._latest) as view:
            try:
                told = await self._run.told()
            except ReflactError as error:
                await client.say(framed("failed", json.dumps(str(error))))
                return
            ids = [event.id for event in told]
            missed = ids.index(self._after) + 1 if self._after in ids else 0
            for event in told[missed:]:
                await client.tell(event)
            known = set(ids)
            async for event in view:
                if not (event.durable and event.id in known):
                    await client.tell(event)
        await start.over.wait()
        if start.failure is not None:
            await client.say(framed("failed", json.dumps(start.failure)))


class Client:
    """The way to a client; ``connection`` is cancelled when it has gone."""

    def __init__(self, send: Send, connection: anyio.CancelScope) -> None:
        self._send = send
        self._connection = connection
        self.gone = False

    async def tell(self, event: Event) -> None:
        """Send an event; a durable one with its id, which the client names when it comes back."""
        text = event.model_dump_json(ensure_ascii=True)
        await self.say(framed(event.kind, text, event.id if event.durable else None))

    async def say(self, text: str) -> None:
        """Send text. Waits while the client is slow, and the run with it, but not for ever."""
        with anyio.move_on_after(PATIENCE_SECONDS) as patience:
            await self._send({"type": "http.response.body", "body": text.encode(), "more_body": True})
        if patience.cancelled_caught:
            self._leave()

    async def beat(self) -> None:
        """Send comments, which clients ignore."""
        while True:
            await self.say(": the run goes on\n\n")
            await anyio.sleep(BEAT_SECONDS)

    async def leaves(self, receive: Receive) -> None:
        """Wait until the client closes the connection."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self._leave()

    def _leave(self) -> None:
        self.gone = True
        self._connection.cancel()


def framed(kind: str, data: str, event_id: str | None = None) -> str:
    """Return one server-sent event; ``data`` is JSON, which has no line breaks."""
    head = "" if event_id is None else f"id: {event_id}\n"
    return f"{head}event: {kind}\ndata: {data}\n\n"


# ------------------------------------------------------------------------------------------ the service


class Service:
    """Answers requests: the page, the names of the runs, and their events."""

    _tasks: TaskGroup

    def __init__(self, runs: Mapping[str, Run]) -> None:
        self._runs = runs

    @asynccontextmanager
    async def open(self, _: Starlette) -> AsyncIterator[None]:
        """Hold the runs under way; at the end of the service they are cancelled."""
        async with anyio.create_task_group() as self._tasks:
            yield
            self._tasks.cancel_scope.cancel()

    async def page(self, _: Request) -> Response:
        """Return the page; nothing in it runs, loads or connects but what it brings itself."""
        nonce = secrets.token_urlsafe(16)
        text = PAGE.read_text(encoding="utf-8").replace("{nonce}", nonce)
        policy = POLICY.replace("{nonce}", nonce)
        return HTMLResponse(text, headers={"content-security-policy": policy, "cache-control": "no-store"})

    async def names(self, _: Request) -> Response:
        """Return the names of the configured runs."""
        return JSONResponse(list(self._runs))

    async def events(self, request: Request) -> Response:
        """Return the events of a run, which starts where it is not under way."""
        if request.headers.get("sec-fetch-site", "none") not in {"same-origin", "none"}:
            raise HTTPException(403, "pages of other sites cannot start runs")
        run = self._runs.get(request.path_params["name"])
        if run is None:
            raise HTTPException(404, "there is no run of this name")
        latest = request.query_params.get("view") == "latest"
        return EventStream(run, self._tasks, after=request.headers.get("last-event-id"), latest=latest)


def application(runs: Mapping[str, Run]) -> Starlette:
    """Return the service of some runs, by name."""
    service = Service(runs)
    routes = [
        Route("/", service.page),
        Route("/runs", service.names),
        Route("/runs/{name}/events", service.events),
    ]
    hosts = Middleware(TrustedHostMiddleware, allowed_hosts=HOSTS)
    return Starlette(routes=routes, middleware=[hosts], lifespan=service.open)


# ------------------------------------------------------------------------------------------- the demo


class Paced(httpx.AsyncBaseTransport):
    """Answers from a recording as a provider would: where drafts are asked for, piece by piece."""

    def __init__(self, cassette: Path, delay: float) -> None:
        self._recorded = ReplayTransport(cassette, read_cassette(cassette))
        self._delay = delay

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Return the recorded answer."""
        answer = await self._recorded.handle_async_request(request)
        whole = json.loads(await answer.aread())
        if not json.loads(request.content).get("stream"):
            return answer
        return httpx.Response(200, headers={"content-type": "text/event-stream"}, content=self._pieces(whole))

    async def _pieces(self, whole: Any) -> AsyncIterator[bytes]:
        (choice,) = whole["choices"]
        text, end = choice["message"]["content"], choice["finish_reason"]
        said = [({"content": text[at : at + 8]}, None) for at in range(0, len(text), 8)]
        for delta, reason in (*said, ({}, end)):
            part = {"index": 0, "delta": delta, "finish_reason": reason}
            yield _sent({**whole, "object": "chat.completion.chunk", "choices": [part], "usage": None})
            await anyio.sleep(self._delay)
        yield _sent({**whole, "object": "chat.completion.chunk", "choices": []})
        yield b"data: [DONE]\n\n"


def _sent(chunk: Any) -> bytes:
    return f"data: {json.dumps(chunk)}\n\n".encode()


def demo(delay: float) -> Run:
    """Return the recorded demo, which needs no key and no network."""
    folder = find_data_folder("demo")
    config = load_config(folder / "demo.yaml", overrides=["replay.cassette=null"])
    return Run(Trainer(config, transport=Paced(folder / "cassette.jsonl", delay)), database(config))


def configured(path: str) -> Run:
    """Return the run of a configuration file."""
    config = load_config(path)
    return Run(Trainer(config), database(config))


def database(config: TrainerConfig) -> Path:
    """Return where a run is kept."""
    return config.store or config.out_dir / "run.db"


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
    given = parser.parse_args()
    named = (text.partition("=") for text in given.runs)
    runs = {name: configured(path) for name, _, path in named} or {"demo": demo(given.delay)}
    uvicorn.run(application(runs), host="127.0.0.1", port=given.port, timeout_graceful_shutdown=1)


if __name__ == "__main__":
    main()
