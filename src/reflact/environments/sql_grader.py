"""The grader of SQL queries: an answer is right if it returns the same rows as the reference query.

Models write these queries, so each runs as one statement on a copy of the tables in memory. SQLite refuses
everything except reading, and limits steps and rows. There is no process boundary: SQLite itself is trusted.
"""

from __future__ import annotations

import csv
import hashlib
import itertools
import math
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import ClassVar, NamedTuple

from pydantic import JsonValue

from reflact.environments.graders import ReferenceGrader
from reflact.errors import ConfigError
from reflact.types import Item

SQLValue = str | float | int | bytes | None
SQLRow = tuple[SQLValue, ...]

MAX_STEPS = 20_000_000
"""Maximum of virtual-machine steps of a query, about a second; a count is the same on every machine."""

MAX_ROWS = 1000
"""Maximum number of rows of a query."""

MAX_VALUE_BYTES = 1_000_000
"""Maximum size of a value in bytes."""

RELATIVE_TOLERANCE = 1e-6
"""Numbers with at most this relative difference are equal."""

READ_ACTIONS = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE}

REFUSED_FUNCTIONS = {
    "random",
    "randomblob",
    "current_date",
    "current_time",
    "current_timestamp",
    "load_extension",
}
"""Refused functions: scores must be reproducible, and queries must not load code."""


class QueryResult(NamedTuple):
    """The rows of a query, and whether their order counts."""

    rows: tuple[SQLRow, ...]
    ordered: bool


class SQLGrader(ReferenceGrader[QueryResult]):
    """Compares the rows of two queries; their order counts if the reference has an ORDER BY.

    Args:
        tables: The database's image, as ``read_tables`` returns it.
    """

    name: ClassVar[str] = "sql"
    tables: bytes

    @property
    def identity(self) -> dict[str, JsonValue]:
        """Name, version and the tables' hash."""
        tables = hashlib.sha256(self.tables).hexdigest()
        return {"grader": self.name, "version": self.version, "tables": tables}

    def _read(self, reference: JsonValue) -> QueryResult:
        if not isinstance(reference, str):
            raise ValueError("the reference must be a query")  # noqa: TRY004 - the caller catches it
        return QueryResult(self._rows(reference), "order by" in reference.lower())

    def _match(self, expected: QueryResult, answer: str) -> tuple[float, str]:
        try:
            rows = self._rows(answer)
        except ValueError as error:
            return 0.0, str(error)
        expected_rows = expected.rows
        if not expected.ordered:
            rows, expected_rows = _sort_rows(rows), _sort_rows(expected_rows)
        same = [
            len(a) == len(b) and all(map(_is_same, a, b)) for a, b in zip(expected_rows, rows, strict=False)
        ]
        return float(len(expected_rows) == len(rows) and all(same)), ""

    def _feedback(self, item: Item, answer: str, reason: str) -> str:
        return reason

    def _rows(self, query: str) -> tuple[SQLRow, ...]:
        if not query.strip():
            raise ValueError("there is no query")
        with closing(sqlite3.connect(":memory:")) as connection:
            connection.deserialize(self.tables)
            connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_VALUE_BYTES)
            connection.set_authorizer(_authorize)
            calls = itertools.count(1)
            connection.set_progress_handler(lambda: next(calls) > MAX_STEPS // 1000, 1000)
            try:
                rows = connection.execute(query).fetchmany(MAX_ROWS + 1)
            except (sqlite3.Error, sqlite3.Warning, ValueError) as error:
                raise ValueError(f"it does not run as one query: {error}") from None
        if len(rows) > MAX_ROWS:
            raise ValueError(f"it returns more than {MAX_ROWS} rows")
        return tuple(rows)


def read_tables(folder: Path) -> bytes:
    """Return the image of a database with one table for each ``.csv`` file of a folder.

    The first row names the columns; a column whose values are all numbers is REAL, any other TEXT.

    Raises:
        ConfigError: The folder has no tables, or one is malformed.
    """
    files = sorted(folder.glob("*.csv"))
    if not files:
        raise ConfigError(f"environment.tables: {folder} holds no .csv file")
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
    kinds = ["REAL" if all(_is_number(row[i]) for row in rows) else "TEXT" for i in range(len(header))]
    columns = ", ".join(f"{_quote_identifier(name)} {kind}" for name, kind in zip(header, kinds, strict=True))
    marks = ", ".join("?" for _ in header)
    try:
        connection.execute(f"CREATE TABLE {_quote_identifier(file.stem)} ({columns})")
        connection.executemany(f"INSERT INTO {_quote_identifier(file.stem)} VALUES ({marks})", rows)  # noqa: S608 - quoted
    except sqlite3.Error as error:
        raise ConfigError(f"environment.tables: {file} makes no table: {error}") from None


def _authorize(action: int, _: str | None, name: str | None, *__: str | None) -> int:
    allowed = action in READ_ACTIONS and (action != sqlite3.SQLITE_FUNCTION or name not in REFUSED_FUNCTIONS)
    return sqlite3.SQLITE_OK if allowed else sqlite3.SQLITE_DENY


def _is_same(one: SQLValue, other: SQLValue) -> bool:
    if isinstance(one, int | float) and isinstance(other, int | float):
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


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _quote_identifier(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
