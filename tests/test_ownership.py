"""One run, one owner: over several folders and processes, and when files go away during the run."""

from __future__ import annotations

import multiprocessing
import random
import shutil
import signal
import sqlite3
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

import pure_world
from reflact import Trainer
from reflact.errors import StoreError
from reflact.messages import CallId, RenderedPrompt, ReplyModel
from reflact.records import RunSummary
from reflact.store.runs import open_store
from reflact.testing import toy_optimizer
from reflact.testing.llm import Script, ScriptedAnswer
from served import Endpoint, serving
from toy_runs import build_trainer, settings
from training_process import REFUSED, STOPPED, train_below

FOLDERS, TOGETHER, IN_FLIGHT, LIMIT = 3, 2, 16, 120
HANGS = 120

Change = Callable[[Path, Path], object]
"""Takes something away from a run's folder and store."""


def remove_identity_lock(folder: Path, store: Path) -> None:
    for lock in store.parent.glob(f"{store.name}-r*.lock"):
        lock.unlink()


CHANGES: dict[str, Change] = {
    "remove folder": lambda folder, store: shutil.rmtree(folder),
    "move folder": lambda folder, store: folder.rename(folder.with_name("moved")),
    "remove folder lock": lambda folder, store: (folder / "run.lock").unlink(),
    "remove identity lock": remove_identity_lock,
    "remove database": lambda folder, store: store.unlink(),
    "move database": lambda folder, store: store.rename(store.with_name("elsewhere.db")),
}


def trainer_in(folder: Path, store: Path | None = None, script: Script | None = None) -> Trainer:
    config: dict[str, Any] = settings(folder, train={"batch_size": 4, "num_epochs": 1})
    if store is not None:
        config["store"] = store
    return build_trainer(config, script=script)


def read_summaries(folder: Path) -> list[RunSummary]:
    return [RunSummary.model_validate_json(path.read_text("utf-8")) for path in folder.rglob("summary.json")]


async def train_and_change(change: Change, folder: Path, store: Path) -> str:
    """Train, change the files in the second step, and return the error that ends the run."""
    usual, changed, committed = toy_optimizer(), list[int](), list[int]()

    def answer(prompt: RenderedPrompt, reply_type: type[ReplyModel], call_id: CallId) -> ScriptedAnswer:
        if call_id.step == 2 and not changed:
            change(folder, store)
            changed.append(call_id.step)
        return usual(prompt, reply_type, call_id)

    shared = None if store.parent == folder else store
    try:
        async with trainer_in(folder, shared, answer).stream() as stream:
            async for event in stream:
                committed += [event.step] if event.kind == "step_committed" else []
    except StoreError as error:
        assert changed
        assert committed == [1]
        return str(error)
    pytest.fail("the run did not notice")


@pytest.mark.parametrize("shared", [False, True], ids=["own store", "shared store"])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
async def test_what_goes_away_during_a_run_ends_it(tmp_path: Path, change: Change, shared: bool) -> None:
    folder = tmp_path / "run"
    store = tmp_path / "runs.db" if shared else folder / "run.db"
    error = await train_and_change(change, folder, store)
    assert "\n" not in error
    assert "moved" in error
    assert "start again" in error
    assert "completed" not in {summary.status for summary in read_summaries(tmp_path)}


@pytest.mark.parametrize("change", ["remove folder lock", "remove identity lock", "move folder"])
async def test_a_run_whose_files_are_put_back_resumes(tmp_path: Path, change: str) -> None:
    folder = tmp_path / "run"
    await train_and_change(CHANGES[change], folder, folder / "run.db")
    if (tmp_path / "moved").exists():
        (tmp_path / "moved").rename(folder)
    trainer = trainer_in(folder)
    assert (await trainer.train()).status == "completed"
    whole = trainer_in(tmp_path / "whole")
    await whole.train()
    async with open_store(folder / "run.db") as one, open_store(tmp_path / "whole" / "run.db") as other:
        assert await one.records(trainer.run_id) == await other.records(whole.run_id)
        assert len(await one.records(trainer.run_id)) == 2


class Contest:
    """Processes that train one run from several folders over one store, and die at random moments."""

    def __init__(self, folder: Path, url: str, endpoint: Endpoint, *, kills: int) -> None:
        self.store = folder / "runs.db"
        self.killed = 0
        self._endpoint = endpoint
        self._folder = folder
        self._port = int(url.rpartition(":")[2].removesuffix("/v1"))
        self._world = pure_world.write_world(folder / "world")
        self._chance = random.Random(13)
        self._kills = kills
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["reflact.llm.client", "reflact.store.runs", "training_process"])

    def start(self, **sections: Any) -> BaseProcess:
        folder = self._folder / f"folder-{self._chance.randrange(FOLDERS)}"
        plain = pure_world.settings(self._world, Path("run"), train={"num_epochs": 2}, **sections)
        config = {**plain, "store": str(self.store)}
        process = self._context.Process(target=train_below, args=(folder, config, self._port))
        process.start()
        return process

    def refuse_second(self, **sections: Any) -> None:
        """Start one process, and another once the first owns the run; then kill the owner."""
        owner = self.start(**sections)
        assert self._endpoint.held.wait(HANGS)
        second = self.start(**sections)
        second.join(HANGS)
        assert second.exitcode == REFUSED
        owner.kill()
        owner.join()
        self.killed += 1
        self._endpoint.go_on.set()

    def finish(self, code: int, **sections: Any) -> None:
        kills, codes = self._kills, set[int | None]()
        processes: list[BaseProcess] = []
        while code not in codes:
            assert codes <= {REFUSED, -signal.SIGKILL}
            together = TOGETHER if kills else 1
            processes += [self.start(**sections) for _ in range(together - len(processes))]
            goal = len(self._endpoint.samples) + self._chance.randrange(20)
            while len(self._endpoint.samples) < goal and any(p.is_alive() for p in processes):
                processes[-1].join(0.01)
            if kills and any(process.is_alive() for process in processes):
                for process in processes:
                    process.kill()
                    process.join()
                kills, self.killed = kills - 1, self.killed + 1
            ended = [process for process in processes if not process.is_alive()]
            processes = [process for process in processes if process.is_alive()]
            codes |= {process.exitcode for process in ended}
        for process in processes:
            process.join(HANGS)
            assert process.exitcode in {code, REFUSED}

    def unsettled(self) -> Counter[str]:
        with closing(sqlite3.connect(self.store)) as store:
            rows = store.execute("SELECT call_id FROM calls WHERE state <> 'settled'")
            return Counter(str(call_id) for (call_id,) in rows)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGKILL")
def test_three_folders_and_two_processes_pay_once(tmp_path: Path, kills: int) -> None:
    """One identity over a shared store keeps its budget and repeats no settled call, whoever continues it.

    Two processes at a time train it from three folders, and all are killed at random moments.
    """
    endpoint = Endpoint(hold=lambda call_id, before: not before)
    with serving(endpoint.answer) as url:
        contest = Contest(tmp_path, url, endpoint, kills=-(-kills // 2))
        contest.refuse_second(budget={"max_calls": LIMIT})
        contest.finish(STOPPED, budget={"max_calls": LIMIT})
        assert len(endpoint.samples) <= LIMIT
        contest.finish(0, budget={"max_calls": 100_000})
    repeats = Counter(endpoint.samples) - Counter(set(endpoint.samples))
    assert repeats - contest.unsettled() == Counter()
    assert repeats.total() <= contest.killed * IN_FLIGHT
