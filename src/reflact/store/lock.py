"""The lock of a run: an operating-system lock on a file in the run's folder, which ends with its process.

The first line of the file names the process for the error message of others. The second line counts the run's
commits, which reveals a database that was replaced by an older copy or lost its write-ahead log.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from reflact.errors import RunConflict, StoreError
from reflact.store.artifacts import resolve_inside

if sys.platform == "win32":
    import msvcrt

    def _lock(file: int) -> None:
        os.lseek(file, 1 << 30, os.SEEK_SET)
        msvcrt.locking(file, msvcrt.LK_NBLCK, 1)

else:
    import fcntl

    def _lock(file: int) -> None:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


MAX_LOCK_BYTES = 4096
OPEN_FLAGS = os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0)


class RunLock:
    """The lock of a run's folder while this process owns it."""

    def __init__(self, file: int) -> None:
        self._file = file
        now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        self._holder = f"process {os.getpid()} on {socket.gethostname()} since {now}"
        self._last_commit = _read_text(file).partition("\n")[2].strip()
        self._write()

    @property
    def last_commit(self) -> tuple[str, int] | None:
        """The folder's last run and its number of commits; None if unknown."""
        run_id, _, commits = self._last_commit.partition(" ")
        return (run_id, int(commits)) if commits.isdecimal() else None

    def record_commit(self, run_id: str, commits: int) -> None:
        """Write down the number of a run's commits."""
        self._last_commit = f"{run_id} {commits}"
        self._write()

    def clear(self) -> None:
        """Forget the last run, since a new run starts."""
        self._last_commit = ""
        self._write()

    def _write(self) -> None:
        with suppress(OSError):  # a full disk: the lock works without its text
            os.ftruncate(self._file, 0)
            os.lseek(self._file, 0, os.SEEK_SET)
            os.write(self._file, f"{self._holder}\n{self._last_commit}\n".encode())


@contextmanager
def lock_run(folder: Path) -> Iterator[RunLock]:
    """Lock a run's folder while the block runs; the folder is created if it is missing.

    Raises:
        RunConflict: Another process, or another trainer of this process, has the lock; names it.
        StoreError: The lock file cannot be created.
    """
    path = resolve_inside(folder, "run.lock")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = os.open(path, OPEN_FLAGS, 0o644)
    except OSError as error:
        raise StoreError(
            f"cannot create the lock file {path}: {error.strerror or error}; "
            "free some space, make the folder writable, or choose another out_dir"
        ) from error
    try:
        try:
            _lock(file)
        except (BlockingIOError, PermissionError):
            raise RunConflict(_describe_holder(folder, file)) from None
        except OSError as error:
            raise StoreError(
                f"cannot lock {path}: {error.strerror or error}; choose an out_dir on a disk with file locks"
            ) from error
        yield RunLock(file)
    finally:
        os.close(file)


def _describe_holder(folder: Path, file: int) -> str:
    holder = _read_text(file).partition("\n")[0].strip() or "another process"
    own = holder.startswith(f"process {os.getpid()} on {socket.gethostname()} ")
    wait = "that is this one: leave its `async with trainer.stream()`" if own else "wait until it has ended"
    return f"{folder} is in use by {holder}; {wait}, or choose another out_dir"


def _read_text(file: int) -> str:
    os.lseek(file, 0, os.SEEK_SET)
    return os.read(file, MAX_LOCK_BYTES).decode("utf-8", "replace")
