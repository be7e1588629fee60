"""The command `reflact calibrate` in tests: a configuration, recorded traces, a served model."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path

from typer.testing import CliRunner, Result

from flattered_world import answer, record_flattered
from reflact.calibration.asked import JudgeReply, MistakenReply
from reflact.calibration.critic import CriticReply
from reflact.cli.app import app
from reflact.messages import Message, RenderedPrompt
from served import HANGS, asked_of, serving

REPLIES = {kind.__name__: kind for kind in (CriticReply, JudgeReply, MistakenReply)}
MODEL = {
    "model": "small",
    "api_key_env": None,
    "max_retries": 0,
    "mode": "json_schema",
    "call_id_header": "x-sample",
}


def reflact(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["calibrate", *map(str, arguments)], terminal_width=200)


@contextmanager
def flattering(hold: Hold | None = None, *, excess: float = 0.0) -> Iterator[tuple[str, list[bytes]]]:
    """Serve the flattered model; gives the address and what was asked, each with the sample before it."""
    asked: list[bytes] = []

    def play(handler: BaseHTTPRequestHandler) -> None:
        body, call_id = asked_of(handler), str(handler.headers["x-sample"])
        asked.append(call_id.encode() + json.dumps(body).encode())
        if hold is not None:
            hold.wait(len(asked))
        messages = tuple(Message(role=m["role"], content=m["content"]) for m in body["messages"][:2])
        reply_type = REPLIES[body["response_format"]["json_schema"]["name"]]
        said = answer(RenderedPrompt(name="x", version=1, messages=messages), reply_type, excess=excess)
        message = {"role": "assistant", "content": json.dumps(said)}
        usage = {"prompt_tokens": 10, "completion_tokens": 3, "total_tokens": 13}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        about = {"id": "x", "object": "chat.completion", "created": 0, "model": "small"}
        content = json.dumps({**about, "choices": [choice], "usage": usage}).encode()
        handler.send_response(200)
        handler.send_header("content-type", "application/json")
        handler.send_header("content-length", str(len(content)))
        handler.end_headers()
        handler.wfile.write(content)

    with serving(play) as url:
        yield url, asked


class Hold:
    """Holds back every answer after so many, until it may go on."""

    def __init__(self, after: int = 1_000_000) -> None:
        self.after = after
        self.go_on = threading.Event()
        self._held = threading.Semaphore(0)

    def wait(self, asked: int) -> None:
        if asked > self.after:
            self._held.release()
            self.go_on.wait(HANGS)

    def until_held(self, number: int = 1) -> None:
        for _ in range(number):
            assert self._held.acquire(timeout=HANGS)


def record(folder: Path, number: int) -> None:
    folder.mkdir()
    for n in range(number):
        path = folder / f"{n:03}.jsonl"
        record_flattered(f"{folder.name} {n}", n, claims=[n % 2 == 0], path=path).finish()


def one_line(text: str) -> str:
    return " ".join(text.split())


def configured(
    folder: Path, url: str = "http://127.0.0.1:9/v1", *, name: str = "memory", **calibrator: int
) -> Path:
    """Write a configuration with a memory of its own and return its path."""
    plain = {
        "memory": f"{folder}/{name}.db",
        "traces": "learn",
        "heldout": "held out",
        "models": {"critic": {**MODEL, "base_url": url}},
        "calibrator": {"max_asked": 0, "pairs_per_step": 1, "max_rounds": 1, **calibrator},
    }
    path = folder / f"{name}.yaml"
    path.write_text(json.dumps(plain), encoding="utf-8")
    return path
