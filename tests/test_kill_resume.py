"""A training run under SIGKILL: real processes, a real server, one history."""

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
from collections.abc import Callable, Iterator
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import NamedTuple

import pytest

from pure_world import TWINS, Ended, differences, left_by, rows, settings, write_world
from reflact.records import StepRecord
from training_process import train

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGKILL"),
]

RUNS = 4
KILLS_EACH = 4
IN_FLIGHT = 16
SEED = 20260
LATEST_SECONDS = 0.03
HERE = Path(__file__).parent
PRELOADED = ["reflact.llm.client", "reflact.store.runs", "reflact.targets.chat", "training_process"]


class Whole(NamedTuple):
    """An unbroken run: where it is, what it left, and what the server saw."""

    folder: Path
    ended: Ended
    seen: list[tuple[str, str]]


class House:
    """The server, and the processes that train against it."""

    def __init__(self, port: int, context: ForkServerContext, folder: Path) -> None:
        self._port = port
        self._context = context
        self._world = write_world(folder / "world")

    def start(self, out_dir: Path) -> ForkServerProcess:
        """Start a process that trains."""
        process = self._context.Process(target=train, args=(settings(self._world, out_dir), self._port))
        process.start()
        return process

    def finish(self, out_dir: Path) -> Ended:
        """Train to the end in a process, and read what it left."""
        process = self.start(out_dir)
        process.join(60)
        assert process.exitcode == 0
        return left_by(out_dir)

    def ask(self, path: str) -> list[tuple[str, str]]:
        """Ask the server something; it answers with its log."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self._port}{path}", timeout=30) as response:
            return [(body, call_id) for body, call_id in json.load(response)]


def _unsettled(out_dir: Path) -> Counter[str]:
    return Counter(
        call_id for (call_id,) in rows(out_dir, "SELECT call_id FROM calls WHERE state = 'unsettled'")
    )


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
    """The run that is to be killed has every stage, asks again, falls back, accepts and rejects."""
    records = [StepRecord.model_validate_json(c[3]) for c in whole.ended.commits if c[1] == "step"]
    purposes = {call_id.split("/")[1] for _, call_id in whole.seen}
    stages = {"rollout", "merge", "ranking", "slow_update", "meta_skill", "consolidate"}
    analysts = {"analyst_failure", "analyst_success", "lapse_failure", "lapse_success"}
    assert purposes >= stages | analysts
    assert {r.verdict.action for r in records} & {"accept", "accept_new_best"}
    assert {r.verdict.action for r in records} & {"reject", "inconclusive"}
    assert not whole.ended.summary.deterministic
    assert any(call_id.endswith("attempt=1") for _, call_id in whole.seen)
    assert any(f.label.startswith("merge/") for r in records for f in r.merged.fallbacks)
    assert Counter(c[1] for c in whole.ended.commits)["epoch"] == 3


def test_no_request_is_sent_twice(house: House, whole: Whole) -> None:
    """An unbroken run asks for every body and sample once, and starting it again asks for nothing."""
    assert max(Counter(whole.seen).values()) == 1
    assert differences(house.finish(whole.folder), whole.ended) == []
    assert house.ask("/forget") == []


def test_equal_texts_are_two_effects(whole: Whole) -> None:
    """Two items of one text at temperature 1 send the same body twice and get an answer each."""
    samples: dict[str, set[str]] = {}
    for body, call_id in whole.seen:
        samples.setdefault(body, set()).add(call_id)
    assert max(len(found) for found in samples.values()) >= len(TWINS)
    rollouts = [json.loads(text) for (text,) in rows(whole.folder, "SELECT rollout FROM rollouts")]
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
    assert differences(ended, whole.ended) == []
    assert seen.keys() == set(whole.seen)
    repeats = Counter({call_id: times - 1 for (_, call_id), times in seen.items()})
    assert repeats <= _unsettled(tmp_path)
    assert repeats.total() <= KILLS_EACH * IN_FLIGHT
