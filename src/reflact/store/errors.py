"""Errors of SQLite and its driver as reflact's, with what to do."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from pathlib import Path

from pydantic import ValidationError

from reflact.errors import DataError, StoreError
from reflact.jsonutil import describe_problems

SQLITE_REASONS: Mapping[int, str] = {
    sqlite3.SQLITE_BUSY: "another process kept it locked; end that process or try again",
    sqlite3.SQLITE_LOCKED: "another process kept it locked; end that process or try again",
    sqlite3.SQLITE_READONLY: "it or its folder is read-only; make them writable or name another place",
    sqlite3.SQLITE_PERM: "it may not be opened; check the permissions of the file and its folder",
    sqlite3.SQLITE_CANTOPEN: "it cannot be opened; check that its folder exists and is writable",
    sqlite3.SQLITE_FULL: "the disk is full; free some space and start again; stored data is kept",
    sqlite3.SQLITE_IOERR: "the disk failed to read or write, or a limit on the size of files was reached; "
    "fix that and start again; stored data is kept",
    sqlite3.SQLITE_CORRUPT: "the file is damaged; put back a copy of it or name another place",
    sqlite3.SQLITE_NOTADB: "the file is not a SQLite database; name another, or a new one",
    sqlite3.SQLITE_CONSTRAINT: "a value contradicts what is stored",
}

UNSTORABLE_ERRORS = (UnicodeEncodeError, OverflowError)
"""Errors of the driver for values that SQLite cannot store."""


def translate_error(error: BaseException, path: Path) -> BaseException:
    """Return reflact's error for an error of SQLite or its driver; others that a future can hold are unchanged."""
    if isinstance(error, UnicodeEncodeError):
        return DataError(
            f"{error.object!a} holds half of a surrogate pair, which cannot be stored; remove it"
        )
    if isinstance(error, OverflowError):
        return DataError("a whole number has more than 64 bits and cannot be stored; give a smaller one")
    # These errors quote what is damaged.
    if isinstance(error, UnicodeDecodeError) or (
        isinstance(error, sqlite3.Error) and str(error).startswith("Could not decode")
    ):
        return StoreError(f"database {path}: {SQLITE_REASONS[sqlite3.SQLITE_CORRUPT]} (a text is not UTF-8)")
    if isinstance(error, ValidationError):
        problem = describe_problems(error)
        return StoreError(f"database {path}: {SQLITE_REASONS[sqlite3.SQLITE_CORRUPT]} ({problem})")
    if isinstance(error, sqlite3.Error):
        code = getattr(error, "sqlite_errorcode", None)
        reason = SQLITE_REASONS.get(code & 0xFF) if code is not None else None
        found: Exception = StoreError(f"database {path}: {f'{reason} ({error})' if reason else error}")
    elif isinstance(error, StopIteration):
        found = RuntimeError("work on the tables raised StopIteration")
    else:
        return error
    found.__cause__ = error
    return found
