"""The process for SQL queries: it compares the rows of answers with those of reference queries.

The grader starts this file's text in a confined process (see ``sandbox``) and keeps the process for
further answers. The process reads the size of the tables and the tables, and then one request in
each line. To a request it writes two lines: the problem of the references, and then the verdict on
the answer.

Each query runs as one statement on tables in memory. SQLite refuses everything except reading, and
limits steps, rows, sizes and memory. A timer ends the process if a single step takes too long.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import signal
import sqlite3
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO, NamedTuple

SQLValue = str | float | int | bytes | None
SQLRow = tuple[SQLValue, ...]

# Maximum of virtual-machine steps of a query, about a second; a count is the same on every machine.
MAX_STEPS = 20_000_000

# Maximum number of rows of a query.
MAX_ROWS = 1000

# Maximum size of a value in bytes.
MAX_VALUE_BYTES = 1_000_000

# Maximum size of all values of a query's rows, in bytes.
MAX_RESULT_BYTES = 32_000_000

# Maximum memory of SQLite beside the tables, in bytes.
MAX_HEAP_BYTES = 256 << 20

# Exit code of a process in which a query needed too much memory.
OUT_OF_MEMORY = 3

# Processor time of a query, in seconds; it matters for steps that take long, such as a huge
# pattern.
MAX_SECONDS = 5

# Maximum length of a reason, in characters.
MAX_REASON_CHARS = 300

# Numbers with at most this relative difference are equal.
RELATIVE_TOLERANCE = 1e-6

READ_ACTIONS = {
    sqlite3.SQLITE_SELECT,
    sqlite3.SQLITE_READ,
    sqlite3.SQLITE_FUNCTION,
    sqlite3.SQLITE_RECURSIVE,
}

# Refused functions: scores must be reproducible, and queries must not load code.
REFUSED_FUNCTIONS = {
    "random",
    "randomblob",
    "current_date",
    "current_time",
    "current_timestamp",
    "load_extension",
    "sqlite_log",
}

# Functions of a given time, each with the argument that is the time. Without it, they use the
# current time.
TIME_FUNCTIONS = {
    "date": 0,
    "time": 0,
    "datetime": 0,
    "julianday": 0,
    "unixepoch": 0,
    "strftime": 1,
    "timediff": 0,
}

# Times that stand for the current time.
CURRENT_TIME = {"now", "subsec", "subsecond"}


class QueryResult(NamedTuple):
    """The rows of a query, and whether their order counts."""

    rows: tuple[SQLRow, ...]
    ordered: bool


class QueryDatabase:
    """Tables in memory, for reading."""

    def __init__(self, image: bytes) -> None:
        self._connection = sqlite3.connect(":memory:")
        self._times = sqlite3.connect(":memory:")
        self._connection.deserialize(image)
        self._connection.execute("PRAGMA temp_store = MEMORY")
        self._connection.execute(f"PRAGMA hard_heap_limit = {MAX_HEAP_BYTES + 2 * len(image)}")
        self._connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_VALUE_BYTES)
        self._times.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_VALUE_BYTES)
        self._problem = ""
        for name, position in TIME_FUNCTIONS.items():
            function = self._build_time_function(name, position)
            self._connection.create_function(name, -1, function, deterministic=True)
        self._connection.set_authorizer(_authorize)

    def list_rows(self, query: str) -> tuple[SQLRow, ...]:
        """Return the rows of a query; ValueError if it does not read, or exceeds a limit."""
        if not query.strip():
            raise ValueError("there is no query")
        calls = itertools.count(1)
        self._connection.set_progress_handler(lambda: next(calls) > MAX_STEPS // 1000, 1000)
        self._problem = ""
        rows: list[SQLRow] = []
        size = 0
        try:
            for row in self._connection.execute(query):
                rows.append(row)
                size += sum(len(value) if isinstance(value, str | bytes) else 8 for value in row)
                if len(rows) > MAX_ROWS:
                    raise ValueError(f"it returns more than {MAX_ROWS} rows")
                if size > MAX_RESULT_BYTES:
                    raise ValueError(f"it returns more than {MAX_RESULT_BYTES // 1_000_000} MB")
        except (sqlite3.Error, sqlite3.Warning, UnicodeError) as error:
            raise ValueError(f"it does not run as one query: {self._problem or error}") from None
        return tuple(rows)

    def _build_time_function(self, name: str, position: int) -> Callable[..., Any]:
        def call(*arguments: SQLValue) -> SQLValue:
            names = [_read_word(value) for value in arguments]
            if len(arguments) <= position or "now" in names or names[position] in CURRENT_TIME:
                self._problem = (
                    f"{name} of the current time is not allowed, because results must not change"
                )
                raise ValueError(self._problem)
            marks = ", ".join("?" * len(arguments))
            row: SQLRow = self._times.execute(f"SELECT {name}({marks})", arguments).fetchone()
            return row[0]

        return call


def is_same_result(expected: QueryResult, rows: Sequence[SQLRow]) -> bool:
    """Whether rows are the expected ones."""
    expected_rows: Sequence[SQLRow] = expected.rows
    if not expected.ordered:
        rows = _sort_rows(rows)
        expected_rows = _sort_rows(expected_rows)
    return len(expected_rows) == len(rows) and all(
        len(a) == len(b) and all(map(_is_same, a, b))
        for a, b in zip(expected_rows, rows, strict=True)
    )


def serve(source: BinaryIO, sink: BinaryIO) -> None:
    """Answer requests until the input ends."""

    def reply(value: bool | str | None) -> None:
        if isinstance(value, str):
            value = value[:MAX_REASON_CHARS]
        sink.write(json.dumps(value).encode() + b"\n")
        sink.flush()

    database = QueryDatabase(source.read(int(source.readline())))
    reply(True)
    for line in source:
        request = json.loads(line)
        try:
            expected = [_run(database, reference) for reference in request["references"]]
            reply(None)
            if request["answer"] is not None:
                answer = _run(database, request["answer"])
                reply(any(is_same_result(result, answer.rows) for result in expected))
        except ValueError as error:
            reply(str(error))


def _run(database: QueryDatabase, query: str) -> QueryResult:
    signal.setitimer(signal.ITIMER_PROF, MAX_SECONDS)
    try:
        return QueryResult(database.list_rows(query), "order by" in query.lower())
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _authorize(action: int, _: str | None, name: str | None, *__: str | None) -> int:
    is_refused = action == sqlite3.SQLITE_FUNCTION and str(name).lower() in REFUSED_FUNCTIONS
    return sqlite3.SQLITE_OK if action in READ_ACTIONS and not is_refused else sqlite3.SQLITE_DENY


def _read_word(value: SQLValue) -> str:
    """Return a value as SQLite's time functions read a word: up to a zero, in lower case."""
    text = value.decode("latin-1") if isinstance(value, bytes) else value
    return text[:20].partition("\0")[0].lower() if isinstance(text, str) else ""


def _is_same(one: SQLValue, other: SQLValue) -> bool:
    if (
        isinstance(one, int | float)
        and isinstance(other, int | float)
        and float in {type(one), type(other)}
    ):
        return math.isclose(one, other, rel_tol=RELATIVE_TOLERANCE, abs_tol=1e-9)
    return one == other


def _sort_rows(rows: Sequence[SQLRow]) -> tuple[SQLRow, ...]:
    return tuple(sorted(rows, key=lambda row: [_rank(value) for value in row]))


def _rank(value: SQLValue) -> tuple[int, float, str]:
    if value is None:
        return 0, 0.0, ""
    if isinstance(value, int | float):
        return 1, float(value), ""
    return 2, 0.0, value if isinstance(value, str) else value.hex()


if __name__ == "__main__":
    try:
        serve(os.fdopen(0, "rb"), os.fdopen(1, "wb"))
    except MemoryError:
        raise SystemExit(OUT_OF_MEMORY) from None
