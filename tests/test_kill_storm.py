"""Many kills at random moments of a run that writes a lot; ``--kills 100`` for the whole of it."""

from __future__ import annotations

import json
import multiprocessing
import random
import signal
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from pure_world import differences, left_by, rows, settings, write_world
from training_process import train

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGKILL"),
]

SEED = 4100
IN_FLIGHT = 32
EARLY = 0.2
"""Share of the kills that come before a process has asked for anything."""

SHARE = 0.15
"""The longest that a process asks before it is killed, as a share of an unbroken run's time for that."""

HERE = Path(__file__).parent
PRELOADED = ["reflact.llm.client", "reflact.store.runs", "reflact.targets.chat", "training_process"]

KEPT = {
    "responses": "SELECT key, response FROM responses",
    "rollouts": "SELECT key, rollout FROM rollouts",
    "skills": "SELECT hash, text FROM skills",
    "commits": "SELECT run_id, number, kind, record, state FROM commits",
    "decision_log": "SELECT run_id, step, label, value FROM decision_log",
    "events": "SELECT sequence, id, event FROM events",
    "settled": "SELECT id, call_id, input_tokens, output_tokens FROM calls WHERE state = 'settled'",
}
"""What is committed is never changed and never lost."""


class Storm:
    """The server, and the processes that train against it."""

    def __init__(self, port: int, context: ForkServerContext, folder: Path) -> None:
        self._port = port
        self._context = context
        self._world = write_world(folder / "world", train=24, val=16, test=8)

    def start(self, out_dir: Path) -> ForkServerProcess:
        """Start a process that trains."""
        config: dict[str, Any] = settings(self._world, out_dir, train={"num_epochs": 1, "batch_size": 6})
        for role in ("target", "optimizer"):
            config["models"][role]["concurrency"] = IN_FLIGHT
        process = self._context.Process(target=train, args=(config, self._port))
        process.start()
        return process

    def requests(self, how: str = "forget") -> list[str]:
        """Return the samples that the server was asked for since the last time."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/{how}", timeout=30) as response:
            return [call_id for _, call_id in json.load(response)]

    def until_asked(self, process: ForkServerProcess) -> float:
        """Wait until the server is asked something, or a process ends; returns the seconds that it took."""
        since = time.monotonic()
        while process.is_alive() and not self.requests("seen"):
            process.join(0.02)
        return time.monotonic() - since


class Kept(NamedTuple):
    """All that a database holds for good, by table."""

    tables: dict[str, frozenset[Any]]

    @property
    def settled(self) -> set[str]:
        """The samples whose calls are settled."""
        return {str(call_id) for _, call_id, *_ in self.tables["settled"]}


NOTHING = Kept({name: frozenset() for name in KEPT})


@pytest.fixture(scope="module")
def storm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Storm]:
    """A server in its own process, and processes at hand that have imported everything."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    command = [sys.executable, str(HERE / "pure_server.py")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield Storm(int(server.stdout.readline()), context, tmp_path_factory.mktemp("storm"))
        finally:
            server.kill()


def looked_into(out_dir: Path) -> Kept:
    """Check that the database is sound, and return what it holds."""
    if not rows(out_dir, "SELECT 1 FROM sqlite_master WHERE name = 'commits'"):
        return NOTHING
    assert rows(out_dir, "PRAGMA integrity_check") == (("ok",),)
    assert rows(out_dir, "PRAGMA foreign_key_check") == ()
    return Kept({name: frozenset(rows(out_dir, query)) for name, query in KEPT.items()})


def unsettled(out_dir: Path) -> Counter[str]:
    """Return how often each sample was cut off in flight."""
    return Counter(str(s) for (s,) in rows(out_dir, "SELECT call_id FROM calls WHERE state <> 'settled'"))


def test_random_kills_lose_nothing_and_repeat_nothing(storm: Storm, tmp_path: Path, kills: int) -> None:
    """After every kill the file is sound and holds all that it held; nothing settled is asked again.

    A run that was killed so ends as one that never was, and repeats at most what was in flight.
    """
    process = storm.start(tmp_path / "whole")
    start_up, since = storm.until_asked(process), time.monotonic()
    process.join(120)
    assert process.exitcode == 0
    longest = SHARE * (time.monotonic() - since)
    whole, asked = left_by(tmp_path / "whole"), Counter(storm.requests())
    assert max(asked.values()) == 1

    chance, done, run, written = random.Random(SEED), 0, 0, 0
    while done < kills:
        out_dir, before, seen, killed = tmp_path / f"run-{run}", NOTHING, Counter[str](), 0
        out_dir.mkdir()
        while True:
            process = storm.start(out_dir)
            if done == kills:
                process.join(120)
            elif chance.random() < EARLY:
                process.join(chance.uniform(0, start_up))
            else:
                storm.until_asked(process)
                process.join(chance.uniform(0, longest))
            process.kill()
            process.join()
            now, requests = looked_into(out_dir), storm.requests()
            assert not before.settled & set(requests)
            for name in KEPT:
                assert now.tables[name] >= before.tables[name], f"{name} after kill {done}"
            seen.update(requests)
            if process.exitcode == 0:
                break
            assert process.exitcode == -signal.SIGKILL
            written += sum(len(rows) for rows in now.tables.values()) > sum(map(len, before.tables.values()))
            before, done, killed = now, done + 1, killed + 1
        assert differences(left_by(out_dir), whole) == []
        assert seen.keys() == asked.keys()
        assert seen - asked <= unsettled(out_dir)
        assert (seen - asked).total() <= killed * IN_FLIGHT
        run += 1
    assert written >= kills // 3, "most kills have to hit a process that writes"
