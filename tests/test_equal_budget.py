"""The comparison at equal budget: the budget holds, results are kept, and the page shows what was run."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
import yaml

import pure_server
from served import asked_of, completion, send, serving

FOLDER = Path(__file__).parent.parent / "benchmarks" / "equal_budget"
ROLLOUTS = 40
TOKENS = 4000
RULES = ("alpha", "beta", "gamma", "delta")
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
        self.url = ""

    def serve(self, handler: BaseHTTPRequestHandler) -> None:
        body = asked_of(handler)
        text = self.answer(body)
        sent = sum(len(message["content"]) for message in body["messages"]) // 4
        written = len(text) // 4
        usage = {"prompt_tokens": sent, "completion_tokens": written, "total_tokens": sent + written}
        send(handler, {**completion(text), "model": body["model"], "usage": usage})

    def answer(self, body: dict[str, Any]) -> str:
        self.calls[body["model"]] += 1
        if body["model"] == "small":
            return pure_server.answer(body, "target/")
        schema = body.get("response_format", {}).get("json_schema", {}).get("schema")
        if schema is None:
            return "```\n- rule alpha.\n```"
        if "word" in schema["properties"]:
            return '{"word": "ready"}'
        return pure_server.answer(body, "part=0/", spoiled=None)


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    played = Endpoint()
    with serving(played.serve) as played.url:
        yield played


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
    done = subprocess.run(
        [sys.executable, str(FOLDER / script), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
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
    settings = write_settings(tmp_path, endpoint.url)
    folders = ("--settings", settings, "--results", tmp_path / "results", "--work", tmp_path / "work")
    run("run.py", "train", *folders, "--seeds", "1", "--tasks", "desk", "--methods", "one_rewrite")
    result = json.loads((tmp_path / "results" / "desk-one_rewrite-small-1.json").read_text(encoding="utf-8"))
    assert result["spend"]["target"]["rollouts"] == 8
    assert result["spend"]["target"]["calls"] == 8 * 4
    assert result["skill"] == "- rule alpha."


def test_the_items_of_the_tasks_are_what_their_program_writes() -> None:
    run("tasks/make.py", "--check")
    for folder in (FOLDER / "tasks").glob("*/data"):
        lines = [
            line for path in folder.glob("*/items.jsonl") for line in path.read_text("utf-8").splitlines()
        ]
        assert len({json.loads(line)["input"] for line in lines}) == len(lines) == 104


def test_the_page_is_current() -> None:
    run("page.py", "--check")
