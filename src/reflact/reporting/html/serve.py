"""Serves the pages of runs while they go on: a list of runs, and the page of each.

It only reads: it opens each store read-only for one look, and looks again when the store's files
change.
"""

from __future__ import annotations

import glob
import hashlib
import json
import socket
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import anyio
import uvicorn
from anyio import to_thread
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from reflact.errors import ReflactError, StoreError, UsageError
from reflact.reporting import facts
from reflact.reporting.history import list_databases, list_runs, open_run
from reflact.reporting.html.page import LiveBar
from reflact.reporting.html.run import read_report, render_run_page
from reflact.reporting.html.runs import ServedRun, describe_runs, render_index
from reflact.reporting.progress import RunProgress, list_draft_parts, read_live_events
from reflact.text import escape_controls, escape_line, shorten, suggest_path
from reflact.training.items import read_config

ADDRESS = "127.0.0.1"

# Names of this machine. Another name in a request may be one that a foreign page has pointed here.
LOCAL_HOSTS = (ADDRESS, "localhost")

# The rest of the policy is written in each page, with the hashes of its style and scripts.
HEADERS = {
    "content-security-policy": "frame-ancestors 'none'",
    "cache-control": "no-store",
    "cross-origin-resource-policy": "same-origin",
    "x-content-type-options": "nosniff",
}

POLL_SECONDS = 0.5
BEAT_SECONDS = 15.0
N_ANSWERS = 3
ANSWER_CHARS = 300
DRAFT_CHARS = 1_500


class RunPages:
    """Answers requests for the pages of the runs in a folder, or of one database."""

    def __init__(self, root: Path, *, is_closing: Callable[[], bool] = lambda: False) -> None:
        self._root = root
        self._is_closing = is_closing

    async def index(self, _: Request) -> Response:
        """Return the list of runs."""
        runs, errors = await self._list_runs()
        document = render_index(self._root, runs, errors, version=_compute_version(runs))
        return HTMLResponse(document, headers=HEADERS)

    async def run(self, request: Request) -> Response:
        """Return the page of a run."""
        run = await self._find(request.path_params["key"])
        report = await read_report(run.database, run.listing.run_id)
        state = facts.describe_listing(run.listing)
        rows = await _list_live_rows(run)
        bar = LiveBar(f"/runs/{run.key}/events", _compute_version([run]), state, rows=rows)
        document = await to_thread.run_sync(partial(render_run_page, report, live=bar))
        return HTMLResponse(document, headers=HEADERS)

    async def events(self, request: Request) -> Response:
        """Return a stream that tells when a run, or any of the list, has something new."""
        key = request.path_params.get("key")
        if key is not None:
            await self._find(key)
        return StreamingResponse(self._follow(key), media_type="text/event-stream", headers=HEADERS)

    async def _follow(self, key: str | None) -> AsyncIterator[str]:
        seen: object = None
        quiet = 0.0
        while not self._is_closing():
            files = await to_thread.run_sync(self._stat_files)
            if files != seen:
                seen = files
                quiet = 0.0
                runs, _ = await self._list_runs()
                shown = [run for run in runs if key in {None, run.key}]
                text = describe_runs(runs)
                rows: list[tuple[str, str]] = []
                if key and shown:
                    text = facts.describe_listing(shown[0].listing)
                    rows = await _list_live_rows(shown[0])
                progress = {"text": text, "rows": rows, "version": _compute_version(shown)}
                yield f"event: progress\ndata: {json.dumps(progress)}\n\n"
            elif quiet >= BEAT_SECONDS:
                quiet = 0.0
                yield ": no news\n\n"
            await anyio.sleep(POLL_SECONDS)
            quiet += POLL_SECONDS

    def _list_databases(self) -> tuple[Path, ...]:
        return (self._root,) if self._root.is_file() else list_databases(self._root)

    def _stat_files(self) -> list[tuple[str, int, int]]:
        """Return what changes when a process commits, or tells how far a run is."""
        files = []
        for database in self._list_databases():
            live = database.parent.glob(f"{glob.escape(database.name)}-*.live")
            for path in (database, database.with_name(f"{database.name}-wal"), *live):
                with suppress(OSError):
                    state = path.stat()
                    files.append((str(path), state.st_size, state.st_mtime_ns))
        return files

    async def _list_runs(self) -> tuple[list[ServedRun], list[str]]:
        """Return the runs, the newest first, and the errors of databases that cannot be read."""
        runs: list[ServedRun] = []
        errors = []
        for database in await to_thread.run_sync(self._list_databases):
            try:
                listings = await list_runs(database)
            except StoreError as error:
                errors.append(str(error))
                continue
            digest = hashlib.sha256(str(database.resolve()).encode()).hexdigest()[:10]
            runs += [ServedRun(f"{digest}-{each.run_id}", database, each) for each in listings]
        return sorted(runs, key=lambda run: run.listing.created, reverse=True), errors

    async def _find(self, key: str) -> ServedRun:
        runs, _ = await self._list_runs()
        for run in runs:
            if run.key == key:
                return run
        raise HTTPException(404, "there is no run at this address")


async def _list_live_rows(run: ServedRun) -> list[tuple[str, str]]:
    """Return how far a run under way is, as a terminal shows it, with its latest answers."""
    if run.listing.status != "running":
        return []
    async with open_run(run.database, run.listing.run_id) as (store, row):
        durable = await store.events(row.run_id)
        is_alone = len(await store.runs()) == 1
        # Rollouts belong to no run, so those of a shared store may be of another one.
        answers = await store.latest_rollouts(N_ANSWERS) if is_alone else ()
    progress = RunProgress(epochs=read_config(row).train.planned_epochs)
    for event in (*durable, *read_live_events(run.database, row.run_id)):
        progress.update(event, event.at.timestamp())
    now = time.time()
    rows = [(each.label, escape_controls(each.text)) for each in progress.list_rows(now)]
    draft = "\n".join(list_draft_parts(progress.draft))[-DRAFT_CHARS:]
    if draft:
        rows.append(("", escape_controls(draft)))
    for rollout in answers:
        score = facts.describe_score(rollout.score)
        answer = shorten(" ".join(rollout.answer.split()), ANSWER_CHARS)
        rows.append(("answer", escape_controls(f"{rollout.item_id}: {answer} (score {score})")))
    return rows


def _compute_version(runs: Sequence[ServedRun]) -> str:
    """Return a text that changes when a page of these runs has something new to show."""
    states = [run.listing.model_dump_json(exclude={"usage"}) for run in runs]
    return hashlib.sha256(json.dumps(states).encode()).hexdigest()[:16]


# ------------------------------------------------------------------------------------- the server


async def _show_error(_: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 409
    detail = error.detail if isinstance(error, HTTPException) else str(error)
    return PlainTextResponse(escape_line(detail), status)


def create_run_pages(
    root: Path | str,
    *,
    hosts: Sequence[str] = LOCAL_HOSTS,
    is_closing: Callable[[], bool] = lambda: False,
) -> Starlette:
    """Return an ASGI application with the pages of the runs in a folder, or of a database.

    It asks nobody who they are. A service that others can reach must do so before it passes
    requests on.

    Args:
        root: A run's folder, a folder above several, or a database.
        hosts: The host names of requests that are answered.
        is_closing: Tells streams of events that the server ends.
    """
    pages = RunPages(Path(root), is_closing=is_closing)
    routes = [
        Route("/", pages.index),
        Route("/events", pages.events),
        Route("/runs/{key}", pages.run),
        Route("/runs/{key}/events", pages.events),
    ]
    guard = Middleware(TrustedHostMiddleware, allowed_hosts=hosts, www_redirect=False)
    handlers = {HTTPException: _show_error, ReflactError: _show_error}
    return Starlette(routes=routes, middleware=[guard], exception_handlers=handlers)


def serve_runs(root: Path, *, port: int, on_start: Callable[[str], None]) -> None:
    """Serve the pages of runs to this machine until Ctrl-C or SIGTERM; port 0 means a free one.

    ``on_start`` gets the address of the list of runs.

    Raises:
        UsageError: There is no such folder, or the port is in use.
    """
    if not root.exists():
        raise UsageError(
            f"{root} does not exist; name the out_dir of a run, or a folder above several"
            f"{suggest_path(root)}"
        )
    try:
        listener = socket.create_server((ADDRESS, port))
    except OSError as error:
        raise UsageError(
            f"cannot listen at port {port}: {error.strerror}; choose another --port"
        ) from None
    with listener:
        application = create_run_pages(root, is_closing=lambda: server.should_exit)
        config = uvicorn.Config(
            application,
            log_level="error",
            lifespan="off",
            timeout_graceful_shutdown=3,
            server_header=False,
        )
        server = uvicorn.Server(config)
        on_start(f"http://{ADDRESS}:{listener.getsockname()[1]}/")
        server.run(sockets=[listener])
