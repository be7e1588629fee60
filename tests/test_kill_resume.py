"""A training run under SIGKILL: real processes, a real server, one history."""

from __future__ import annotations

import json
import multiprocessing
import random
import signal
import sqlite3
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import pytest

from reflact.events import Event
from reflact.records import StepRecord
from reflact.results import RunSummary, Spend
from reflact.store.runs import open_store
from reflact.types import Frozen
from training_process import train

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGKILL")

RUNS = 5
KILLS_EACH = 4
IN_FLIGHT = 16
SEED = 20260
LATEST_SECONDS = 0.03
HERE = Path(__file__).parent
PRELOADED = ["reflact.llm.client", "reflact.store.runs", "reflact.targets.chat", "training_process"]

RULES = ("alpha", "beta", "gamma", "delta")
TWINS = ("train-4", "train-9")


class Ended(Frozen):
    """Everything that a run leaves, but for times and what a crash cost."""

    files: dict[str, str]
    records: tuple[StepRecord, ...]
    events: tuple[Event, ...]
    summary: RunSummary
    spend: tuple[Spend, ...]


class Whole(NamedTuple):
    """An unbroken run: where it is, what it left, and what the server saw."""

    folder: Path
    ended: Ended
    seen: list[tuple[str, str]]


class House:
    """The server, and the processes that train against it."""

    def __init__(self, port: int, context: ForkServerContext, folder: Path) -> None:
        self._root = f"http://127.0.0.1:{port}"
        self._context = context
        self._data = _data(folder / "data")

    def config(self, out_dir: Path) -> dict[str, Any]:
        """Return the configuration of a run."""
        return {
            "out_dir": str(out_dir),
            "data": {"path": str(self._data)},
            "environment": {"grader": "exact"},
            "models": {
                "target": {
                    "model": "pure",
                    "base_url": f"{self._root}/v1",
                    "api_key_env": None,
                    "temperature": 1,
                    "sample_header": "x-sample",
                },
                "optimizer": {"sample_header": "x-sample"},
            },
            "train": {"num_epochs": 2, "batch_size": 4},
            "reflect": {"minibatch_size": 1},
            "aggregate": {"merge_batch_size": 2},
            "select": {"max_edits": 2, "min_edits": 1},
            "test": {"placebo": True},
        }

    def start(self, out_dir: Path) -> ForkServerProcess:
        """Start a process that trains."""
        process = self._context.Process(target=train, args=(self.config(out_dir),))
        process.start()
        return process

    def finish(self, out_dir: Path) -> Ended:
        """Train to the end in a process, and read what it left."""
        process = self.start(out_dir)
        process.join(60)
        assert process.exitcode == 0
        return anyio.run(_read, out_dir)

    def ask(self, path: str) -> list[tuple[str, str]]:
        """Ask the server something; it answers with its log."""
        with urllib.request.urlopen(f"{self._root}{path}", timeout=30) as response:
            return [(body, sample) for body, sample in json.load(response)]


def _data(folder: Path) -> Path:
    twins = dict.fromkeys(TWINS, "coin 5")
    for number, (split, size) in enumerate([("train", 12), ("val", 6), ("test", 6)]):
        rows = []
        for n in range(size):
            text = twins.get(f"{split}-{n}", f"{RULES[n % len(RULES)]} {100 * number + n}")
            rows.append({"id": f"{split}-{n}", "input": text, "reference": text.replace(" ", ":")})
        (folder / split).mkdir(parents=True)
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / split / "items.jsonl").write_text(lines, encoding="utf-8")
    return folder


async def _read(out_dir: Path) -> Ended:
    summary = RunSummary.model_validate_json((out_dir / "summary.json").read_text(encoding="utf-8"))
    exported = [*sorted((out_dir / "skills").iterdir()), out_dir / "best_skill.md"]
    async with open_store(out_dir / "run.db") as store:
        return Ended(
            files={path.name: path.read_bytes().decode("utf-8") for path in exported},
            records=await store.records(summary.run_id),
            events=await store.events(summary.run_id),
            summary=summary.model_copy(update={"seconds": 0.0, "config": None, "spend": ()}),
            spend=tuple(s.model_copy(update={"unsettled": 0}) for s in summary.spend),
        )


def _unsettled(out_dir: Path) -> Counter[str]:
    with closing(sqlite3.connect(out_dir / "run.db")) as database:
        rows = database.execute("SELECT sample FROM calls WHERE state = 'unsettled'").fetchall()
    return Counter(sample for (sample,) in rows)


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """A server in its own process, and processes at hand that have imported everything."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with subprocess.Popen(
        [sys.executable, HERE / "pure_server.py"], stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        try:
            yield House(int(server.stdout.readline()), context, tmp_path_factory.mktemp("house"))
        finally:
            server.kill()


@pytest.fixture(scope="module")
def whole(house: House, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """An unbroken run."""
    folder = tmp_path_factory.mktemp("whole")
    return Whole(folder, house.finish(folder), house.ask("/forget"))


def test_an_unbroken_run_has_every_turn(whole: Whole) -> None:
    """The run that is to be killed accepts and rejects, asks again, merges, ranks and falls back."""
    records = whole.ended.records
    assert {r.verdict.action for r in records} >= {"accept_new_best", "reject"}
    purposes = {sample.split("/")[1] for _, sample in whole.seen}
    assert purposes == {"rollout", "analyst_failure", "analyst_success", "merge", "merge_final", "ranking"}
    assert any(sample.endswith("attempt=1") for _, sample in whole.seen)
    assert any(f.label.startswith("merge/") for r in records for f in r.merged.fallbacks)


def test_no_request_is_sent_twice(house: House, whole: Whole) -> None:
    """An unbroken run asks for every body and sample once, and starting it again asks for nothing."""
    assert max(Counter(whole.seen).values()) == 1
    assert house.finish(whole.folder) == whole.ended
    assert house.ask("/forget") == []


def test_equal_texts_are_two_effects(whole: Whole) -> None:
    """Two items of one text at temperature 1 send the same body twice and get an answer each."""
    samples: dict[str, set[str]] = {}
    for body, sample in whole.seen:
        samples.setdefault(body, set()).add(sample)
    assert max(len(found) for found in samples.values()) >= len(TWINS)
    with closing(sqlite3.connect(whole.folder / "run.db")) as database:
        rollouts = [json.loads(text) for (text,) in database.execute("SELECT rollout FROM rollouts")]
    told = {r["item_id"]: r["answer"] for r in rollouts if r["item_id"] in TWINS}
    assert len(set(told.values())) == len(TWINS)


@pytest.mark.parametrize("run", range(RUNS))
def test_a_killed_run_goes_on(
    house: House, whole: Whole, run: int, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """Killed at any moments and started again, a run ends as an unbroken one and repeats only what flew."""
    chance = random.Random(f"{SEED}/{run}")
    moments = [
        (len(whole.seen) * (run + RUNS * kill)) // (RUNS * KILLS_EACH) + 1 for kill in range(KILLS_EACH)
    ]
    for requests in moments:
        offset = chance.uniform(0, LATEST_SECONDS)
        record_property("killed", f"{1000 * offset:.1f} ms after request {requests} of {len(whole.seen)}")
        process = house.start(tmp_path)
        house.ask(f"/wait/{requests}")
        time.sleep(offset)
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL

    ended = house.finish(tmp_path)
    seen = Counter(house.ask("/forget"))
    for part in Ended.model_fields:
        assert getattr(ended, part) == getattr(whole.ended, part)
    assert seen.keys() == set(whole.seen)
    repeats = Counter({sample: times - 1 for (_, sample), times in seen.items()})
    assert repeats <= _unsettled(tmp_path)
    assert repeats.total() <= KILLS_EACH * IN_FLIGHT
