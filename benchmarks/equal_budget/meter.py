"""An endpoint between the methods and the models: it counts calls and tokens, and ends a cell that spent its budget.

All methods ask the same two models through it. It sets temperature, seed and the largest number of reply tokens of
each role, so that no method can differ in them. A rollout is a conversation with the target: a call that has an earlier
reply of the target in its messages goes on with one. What starts within the budget is completed; every later call gets
the status 402. The optimizer answers a cell one call at a time, so no cell exceeds its budget by more than one call.
Replies are stored by their request: an equal call is computed once and counted each time.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

import httpx
from pydantic import BaseModel, ConfigDict

SPENT = 402
TRIES = 60
WAIT = 5.0
"""Seconds between two tries if the model's server does not answer."""

Grading = Callable[[str, Sequence[str]], dict[str, Any]]
"""Grades the answers of a conversation about the item of an id, or returns the next ``message`` to the target."""


class Frozen(BaseModel):
    """A value."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ServerSettings(Frozen):
    """A server of a model, and how many requests it gets at a time."""

    base_url: str
    at_once: int = 1


class ModelSettings(Frozen):
    """A model behind OpenAI-compatible servers, and what each call to it may ask for."""

    model: str
    servers: tuple[ServerSettings, ...]
    temperature: float
    max_tokens: int


class BudgetLimits(Frozen):
    """The most that a method may spend in one cell: rollouts, and tokens of the optimizer both ways."""

    rollouts: int
    optimizer_tokens: int


class RoleSpend(Frozen):
    """What a role has cost; ``seconds`` are those of the model, also for stored replies.

    ``rollouts`` are the calls of the target that begin a conversation.
    """

    calls: int = 0
    rollouts: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    refused: int = 0
    seconds: float = 0.0

    @property
    def tokens(self) -> int:
        """All tokens, both ways."""
        return self.prompt_tokens + self.completion_tokens


class ReplyStore:
    """Replies of models by their request, in a file of one JSON object for each line."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._replies: dict[str, dict[str, Any]] = {}
        self._running: dict[str, threading.Lock] = {}
        if path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                stored = json.loads(line)
                self._replies[stored["key"]] = stored

    def get(self, key: str) -> dict[str, Any] | None:
        """Return the stored reply, if there is one."""
        return self._replies.get(key)

    def lock(self, key: str) -> threading.Lock:
        """Return the lock of a key, so that equal requests run once."""
        with self._lock:
            return self._running.setdefault(key, threading.Lock())

    def put(self, key: str, reply: dict[str, Any], seconds: float) -> None:
        """Store a reply and the seconds that it took."""
        stored = {"key": key, "reply": reply, "seconds": round(seconds, 3)}
        with self._lock:
            self._replies[key] = stored
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(stored) + "\n")


class Servers:
    """Sends requests to the servers of each model that are free."""

    def __init__(self, models: Mapping[str, ModelSettings]) -> None:
        self._client = httpx.Client(timeout=1800, limits=httpx.Limits(max_connections=None))
        self._free: dict[str, queue.Queue[str]] = {}
        for role, model in models.items():
            self._free[role] = queue.Queue()
            for number in range(max(server.at_once for server in model.servers)):
                for server in model.servers:
                    if number < server.at_once:
                        self._free[role].put(server.base_url)

    def send(self, role: str, body: dict[str, Any]) -> tuple[int, dict[str, Any], float]:
        """Send a request; return status, payload and seconds."""
        url = self._free[role].get()
        start = time.monotonic()
        try:
            status, payload = self._post(f"{url}/chat/completions", body)
        finally:
            self._free[role].put(url)
        return status, payload, time.monotonic() - start

    def _post(self, url: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        for attempt in range(TRIES):
            try:
                response = self._client.post(url, json=body)
                return response.status_code, response.json()
            except (httpx.TransportError, ValueError) as error:
                if attempt == TRIES - 1:
                    return 502, _error(f"no answer of {url}: {error}", "unreachable")
                time.sleep(WAIT)
        raise AssertionError


class Meter:
    """Counts and limits the calls of one cell.

    Args:
        models: The model of each role, ``target`` and ``optimizer``.
        limits: The budget of the cell.
        replies: Stored replies, shared by all cells.
        servers: The servers of the models, shared by all cells.
        seed: Seed of the cell; calls of the optimizer without a seed get one made from it and their number.
    """

    def __init__(
        self,
        models: Mapping[str, ModelSettings],
        limits: BudgetLimits,
        replies: ReplyStore,
        servers: Servers,
        seed: int,
    ) -> None:
        self._models = models
        self.limits = limits
        self._replies = replies
        self._servers = servers
        self.seed = seed
        self._lock = threading.Lock()
        self._turns = {
            role: threading.Lock() if role == "optimizer" else contextlib.nullcontext()
            for role in models
        }
        self.spend = {role: RoleSpend() for role in models}

    def ask(self, role: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Answer a request of a method: an HTTP status and a payload."""
        with self._turns[role]:
            return self._ask(role, body)

    def _ask(self, role: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        is_start = role == "target" and all(
            turn["role"] != "assistant" for turn in body["messages"]
        )
        with self._lock:
            if (is_start or role == "optimizer") and self.is_spent(role):
                return SPENT, _error("the budget of this cell is spent", "budget_spent")
            number = self.spend[role].calls
            self._add(role, calls=1, rollouts=int(is_start))
        status, payload, seconds = self.complete(role, body, number)
        usage = payload.get("usage") or {}
        with self._lock:
            if status == 200:
                self._add(
                    role,
                    prompt_tokens=usage["prompt_tokens"],
                    completion_tokens=usage["completion_tokens"],
                    seconds=seconds,
                )
            else:
                self._add(role, calls=-1, rollouts=-int(is_start), refused=1)
        return status, payload

    def complete(
        self, role: str, body: dict[str, Any], number: int = 0
    ) -> tuple[int, dict[str, Any], float]:
        """Return status, payload and seconds of a call without counting it."""
        model = self._models[role]
        asked = int(body.get("max_tokens") or body.get("max_completion_tokens") or model.max_tokens)
        sent = {
            "model": model.model,
            "messages": body["messages"],
            "temperature": model.temperature,
            "max_tokens": min(asked, model.max_tokens),
            "seed": 0 if model.temperature == 0 else body.get("seed", self.seed * 1000 + number),
        }
        if body.get("response_format"):
            sent["response_format"] = body["response_format"]
        if body.get("stop"):
            sent["stop"] = body["stop"]
        key = hashlib.sha256(json.dumps(sent, sort_keys=True).encode()).hexdigest()
        with self._replies.lock(key):
            if stored := self._replies.get(key):
                return 200, stored["reply"], stored["seconds"]
            status, payload, seconds = self._servers.send(role, sent)
            if status == 200:
                names = ("id", "object", "created", "model", "choices", "usage")
                payload = {name: payload[name] for name in names}
                self._replies.put(key, payload, seconds)
            return status, payload, seconds

    def is_spent(self, role: str) -> bool:
        """Whether a new call of a role is refused."""
        if self.spend["target"].rollouts >= self.limits.rollouts:
            return True
        return role == "optimizer" and self.spend[role].tokens >= self.limits.optimizer_tokens

    def _add(self, role: str, **amounts: float) -> None:
        old = self.spend[role]
        self.spend[role] = old.model_copy(
            update={name: getattr(old, name) + amount for name, amount in amounts.items()}
        )


def _error(message: str, code: str) -> dict[str, Any]:
    return {
        "error": {"message": message, "type": "invalid_request_error", "param": None, "code": code}
    }


class MeterServer:
    """Serves a meter and a grader on this machine while it is open.

    Routes: ``POST /target/v1/chat/completions``, the same for ``optimizer``,.
    """

    def __init__(self, meter: Meter, grade: Grading) -> None:
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _build_handler(meter, grade))
        self._server.daemon_threads = True

    @property
    def url(self) -> str:
        """The root of all routes."""
        return f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def _build_handler(meter: Meter, grade: Grading) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class names it so
            """No log."""

        def do_POST(self) -> None:
            """Answer one request."""
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)))
            role, _, rest = self.path.strip("/").partition("/")
            if role == "grade":
                status, payload = 200, grade(body["id"], body["answers"])
            elif role == "spent":
                status, payload = 200, {"spent": meter.is_spent("optimizer")}
            elif role in meter.spend and rest == "v1/chat/completions" and not body.get("stream"):
                status, payload = meter.ask(role, body)
            else:
                status, payload = (
                    404,
                    _error(f"no route {self.path}, or a stream was asked for", "no_route"),
                )
            data = json.dumps(payload).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            with contextlib.suppress(
                BrokenPipeError, ConnectionResetError
            ):  # the method did not wait
                self.wfile.write(data)

    return Handler
