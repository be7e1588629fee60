"""A database that SQLite cannot read where it stands, copied to be read."""

from __future__ import annotations

import shutil
import sqlite3
from pathlib import Path

from reflact.errors import StoreError


def is_out_of_reach(error: sqlite3.Error) -> bool:
    """Whether SQLite refused since it cannot make the files that it needs beside the one that it reads."""
    return error.sqlite_errorcode & 0xFF in {sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN}


def log_of(path: Path) -> Path:
    """Return where the log of a database stands: what was committed and is not yet in the file."""
    return path.with_name(f"{path.name}-wal")


def copy_files(path: Path, target: Path) -> None:
    """Copy a database with its log.

    Raises:
        StoreError: They cannot be copied, or another process wrote to them meanwhile.
    """
    try:
        before = _state(path)
        shutil.copyfile(path, target)
        if log_of(path).exists():
            shutil.copyfile(log_of(path), log_of(target))
        changed = _state(path) != before
    except OSError as error:
        raise StoreError(
            f"database {path}: its folder cannot be written to, so a copy of it in {target.parent} is to be "
            f"read, which cannot be made: {error.strerror or error}"
        ) from error
    if changed:
        raise StoreError(
            f"database {path}: its folder cannot be written to, so a copy of it is read, but another process "
            "wrote to it meanwhile; try again"
        )


def _state(path: Path) -> list[tuple[int, int]]:
    files = [one.stat() for one in (path, log_of(path)) if one.exists()]
    return [(found.st_size, found.st_mtime_ns) for found in files]
