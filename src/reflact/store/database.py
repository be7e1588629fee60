"""An asynchronous SQLite database: one writer thread that commits in groups, and two reader threads.

Concurrent writes share a transaction and so one wait for the disk. Other modules pass work on the tables as
plain functions. The threads take it from queues, since an executor needs several times the processor time to hand work
over, which is more than a short read takes itself.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import shutil
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import closing, suppress
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any, Generic, NamedTuple, Self, TypeVar

import anyio
from sqlite_utils import Database as Tables
from sqlite_utils import Migrations

from reflact.errors import StoreError
from reflact.store.errors import SQLITE_REASONS, translate_error

__all__ = ["Database", "Tables"]
T = TypeVar("T")
MAX_READERS = 2
LOCK_TIMEOUT_SECONDS = 30.0
CHECKPOINT_SECONDS = 1.0
"""How long a checkpoint waits for readers of the log."""

LOCK_POLL_SECONDS = 0.1
"""How long the writer waits for another process's lock before it checks whether the database closes."""

MANY_OUTCOMES = 64
"""More outcomes than these are fetched in several iterations of the event loop, a few in each."""

FEW_OUTCOMES, MAX_HELD = 6, 10
"""How many outcomes each of these iterations fetches, and for how many of them requests wait to form a group."""

_FileIdentities = tuple[tuple[int, int] | None, tuple[int, int] | None]


_Outcome = tuple[Any, BaseException | None]


class _Mailbox:
    """Requests and outcomes of the callers on one event loop.

    The writes and short reads of one iteration of the loop are handed over together, and the loop is woken once for
    all outcomes that it has not yet fetched: a hand-over between threads takes more processor time than a short read.

    The callers that get their outcomes in one iteration all do their further work in it. So many outcomes are fetched
    in several iterations, between which the loop serves others. Meanwhile, requests wait a little to form a group.
    As long as requests wait, their hand-over is scheduled; as long as outcomes wait, their fetch is.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, path: Path, submit: _Submit) -> None:
        self._loop = loop
        self._path = path
        self._submit = submit
        self.reads: list[_Request[Any]] = []
        self.writes: list[_Request[Any]] = []
        self._outcomes: deque[tuple[asyncio.Future[Any], _Outcome]] = deque()
        self._is_fetch_due = False
        self._has_many_outcomes = False
        self._n_held = 0
        self._is_closed = False

    def create_request(self, work: Callable[[Tables], T]) -> _Request[T]:
        """Return a request that is not handed over yet."""
        return _Request(work, self._loop.create_future(), self, time.monotonic())

    def add(self, request: _Request[Any], requests: list[_Request[Any]]) -> None:
        """Add a request to the reads or the writes that are handed over at the end of this iteration, or soon."""
        if not self.reads and not self.writes:
            self._n_held = 0
            self._loop.call_soon(self._hold_or_hand_over)
        requests.append(request)

    def _hold_or_hand_over(self) -> None:
        self._n_held += 1
        if self._has_many_outcomes and self._n_held < MAX_HELD:
            self._loop.call_soon(self._hold_or_hand_over)
        else:
            self._hand_over()

    def close(self) -> None:
        """Hand over the last requests; from now on, all outcomes are fetched at once."""
        self._is_closed = True
        self._hand_over()

    def _hand_over(self) -> None:
        """Hand over the requests that were added; they may have been already."""
        reads, self.reads, writes, self.writes = self.reads, [], self.writes, []
        self._submit(reads, writes)

    def put(self, future: asyncio.Future[Any], outcome: _Outcome) -> None:
        """Add an outcome, on any thread."""
        self._outcomes.append((future, outcome))

    def wake(self) -> None:
        """Have the loop fetch the outcomes, on any thread."""
        if not self._is_fetch_due:
            self._is_fetch_due = True
            with suppress(RuntimeError):  # the loop of cancelled callers may be closed
                self._loop.call_soon_threadsafe(self._fetch)

    def _fetch(self) -> None:
        self._is_fetch_due = False  # before the outcomes are fetched: a later one wakes the loop again
        n_wanted = len(self._outcomes)
        many = FEW_OUTCOMES if self._has_many_outcomes else MANY_OUTCOMES
        self._has_many_outcomes = n_wanted > many and not self._is_closed
        if self._has_many_outcomes:
            n_wanted = FEW_OUTCOMES
            self._loop.call_soon(self._fetch)  # first, so that no error below loses the others
            self._is_fetch_due = True
        while n_wanted and self._outcomes:
            future, (value, failure) = self._outcomes.popleft()
            if future.done():
                continue  # its caller was cancelled, and does nothing in this iteration
            n_wanted -= 1
            if failure is None:
                future.set_result(value)
            else:
                future.set_exception(translate_error(failure, self._path))


class _Request(NamedTuple, Generic[T]):
    work: Callable[[Tables], T]
    future: asyncio.Future[T]
    mailbox: _Mailbox
    since: float


_Submit = Callable[[Sequence[_Request[Any]], Sequence[_Request[Any]]], None]
"""Hands some reads and some writes over to the threads."""


class Database:
    """An asynchronous SQLite database; use it once, by ``async with``.

    Args:
        path: The file; it and its folder are created if they are missing.
        schema: All migrations in order; pending ones are applied on opening.
        lock_timeout: Seconds to wait for another process's lock.
        grace: Seconds that a cancelled closing waits for active writes, which complete later.
        guard: Checks an existing file before the first write, and may raise.
        read_only: Write nothing to the file, which must exist. If its folder is not writable, a copy is read.

    Attributes:
        fence: Called at the start of each write transaction; it may raise to refuse the transaction.

    Raises:
        StoreError: On opening and from every method; names the file and the problem. Writing notices that the
            file was moved, removed or replaced, or that this process is a fork of the one that opened it.
        DataError: From every method; a text or a number cannot be stored in a file.
    """

    _tables: Tables

    def __init__(
        self,
        path: Path,
        schema: Migrations,
        *,
        lock_timeout: float = LOCK_TIMEOUT_SECONDS,
        grace: float = 0.3,
        guard: Callable[[Tables], None] | None = None,
        read_only: bool = False,
    ) -> None:
        self.path = path
        self.n_transactions = 0
        self.fence: Callable[[Tables], None] | None = None
        self._absolute_path = str(path.absolute())
        self._pid = os.getpid()
        self._files: _FileIdentities = (None, None)
        self._readable_path = path
        self._read_mode = "ro"
        self._read_only = read_only
        self._copy_folder: TemporaryDirectory[str] | None = None
        self._schema = schema
        self._lock_timeout = lock_timeout
        self._grace = grace
        self._guard = guard
        self._open = False
        self._closing = threading.Event()
        self._pending: deque[_Request[Any]] = deque()
        self._is_commit_due = False
        self._jobs: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._writer = threading.Thread(target=self._do_jobs, name="reflact-store-writer", daemon=True)
        self._reads: SimpleQueue[Sequence[_Request[Any]] | None] = SimpleQueue()
        self._readers: list[threading.Thread] = []
        self._connections: list[Tables] = []
        self._mailboxes: dict[asyncio.AbstractEventLoop, _Mailbox] = {}

    async def __aenter__(self) -> Self:
        self._pid = os.getpid()
        self._writer.start()
        try:
            await _await_thread(self._submit(self._set_up))
        except BaseException as error:
            await self._close(cancelled=_is_cancellation(type(error)))
            raise
        self._open = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open = False
        await self._close(cancelled=kind is not None and _is_cancellation(kind))

    async def check_integrity(self) -> None:
        """Read the whole file, and check its structure and its indexes; StoreError if it is damaged."""
        ((found, *_), *_) = await self.fetch_rows("PRAGMA integrity_check(1)")
        if found != "ok":
            shown = " ".join(str(found).split())
            raise StoreError(f"database {self.path}: {SQLITE_REASONS[sqlite3.SQLITE_CORRUPT]} ({shown})")

    async def write(self, work: Callable[[Tables], T]) -> T:
        """Run a function in a write transaction and return its result once that is on disk.

        Waiting functions share the transaction; a function that raises is rolled back alone. A cancelled
        caller returns at once; its function still runs and is committed.
        """
        self._require_writable()
        mailbox = self._find_mailbox()
        request = mailbox.create_request(work)
        mailbox.add(request, mailbox.writes)
        return await request.future

    async def read(self, work: Callable[[Tables], T], *, single: bool = False) -> T:
        """Run a function on a read-only snapshot; it must return values and no open cursors.

        ``single``: it executes one statement, which is a snapshot without a transaction.
        """

        def read(tables: Tables) -> T:
            with tables.atomic():
                return work(tables)

        self._require_open()
        mailbox = self._find_mailbox()
        request = mailbox.create_request(work if single else read)
        if single:
            mailbox.add(request, mailbox.reads)
        else:
            self._reads.put([request])
        return await request.future

    async def checkpoint(self) -> bool:
        """Move committed data from the log into the file; return whether the log is empty.

        Another process that reads the log, or writes, prevents this.
        """
        self._require_writable()
        return await _await_thread(self._submit(self._checkpoint))

    async def execute(self, sql: str, parameters: Sequence[Any] = ()) -> int:
        """Execute a statement and return the number of changed rows."""
        return await self.write(lambda tables: tables.execute(sql, parameters).rowcount)

    async def fetch_rows(self, sql: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Execute a query and return all rows."""
        return await self.read(lambda tables: tables.execute(sql, parameters).fetchall(), single=True)

    def _find_mailbox(self) -> _Mailbox:
        """Return the mailbox of the running loop."""
        loop = asyncio.get_running_loop()
        mailbox = self._mailboxes.get(loop)
        if mailbox is None:
            mailbox = self._mailboxes[loop] = _Mailbox(loop, self.path, self._submit_requests)
        return mailbox

    def _submit_requests(self, reads: Sequence[_Request[Any]], writes: Sequence[_Request[Any]]) -> None:
        if reads:
            self._reads.put(reads)
        self._pending.extend(writes)
        if writes and not self._is_commit_due:
            self._is_commit_due = True
            self._jobs.put(self._commit_pending)

    def _require_open(self) -> None:
        if not self._open:
            raise StoreError(f"database {self.path}: it is not open; use it inside `async with`")
        if os.getpid() != self._pid:
            raise StoreError(
                f"database {self.path}: process {self._pid} opened it, and this process is a fork of that one; "
                "open it anew in this process"
            )

    def _require_writable(self) -> None:
        self._require_open()
        if self._read_only:
            raise StoreError(f"database {self.path}: it was opened read-only; open it without read_only")

    async def _close(self, *, cancelled: bool) -> None:
        for mailbox in self._mailboxes.values():
            mailbox.close()
        closing = self._submit(self._tear_down)
        self._jobs.put(None)
        try:
            if not cancelled:
                await _await_thread(closing)
        finally:
            with anyio.move_on_after(self._grace, shield=True):
                await _await_thread(closing)
            self._closing.set()
            if closing.done():
                self._writer.join()
            else:
                atexit.register(self._writer.join)

    def _submit(self, work: Callable[[], T]) -> Future[T]:
        """Have the writer's thread do work between two transactions."""
        future: Future[T] = Future()

        def job() -> None:
            try:
                future.set_result(work())
            except BaseException as error:  # noqa: BLE001 - handed to the caller
                future.set_exception(error)

        self._jobs.put(job)
        return future

    # ------------------------------------------------------------------ on the writer's thread

    def _do_jobs(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()

    def _set_up(self) -> None:
        try:
            if self.path.exists() and not self.path.is_file():
                raise StoreError(f"database {self.path}: it cannot be opened, since it is no regular file")
            if self._read_only:
                self._set_up_read_only()
            else:
                self._set_up_writable()
            for _ in range(MAX_READERS):
                tables = self._connect(self._read_mode, self._lock_timeout)
                name = f"reflact-store-reader-{len(self._readers)}"
                self._readers.append(
                    threading.Thread(target=self._do_reads, args=(tables,), name=name, daemon=True)
                )
                self._readers[-1].start()
        except (sqlite3.Error, UnicodeDecodeError) as error:
            raise translate_error(error, self.path) from error

    def _set_up_writable(self) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            reason = error.strerror or error
            raise StoreError(f"database {self.path}: cannot make its folder: {reason}") from error
        if self._guard is not None:
            # It is closed before the writer, which otherwise could not remove the log at the end.
            with closing(self._connect(self._find_read_mode(), self._lock_timeout)) as tables:
                self._guard(tables)
        self._tables = self._connect("rwc", min(self._lock_timeout, LOCK_POLL_SECONDS))
        self._retry_while_locked(self._prepare, time.monotonic())
        self._files = _identify_files(self._absolute_path)

    def _set_up_read_only(self) -> None:
        """Open the file, or a copy if SQLite cannot read it in its folder."""
        self._read_mode = self._find_read_mode()
        try:
            self._tables = self._connect(self._read_mode, self._lock_timeout)
            pending = self._has_pending_migrations()
        except sqlite3.OperationalError as error:
            unreachable = {sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN}
            if error.sqlite_errorcode & 0xFF not in unreachable or not os.access(self.path, os.R_OK):
                raise
            self._copy_folder = TemporaryDirectory(prefix="reflact-")
            self._readable_path = Path(self._copy_folder.name, "copy.db")
            copy_database(self.path, self._readable_path)
            self._tables = self._connect("rwc", self._lock_timeout)
            pending = self._has_pending_migrations()
        if pending:
            raise StoreError(f"database {self.path}: reflact has stored nothing in it; name another file")

    def _find_read_mode(self) -> str:
        """Return the mode of a connection that does not write.

        A read-only connection leaves a log and its index behind. If there is no log, a connection in mode
        ``rw`` creates both and removes them on closing; ``query_only`` keeps it from writing.
        """
        return "ro" if wal_path(self.path).exists() else "rw"

    def _prepare(self) -> None:
        self._tables.execute("PRAGMA journal_mode = WAL")
        self._tables.execute("PRAGMA synchronous = FULL")
        self._tables.execute("PRAGMA foreign_keys = ON")
        self._tables.execute("PRAGMA secure_delete = ON")
        if self._has_pending_migrations():
            self._transact(lambda: self._schema.apply(self._tables))

    def _connect(self, mode: str, lock_timeout: float) -> Tables:
        connection = sqlite3.connect(
            f"{self._readable_path.absolute().as_uri()}?mode={mode}",
            uri=True,
            timeout=lock_timeout,
            isolation_level=None,
            check_same_thread=False,
        )
        tables = Tables(connection, execute_plugins=False)
        self._connections.append(tables)
        if mode == "rw":
            tables.execute("PRAGMA query_only = ON")
        return tables

    def _has_pending_migrations(self) -> bool:
        """Whether migrations are pending; StoreError if the file has an unknown one."""
        with closing(Tables(memory=True)) as empty:
            known = {step.name for step in self._schema.pending(empty)}
        unknown = [done.name for done in self._schema.applied(self._tables) if done.name not in known]
        if unknown:
            written = f"it was written by another version of reflact (schema step {unknown[-1]})"
            raise StoreError(f"database {self.path}: {written}; use that version, or name another file")
        return bool(self._schema.pending(self._tables))

    def _commit_pending(self) -> None:
        self._is_commit_due = False  # before the requests are taken: a later one submits the next commit
        batch = [self._pending.popleft() for _ in range(len(self._pending))]
        if not batch:
            return
        outcomes: list[_Outcome]
        try:
            since = min(request.since for request in batch)  # it may have waited for the batch before
            outcomes = self._retry_while_locked(
                lambda: self._transact(lambda: self._attempt_all(batch)), since
            )
            self._check_files()
            self.n_transactions += 1
        except BaseException as error:  # noqa: BLE001 - handed to everyone who waits for this transaction
            outcomes = [(None, error)] * len(batch)
        for request, outcome in zip(batch, outcomes, strict=True):
            request.mailbox.put(request.future, outcome)
        for mailbox in {request.mailbox for request in batch}:
            mailbox.wake()

    def _checkpoint(self) -> bool:
        end = time.monotonic() + min(self._lock_timeout, CHECKPOINT_SECONDS)
        try:
            while True:
                (busy, *_) = self._tables.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
                if not busy or time.monotonic() >= end or self._closing.wait(LOCK_POLL_SECONDS / 10):
                    return not busy
        except sqlite3.Error as error:
            raise translate_error(error, self.path) from error

    def _retry_while_locked(self, work: Callable[[], T], since: float) -> T:
        """Repeat work while another process has the lock, until its timeout since a time or the database closes."""
        end = since + self._lock_timeout
        while True:
            try:
                return work()
            except sqlite3.OperationalError as error:
                code = getattr(error, "sqlite_errorcode", 0)  # a text that is no UTF-8 has none
                locked = code & 0xFF in {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}
                if not locked or time.monotonic() >= end or self._closing.wait(LOCK_POLL_SECONDS / 10):
                    raise

    def _transact(self, work: Callable[[], T]) -> T:
        self._tables.execute("BEGIN IMMEDIATE")
        try:
            result = work()
            self._tables.execute("COMMIT")
        except BaseException:
            self._tables.rollback()
            raise
        return result

    def _attempt_all(self, batch: Sequence[_Request[Any]]) -> list[_Outcome]:
        self._check_files()
        if self.fence is not None:
            self.fence(self._tables)
        if len(batch) == 1:  # the transaction undoes it
            return [(batch[0].work(self._tables), None)]
        return [self._attempt(request.work) for request in batch]

    def _check_files(self) -> None:
        """Check that the open files are still those at the path; others would not find what is written now."""
        if _identify_files(self._absolute_path) != self._files:
            raise StoreError(
                f"database {self.path}: the file, or its file {wal_path(self.path).name}, was moved, removed or "
                "replaced while it was open; put the right files back and start again"
            )

    def _attempt(self, work: Callable[[Tables], Any]) -> _Outcome:
        tables = self._tables
        tables.execute("SAVEPOINT attempt")  # one name, so that SQLite's driver keeps the prepared statement
        try:
            outcome: _Outcome = (work(tables), None)
        except Exception as error:  # its caller gets it; the other functions continue
            if not tables.conn.in_transaction:
                raise
            tables.execute("ROLLBACK TO attempt")
            outcome = (None, error)
        tables.execute("RELEASE attempt")
        return outcome

    def _tear_down(self) -> None:
        for _ in self._readers:
            self._reads.put(None)
        for reader in self._readers:
            reader.join()
        for tables in reversed(self._connections):
            tables.close()
        if self._copy_folder is not None:
            self._copy_folder.cleanup()

    # ------------------------------------------------------------------ on a reader's thread, or any

    def _do_reads(self, tables: Tables) -> None:
        while (requests := self._reads.get()) is not None:
            for request in requests:
                try:
                    outcome: _Outcome = (request.work(tables), None)
                except BaseException as error:  # noqa: BLE001 - handed to the caller
                    outcome = (None, error)
                request.mailbox.put(request.future, outcome)
            request.mailbox.wake()


def _is_cancellation(kind: type[BaseException]) -> bool:
    return issubclass(kind, anyio.get_cancelled_exc_class())


async def _await_thread(future: Future[T]) -> T:
    """Wait for a thread's result; cancelling the caller does not stop the thread."""
    loop = asyncio.get_running_loop()
    done = anyio.Event()

    def wake(_: Future[T]) -> None:
        with suppress(RuntimeError):  # the loop of a cancelled caller may be closed
            loop.call_soon_threadsafe(done.set)

    future.add_done_callback(wake)
    await done.wait()
    return future.result()


def _identify_files(path: str) -> _FileIdentities:
    """Return device and number of a database's file and of its log; None for a missing one."""

    def identify(file: str) -> tuple[int, int] | None:
        try:
            found = os.stat(file)  # noqa: PTH116 - several times faster than a Path, before and after each transaction
        except OSError:
            return None
        return found.st_dev, found.st_ino

    return identify(path), identify(f"{path}-wal")


def wal_path(path: Path) -> Path:
    """Return the path of a database's write-ahead log."""
    return path.with_name(f"{path.name}-wal")


def copy_database(path: Path, target: Path) -> None:
    """Copy a database with its log; StoreError if another process writes to the files meanwhile."""
    try:
        before = _stat_files(path)
        shutil.copyfile(path, target)
        if wal_path(path).exists():
            shutil.copyfile(wal_path(path), wal_path(target))
        changed = _stat_files(path) != before
    except OSError as error:
        raise StoreError(
            f"database {path}: its folder is not writable, and copying it to {target.parent} "
            f"failed: {error.strerror or error}"
        ) from error
    if changed:
        raise StoreError(
            f"database {path}: its folder is not writable, so a copy is read, and another process wrote to "
            "the file while it was copied; try again"
        )


def _stat_files(path: Path) -> list[tuple[int, int]]:
    files = [one.stat() for one in (path, wal_path(path)) if one.exists()]
    return [(found.st_size, found.st_mtime_ns) for found in files]
