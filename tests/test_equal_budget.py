"""The comparison at equal budget: the budget holds, results are kept, and the page shows what was run."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

import pure_server

FOLDER = Path(__file__).parent.parent / "benchmarks" / "equal_budget"
ROLLOUTS = 40
TOKENS = 4000
RULES = ("alpha", "beta", "gamma", "delta")
PEERS = {"gepa": "gepa", "dspy_gepa": "dspy", "mipro": "dspy", "bootstrap": "dspy", "skillopt": "skillopt"}
OWN_SETTINGS = {
    "search.sources": ["edits"],
    "train.num_epochs": 4,
    "train.batch_size": 4,
    "reflect.minibatch_size": 4,
    "reflect.failure_only": True,
    "select.max_edits": 1,
    "update.operations": ["append"],
    "target.deterministic": True,
}
"""Those with which the played optimizer teaches one rule after the other."""


class Endpoint:
    """Both models, played: rules lead to right answers, and the optimizer proposes the rules that cases lack."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class names it so
                """No log."""

            def do_POST(self) -> None:
                """Answer a chat request."""
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                text = endpoint.answer(body)
                sent = sum(len(message["content"]) for message in body["messages"])
                usage = {"prompt_tokens": sent // 4, "completion_tokens": len(text) // 4}
                choice = {
                    "index": 0,
                    "message": {"role": "assistant", "content": text},
                    "finish_reason": "stop",
                }
                reply = {"id": "x", "object": "chat.completion", "created": 0, "model": body["model"]}
                usage["total_tokens"] = sum(usage.values())
                data = json.dumps({**reply, "choices": [choice], "usage": usage}).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def answer(self, body: dict[str, Any]) -> str:
        """Return the text of a reply."""
        self.calls[body["model"]] += 1
        if body["model"] == "small":
            return pure_server.answer(body, "target/")
        schema = body.get("response_format", {}).get("json_schema", {}).get("schema")
        if schema is None:
            return "```\n- rule alpha.\n```"
        if "word" in schema["properties"]:
            return '{"word": "ready"}'
        return pure_server.answer(body, "part=0/", spoiled=None)

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    """Serve both models while a test runs."""
    served = Endpoint()
    yield served
    served.close()


def write_settings(folder: Path, url: str) -> Path:
    """Write a task of four rules, and settings with a small budget."""
    for split, numbers in (("train", range(8)), ("val", range(8, 16)), ("test", range(16, 24))):
        (folder / "data" / split).mkdir(parents=True)
        items = [{"input": f"{RULES[n % 4]} {n}", "reference": f"{RULES[n % 4]}:{n}"} for n in numbers]
        (folder / "data" / split / "items.json").write_text(json.dumps(items), encoding="utf-8")
    (folder / "task.yaml").write_text("data: {path: data}\n", encoding="utf-8")
    settings = yaml.safe_load((FOLDER / "settings.yaml").read_text(encoding="utf-8"))
    common = {"servers": [{"base_url": url, "at_once": 4}], "temperature": 0, "max_tokens": 300}
    settings["models"] = {
        role: {"model": name, **common} for role, name in (("target", "small"), ("optimizer", "large"))
    }
    settings["budgets"] = {"small": {"rollouts": ROLLOUTS, "optimizer_tokens": TOKENS}}
    settings["sizes"] = {"train": 8, "val": 8, "test": 8}
    about = {"half": "showing", "reply_tokens": 300}
    desk = FOLDER / "tasks" / "desk" / "task.yaml"
    settings["tasks"] = {
        "rules": {"title": "rules", "config": str(folder / "task.yaml"), **about},
        "desk": {"title": "desk", "config": str(desk), **about},
    }
    for method in settings["methods"].values():
        method["budgets"] = ["small"]
    settings["methods"]["reflact"]["settings"] = OWN_SETTINGS
    settings["seeds"] = [1, 2]
    path = folder / "settings.yaml"
    path.write_text(yaml.safe_dump(settings), encoding="utf-8")
    return path


def run(script: str, *arguments: str | Path) -> str:
    """Run a script of the comparison and return its output."""
    done = subprocess.run(
        [sys.executable, str(FOLDER / script), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_cell_ends_within_its_budget_and_its_result_is_kept(endpoint: Endpoint, tmp_path: Path) -> None:
    """A run of reflact learns within the budget; a second start runs nothing; the page tells what was run."""
    settings = write_settings(tmp_path, endpoint.url)
    folders = ("--settings", settings, "--results", tmp_path / "results")
    methods = ("none", "reflact", "best_of_n")
    chosen = (
        *folders,
        "--work",
        tmp_path / "work",
        "--seeds",
        "1",
        "--tasks",
        "rules",
        "--methods",
        *methods,
    )
    run("run.py", "train", *chosen)
    result = json.loads((tmp_path / "results" / "rules-reflact-small-1.json").read_text(encoding="utf-8"))
    assert 0 < result["spend"]["target"]["rollouts"] <= ROLLOUTS
    assert "- rule " in result["skill"]
    assert result["val"]["mean"] > 0
    assert result["document_tokens"] > 0
    assert result["test"] is None
    used = endpoint.calls.copy()
    assert run("run.py", "train", *chosen) == ""
    assert endpoint.calls == used
    run("page.py", *folders, "--page", tmp_path / "page.md")
    assert "Tasks: desk, rules. Not run." in (tmp_path / "page.md").read_text(encoding="utf-8")
    run("run.py", "test", *chosen)
    run("page.py", *folders, "--page", tmp_path / "page.md")
    page = " ".join((tmp_path / "page.md").read_text(encoding="utf-8").split())
    assert "| no skill | **0.000** | 0.000 to 0.000 | +" in page
    assert "| 1 of 2 | 1 |" in page
    assert "reflact, edits alone" in page.partition("Not run: ")[2]
    assert "The optimizer is `large` at temperature 0, with at most 300 tokens in a reply." in page
    assert "](page.svg)" in page
    assert ">reflact</text>" in (tmp_path / "page.svg").read_text(encoding="utf-8")


def test_a_conversation_is_one_rollout_and_its_program_grades(endpoint: Endpoint, tmp_path: Path) -> None:
    """In the task of several turns, calls that go on with a conversation are no rollouts."""
    settings = write_settings(tmp_path, endpoint.url)
    folders = ("--settings", settings, "--results", tmp_path / "results", "--work", tmp_path / "work")
    run("run.py", "train", *folders, "--seeds", "1", "--tasks", "desk", "--methods", "one_rewrite")
    result = json.loads((tmp_path / "results" / "desk-one_rewrite-small-1.json").read_text(encoding="utf-8"))
    assert result["spend"]["target"]["rollouts"] == 8
    assert result["spend"]["target"]["calls"] == 8 * 4
    assert result["skill"] == "- rule alpha."


def test_the_items_of_the_tasks_are_what_their_program_writes() -> None:
    """The items are reproducible, and the splits of a task have no item in common."""
    run("tasks/make.py", "--check")
    for folder in (FOLDER / "tasks").glob("*/data"):
        lines = [
            line for path in folder.glob("*/items.jsonl") for line in path.read_text("utf-8").splitlines()
        ]
        assert len({json.loads(line)["input"] for line in lines}) == len(lines) == 104


@pytest.mark.parametrize("method", PEERS)
def test_a_peer_returns_its_best_document(endpoint: Endpoint, tmp_path: Path, method: str) -> None:
    """Each peer runs unpatched behind the meter, if it is installed beside reflact."""
    if importlib.util.find_spec(PEERS[method]) is None:
        pytest.skip(f"{PEERS[method]} is not installed")
    settings = write_settings(tmp_path, endpoint.url)
    environment = tmp_path / f"venv-{PEERS[method]}" / "bin"
    environment.mkdir(parents=True)
    (environment / "python").symlink_to(sys.executable)
    folders = ("--results", tmp_path / "results", "--work", tmp_path / "work", "--peers", tmp_path)
    run(
        "run.py",
        "train",
        "--settings",
        settings,
        *folders,
        "--seeds",
        "1",
        "--tasks",
        "rules",
        "--methods",
        method,
    )
    result = json.loads((tmp_path / "results" / f"rules-{method}-small-1.json").read_text(encoding="utf-8"))
    assert 0 < result["spend"]["target"]["rollouts"] <= ROLLOUTS


def test_the_page_is_current() -> None:
    """The committed page is what the results and settings give."""
    run("page.py", "--check")
