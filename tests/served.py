"""A small world of its own files, a server for it, and `reflact` in processes of their own."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from typer.testing import CliRunner, Result

import pure_server
from pure_world import settings, write_world
from reflact.cli.app import app

ITEMS = [{"id": f"q{i}", "input": f"What is {i} + {i}?", "reference": str(2 * i)} for i in range(10)]
CONFIG = """
out_dir: {folder}/run
data: {{path: items.jsonl, ratio: "4:3:3"}}
models:
  target: {{model: small, base_url: "{url}", api_key_env: null, max_retries: 0}}
"""

HANGS = 60.0
"""Longer than any of these processes may live, in seconds."""

# A job that a shell started in the background inherits ignored signals; a terminal's does not.
MAIN = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
if hasattr(signal, "SIGHUP"):
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
from reflact.cli import main
main()
"""


def configured(folder: Path, url: str = "http://127.0.0.1:9/v1") -> Path:
    """Write a small data file and a configuration for it, and return the latter's path."""
    lines = (json.dumps(item) for item in ITEMS)
    (folder / "items.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    path = folder / "run.yaml"
    path.write_text(CONFIG.format(folder=folder, url=url), encoding="utf-8")
    return path


def reflact(*arguments: object) -> Result:
    """Run a command in this process."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments], prog_name="reflact")


def reflact_process(*arguments: object, **options: Any) -> subprocess.Popen[str]:
    """Start a command in a process of its own, as a terminal does."""
    return subprocess.Popen(
        [sys.executable, "-c", MAIN, *(str(argument) for argument in arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


@contextmanager
def serving(answer: Callable[[BaseHTTPRequestHandler], None]) -> Iterator[str]:
    """An HTTP server for the length of the block; gives the root of its API."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            answer(self)

        def log_message(self, *_: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        def handle_error(self, *where: Any) -> None:
            if not isinstance(sys.exception(), ConnectionError):  # a client may hang up
                super().handle_error(*where)

    server = Server(("127.0.0.1", 0), Handler)
    noticed = 0.01  # seconds until a shutdown is noticed
    thread = threading.Thread(target=server.serve_forever, args=(noticed,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def asked_of(handler: BaseHTTPRequestHandler) -> dict[str, Any]:
    """Return the body of a request; ConnectionError where the client hung up before its end."""
    length = int(handler.headers["Content-Length"])
    text = handler.rfile.read(length)
    if len(text) < length:
        raise ConnectionError
    body: dict[str, Any] = json.loads(text)
    return body


def send(handler: BaseHTTPRequestHandler, body: object, status: int = 200, **headers: str) -> None:
    """Send an answer as JSON."""
    text = json.dumps(body).encode()
    handler.send_response(status)
    for name, value in {"Content-Type": "application/json", **headers}.items():
        handler.send_header(name, value)
    handler.send_header("Content-Length", str(len(text)))
    handler.end_headers()
    handler.wfile.write(text)


def assert_refused(result: Result, *words: str) -> None:
    """Check that a command ended with code 2 and one sentence that holds the words."""
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1, result.stderr
    for word in words:
        assert word in result.stderr
    assert "Traceback" not in result.output


def trained(folder: Path, url: str) -> Result:
    """Train against an address with three slots."""
    command = ["train", str(configured(folder, url)), "--set", "models.target.concurrency=3"]
    return CliRunner().invoke(app, command, env={"REFLACT_TEST_KEY": None}, prog_name="reflact")


def assert_one_message(result: Result, *words: str) -> None:
    """Check that a run failed with one message that holds the words; the exit code says if a call is booked."""
    is_booked = "interrupted call" in result.output
    assert result.exit_code == (1 if is_booked else 2), result.output
    assert result.stderr.startswith(("error: the run ended as failed: ", "error: the run ended as budget: "))
    assert result.stderr.count("\n") == 1, result.stderr
    assert "Traceback" not in result.output
    for word in words:
        assert word in result.stderr


def completion(content: str) -> dict[str, Any]:
    """Return a chat completion that says something."""
    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": content}}
    usage = {"prompt_tokens": 5, "completion_tokens": 1, "total_tokens": 6}
    kind = {"id": "x", "object": "chat.completion", "created": 1, "model": "small"}
    return {**kind, "choices": [choice], "usage": usage}


def say_four(handler: BaseHTTPRequestHandler) -> None:
    """Answer any chat request with the text 4, which is no valid typed reply."""
    asked_of(handler)
    send(handler, completion("4"))


def say_four_and_append(handler: BaseHTTPRequestHandler) -> None:
    """Answer a typed request by the least value of its schema, and any other chat request with the text 4."""
    body = asked_of(handler)
    schema = body.get("response_format", {}).get("json_schema", {}).get("schema")
    send(handler, completion("4" if schema is None else json.dumps(fill(schema, schema.get("$defs", {})))))


def fill(schema: dict[str, Any], definitions: dict[str, Any]) -> Any:
    """Return a small value of a JSON schema."""
    if "$ref" in schema:
        return fill(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    if choices := schema.get("anyOf") or schema.get("oneOf"):
        return fill(choices[0], definitions)
    if "const" in schema or "enum" in schema:
        return schema.get("const", schema.get("enum", [None])[0])
    if schema.get("type") == "object":
        return {name: fill(each, definitions) for name, each in schema.get("properties", {}).items()}
    if schema.get("type") == "array":
        return [fill(schema["items"], definitions)] * max(1, schema.get("minItems", 0))
    plain = {"integer": schema.get("minimum", 1), "number": schema.get("minimum", 1), "boolean": False}
    return plain.get(schema.get("type", ""), "Answer with the number alone.")


class Endpoint:
    """Answers as the pure server does; what ``hold`` picks is answered once ``go_on`` is set.

    Args:
        hold: Says of a request's sample, and of those before it, whether it waits.

    Attributes:
        samples: What was asked for, in order.
    """

    def __init__(self, hold: Callable[[str, list[str]], bool] = lambda call_id, before: False) -> None:
        self.samples: list[str] = []
        self.held = threading.Event()
        self.go_on = threading.Event()
        self._hold = hold

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        """Answer a request."""
        body, call_id = asked_of(handler), handler.headers["x-sample"]
        wait = self._hold(call_id, list(self.samples))
        self.samples.append(call_id)
        if wait:
            self.held.set()
            self.go_on.wait(HANGS)
        try:
            send(handler, pure_server.completion(body, pure_server.answer(body, call_id)))
        except OSError:
            assert wait, "only those that were kept waiting may have hung up"


@contextmanager
def world(folder: Path, endpoint: Endpoint, *, grace: float = 5.0, train: int = 3) -> Iterator[Path]:
    """Serve an endpoint and give the path of a configuration for it: one epoch, a step for three items."""
    with serving(endpoint.answer) as url:
        plain = settings(
            write_world(folder / "world", train=train, val=3, test=2),
            folder / "run",
            url=url.removesuffix("/v1"),
            train={"num_epochs": 1, "accumulation": 1, "grace_seconds": grace},
            appendix={"enabled": False},
            test={"enabled": False},
        )
        path = folder / "run.yaml"
        path.write_text(json.dumps(plain), encoding="utf-8")
        try:
            yield path
        finally:
            endpoint.go_on.set()
