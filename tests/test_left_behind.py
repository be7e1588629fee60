"""Work on a database whose caller was cancelled ends in silence, also after the caller's event loop."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import anyio
import pytest

from memory_pairs import make_pair
from reflact import MemoryStore


def join_threads() -> None:
    """Wait for all threads of stores."""
    for thread in threading.enumerate():
        if thread.name.startswith("reflact-store"):
            thread.join()


async def cut_off(path: Path, begin: Callable[[MemoryStore, anyio.abc.TaskGroup], None]) -> None:
    """Begin something on a store, and be cancelled while it is under way."""
    with anyio.CancelScope() as scope:
        async with MemoryStore(path) as memory, anyio.create_task_group() as tasks:
            begin(memory, tasks)
            await anyio.wait_all_tasks_blocked()
            scope.cancel()


def test_a_read_that_outlives_its_loop_says_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What a thread finds out for somebody who is gone is dropped; nothing is logged."""
    go_on = threading.Event()

    def begin(memory: MemoryStore, tasks: anyio.abc.TaskGroup) -> None:
        tasks.start_soon(memory._database.read, lambda _: go_on.wait())

    anyio.run(cut_off, tmp_path / "memory.db", begin)
    go_on.set()
    join_threads()
    assert not caplog.records


def test_writes_that_a_lock_kept_waiting_say_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A command that is stopped while it waits for another one's lock leaves no traceback."""
    path = tmp_path / "memory.db"

    async def make() -> None:
        async with MemoryStore(path):
            pass

    def begin(memory: MemoryStore, tasks: anyio.abc.TaskGroup) -> None:
        tasks.start_soon(memory.submit, make_pair(0))

    anyio.run(make)
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        anyio.run(cut_off, path, begin)
        join_threads()
    assert not caplog.records
