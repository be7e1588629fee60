"""The grader of SQL queries: an answer is right if it returns the same rows as the reference query.

Models write these queries, so they run in processes of their own, which the kernel confines if it
can (see ``sql_worker`` and ``sandbox``). A process serves many answers. One that exceeds a limit is
ended, and the next answer gets another.
"""

from __future__ import annotations

import csv
import hashlib
import json
import math
import os
import select
import signal
import sqlite3
import subprocess
import time
import weakref
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import ClassVar, NamedTuple, Self

import anyio
from anyio import to_thread
from pydantic import JsonValue, PrivateAttr

from reflact.config.training import EnvironmentConfig
from reflact.environments.graders import CheckedGrader
from reflact.environments.sql_worker import MAX_SECONDS, OUT_OF_MEMORY
from reflact.errors import ConfigError, DataError, EnvironmentFailure
from reflact.processes.confined import ConfinedProcess, find_last_line
from reflact.processes.sandbox import can_confine
from reflact.text import suggest_path
from reflact.types import Grade, Item, Score

WORKER = Path(__file__).with_name("sql_worker.py")

# Maximum length of a query, in characters.
MAX_QUERY_CHARS = 1_000_000

# Maximum memory of a process beside the tables, in bytes; most of it is SQLite's own limit.
MAX_MEMORY_BYTES = 512 << 20

# Maximum size of what a process writes about its own failure, in bytes.
MAX_ERROR_BYTES = 100_000

# Limit of wall-clock time of a query, as a multiple of its processor time.
PATIENCE = 10


class QueryVerdict(NamedTuple):
    """Whether an answer is right, or the reason why not; a ``problem`` is the references'."""

    right: bool = False
    reason: str = ""
    problem: str = ""


class SQLGrader(CheckedGrader[str]):
    """Compares the rows of two queries; their order counts if the reference has an ORDER BY.

    Queries run in other processes, with limits of time, memory, steps, rows and sizes. They cannot
    use random numbers or the current time, because a score must not change.

    Args:
        tables: The database's image, as ``read_tables`` returns it.
    """

    name: ClassVar[str] = "sql"
    meaning: ClassVar[str] = (
        "An answer is a query; it is right if it returns the same rows as the reference."
    )
    tables: bytes
    _idle: list[QueryProcess] = PrivateAttr(default_factory=list)
    _slots: anyio.CapacityLimiter = PrivateAttr(
        default_factory=lambda: anyio.CapacityLimiter(os.cpu_count() or 1)
    )

    @classmethod
    def from_config(cls, config: EnvironmentConfig) -> Self:
        """Return the grader on the configured tables; ConfigError if there are none."""
        if config.tables is None:
            raise ConfigError(
                "environment.tables is required for grader: sql; name a folder of .csv files or a "
                "SQLite file"
            )
        return cls(tables=read_tables(config.tables))

    @property
    def identity(self) -> dict[str, JsonValue]:
        """Name, version and the tables' hash."""
        tables = hashlib.sha256(self.tables).hexdigest()
        return {"grader": self.name, "version": self.version, "tables": tables}

    async def __call__(self, item: Item, answer: str) -> Grade:
        """Run an answer and the item's reference, and compare their rows."""
        references = self._list_accepted(item)
        async with self._slots:
            process = self._idle.pop() if self._idle else QueryProcess(self.tables)
            try:
                verdict = await to_thread.run_sync(
                    process.judge, references, answer, abandon_on_cancel=True
                )
            except anyio.get_cancelled_exc_class():
                process.kill()
                raise
            self._idle.append(process)
        self._refuse_problem(item, verdict)
        score = Score.of(verdict.right)
        return Grade(score=score, answer=answer, feedback=verdict.reason or None)

    def check(self, item: Item) -> None:
        """Raise DataError, which names the item, if its reference is no query that runs."""
        process = self._idle.pop() if self._idle else QueryProcess(self.tables)
        verdict = process.judge(self._list_accepted(item), None)
        self._idle.append(process)
        self._refuse_problem(item, verdict)

    def _refuse_problem(self, item: Item, verdict: QueryVerdict) -> None:
        if verdict.problem:
            raise DataError(f"item {item.id!r} cannot be graded by {self.name}: {verdict.problem}")

    def _read(self, reference: JsonValue) -> str:
        if not isinstance(reference, str):
            raise ValueError("the reference must be a query")  # noqa: TRY004 - the caller catches it
        return reference


# A process has the image of the tables as text, as bytes, and in SQLite, with some room.
COPIES_OF_TABLES = 4


class QueryProcess:
    """A process that runs queries; it starts with the first one, and again after it was ended.

    One thread at a time may use it. It ends with this object and with the process that started it.
    """

    def __init__(self, tables: bytes) -> None:
        self._tables = tables
        self._process: ConfinedProcess | None = None
        self._owner = 0

    def judge(self, references: Sequence[str], answer: str | None) -> QueryVerdict:
        """Run references and an answer (None: only the references), and compare their rows.

        The process reads one line of JSON. It replies with a line for the references, null or what
        is wrong with them, and then with one for the answer: true, false, or what is wrong with it.
        """
        if answer is not None and len(answer) > MAX_QUERY_CHARS:
            return QueryVerdict(reason=f"the query has more than {MAX_QUERY_CHARS} characters")
        process = self._open_process()
        request = json.dumps({"references": references, "answer": answer})
        _write(process, request.encode() + b"\n")
        problem = _read_reply(process, len(references))
        if problem is not None or answer is None:
            return QueryVerdict(problem=str(problem or ""))
        verdict = _read_reply(process, 1)
        if isinstance(verdict, str):
            return QueryVerdict(reason=verdict)
        return QueryVerdict(right=bool(verdict))

    def kill(self) -> None:
        """End the process, also while another thread waits for it."""
        if self._process is not None:
            self._process.kill()

    def _open_process(self) -> ConfinedProcess:
        process = self._process
        if process is not None and self._owner == os.getpid() and process.popen.poll() is None:
            return process
        process = ConfinedProcess(
            WORKER.read_text(encoding="utf-8"),
            None,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            folder=None,
            seconds=None,
            memory=MAX_MEMORY_BYTES + COPIES_OF_TABLES * len(self._tables),
            output=MAX_ERROR_BYTES,
            confine=can_confine(),
            parent=None,  # a thread starts it, which may end before
            variables={"TZ": "UTC"},
        )
        weakref.finalize(self, process.close)
        _write(process, f"{len(self._tables)}\n".encode() + self._tables)
        if _read_line(process, MAX_SECONDS * PATIENCE) is None:
            raise EnvironmentFailure(
                "the process for queries did not start as it should: "
                f"{find_last_line(process.read_errors())}"
            )
        self._process = process
        self._owner = os.getpid()
        return process


def _write(process: ConfinedProcess, text: bytes) -> None:
    """Write to a process; one that has ended is noticed when its reply is read."""
    assert process.popen.stdin is not None
    view = memoryview(text)
    with suppress(BrokenPipeError):
        while view:
            view = view[process.popen.stdin.write(view) :]


def _read_line(process: ConfinedProcess, seconds: float) -> bytes | None:
    """Return the next line of a process; None if it has ended, or was ended after some seconds.

    The pipe has no buffer in this process, so what ``poll`` sees is all that there is to read.
    """
    assert process.popen.stdout is not None
    poll = select.poll()
    poll.register(process.popen.stdout, select.POLLIN)
    if not poll.poll(seconds * 1000):
        process.kill()
    line = process.popen.stdout.readline()
    return line if line.endswith(b"\n") else None


def _read_reply(process: ConfinedProcess, n_queries: int) -> bool | str | None:
    """Return the reply to queries, or the reason why the process has ended."""
    begin = time.monotonic()
    patience = MAX_SECONDS * PATIENCE * n_queries
    line = _read_line(process, patience)
    if line is not None:
        reply: bool | str | None = json.loads(line)
        return reply
    code = process.popen.wait()
    if code == -signal.SIGKILL and time.monotonic() - begin < patience:
        raise EnvironmentFailure("the process for queries was killed")
    reasons = {
        -signal.SIGKILL: f"it waited too long: it has {MAX_SECONDS} seconds of processor time",
        -signal.SIGPROF: f"it took more than {MAX_SECONDS} seconds of processor time",
        OUT_OF_MEMORY: "it needs too much memory",
    }
    return reasons.get(code, f"it ended the process for queries, with exit code {code}")


# The bytes of a SQLite file that say whether it has a log beside it; an image in memory has none.
JOURNAL_BYTES = slice(18, 20)
WITHOUT_LOG = b"\x01\x01"


def read_tables(path: Path) -> bytes:
    """Return the image of a SQLite file, or of a database with a table for each ``.csv`` file.

    A SQLite file is only read. In a ``.csv`` file of a folder, the first row names the columns; a
    column whose values are all numbers is REAL, any other TEXT.

    Raises:
        ConfigError: There are no tables, or one is malformed.
    """
    return _read_folder(path) if path.is_dir() else _read_database(path)


def _read_database(file: Path) -> bytes:
    try:
        address = f"{file.absolute().as_uri()}?mode=ro"
        with (
            closing(sqlite3.connect(address, uri=True)) as source,
            closing(sqlite3.connect(":memory:")) as copy,
        ):
            source.backup(copy)
            image = bytearray(copy.serialize())
    except sqlite3.Error as error:
        raise ConfigError(
            f"environment.tables: cannot read {file}: {error}; name a SQLite file or a folder of "
            ".csv files"
        ) from None
    image[JOURNAL_BYTES] = WITHOUT_LOG
    return bytes(image)


def _read_folder(folder: Path) -> bytes:
    files = sorted(folder.glob("*.csv"))
    if not files:
        raise ConfigError(f"environment.tables: {folder} holds no .csv file{suggest_path(folder)}")
    with closing(sqlite3.connect(":memory:")) as connection:
        for file in files:
            _load(connection, file)
        connection.commit()
        return connection.serialize()


def _load(connection: sqlite3.Connection, file: Path) -> None:
    try:
        with file.open(encoding="utf-8", newline="") as handle:
            header, *rows = list(csv.reader(handle, strict=True))
    except (OSError, ValueError, csv.Error) as error:
        raise ConfigError(f"environment.tables: cannot read {file}: {error}") from None
    if any(len(row) != len(header) for row in rows):
        raise ConfigError(f"environment.tables: the rows of {file} differ in length")
    kinds = [
        "REAL" if all(_is_number(row[i]) for row in rows) else "TEXT" for i in range(len(header))
    ]
    columns = ", ".join(
        f"{_quote_identifier(name)} {kind}" for name, kind in zip(header, kinds, strict=True)
    )
    marks = ", ".join("?" for _ in header)
    try:
        connection.execute(f"CREATE TABLE {_quote_identifier(file.stem)} ({columns})")
        connection.executemany(f"INSERT INTO {_quote_identifier(file.stem)} VALUES ({marks})", rows)  # noqa: S608 - quoted
    except sqlite3.Error as error:
        raise ConfigError(f"environment.tables: {file} makes no table: {error}") from None


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _quote_identifier(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
