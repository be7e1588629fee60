"""The database: group commit, isolation of failures, cancellation, closing, and refusals."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest
from sqlite_utils import Migrations

from reflact.concurrency import open_task_group
from reflact.errors import StoreError
from reflact.store.database import Database, Tables

TABLE = "CREATE TABLE notes (id INTEGER PRIMARY KEY, text TEXT NOT NULL UNIQUE)"
COLOUR = "ALTER TABLE notes ADD COLUMN colour TEXT; CREATE TABLE other (id INTEGER)"


def steps(**scripts: str) -> Migrations:
    schema = Migrations("tests")
    for name, script in scripts.items():
        schema(name=name)(partial(Tables.executescript, sql=script))
    return schema


NOTES = steps(notes=TABLE)
LATER = steps(notes=TABLE, colour=COLOUR)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "what? 100% #1.db"


@pytest.fixture
async def database(path: Path) -> AsyncIterator[Database]:
    async with Database(path, NOTES) as opened:
        yield opened


async def put(database: Database, text: str | None) -> int:
    return await database.execute("INSERT INTO notes (text) VALUES (?)", (text,))


async def texts(database: Database) -> list[str]:
    return [text for (text,) in await database.fetch_rows("SELECT text FROM notes ORDER BY id")]


def holding(entered: threading.Event, go_on: threading.Event) -> Callable[[Tables], None]:

    def work(tables: Tables) -> None:
        entered.set()
        assert go_on.wait(60)

    return work


async def until(condition: Callable[[], bool]) -> None:
    with anyio.fail_after(60):
        while not condition():
            await anyio.lowlevel.checkpoint()


async def test_a_failing_write_is_undone_alone(database: Database) -> None:

    def two_then_fail(tables: Tables) -> None:
        tables.execute("INSERT INTO notes (text) VALUES ('mine')")
        raise LookupError("mine")

    async def answer(work: Callable[[], Awaitable[object]]) -> object:
        try:
            return await work()
        except (StoreError, LookupError) as error:
            return error

    writes = (
        partial(put, database, "a"),
        partial(database.write, two_then_fail),
        partial(put, database, None),
        partial(put, database, "b"),
    )
    entered, go_on = threading.Event(), threading.Event()
    transactions = list[Tables]()
    database.fence = transactions.append
    async with open_task_group() as tasks:
        tasks.start_soon(database.write, holding(entered, go_on))
        await until(entered.is_set)
        answers = [tasks.start_soon(answer, write) for write in writes]
        await anyio.wait_all_tasks_blocked()
        go_on.set()
    first, own, sql, last = (each.return_value for each in answers)
    assert await texts(database) == ["a", "b"]
    assert (first, last, type(own)) == (1, 1, LookupError)
    assert "NOT NULL constraint failed: notes.text" in str(sql)
    assert len(transactions) == 2


async def test_a_cancelled_write_still_completes(database: Database) -> None:
    entered, go_on = threading.Event(), threading.Event()
    async with open_task_group() as tasks:
        tasks.start_soon(database.write, holding(entered, go_on))
        await until(entered.is_set)
        async with open_task_group() as doomed:
            doomed.start_soon(put, database, "kept")
            await anyio.wait_all_tasks_blocked()
            doomed.cancel_scope.cancel()
        assert not go_on.is_set()
        go_on.set()
    await put(database, "later")
    assert await texts(database) == ["kept", "later"]


async def test_closing_waits_no_longer_than_its_grace(path: Path) -> None:
    entered, go_on, before = threading.Event(), threading.Event(), set(threading.enumerate())
    async with open_task_group() as tasks, Database(path, NOTES, grace=0.01) as database:
        tasks.start_soon(put, database, "first")
        tasks.start_soon(database.write, holding(entered, go_on))
        tasks.start_soon(put, database, "last")
        await until(entered.is_set)
        await anyio.wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()
    go_on.set()
    await until(lambda: set(threading.enumerate()) == before)
    async with Database(path, NOTES) as again:
        assert await texts(again) == ["first", "last"]


async def test_a_database_may_be_opened_after_a_fork_but_not_before(path: Path) -> None:
    async with Database(path, NOTES) as database:
        database._pid += 1
        for call in (put(database, "x"), texts(database), database.checkpoint()):
            with pytest.raises(StoreError, match="this process is a fork of that one; open it anew"):
                await call
        database._pid -= 1


async def test_writes_wait_for_the_disk(database: Database) -> None:

    def settings(tables: Tables) -> tuple[object, ...]:
        names = ("journal_mode", "synchronous", "foreign_keys", "secure_delete")
        return tuple(tables.execute(f"PRAGMA {name}").fetchone()[0] for name in names)

    assert await database.write(settings) == ("wal", 2, 1, 1)


async def test_an_unknown_schema_is_refused(path: Path) -> None:
    """An older database gets the missing steps and keeps its rows; an older version does not touch it then."""
    async with Database(path, NOTES) as older:
        await put(older, "old")
    for _ in range(2):
        async with Database(path, LATER) as newer:
            assert await newer.fetch_rows("SELECT text, colour FROM notes") == [("old", None)]
    with pytest.raises(StoreError, match=r"another version of reflact .*colour"):
        async with Database(path, NOTES):
            pass


async def test_a_lock_is_waited_for(path: Path) -> None:
    async with Database(path, NOTES) as database:
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        async with open_task_group() as tasks:
            tasks.start_soon(put, database, "patient")
            await anyio.wait_all_tasks_blocked()
            other.execute("ROLLBACK")
        other.close()
        assert await texts(database) == ["patient"]
