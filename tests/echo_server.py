"""A chat endpoint that sends back whatever key it is sent, wherever it can."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal, NamedTuple

import pure_server

Behaviour = Literal["answers", "refuses", "fails", "babbles"]
"""Answers as the pure server; answers 401; answers 500; answers with no chat completion."""


class Echoing(NamedTuple):
    """A running server: the root of its API, and all values of headers that it was sent."""

    url: str
    heard: set[str]


@contextmanager
def echoing(behaviour: Behaviour) -> Iterator[Echoing]:
    """Run such a server for the length of the block."""
    heard: set[str] = set()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            heard.update(self.headers.values())
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status, said = _said(behaviour, body, dict(self.headers))
            text = said.encode()
            self.send_response(status)
            for name in ("X-Echo", "Set-Cookie", "WWW-Authenticate"):
                self.send_header(name, json.dumps(_keys(dict(self.headers))))
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield Echoing(f"http://127.0.0.1:{server.server_port}/v1", heard)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _said(behaviour: Behaviour, body: dict[str, Any], headers: dict[str, str]) -> tuple[int, str]:
    keys = _keys(headers)
    if behaviour == "answers":
        answer = pure_server.completion(body, pure_server.answer(body, headers["x-sample"]))
        return 200, json.dumps({**answer, "system_fingerprint": " ".join(keys), "sent": headers})
    if behaviour == "babbles":
        return 200, json.dumps(keys)
    words = {"error": {"message": f"Incorrect API key provided: {', '.join(keys)}.", "sent": headers}}
    return {"refuses": 401, "fails": 500}[behaviour], json.dumps(words)


def _keys(headers: dict[str, str]) -> list[str]:
    return [value for name, value in headers.items() if name.lower() in {"authorization", "api-key"}]
