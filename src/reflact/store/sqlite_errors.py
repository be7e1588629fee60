"""What SQLite and its driver refuse, as the library's own errors."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from pathlib import Path

from reflact.errors import DataError, StoreError

SQLITE_REASONS: Mapping[int, str] = {
    sqlite3.SQLITE_BUSY: "another process kept it locked; end that process or try again",
    sqlite3.SQLITE_LOCKED: "another process kept it locked; end that process or try again",
    sqlite3.SQLITE_READONLY: "it or its folder is read-only; make them writable or name another place",
    sqlite3.SQLITE_PERM: "it may not be opened; check the permissions of the file and its folder",
    sqlite3.SQLITE_CANTOPEN: "it cannot be opened; check that its folder exists and is writable",
    sqlite3.SQLITE_FULL: "the disk is full; free some space and start again, what was stored is kept",
    sqlite3.SQLITE_IOERR: "the disk failed to read or write, or a limit on the size of files was reached; "
    "mend that and start again, what was stored is kept",
    sqlite3.SQLITE_CORRUPT: "the file is damaged; put back a copy of it or name another place",
    sqlite3.SQLITE_NOTADB: "the file is not a SQLite database; name another, or a new one",
    sqlite3.SQLITE_CONSTRAINT: "a value contradicts what is stored",
}

UNSTORABLE_ERRORS = (UnicodeEncodeError, OverflowError)
"""What the driver raises of values that SQLite cannot hold."""


def translate_error(error: Exception, path: Path) -> Exception:
    """Return what to raise instead of an error that SQLite or its driver gave, others as they are."""
    if isinstance(error, UnicodeEncodeError):
        return DataError(f"{error.object!a} holds half of a surrogate pair, which no file can; mend it")
    if isinstance(error, OverflowError):
        return DataError("a number is beyond the 64 bits that a file holds; give a smaller one")
    if not isinstance(error, sqlite3.Error):
        return error
    code = getattr(error, "sqlite_errorcode", None)
    reason = SQLITE_REASONS.get(code & 0xFF) if code is not None else None
    found = StoreError(f"database {path}: {f'{reason} ({error})' if reason else error}")
    found.__cause__ = error
    return found
