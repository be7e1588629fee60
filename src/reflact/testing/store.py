"""A run store in memory."""

from __future__ import annotations

import sqlite3
import weakref
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TypeVar

from reflact.store.database import Database, Tables
from reflact.store.errors import UNSTORABLE_ERRORS, translate_error
from reflact.store.runs import SQLiteRunStore
from reflact.store.schema import SCHEMA

T = TypeVar("T")


class InMemoryRunStore(SQLiteRunStore):
    """A store of runs without a file and without threads, for one event loop."""

    def __init__(self) -> None:
        super().__init__(InMemoryDatabase())


class InMemoryDatabase(Database):
    """A database without a file: each function runs at once, in the caller's thread."""

    def __init__(self) -> None:
        super().__init__(Path(":memory:"), SCHEMA)
        connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        connection.deserialize(_serialize_empty_database())
        connection.execute("PRAGMA foreign_keys = ON")
        self._tables = Tables(connection, execute_plugins=False)
        weakref.finalize(self, connection.close)

    async def write(self, work: Callable[[Tables], T]) -> T:
        """Run a function in a transaction and return its result."""
        try:
            with self._tables.atomic():
                return work(self._tables)
        except (sqlite3.Error, *UNSTORABLE_ERRORS) as error:
            raise translate_error(error, self.path) from error

    async def read(self, work: Callable[[Tables], T], *, single: bool = False) -> T:
        """Run a function and return its result."""
        return await self.write(work)

    async def checkpoint(self) -> bool:
        """Return that there is no log."""
        return True


@cache
def _serialize_empty_database() -> bytes:
    connection = sqlite3.connect(":memory:", isolation_level=None)
    try:
        SCHEMA.apply(Tables(connection, execute_plugins=False))
        return connection.serialize()
    finally:
        connection.close()
