"""Forgetting: what was removed stands nowhere any more, and where it does that is said."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import anyio
import pytest
from typer.testing import CliRunner, Result

from memory_pairs import make_pair
from reflact import MemoryStore, Trace
from reflact.cli.app import app
from reflact.memory.models import Action, Label, Transition

pytestmark = pytest.mark.anyio

WORD = "zebrafink"
GOLD = Label(progress_before=0, progress_after=1, source="human")


async def fill(memory: MemoryStore) -> None:
    """Store a trace and pairs that were made of it, all with one word in them, and an anchor of another."""
    trace = Trace(f"Feed the {WORD}.", id=f"{WORD} 1")
    for number in range(20):
        step = Transition(
            before=f"{WORD} {number} {'pad ' * 400}", action=Action(name="feed"), after=f"{WORD} fed {number}"
        )
        trace.record(step, label=GOLD)
    await trace.save_to(memory)
    for number in range(20):
        await memory.submit(make_pair(number, note=f"the {WORD} ate", trace=trace.id))
    await memory.add_anchors([make_pair(99, trace="another")])


def places(path: Path) -> set[str]:
    """Return the files of a memory that hold the word, in whatever case."""
    files = [file for file in path.parent.iterdir() if file.name.startswith(path.name)]
    return {file.name for file in files if WORD.encode() in file.read_bytes().lower()}


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Read from a memory for the length of the block, in a transaction of another connection."""
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN")
        other.execute("SELECT count(*) FROM traces").fetchone()
        yield


def locked(connection: sqlite3.Connection) -> bool:
    """Whether another connection keeps this one from writing."""
    try:
        connection.execute("BEGIN IMMEDIATE")
    except sqlite3.OperationalError:
        return True
    connection.execute("ROLLBACK")
    return False


def forget(path: Path) -> Result:
    """Forget the trace at a terminal."""
    return CliRunner().invoke(app, ["memory", "forget", str(path), f"{WORD} 1"])


async def test_nothing_of_a_forgotten_trace_stands_in_the_file_or_its_log(tmp_path: Path) -> None:
    """Its words are gone from both while the memory is still open, and stay gone."""
    path = tmp_path / "memory.db"
    async with MemoryStore(path) as memory:
        await fill(memory)
        assert places(path)
        gone = await memory.forget(f"{WORD} 1")
        assert (gone.n_events, len(gone.unit_ids), gone.n_anchors, gone.remains_in_wal) == (20, 20, 0, False)
        assert places(path) == set()
    assert places(path) == set()


async def test_a_reader_keeps_the_log_and_forgetting_again_empties_it(tmp_path: Path) -> None:
    """While another connection reads, the log holds what was removed; that is said, until it is emptied."""
    path = tmp_path / "memory.db"
    async with MemoryStore(path, lock_timeout=0.05) as memory:
        await fill(memory)
        with reading(path):
            assert (await memory.forget(f"{WORD} 1")).remains_in_wal
            assert places(path) == {"memory.db-wal"}
            assert (await memory.forget(f"{WORD} 1")).remains_in_wal
        assert not (await memory.forget(f"{WORD} 1")).remains_in_wal
        assert places(path) == set()


def test_the_command_says_that_the_log_still_holds_it(tmp_path: Path) -> None:
    """It names the file and what to do; given again after the reader has ended, it says that this is done."""
    path = tmp_path / "memory.db"

    async def prepare() -> None:
        async with MemoryStore(path) as memory:
            await fill(memory)

    anyio.run(prepare)
    with reading(path):
        said = forget(path).stdout
        assert "forgot trace zebrafink 1: 20 events" in said
        assert "memory.db-wal still contains" in said
        assert "run this command again" in said
        again = forget(path)
        assert again.exit_code == 2
        assert "memory.db-wal may still contain data" in again.stderr
    done = forget(path)
    assert done.exit_code == 2
    assert "nothing in" in done.stderr
    assert "still" not in done.stderr
    assert places(path) == set()


async def test_waiting_for_a_reader_leaves_the_processor_alone(tmp_path: Path) -> None:
    """Where SQLite says at once that the log is busy, it is not asked again without a pause."""
    path, asked = tmp_path / "memory.db", []

    def checkpoint() -> None:
        with closing(sqlite3.connect(path, timeout=20)) as other:
            other.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()

    def note(statement: str) -> None:
        if "checkpoint" in statement:
            asked.append(statement)

    async with MemoryStore(path, lock_timeout=0.2) as memory:
        await fill(memory)
        await memory._database.write(lambda tables: tables.conn.set_trace_callback(note))
        with reading(path):
            await memory.submit(make_pair(200))
            other = threading.Thread(target=checkpoint)
            other.start()
            with closing(sqlite3.connect(path, timeout=0, isolation_level=None)) as third:
                while not locked(third):
                    await anyio.lowlevel.checkpoint()
            assert not await memory._database.checkpoint()
        await anyio.to_thread.run_sync(other.join)
    assert 1 <= len(asked) <= 25
