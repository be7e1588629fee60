"""Serves the pages of runs while they go on: a list of runs, the page of each, and the comparison of two.

It only reads: it opens each store read-only for one look, and looks again when the store's files change.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import anyio
import htpy as h
import uvicorn
from anyio import to_thread
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import HTTPConnection, Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from reflact.errors import ReflactError, StoreError, UsageError
from reflact.records import IntervalEstimate
from reflact.reporting.html.page import (
    LiveBar,
    MarkStyle,
    PageSection,
    TextLimit,
    break_key,
    build_column_table,
    build_document,
    build_figure,
    build_table,
    draw_estimates,
)
from reflact.reporting.html.run import estimate_score, read_report, render_run_page
from reflact.reporting.html.run_details import build_diff
from reflact.reporting.lines import escape_line, format_score, name_count, shorten_middle
from reflact.reporting.tables import (
    describe_prompts,
    list_comparison_columns,
    list_gain_lines,
    list_run_columns,
    list_setting_rows,
    shorten_path,
)
from reflact.reporting.verdict import format_usd
from reflact.training.history import (
    ComparedRun,
    RunComparison,
    RunListing,
    compare_runs,
    list_databases,
    list_runs,
)

LOCAL_HOSTS = ("127.0.0.1", "localhost", "[::1]")
LOCAL_ADDRESSES = {"127.0.0.1", "localhost", "::1"}
COOKIE = "reflact-token"
POLL_SECONDS, BEAT_SECONDS = 0.5, 15.0
HEADERS = {
    "content-security-policy": "frame-ancestors 'none'",
    "cache-control": "no-store",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
"""The rest of the policy is written in each page, with the hashes of its style and scripts."""

MAX_RUNS, TEXT_BYTES, MAX_LABEL_CHARS = 1_000, 500_000, 15


class ServedRun(NamedTuple):
    """A run of the list, with its database and the key of its address."""

    key: str
    database: Path
    listing: RunListing


class RunPages:
    """Answers requests for the pages of the runs in a folder, or of one database.

    Args:
        root: A run's folder, a folder above several, or a database.
        is_closing: Tells streams of events that the server ends.
    """

    def __init__(self, root: Path, *, is_closing: Callable[[], bool] = lambda: False) -> None:
        self._root = root
        self._is_closing = is_closing

    async def index(self, _: Request) -> Response:
        """Return the list of runs, with a form that compares two."""
        runs, errors = await self._list_runs()
        return HTMLResponse(render_index(self._root, runs, errors))

    async def run(self, request: Request) -> Response:
        """Return the page of a run."""
        run = await self._find(request.path_params["key"])
        report = await read_report(run.database, run.listing.run_id)
        bar = LiveBar(f"/runs/{run.key}/events", _compute_version([run]), describe_progress(run.listing))
        return HTMLResponse(await to_thread.run_sync(partial(render_run_page, report, live=bar)))

    async def compare(self, request: Request) -> Response:
        """Return the comparison of the runs that the query names, with the oldest of them."""
        chosen = [await self._find(key) for key in request.query_params.getlist("run")]
        chosen.sort(key=lambda run: run.listing.created)
        if len(chosen) < 2:
            raise HTTPException(400, "choose at least two runs")
        comparison = await compare_runs(
            [run.database for run in chosen], run_ids=[run.listing.run_id for run in chosen]
        )
        return HTMLResponse(render_comparison(comparison, [self._name(run) for run in chosen]))

    async def events(self, request: Request) -> Response:
        """Return a stream that tells when a run, or any of the list, has something new."""
        key = request.path_params.get("key")
        if key is not None:
            await self._find(key)
        return StreamingResponse(self._follow(key), media_type="text/event-stream")

    async def _follow(self, key: str | None) -> AsyncIterator[str]:
        seen: object = None
        quiet = 0.0
        while not self._is_closing():
            files = await to_thread.run_sync(self._stat_files)
            if files != seen:
                seen, quiet = files, 0.0
                runs, _ = await self._list_runs()
                shown = [run for run in runs if key in {None, run.key}]
                text = describe_progress(shown[0].listing) if key and shown else _describe_list(runs)
                progress = {"text": text, "version": _compute_version(shown)}
                yield f"event: progress\ndata: {json.dumps(progress)}\n\n"
            elif quiet >= BEAT_SECONDS:
                quiet = 0.0
                yield ": no news\n\n"
            await anyio.sleep(POLL_SECONDS)
            quiet += POLL_SECONDS

    def _list_databases(self) -> tuple[Path, ...]:
        return (self._root,) if self._root.is_file() else list_databases(self._root)

    def _stat_files(self) -> list[tuple[str, int, int]]:
        """Return what changes when a process commits."""
        found = []
        for database in self._list_databases():
            for path in (database, database.with_name(f"{database.name}-wal")):
                if path.exists():
                    state = path.stat()
                    found.append((str(path), state.st_size, state.st_mtime_ns))
        return found

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

    def _name(self, run: ServedRun) -> str:
        return f"{shorten_path(run.listing.folder, self._root)} ({run.listing.run_id})"


def _compute_version(runs: Sequence[ServedRun]) -> str:
    """Return a text that changes when a page of these runs has something new to show."""
    states = [[run.key, run.listing.status, run.listing.steps, run.listing.measured] for run in runs]
    scores = [[run.listing.val, run.listing.test, run.listing.baseline] for run in runs]
    return hashlib.sha256(json.dumps([states, scores]).encode()).hexdigest()[:16]


def describe_progress(listing: RunListing) -> str:
    """Return the state of a run in a sentence."""
    state = listing.status or "not ended"
    price = "" if listing.usd is None else f", {format_usd(listing.usd)}"
    best = "" if listing.val is None else f"; best validation score {format_score(listing.val)}"
    counts = f"{name_count(listing.steps, 'step')}, {name_count(listing.calls, 'call')}"
    return f"{state.capitalize()}: {counts}{price}{best}."


def _describe_list(runs: Sequence[ServedRun]) -> str:
    open_runs = sum(run.listing.status in {None, "running"} for run in runs)
    order = "; the newest first" if len(runs) > 1 else ""
    return f"{name_count(len(runs), 'run')}{f', {open_runs:,} not ended' if open_runs else ''}{order}."


def render_index(root: Path, runs: Sequence[ServedRun], errors: Sequence[str]) -> str:
    """Return the list of runs as an HTML document."""
    limit = TextLimit(TEXT_BYTES)
    shown = runs[:MAX_RUNS]
    columns: dict[str, Sequence[h.Node]] = {**list_run_columns([run.listing for run in shown], root)}
    columns["folder"] = [
        [
            h.input(
                type="checkbox", name="run", value=run.key, aria_label=f"Compare run {run.listing.run_id}"
            ),
            h.a(href=f"/runs/{run.key}")[limit.fit(shorten_path(run.listing.folder, root), 200)],
            h.small[escape_line(run.listing.run_id)],
        ]
        for run in shown
    ]
    columns["val"], columns["test"] = zip(*map(_list_scores, shown), strict=True) if shown else ((), ())
    del columns["run"], columns["baseline"]
    left_out = len(runs) - len(shown)
    content: tuple[h.Node, ...] = (
        not runs and h.p["There is no run yet. The page shows the first one when it has begun."],
        bool(runs)
        and h.form(".choose", action="/compare", method="get")[
            build_column_table("Runs, the newest first", columns, prose=("status",)),
            left_out > 0 and h.p(".note")[f"{left_out:,} older runs are left out."],
            len(runs) > 1 and h.button(type="submit")["Compare the chosen runs"],
        ],
        [h.p(".note")[f"A database cannot be read: {limit.fit(error, 500)}"] for error in errors[:20]],
    )
    bar = LiveBar("/events", _compute_version(runs), _describe_list(runs), is_list=True)
    return build_document("Runs", h.h1(".title")["Runs"], [PageSection("runs", "", content)], live=bar)


def _list_scores(run: ServedRun) -> tuple[str, str]:
    """Return a run's scores on validation and test; that of the initial skill stands before one of them."""
    listing = run.listing
    before = "" if listing.baseline is None else f"{format_score(listing.baseline)} → "
    val, test = format_score(listing.val), format_score(listing.test)
    if listing.test is not None:
        return val, f"{before}{test}"
    return (f"{before}{val}" if listing.val is not None else val), test


def render_comparison(comparison: RunComparison, names: Sequence[str]) -> str:
    """Return a comparison of runs, by the names to show, as an HTML document."""
    limit = TextLimit(TEXT_BYTES)
    shown = [limit.fit(name, 200) for name in names]
    named = tuple(
        run.model_copy(update={"name": name}) for run, name in zip(comparison.runs, shown, strict=True)
    )
    by_name = {run.name: name for run, name in zip(comparison.runs, shown, strict=True)}
    gains = tuple(
        gain.model_copy(update={"name": by_name.get(gain.name, gain.name)}) for gain in comparison.gains
    )
    renamed = comparison.model_copy(update={"runs": named, "gains": gains})
    lines = tuple(list_gain_lines(renamed))
    settings: list[list[h.Node]] = [
        [
            break_key(limit.fit(key, 200)),
            *(break_key(limit.fit(value, 300)) for value in values),
        ]
        for key, values in list_setting_rows(comparison)
    ]
    diffs: list[h.Node] = [
        [h.h3[f"From {shown[0]} to {name}"], build_diff(diff) if diff else h.p["The best skills are equal."]]
        for name, diff in zip(shown[1:], comparison.diffs, strict=True)
    ]
    settings_table = build_table(
        "Settings that differ", ("setting", *shown), settings, prose=set(range(1, len(shown) + 1))
    )
    prompts = describe_prompts(comparison)
    nothing = h.p["No setting differs."] if prompts is None else None
    return build_document(
        "Comparison of runs",
        [h.p(".live")[h.a(href="/")["All runs"]], h.h1(".title")["Comparison of runs"]],
        (
            PageSection(
                "results",
                "Results",
                (
                    build_column_table(
                        "The best skills", list_comparison_columns(renamed), prose=("status",)
                    ),
                    _draw_scores(comparison.runs, shown),
                    h.ul[(h.li[line] for line in lines)],
                ),
            ),
            PageSection(
                "settings",
                "Settings",
                (settings_table if settings else nothing, None if prompts is None else h.p[prompts]),
            ),
            PageSection("skills", "Best skills", tuple(diffs)),
        ),
    )


def _draw_scores(runs: Sequence[ComparedRun], names: Sequence[str]) -> h.Node:
    charts = []
    for title, scores in (
        ("Test score", [r.test for r in runs]),
        ("Validation score", [r.val for r in runs]),
    ):
        marks: list[tuple[str, MarkStyle, IntervalEstimate]] = [
            (shorten_middle(name.rpartition(" (")[0], MAX_LABEL_CHARS), "after", estimate)
            for name, score in zip(names, scores, strict=True)
            if score is not None and (estimate := estimate_score(score)) is not None
        ]
        if marks:
            charts.append(draw_estimates(f"compared-{title[:3].lower()}", title, marks))
    return build_figure("Mean scores of the best skills, with 95% intervals.", *charts) if charts else None


# ------------------------------------------------------------------------------------------- the server


class TokenMiddleware:
    """Lets nobody in without the token: in the address once, later in a cookie."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._token = token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it."""
        request = HTTPConnection(scope)  # a handshake of a WebSocket is refused like any request
        answer: ASGIApp = PlainTextResponse("open the address that reflact serve printed", 401)
        named = request.query_params.get("token")
        if named is not None and secrets.compare_digest(named.encode(), self._token):
            answer = RedirectResponse("/", status_code=303)
            answer.set_cookie(COOKIE, named, httponly=True, samesite="strict")
        elif secrets.compare_digest(request.cookies.get(COOKIE, "").encode(), self._token):
            answer = self._app
        await answer(scope, receive, send)


class HeaderMiddleware:
    """Adds the headers of every response."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        await self._app(scope, receive, send_with_headers)


async def _show_error(_: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 409
    detail = error.detail if isinstance(error, HTTPException) else str(error)
    return PlainTextResponse(escape_line(detail), status)


def create_run_pages(
    root: Path | str, *, token: str | None = None, is_closing: Callable[[], bool] = lambda: False
) -> Starlette:
    """Return an ASGI application with the pages of the runs in a folder, or of a database.

    Args:
        root: A run's folder, a folder above several, or a database.
        token: If given, requests need it. Otherwise, only requests to names of this machine are answered.
        is_closing: Tells streams of events that the server ends.
    """
    pages = RunPages(Path(root), is_closing=is_closing)
    routes = [
        Route("/", pages.index),
        Route("/events", pages.events),
        Route("/compare", pages.compare),
        Route("/runs/{key}", pages.run),
        Route("/runs/{key}/events", pages.events),
    ]
    guard = (
        Middleware(TrustedHostMiddleware, allowed_hosts=LOCAL_HOSTS, www_redirect=False)
        if token is None
        else Middleware(TokenMiddleware, token=token)
    )
    handlers = {HTTPException: _show_error, ReflactError: _show_error}
    return Starlette(
        routes=routes, middleware=[Middleware(HeaderMiddleware), guard], exception_handlers=handlers
    )


def serve_runs(
    root: Path, *, host: str, port: int, token: str | None, on_start: Callable[[str], None]
) -> None:
    """Serve the pages of runs until Ctrl-C or SIGTERM.

    Args:
        root: A run's folder, a folder above several, or a database.
        host: The address to listen at. Another one than this machine's own needs a token.
        port: The port; 0 chooses a free one.
        token: What requests must know; None: one is made if the address needs it.
        on_start: Gets the address of the list of runs.

    Raises:
        UsageError: There is no such folder, or the address is in use.
    """
    if not root.exists():
        raise UsageError(f"{root} does not exist; name the out_dir of a run, or a folder above several")
    if token is None and host not in LOCAL_ADDRESSES:
        token = secrets.token_urlsafe(24)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family)
    except OSError as error:
        raise UsageError(
            f"cannot listen at {host}, port {port}: {error.strerror}; choose another --port"
        ) from None
    with listener:
        application = create_run_pages(root, token=token, is_closing=lambda: server.should_exit)
        config = uvicorn.Config(
            application, log_level="error", lifespan="off", timeout_graceful_shutdown=3, server_header=False
        )
        server = uvicorn.Server(config)
        shown = f"[{host}]" if ":" in host else host
        secret = "" if token is None else f"?token={token}"
        on_start(f"http://{shown}:{listener.getsockname()[1]}/{secret}")
        server.run(sockets=[listener])
