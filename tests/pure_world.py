"""Runs in the world of the pure server: their data, their configuration, and all that they leave."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
from anyio.lowlevel import checkpoint

import pure_server
from reflact.records import Reuse, RunSummary, Spend, Usage
from reflact.types import FrozenModel

TWINS = ("train-4", "train-9")
"""Two items of one text, each answered in its own way."""

ODD = dict.fromkeys(TWINS, "coin 5") | {"train-2": "slip 2", "train-7": "slip 7", "val-3": "flip 103"}
"""Items beside the learnable ones: slips are lapses, since their rule stands there, and flips are noise."""

INITIAL = "- rule slip.\n"
URL = "http://pure.test"

Rows = tuple[tuple[Any, ...], ...]


class Ended(FrozenModel):
    """Everything that a run leaves, but for times and what a crash cost.

    Args:
        commits: Number, kind, step, record and state of each commit.
        events: The durable events in order.
        decision_log: Step, label and value of each outcome that was used.
        files: The exported documents.
        summary: The summary without times, configuration, spend and what was found in the store.
        skills: Hashes of all documents in the store.
        replies: Keys of all answers.
        rollouts: Keys of all rollouts.
        spend: What was settled.
        costs: The step, the stage and the settled tokens of each call.
    """

    commits: Rows
    events: Rows
    decision_log: Rows
    files: dict[str, str]
    summary: RunSummary
    skills: Rows
    replies: Rows
    rollouts: Rows
    spend: tuple[Spend, ...]
    costs: Rows


def differences(left: Ended, right: Ended, *, but: tuple[str, ...] = ()) -> list[str]:
    """Return the names of the parts in which two runs differ."""
    return [
        part for part in Ended.model_fields if part not in but and getattr(left, part) != getattr(right, part)
    ]


def left_by(out_dir: Path) -> Ended:
    """Read what a run left."""
    summary = RunSummary.model_validate_json((out_dir / "summary.json").read_text(encoding="utf-8"))
    exported = [*sorted((out_dir / "skills").iterdir()), out_dir / "best_skill.md"]
    unlike = {"seconds": 0.0, "config": None, "spend": (), "faults": (), "reuse": Reuse()}
    return Ended(
        commits=rows(out_dir, "SELECT number, kind, step, record FROM commits ORDER BY number"),
        events=rows(
            out_dir, "SELECT json_remove(value, '$.at') FROM outcomes WHERE kind = 'event' ORDER BY rowid"
        ),
        decision_log=rows(out_dir, "SELECT key, value FROM outcomes WHERE kind = 'decision' ORDER BY key"),
        files={path.name: path.read_bytes().decode("utf-8") for path in exported},
        summary=summary.model_copy(update=unlike),
        skills=rows(out_dir, "SELECT key FROM outcomes WHERE kind = 'skill' ORDER BY key"),
        replies=rows(out_dir, "SELECT key FROM outcomes WHERE kind = 'response' ORDER BY key"),
        rollouts=rows(out_dir, "SELECT key FROM outcomes WHERE kind = 'rollout' ORDER BY key"),
        spend=tuple(
            s.model_copy(update={"unsettled": 0, "worst_case": Usage()})
            for s in summary.spend
            if s.usage.calls
        ),
        costs=rows(
            out_dir,
            "SELECT step, stage, call_id, input_tokens, output_tokens FROM calls WHERE state = 'settled' ORDER BY call_id",
        ),
    )


def rows(out_dir: Path, query: str) -> Rows:
    """Return what a query finds in a run's database."""
    with closing(sqlite3.connect(out_dir / "run.db")) as database:
        return tuple(database.execute(query).fetchall())


def write_world(folder: Path, *, train: int = 12, val: int = 4, test: int = 2) -> Path:
    """Write the data and the initial skill into a folder and return it."""
    for number, (split, size) in enumerate([("train", train), ("val", val), ("test", test)]):
        items = []
        for n in range(size):
            rule = pure_server.RULES[n % len(pure_server.RULES)]
            text = ODD.get(f"{split}-{n}", f"{rule} {100 * number + n}")
            items.append({"id": f"{split}-{n}", "input": text, "reference": text.replace(" ", ":")})
        (folder / split).mkdir(parents=True)
        lines = "".join(json.dumps(item) + "\n" for item in items)
        (folder / split / "items.jsonl").write_text(lines, encoding="utf-8")
    (folder / "skill.md").write_text(INITIAL, encoding="utf-8")
    return folder


def settings(world: Path, out_dir: Path, *, url: str = URL, **sections: Any) -> dict[str, Any]:
    """Return the configuration of a run with everything on, with sections replaced in part."""
    plain: dict[str, Any] = {
        "out_dir": str(out_dir),
        "report": False,
        "skill": str(world / "skill.md"),
        "data": {"path": str(world)},
        "environment": {"grader": "exact"},
        "models": {
            "target": {
                "model": "pure",
                "base_url": f"{url}/v1",
                "api_key_env": None,
                "temperature": 1,
                "call_id_header": "x-sample",
            },
            "optimizer": {"call_id_header": "x-sample"},
        },
        "search": {"sources": ["edits"]},
        "train": {"num_epochs": 3, "batch_size": 3, "accumulation": 2},
        "reflect": {"minibatch_size": 1},
        "aggregate": {"merge_batch_size": 2},
        "select": {"max_edits": 2, "min_edits": 1},
        "gate": {"policy": "ranked"},
        "slow_update": {"samples": 3, "gated": True},
        "meta_skill": {"enabled": True},
        "appendix": {"enabled": True, "consolidate_threshold": 1},
        "test": {"placebo": True},
    }
    for name, values in sections.items():
        plain[name] = {**plain.get(name, {}), **values} if isinstance(values, Mapping) else values
    return plain


class TooLong(Exception):
    """A request that does not fit the model's context."""


class PureNetwork(httpx.AsyncBaseTransport):
    """The pure server's answers without a server.

    Args:
        answer: Says what the model says to a body and a sample, by default as the pure server does; it may
            raise ``TooLong``.

    Attributes:
        samples: The samples that were asked for, in order.
    """

    def __init__(self, answer: Callable[[dict[str, Any], str], str] = pure_server.answer) -> None:
        self._answer = answer
        self.samples: list[str] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(await request.aread())
        call_id = request.headers["x-sample"]
        self.samples.append(call_id)
        await checkpoint()
        try:
            said = self._answer(body, call_id)
        except TooLong:
            return httpx.Response(400, json={"error": {"code": "context_length_exceeded"}})
        return httpx.Response(200, json=pure_server.completion(body, said))
