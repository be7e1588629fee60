"""The memory under SIGKILL and under several processes; ``--kills 100`` for the whole of it."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from memory_pairs import CRITIC, make_pair
from reflact import MemoryStore
from reflact.memory.models import CardQuery

pytestmark = [pytest.mark.slow, pytest.mark.anyio]

WRITERS = 6
PROCESSES = 4
PAIRS = 250
HERE = Path(__file__).parent
HANGS = 600
"""Seconds after which a process hangs; no test waits for so long."""

PREAMBLE = """
    import os, sys
    from itertools import count
    from pathlib import Path

    import anyio

    from memory_pairs import HELD_OUT, evidence_for, make_pair
    from reflact import MemoryStore
    from reflact.memory.models import Action, Evaluation, ScoreEvent, Transition
    from reflact.concurrency import fan_out

    def acknowledge(kind, name):
        os.write(1, f"{kind} {name}\\n".encode())
"""

LOAD = """
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
            test = await memory.open_test([pair.id], holdout_id="h", traces=HELD_OUT)
            acknowledge("test", test.number)
            await memory.close_test(test.number, evidence_for(test, promoted=n % 2 == 0))
            if n % 2 == 0:
                acknowledge("promoted", pair.id)

    async def main(path, round, writers):
        async with MemoryStore(path, max_active_cards=10**6) as memory:
            await fan_out(lambda w: writer(memory, f"{round}-{w}"), range(writers))

    anyio.run(main, Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
"""

SHARE = """
    async def main(path, name, pairs):
        async with MemoryStore(path) as memory:
            shared = [make_pair(n, note="shared") for n in range(10)]
            own = [make_pair(n, note=name) for n in range(pairs)]
            await fan_out(memory.submit, shared + own, limit=8)
            test = await memory.open_test([own[0].id], holdout_id="h", traces=HELD_OUT)
            await memory.close_test(test.number, evidence_for(test))
            acknowledge("before", test.n_earlier_tests)

    anyio.run(main, Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
"""


def start(script: str, *arguments: str) -> subprocess.Popen[str]:
    source = textwrap.dedent(PREAMBLE) + textwrap.dedent(script)
    return subprocess.Popen(
        [sys.executable, "-c", source, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONWARNINGS": "error", "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])},
    )


def killed_after(acknowledgements: int, path: Path, name: str) -> list[tuple[str, str]]:
    """Let a process write until it has acknowledged so many writes, kill it, and return all it said."""
    with start(LOAD, str(path), name, str(WRITERS)) as child:
        assert child.stdout is not None
        heard = [child.stdout.readline() for _ in range(acknowledgements)]
        child.send_signal(signal.SIGKILL)
        heard += child.stdout.readlines()
    assert child.returncode == -signal.SIGKILL
    lines = (line.strip().split(" ", 1) for line in heard if line.endswith("\n"))
    return [(kind, name) for kind, name in lines]


def column(path: Path, sql: str) -> set[object]:
    other = sqlite3.connect(path)
    try:
        return {value for (value,) in other.execute(sql)}
    finally:
        other.close()


def assert_sound(path: Path) -> None:
    """The file, its index and what belongs together are whole."""
    assert column(path, "PRAGMA integrity_check") == {"ok"}
    assert column(path, "PRAGMA foreign_key_check") == set()
    column(path, "INSERT INTO memory_units_fts (memory_units_fts) VALUES ('integrity-check')")
    units = column(path, "SELECT number FROM memory_units")
    assert column(path, "SELECT rowid FROM memory_units_fts") == units
    halves = "SELECT unit FROM memory_cards GROUP BY unit HAVING count(*) = 2 AND count(DISTINCT kind) = 2"
    assert column(path, halves) == units
    last = "(SELECT after FROM memory_history WHERE unit = number ORDER BY sequence DESC LIMIT 1)"
    assert column(path, f"SELECT id FROM memory_units WHERE status <> {last}") == set()
    unproven = "SELECT unit FROM memory_history WHERE after = 'promoted' AND test_number NOT IN "
    proven = "(SELECT number FROM memory_tests WHERE json_extract(evidence, '$.passed_test'))"
    assert column(path, unproven + proven) == set()


@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGKILL")
async def test_what_was_acknowledged_survives_sigkill(tmp_path: Path, kills: int) -> None:
    """After every kill the file is sound and no pair, event, test or promotion is lost or half there."""
    path = tmp_path / "memory.db"
    moments = random.Random(11)
    promised: dict[str, set[str]] = {"pair": set(), "event": set(), "test": set(), "promoted": set()}
    for kill in range(kills):
        for kind, name in killed_after(moments.randint(1, 150), path, str(kill)):
            promised[kind].add(name)
        assert_sound(path)
        assert column(path, "SELECT id FROM memory_units") >= promised["pair"]
        assert column(path, "SELECT trace_id || '-' || step FROM trace_events") >= promised["event"]
        assert column(path, "SELECT CAST(number AS TEXT) FROM memory_tests") >= promised["test"]
        assert column(path, "SELECT id FROM memory_units WHERE status = 'promoted'") >= promised["promoted"]
    assert all(promised.values())
    async with MemoryStore(path) as memory:
        stored = {pair.pair.id for pair in await memory.pairs()}
        assert stored >= promised["pair"]
        tests = await memory.tests()
        assert [test.n_earlier_tests for test in tests] == list(range(len(tests)))
        for trace_id in await memory.trace_ids():
            trace = await memory.trace(trace_id)
            assert trace is not None
            assert [event.step for event in trace.events] == list(range(len(trace.events)))
        assert len(await memory.find(CardQuery(text="report", scope=CRITIC))) > 0


async def test_four_processes_write_one_file(tmp_path: Path) -> None:
    """Four processes that make and write one file at once lose nothing, and count each other's tests."""
    path = tmp_path / "shared.db"
    children = [start(SHARE, str(path), f"p{n}", str(PAIRS)) for n in range(PROCESSES)]
    said = [child.communicate(timeout=HANGS)[0] for child in children]
    assert [child.returncode for child in children] == [0] * PROCESSES
    assert sorted(said) == [f"before {n}\n" for n in range(PROCESSES)]
    assert_sound(path)
    wanted = {make_pair(n, note=f"p{p}").id for n in range(PAIRS) for p in range(PROCESSES)}
    wanted |= {make_pair(n, note="shared").id for n in range(10)}
    assert column(path, "SELECT id FROM memory_units") == wanted
