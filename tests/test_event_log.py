"""The log of durable events: the same bytes in every run of a plan, each once, whenever it was killed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

import pytest

from pure_world import rows
from reflact.config.loading import load_config
from reflact.events import EVENT_ADAPTER, Event
from reflact.records import CommitRecord, RunState
from reflact.testing import InMemoryRunStore, ScriptedLLM, ToyEnvironment, ToyTarget, toy_optimizer
from reflact.training import loop
from reflact.training.open_run import connect_run
from reflact.training.plan import Overrides, prepare_run
from reflact.types import Skill

ROOT = Path(__file__).parent.parent
LOG = "SELECT json_remove(value, '$.at') FROM outcomes WHERE kind = 'event' ORDER BY rowid"
KILLED_AT = (3, 400, 1200)
"""How many lines a process may print before it is killed, one process after the other."""


class Killed(Exception):
    """A process ended here."""


class Mortal(InMemoryRunStore):
    """A store whose process ends just after a write that is part of the history, before anyone knows of it.

    Attributes:
        writes: How many such writes there were.
    """

    def __init__(self, dies_at: int | None = None) -> None:
        super().__init__()
        self._dies_at = dies_at
        self.writes = 0

    async def append_event(self, event: Event) -> bool:
        is_new = await super().append_event(event)
        self._may_die()
        return is_new

    async def commit(
        self, run_id: str, record: CommitRecord | None, state: RunState, skills: Sequence[Skill]
    ) -> None:
        await super().commit(run_id, record, state, skills)
        self._may_die()

    def _may_die(self) -> None:
        self.writes += 1
        if self.writes == self._dies_at:
            raise Killed


async def start(store: InMemoryRunStore, folder: Path) -> list[Event]:
    config = {
        "out_dir": folder,
        "search": {"sources": ["edits"]},
        "train": {"num_epochs": 2, "batch_size": 4},
        "gate": {"worth": 1},
        "select": {"max_edits": 1, "min_edits": 1},
        "slow_update": {"samples": 2},
        "appendix": {"enabled": True},
    }
    environment = ToyEnvironment(train=8, val=4, test=2)
    passed = Overrides(environment, ToyTarget(), ScriptedLLM(toy_optimizer()))
    told: list[Event] = []

    async def listen(event: Event) -> None:
        told.append(event)

    try:
        async with connect_run(prepare_run(load_config(config), passed), store, listen) as run:
            await loop.start(run)
            await loop.train_to_end(run)
    except Killed:
        pass
    return [event for event in told if event.durable]


async def log_of(store: InMemoryRunStore) -> list[str]:
    (run,) = await store.runs()
    return [event.canonical_content for event in await store.events(run.run_id)]


@pytest.mark.slow
async def test_a_kill_at_any_write_loses_and_repeats_no_event(tmp_path: Path, thorough: bool) -> None:
    unbroken = Mortal()
    await start(unbroken, tmp_path / "unbroken")
    whole = await log_of(unbroken)
    kinds = [json.loads(line)["kind"] for line in whole]
    assert kinds.count("epoch_committed") >= 1
    assert kinds.count("skill_version_created") >= 3
    assert len(set(whole)) == len(whole)
    for write in range(1, unbroken.writes, 1 if thorough else 7):
        store = Mortal(write)
        first = await start(store, tmp_path / str(write))
        assert len(await log_of(store)) < len(whole)
        second = await start(store, tmp_path / str(write))
        assert await log_of(store) == whole, f"killed at write {write}"
        heard = [event.canonical_content for event in (*first, *second)]
        assert heard == [line for line in whole if line in heard]
        assert len(whole) - len(heard) <= 1, "at most what was stored when the process died goes unheard"


class Demo:
    def __init__(self, folder: Path, concurrency: int) -> None:
        self.folder = folder
        options = [f"train.rollout_concurrency={concurrency}", f"reflect.concurrency={concurrency}"]
        options += [f"models.{role}.concurrency={concurrency}" for role in ("target", "optimizer")]
        sets = [word for option in options for word in ("--set", option)]
        train = [
            "train",
            str(ROOT / "fixtures" / "demo" / "demo.yaml"),
            "--show",
            "json",
            "--set",
            f"out_dir={folder}",
        ]
        self._command = [sys.executable, "-c", "from reflact.cli import main; main()", *train, *sets]

    def start(self, stdout: IO[str] | int = subprocess.PIPE) -> subprocess.Popen[str]:
        return subprocess.Popen(self._command, stdout=stdout, text=True)

    @property
    def log(self) -> list[str]:
        return [str(event) for (event,) in rows(self.folder, LOG)]


def durable(lines: Sequence[str]) -> list[Event]:
    told = [EVENT_ADAPTER.validate_json(line) for line in lines if line.endswith("\n")]
    return [event for event in told if event.durable]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGKILL")
def test_the_demo_tells_the_same_at_any_concurrency_and_after_kills(tmp_path: Path) -> None:
    slow, fast = Demo(tmp_path / "slow", 1), Demo(tmp_path / "fast", 32)
    began, printed = datetime.now(UTC), list[Event]()
    with (tmp_path / "told").open("w+", encoding="utf-8") as kept, slow.start(kept) as unbroken:
        for limit in KILLED_AT:
            with fast.start() as process:
                lines = [line for line, _ in zip(process.stdout, range(limit), strict=False)]
                process.kill()
                printed += durable([*lines, *process.stdout.readlines()])
            assert process.returncode == -signal.SIGKILL
        with fast.start() as process:
            printed += durable(process.communicate()[0].splitlines(keepends=True))
        unbroken.wait()
        kept.seek(0)
        told = durable(kept.readlines())
    assert [unbroken.returncode, process.returncode] == [0, 0]
    assert [event.canonical_content for event in told] == slow.log
    assert fast.log == slow.log
    said = [event.canonical_content for event in printed]
    assert said == [line for line in fast.log if line in said], "no event is printed twice or out of order"
    assert len(fast.log) - len(said) <= len(KILLED_AT)
    assert all(began <= event.at <= datetime.now(UTC) for event in (*told, *printed))
