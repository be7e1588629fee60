"""The store under SIGKILL and under several processes: real processes, real files."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import subprocess
import sys
import textwrap
from collections import defaultdict
from pathlib import Path

import pytest

from reflact.store.runs import open_store

pytestmark = [pytest.mark.slow, pytest.mark.anyio]

KILLS = 20
WRITERS = 12
PROCESSES = 4
NOTES = 60

HOUSE = """
    import os, sys
    from itertools import count
    from pathlib import Path

    import anyio

    from reflact.messages import CallReservation, StoredResponse
    from reflact.records import Usage
    from reflact.store.runs import open_store
    from reflact.concurrency import fan_out
    from reflact.records import RunState, StepRecord, SkillVersion
    from reflact.types import (Score, Rollout, Skill)

    def acknowledge(kind, name):
        os.write(1, f"{kind} {name}\\n".encode())

    def reserved_call(key, run_id):
        return CallReservation(
            key=key, run_id=run_id, call_id="s", role="target", purpose="rollout", endpoint="e", model="m"
        )

    def reply(key):
        return StoredResponse(
            key=key, status=200, content_type="text/plain", chunks=(key * 40,), usage=Usage(calls=1, usd=0.5)
        )
"""

LOAD = """
    async def caller(store, name):
        for n in count():
            key = f"{name}-{n}"
            await store.reserve(reserved_call(key, "r"))
            acknowledge("reserved", key)
            await store.store_response(reply(key), reserved_call(key, "r"))
            acknowledge("reply", key)
            await store.store_rollout(Rollout(key=key, item_id="i", skill_hash="h", score=Score.of(1)))
            acknowledge("rollout", key)

    async def stepper(store, state):
        for step in count(0 if state is None else state.step + 1):
            skill = Skill(text=f"skill of step {step}")
            version = SkillVersion(number=step, skill_hash=skill.hash, origin="o")
            new = RunState(step=step, commits=step + 1, current=version, best=version)
            await store.commit("r", None, new, [skill])
            acknowledge("step", f"{step} {skill.hash}")

    async def main(path, round, writers):
        async with open_store(path) as store:
            state = await store.open_run("r", {"seed": 1}, None)
            work = [lambda: stepper(store, state)]
            work += [lambda w=w: caller(store, f"{round}-{w}") for w in range(writers)]
            await fan_out(lambda call: call(), work)

    anyio.run(main, Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
"""

SHARE = """
    async def main(path, name, notes):
        async with open_store(path) as store:
            await store.open_run(name, {"name": name}, None)
            await store.open_run("shared", {}, None)

            async def one(n):
                await store.reserve(reserved_call(f"{name}-{n}", name))
                await store.store_response(reply(f"{name}-{n}"), reserved_call(f"{name}-{n}", name))
                await store.add_seconds("shared", 1.0)

            await fan_out(one, range(notes), limit=8)

    anyio.run(main, Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
"""


def start(script: str, *arguments: str) -> subprocess.Popen[str]:
    source = textwrap.dedent(HOUSE) + textwrap.dedent(script)
    return subprocess.Popen(
        [sys.executable, "-c", source, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONWARNINGS": "error"},
    )


def killed_after(acknowledgements: int, path: Path, name: str) -> list[str]:
    """Let a process write until it has acknowledged so many writes, kill it, and return all it said."""
    with start(LOAD, str(path), name, str(WRITERS)) as child:
        assert child.stdout is not None
        heard = [child.stdout.readline() for _ in range(acknowledgements)]
        child.send_signal(signal.SIGKILL)
        heard += child.stdout.readlines()
    assert child.returncode == -signal.SIGKILL
    return [line.strip() for line in heard if line.endswith("\n")]


def column(path: Path, sql: str) -> set[str]:
    other = sqlite3.connect(path)
    try:
        return {value for (value,) in other.execute(sql)}
    finally:
        other.close()


@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGKILL")
async def test_what_was_acknowledged_survives_sigkill(tmp_path: Path) -> None:
    """After each of 20 kills the file is whole, opens, and holds every write acknowledged so far."""
    path = tmp_path / "run.db"
    moments = random.Random(20)
    promised: dict[str, set[str]] = defaultdict(set)
    for kill in range(KILLS):
        for line in killed_after(moments.randint(1, 300), path, str(kill)):
            kind, name = line.split(" ", 1)
            promised[kind].add(name)
        assert column(path, "PRAGMA integrity_check") == {"ok"}
        assert column(path, "SELECT key FROM calls") >= promised["reserved"]
        assert column(path, "SELECT key FROM responses") >= promised["reply"]
        assert column(path, "SELECT key FROM rollouts") >= promised["rollout"]
        assert (
            column(path, "SELECT step || ' ' || json_extract(state, '$.current.skill_hash') FROM commits")
            >= (promised["step"])
        )
        assert column(path, "PRAGMA foreign_key_check") == set()
    assert all(len(names) > KILLS for names in promised.values())
    async with open_store(path) as store:
        state = await store.open_run("r", {"seed": 1}, None)
        assert state is not None
        assert [version.number for version in await store.versions("r")] == list(range(state.step + 1))
        for version in await store.versions("r"):
            assert (await store.skill(version.skill_hash)).text == f"skill of step {version.number}"
        (spend,) = await store.spend("r")
    assert spend.usage.calls == len(column(path, "SELECT key FROM responses"))
    assert spend.usage.calls + spend.unsettled == len(column(path, "SELECT key FROM calls"))
    assert spend.unsettled <= KILLS * WRITERS


async def test_processes_share_a_file(tmp_path: Path) -> None:
    """Four processes that make, open and write one file at the same time lose nothing."""
    path = tmp_path / "shared.db"
    children = [start(SHARE, str(path), f"p{n}", str(NOTES)) for n in range(PROCESSES)]
    for child in children:
        child.communicate(timeout=60)
    assert [child.returncode for child in children] == [0] * PROCESSES
    assert len(column(path, "SELECT key FROM responses")) == PROCESSES * NOTES
    async with open_store(path) as store:
        assert await store.add_seconds("shared", 0.0) == PROCESSES * NOTES
        for n in range(PROCESSES):
            (spend,) = await store.spend(f"p{n}")
            assert (spend.usage.calls, spend.usage.usd, spend.unsettled) == (NOTES, NOTES * 0.5, 0)
