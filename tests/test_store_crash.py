"""The store and the memory under SIGKILL and under several processes; ``--kills 100`` for the whole of it."""

from __future__ import annotations

import random
import signal
import sqlite3
import sys
import textwrap
from collections import defaultdict
from contextlib import closing
from pathlib import Path

import pytest

from processes import Program
from reflact import MemoryStore
from reflact.store.runs import open_store

pytestmark = pytest.mark.slow

KILLS = 20
SCRIPT = """
    import os, sys, warnings
    from itertools import count
    from pathlib import Path

    import anyio

    from memory_pairs import HELD_OUT, evidence_for, make_pair
    from reflact import MemoryStore
    from reflact.concurrency import fan_out
    from reflact.memory.models import Action, Evaluation, ScoreEvent, Transition
    from reflact.messages import CallReservation, StoredResponse
    from reflact.records import RunState, SkillVersion, Usage
    from reflact.store.runs import open_store
    from reflact.types import Rollout, Score, Skill

    warnings.simplefilter("error")

    def acknowledge(kind, name):
        os.write(1, f"{kind} {name}\\n".encode())

    def reserved_call(key, run_id):
        return CallReservation(
            key=key, run_id=run_id, call_id="s", role="target", purpose="rollout", endpoint="e", model="m"
        )

    def reply(key):
        return StoredResponse(key=key, text=key * 40, usage=Usage(calls=1, usd=0.5))
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


MEMORY_LOAD = """
    async def writer(memory, name):
        trace = f"trace-{name}"
        await memory.open_trace(trace, "p")
        for n in count():
            pair = make_pair(n, note=name, trace=trace)
            await memory.submit(pair)
            acknowledge("pair", pair.id)
            transition = Transition(before=0, action=Action(name=name), after=n)
            evaluation = Evaluation(progress_before=0, progress_after=1, reasoning="r" * 3000)
            await memory.append(trace, ScoreEvent(step=n, transition=transition, evaluation=evaluation))
            acknowledge("event", f"{trace}-{n}")
            test = await memory.open_test([pair.id], traces=HELD_OUT)
            acknowledge("test", test.number)
            await memory.close_test(test.number, evidence_for(test, promoted=n % 2 == 0))
            if n % 2 == 0:
                acknowledge("promoted", pair.id)

    async def main(path, round, writers):
        async with MemoryStore(path, max_active_pairs=10**6) as memory:
            await fan_out(lambda w: writer(memory, f"{round}-{w}"), range(writers))

    anyio.run(main, Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
"""


def start(script: str, *arguments: str) -> Program:
    return Program(textwrap.dedent(SCRIPT) + textwrap.dedent(script), *arguments)


def killed_after(n_lines: int, script: str, *arguments: str) -> dict[str, set[str]]:
    """Let a process write until it has acknowledged so many writes, kill it, and return all it said by kind."""
    child = start(script, *arguments)
    heard = [child.output.readline() for _ in range(n_lines)]
    child.kill()
    code, rest = child.wait()
    heard += rest.splitlines(keepends=True)
    assert code == -signal.SIGKILL
    said: dict[str, set[str]] = defaultdict(set)
    for line in heard:
        if line.endswith("\n"):
            kind, name = line.strip().split(" ", 1)
            said[kind].add(name)
    return said


def column(path: Path, sql: str) -> set[object]:
    with closing(sqlite3.connect(path)) as other:
        return {value for (value,) in other.execute(sql)}


def assert_sound(path: Path) -> None:
    assert column(path, "PRAGMA integrity_check") == {"ok"}
    assert column(path, "PRAGMA foreign_key_check") == set()
    passed = "SELECT value FROM memory_tests, json_each(test, '$.pair_ids') WHERE json_extract(test, '$.evidence.passed_test')"
    assert column(path, "SELECT id FROM memory_pairs WHERE status = 'promoted'") == column(path, passed)


@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGKILL")
async def test_what_was_acknowledged_survives_sigkill(tmp_path: Path) -> None:
    """After each of 20 kills the file is whole, opens, and holds every write acknowledged so far."""
    path = tmp_path / "run.db"
    moments = random.Random(20)
    promised: dict[str, set[str]] = defaultdict(set)
    for kill in range(KILLS):
        for kind, names in killed_after(moments.randint(1, 300), LOAD, str(path), str(kill), "12").items():
            promised[kind] |= names
        assert column(path, "PRAGMA integrity_check") == {"ok"}
        assert column(path, "SELECT key FROM calls") >= promised["reserved"]
        assert column(path, "SELECT key FROM outcomes WHERE kind = 'response'") >= promised["reply"]
        assert column(path, "SELECT key FROM outcomes WHERE kind = 'rollout'") >= promised["rollout"]
        assert (
            column(
                path,
                "SELECT step || ' ' || json_extract(record, '$.current.skill_hash') FROM commits",
            )
            >= (promised["step"])
        )
        assert column(path, "PRAGMA foreign_key_check") == set()
    assert all(len(names) > KILLS for names in promised.values())
    async with open_store(path) as store:
        state = await store.open_run("r", {"seed": 1}, None)
        assert [version.number for version in await store.versions("r")] == list(range(state.step + 1))
        for version in await store.versions("r"):
            assert (await store.skill(version.skill_hash)).text == f"skill of step {version.number}"
        (spend,) = await store.spend("r")
    assert spend.usage.calls == len(column(path, "SELECT key FROM outcomes WHERE kind = 'response'"))
    assert spend.usage.calls + spend.unsettled == len(column(path, "SELECT key FROM calls"))
    assert spend.unsettled <= KILLS * 12


@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGKILL")
async def test_what_a_memory_acknowledged_survives_sigkill(tmp_path: Path, kills: int) -> None:
    """After every kill the file is sound and no pair, event, test or promotion is lost or half there."""
    path = tmp_path / "memory.db"
    moments = random.Random(11)
    promised: dict[str, set[str]] = defaultdict(set)
    for kill in range(kills):
        for kind, names in killed_after(
            moments.randint(1, 150), MEMORY_LOAD, str(path), str(kill), "6"
        ).items():
            promised[kind] |= names
        assert_sound(path)
        assert column(path, "SELECT id FROM memory_pairs") >= promised["pair"]
        assert column(path, "SELECT trace_id || '-' || step FROM trace_events") >= promised["event"]
        assert column(path, "SELECT CAST(number AS TEXT) FROM memory_tests") >= promised["test"]
        assert column(path, "SELECT id FROM memory_pairs WHERE status = 'promoted'") >= promised["promoted"]
    assert promised.keys() == {"pair", "event", "test", "promoted"}
    async with MemoryStore(path) as memory:
        stored = {pair.pair.id for pair in await memory.pairs()}
        assert stored >= promised["pair"]
        tests = await memory.tests()
        assert [test.n_earlier_tests for test in tests] == list(range(len(tests)))
        for trace_id in await memory.trace_ids():
            trace = await memory.trace(trace_id)
            assert [event.step for event in trace.events] == list(range(len(trace.events)))
        assert len(await memory.find("report")) > 0
