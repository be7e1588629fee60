"""A store in memory and a network with faults, for tests."""

from __future__ import annotations

import itertools
import sqlite3
import weakref
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TypeAlias, TypeVar

import httpx
from anyio.lowlevel import checkpoint

from reflact.store.database import Database, Tables
from reflact.store.errors import UNSTORABLE_ERRORS, translate_error
from reflact.store.runs import SQLiteRunStore
from reflact.store.schema import SCHEMA

Fault: TypeAlias = httpx.Response | httpx.TransportError
"""A response that is served instead of the server's, or an error that is raised.

The server works only for requests whose answer is late (``httpx.ReadTimeout``)."""


class FaultyTransport(httpx.AsyncBaseTransport):
    """Passes requests on to another transport and injects faults into some.

    Args:
        inner: Serves the requests.
        faults: Gets each request and its number, from 0; returns the fault to inject, or None.
    """

    def __init__(
        self, inner: httpx.AsyncBaseTransport, faults: Callable[[httpx.Request, int], Fault | None]
    ) -> None:
        self._inner = inner
        self._faults = faults
        self._numbers = itertools.count()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Serve or break one request."""
        await checkpoint()
        fault = self._faults(request, next(self._numbers))
        if isinstance(fault, httpx.Response):
            return fault
        if isinstance(fault, httpx.TransportError) and not isinstance(fault, httpx.ReadTimeout):
            raise fault
        response = await self._inner.handle_async_request(request)
        if isinstance(fault, httpx.ReadTimeout):
            await response.aclose()
            raise fault
        return response

    async def aclose(self) -> None:
        """Close the inner transport."""
        await self._inner.aclose()


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

    async def _submit(self, jobs: object, work: Callable[[Tables], T]) -> T:
        try:
            with self._tables.atomic():
                return work(self._tables)
        except (sqlite3.Error, *UNSTORABLE_ERRORS) as error:
            raise translate_error(error, self.path) from error

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
