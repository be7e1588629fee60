"""Training runs under SIGKILL: real processes, a real server, one history; ``--kills 100`` for a hundred kills."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from processes import get_context
from pure_world import TWINS, Ended, differences, left_by, rows, settings, write_world
from reflact.records import StepRecord
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

KEPT = {
    "outcomes": "SELECT kind, run_id, key, value FROM outcomes",
    "commits": "SELECT run_id, number, kind, record FROM commits",
    "settled": "SELECT id, call_id, input_tokens, output_tokens FROM calls WHERE state = 'settled'",
}
"""What is committed is never changed and never lost."""


class Processes:
    """The server, and the processes that train against it, which have imported everything."""

    def __init__(self, port: int, folder: Path) -> None:
        self._port = port
        self._context = get_context()
        self._worlds = {
            False: write_world(folder / "long"),
            True: write_world(folder / "wide", train=24, val=16, test=8),
        }

    def start(self, out_dir: Path, *, wide: bool) -> ForkServerProcess:
        sections: dict[str, Any] = {"train": {"num_epochs": 1, "batch_size": 6}} if wide else {}
        config = settings(self._worlds[wide], out_dir, **sections)
        if wide:
            for role in ("target", "optimizer"):
                config["models"][role]["concurrency"] = IN_FLIGHT
        process = self._context.Process(target=train, args=(config, self._port))
        process.start()
        return process

    def finish(self, out_dir: Path, *, wide: bool) -> Ended:
        process = self.start(out_dir, wide=wide)
        process.join(120)
        assert process.exitcode == 0
        return left_by(out_dir)

    def requests(self, how: str = "forget") -> list[tuple[str, str]]:
        with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/{how}", timeout=30) as response:
            return [(body, call_id) for body, call_id in json.load(response)]

    def until_asked(self, process: ForkServerProcess) -> float:
        since = time.monotonic()
        while process.is_alive() and not self.requests("seen"):
            process.join(0.02)
        return time.monotonic() - since


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    command = [sys.executable, str(HERE / "pure_server.py")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            yield Processes(int(server.stdout.readline()), tmp_path_factory.mktemp("worlds"))
        finally:
            server.kill()


def test_no_request_is_sent_twice(processes: Processes, tmp_path: Path) -> None:
    """An unbroken run asks for every body and sample once, and starting it again asks for nothing.

    The run has every stage, asks again, falls back, accepts and rejects. Two items of one text at temperature 1
    send the same body twice and get an answer each.
    """
    ended, seen = processes.finish(tmp_path, wide=False), processes.requests()
    records = [StepRecord.model_validate_json(c[3]) for c in ended.commits if c[1] == "step"]
    purposes = {call_id.split("/")[1] for _, call_id in seen}
    assert purposes >= {"rollout", "merge", "ranking", "slow_update", "meta_skill", "consolidate"}
    assert purposes >= {"analyst_failure", "analyst_success", "lapse_failure", "lapse_success"}
    assert {r.verdict.action for r in records} & {"accept", "accept_new_best"}
    assert {r.verdict.action for r in records} & {"reject", "set_aside"}
    assert any(call_id.endswith("attempt=1") for _, call_id in seen)
    assert any(f.label.startswith("merge/") for r in records for f in r.merged.fallbacks)
    assert Counter(c[1] for c in ended.commits)["epoch"] == 3

    assert max(Counter(seen).values()) == 1
    samples: dict[str, set[str]] = {}
    for body, call_id in seen:
        samples.setdefault(body, set()).add(call_id)
    assert max(len(found) for found in samples.values()) >= len(TWINS)
    rollouts = [
        json.loads(text) for (text,) in rows(tmp_path, "SELECT value FROM outcomes WHERE kind = 'rollout'")
    ]
    assert len({r["answer"] for r in rollouts if r["item_id"] in TWINS}) >= len(TWINS)

    assert differences(processes.finish(tmp_path, wide=False), ended) == []
    assert processes.requests() == []


class Kept(NamedTuple):
    """All that a database holds for good, by table."""

    tables: dict[str, frozenset[Any]]

    @property
    def settled(self) -> set[str]:
        return {str(call_id) for _, call_id, *_ in self.tables["settled"]}


NOTHING = Kept({name: frozenset() for name in KEPT})


def looked_into(out_dir: Path) -> Kept:
    if not rows(out_dir, "SELECT 1 FROM sqlite_master WHERE name = 'commits'"):
        return NOTHING
    assert rows(out_dir, "PRAGMA integrity_check") == (("ok",),)
    assert rows(out_dir, "PRAGMA foreign_key_check") == ()
    return Kept({name: frozenset(rows(out_dir, query)) for name, query in KEPT.items()})


def unsettled(out_dir: Path) -> Counter[str]:
    return Counter(str(s) for (s,) in rows(out_dir, "SELECT call_id FROM calls WHERE state <> 'settled'"))


@pytest.mark.parametrize("wide", [True, False])
def test_random_kills_lose_nothing_and_repeat_nothing(
    processes: Processes, tmp_path: Path, kills: int, wide: bool
) -> None:
    """After every kill the file is sound and holds all that it held; nothing settled is asked again.

    A run that was killed so ends as one that never was, and repeats at most what was in flight.
    """
    process = processes.start(tmp_path / "whole", wide=wide)
    start_up, since = processes.until_asked(process), time.monotonic()
    process.join(120)
    assert process.exitcode == 0
    longest = SHARE * (time.monotonic() - since)
    whole, asked = left_by(tmp_path / "whole"), Counter(call_id for _, call_id in processes.requests())
    assert max(asked.values()) == 1

    chance, done, run, written = random.Random(SEED), 0, 0, 0
    while done < kills:
        out_dir, before, seen, killed = tmp_path / f"run-{run}", NOTHING, Counter[str](), 0
        out_dir.mkdir()
        while True:
            process = processes.start(out_dir, wide=wide)
            if done == kills:
                process.join(120)
            elif chance.random() < EARLY:
                process.join(chance.uniform(0, start_up))
            else:
                processes.until_asked(process)
                process.join(chance.uniform(0, longest))
            process.kill()
            process.join()
            now, requests = looked_into(out_dir), [call_id for _, call_id in processes.requests()]
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
