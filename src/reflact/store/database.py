"""An asynchronous SQLite database: one thread that writes and commits in groups, and one that
reads.

Concurrent writes share a transaction and so one wait for the disk. Other modules pass work on the
tables as plain functions. The threads take it from queues and wake the event loop once for all
outcomes of a batch: a hand-over between threads takes more processor time than a short statement.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import closing, suppress
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Self, TypeVar

import anyio
from sqlite_utils import Database as Tables
from sqlite_utils import Migrations

from reflact.errors import StoreError
from reflact.store.errors import SQLITE_REASONS, translate_error

__all__ = ["Database", "Tables"]

T = TypeVar("T")
LOCK_TIMEOUT_SECONDS = 30.0
# How long SQLite waits for another process before the writer checks whether it closes.
LOCK_POLL_SECONDS = 0.1
# How long a checkpoint waits for readers of the log.
CHECKPOINT_SECONDS = 1.0


@dataclass(eq=False)
class _Job:
    """A function of the tables, and its outcome for the caller that waits for the future."""

    work: Callable[[Tables], Any]
    future: asyncio.Future[Any]
    value: Any = None
    error: BaseException | None = None

    def run(self, tables: Tables, path: Path) -> None:
        try:
            self.value = self.work(tables)
        except BaseException as error:  # noqa: BLE001 - handed to the caller
            self.error = translate_error(error, path)

    def settle(self) -> None:
        if self.future.done():
            return  # its caller was cancelled
        if self.error is None:
            self.future.set_result(self.value)
        else:
            self.future.set_exception(self.error)


# Jobs of a thread; None ends it.
_Queue = SimpleQueue[_Job | None]


@dataclass(eq=False)
class Database:
    """An asynchronous SQLite database; use it once, by ``async with``, in one event loop.

    Opening it, and every method, raises StoreError, which names the file and the problem, or
    DataError if a text or a number cannot be stored in a file. A fork of the process that opened
    the database is refused.

    Args:
        path: The file; it and its folder are created if they are missing.
        schema: All migrations in order; pending ones are applied on opening.
        lock_timeout: Seconds to wait for another process's lock.
        grace: Seconds that a cancelled closing waits for active writes, which complete later.
        read_only: Write nothing to the file, which must exist.

    Attributes:
        fence: Called at the start of each write transaction; it may raise to refuse the
            transaction.
    """

    path: Path
    schema: Migrations
    _: KW_ONLY
    lock_timeout: float = LOCK_TIMEOUT_SECONDS
    grace: float = 0.3
    read_only: bool = False
    fence: Callable[[Tables], None] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._pid = 0
        self._is_closing = threading.Event()
        self._writes: _Queue = SimpleQueue()
        self._reads: _Queue = SimpleQueue()
        self._opened: Future[None] = Future()
        self._closed: Future[None] = Future()
        self._writer = threading.Thread(target=self._run, name="reflact-store-writer", daemon=True)

    async def __aenter__(self) -> Self:
        self._pid = os.getpid()
        self._loop = asyncio.get_running_loop()
        for future in (self._opened, self._closed):
            future.set_running_or_notify_cancel()  # a cancelled caller does not cancel them
        self._writer.start()
        try:
            await asyncio.wrap_future(self._opened)
        except BaseException as error:
            await self.__aexit__(type(error))
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> None:
        """End the threads after their jobs; if cancelled, wait no longer than the grace."""
        self._pid = 0
        self._writes.put(None)
        try:
            if kind is None or not issubclass(kind, anyio.get_cancelled_exc_class()):
                await asyncio.wrap_future(self._closed)
        finally:
            with anyio.move_on_after(self.grace, shield=True):
                await asyncio.wrap_future(self._closed)
            self._is_closing.set()
            if self._closed.done():
                self._writer.join()
            else:
                atexit.register(self._writer.join)  # the process ends after its writes

    async def check_integrity(self) -> None:
        """Read the whole file, and check its structure; StoreError if it is damaged."""
        ((problem,),) = await self.fetch_rows("PRAGMA integrity_check(1)")
        if problem != "ok":
            shown = " ".join(str(problem).split())
            raise self._refuse(f"{SQLITE_REASONS[sqlite3.SQLITE_CORRUPT]} ({shown})")

    async def write(self, work: Callable[[Tables], T]) -> T:
        """Run a function in a write transaction and return its result once that is on disk.

        Waiting functions share the transaction; a function that raises is rolled back alone. A
        cancelled caller returns at once; its function still runs and is committed.
        """
        if self.read_only:
            raise self._refuse("it was opened read-only; open it without read_only")
        return await self._submit(self._writes, work)

    async def read(self, work: Callable[[Tables], T]) -> T:
        """Run a function on a read-only snapshot; it must return values and no open cursors."""

        def read(tables: Tables) -> T:
            with tables.atomic():
                return work(tables)

        return await self._submit(self._reads, read)

    async def execute(self, sql: str, parameters: Sequence[Any] = ()) -> int:
        """Execute a statement and return the number of changed rows."""
        return await self.write(lambda tables: tables.execute(sql, parameters).rowcount)

    async def fetch_rows(self, sql: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Execute a query, which is a snapshot without a transaction, and return all rows."""
        return await self._submit(
            self._reads, lambda tables: tables.execute(sql, parameters).fetchall()
        )

    async def checkpoint(self) -> bool:
        """Move committed data from the log into the file; return whether the log is empty.

        Another process that reads the log, or writes, prevents this.
        """
        self._require_open()
        return await anyio.to_thread.run_sync(self._empty_log)

    async def _submit(self, jobs: _Queue, work: Callable[[Tables], T]) -> T:
        self._require_open()
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        jobs.put(_Job(work, future))
        return await future

    def _require_open(self) -> None:
        if not self._pid:
            raise self._refuse("it is not open; use it inside `async with`")
        if os.getpid() != self._pid:
            raise self._refuse(
                f"process {self._pid} opened it, and this process is a fork of that one; open it "
                "anew in this process"
            )

    def _refuse(self, reason: str) -> StoreError:
        return StoreError(f"database {self.path}: {reason}")

    # ------------------------------------------------------------------ on the threads

    def _run(self) -> None:
        """Open the file, serve the jobs until the end, and close the file."""
        try:
            with closing(self._open_file()) as tables, closing(self._connect()) as reading:
                reader = threading.Thread(
                    target=self._serve_reads, args=[reading], name="reflact-store-reader"
                )
                reader.daemon = True
                reader.start()
                self._opened.set_result(None)
                self._serve_writes(tables)
                self._reads.put(None)
                reader.join()
        except BaseException as error:  # noqa: BLE001 - handed to the caller
            if not self._opened.done():
                self._opened.set_exception(translate_error(error, self.path))
        finally:
            self._closed.set_result(None)

    def _open_file(self) -> Tables:
        """Return the connection that writes; if nothing is written, one that checks the schema."""
        if self.path.exists() and not self.path.is_file():
            raise self._refuse("it cannot be opened, since it is no regular file")
        if not self.read_only:
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                reason = error.strerror or error
                raise self._refuse(f"cannot make its folder: {reason}") from error
        tables = self._connect(writes=not self.read_only)
        try:
            if not self.read_only:
                self._retry_while_locked(lambda: self._prepare(tables))
            elif self._has_pending_migrations(tables):
                raise self._refuse("reflact has stored nothing in it; name another file")
        except BaseException:
            tables.close()
            raise
        return tables

    def _connect(self, *, writes: bool = False) -> Tables:
        """Open the file.

        A connection in mode ``ro`` leaves a log and its index behind if it created them. One in
        mode ``rw`` removes them on closing, so it is used if nothing writes; ``query_only`` keeps
        it from writing.
        """
        mode = "rw"
        timeout = self.lock_timeout
        if writes:
            mode = "rwc"
            timeout = min(timeout, LOCK_POLL_SECONDS)
        elif wal_path(self.path).exists():
            mode = "ro"
        uri = f"{self.path.absolute().as_uri()}?mode={mode}"
        connection = sqlite3.connect(
            uri, uri=True, timeout=timeout, isolation_level=None, check_same_thread=False
        )
        if not writes:
            connection.execute("PRAGMA query_only = ON")
        return Tables(connection, execute_plugins=False)

    def _prepare(self, tables: Tables) -> None:
        tables.execute("PRAGMA journal_mode = WAL")
        tables.execute("PRAGMA synchronous = FULL")
        tables.execute("PRAGMA foreign_keys = ON")
        tables.execute("PRAGMA secure_delete = ON")
        if self._has_pending_migrations(tables):
            with tables.atomic():
                self.schema.apply(tables)

    def _has_pending_migrations(self, tables: Tables) -> bool:
        """Whether migrations are pending; StoreError if the file has an unknown one."""
        with closing(Tables(memory=True)) as empty:
            known = {step.name for step in self.schema.pending(empty)}
        unknown = [done.name for done in self.schema.applied(tables) if done.name not in known]
        if unknown:
            raise self._refuse(
                f"it was written by another version of reflact (schema step {unknown[-1]}); use "
                "that version, or name another file"
            )
        return bool(self.schema.pending(tables))

    def _serve_writes(self, tables: Tables) -> None:
        while (job := self._writes.get()) is not None:
            try:
                self._retry_while_locked(lambda: tables.execute("BEGIN IMMEDIATE"))
            except sqlite3.Error as error:
                # Jobs that came while the first one waited for the lock do not wait as long again.
                batch = _take_waiting(job, self._writes)
                self._fail(batch, error)
            else:
                batch = _take_waiting(job, self._writes)
                self._commit(tables, batch)
            self._deliver(batch)

    def _commit(self, tables: Tables, batch: Sequence[_Job]) -> None:
        """Run a batch in the open transaction; a function that raises is rolled back alone."""
        try:
            if self.fence is not None:
                self.fence(tables)
            for job in batch:
                # One name, so that the driver keeps the prepared statement.
                tables.execute("SAVEPOINT job")
                job.run(tables, self.path)
                if job.error is not None:
                    if not tables.conn.in_transaction:  # SQLite undid all of it, as on a full disk
                        raise job.error
                    tables.execute("ROLLBACK TO job")
                tables.execute("RELEASE job")
            tables.execute("COMMIT")
        except BaseException as error:  # noqa: BLE001 - handed to all who wait for this transaction
            tables.rollback()
            self._fail(batch, error)

    def _fail(self, batch: Iterable[_Job], error: BaseException) -> None:
        for job in batch:
            job.error = translate_error(error, self.path)

    def _retry_while_locked(self, work: Callable[[], object]) -> None:
        """Repeat work while another process has the lock, until the timeout or the closing."""
        end = time.monotonic() + self.lock_timeout
        while True:
            try:
                work()
            except sqlite3.OperationalError as error:
                code = getattr(error, "sqlite_errorcode", 0)  # a text that is no UTF-8 has none
                is_locked = code & 0xFF in {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}
                is_late = time.monotonic() >= end
                if not is_locked or is_late or self._is_closing.wait(LOCK_POLL_SECONDS / 10):
                    raise
            else:
                return

    def _serve_reads(self, tables: Tables) -> None:
        while (job := self._reads.get()) is not None:
            batch = _take_waiting(job, self._reads)
            for waiting in batch:
                waiting.run(tables, self.path)
            self._deliver(batch)

    def _deliver(self, batch: Sequence[_Job]) -> None:
        """Wake the event loop once for all outcomes of a batch."""

        def settle() -> None:
            for job in batch:
                job.settle()

        with suppress(RuntimeError):  # the loop of cancelled callers may be closed
            self._loop.call_soon_threadsafe(settle)

    def _empty_log(self) -> bool:
        try:
            with closing(self._connect(writes=True)) as tables:
                tables.execute(f"PRAGMA busy_timeout = {int(CHECKPOINT_SECONDS * 1000)}")
                (is_busy, *_) = tables.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        except sqlite3.Error as error:
            raise translate_error(error, self.path) from error
        return not is_busy


def _take_waiting(first: _Job, jobs: _Queue) -> list[_Job]:
    """Return a job with all that wait now, up to the end mark, which stays the last one."""
    batch = [first]
    while not jobs.empty():
        job = jobs.get()
        if job is None:
            jobs.put(None)
            break
        batch.append(job)
    return batch


def wal_path(path: Path) -> Path:
    """Return the path of a database's write-ahead log."""
    return path.with_name(f"{path.name}-wal")
