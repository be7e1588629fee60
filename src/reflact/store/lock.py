"""One process for each run: an operating-system lock on a file in the run's folder.

The system releases it when the process ends, however it ends; the file stays. Its first line words the
message that a second process gets. The second says how far the run had come, which betrays a database that
was replaced by an older copy, or that lost its write-ahead log.
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
    """A run's folder while it is held."""

    def __init__(self, file: int) -> None:
        self._file = file
        now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        self._holder = f"process {os.getpid()} on {socket.gethostname()} since {now}"
        self._last_commit = _read_text(file).partition("\n")[2].strip()
        self._write()

    @property
    def last_commit(self) -> tuple[str, int] | None:
        """The run that was last held here, and how many commits it had; None where that is not known."""
        run_id, _, commits = self._last_commit.partition(" ")
        return (run_id, int(commits)) if commits.isdecimal() else None

    def record_commit(self, run_id: str, commits: int) -> None:
        """Remember how many commits of a run were made."""
        self._last_commit = f"{run_id} {commits}"
        self._write()

    def clear(self) -> None:
        """Remember nothing: the run starts anew."""
        self._last_commit = ""
        self._write()

    def _write(self) -> None:
        with suppress(OSError):  # a full disk: the text only helps people, the lock holds without it
            os.ftruncate(self._file, 0)
            os.lseek(self._file, 0, os.SEEK_SET)
            os.write(self._file, f"{self._holder}\n{self._last_commit}\n".encode())


@contextmanager
def lock_run(folder: Path) -> Iterator[RunLock]:
    """Hold a run's folder, which is made where missing, for as long as the block lasts.

    Raises:
        RunConflict: Another process, or another trainer of this one, holds it; says who and since when.
        StoreError: The lock file cannot be made.
    """
    path = resolve_inside(folder, "run.lock")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = os.open(path, OPEN_FLAGS, 0o644)
    except OSError as error:
        raise StoreError(
            f"cannot make the lock file {path}: {error.strerror or error}; "
            "make room there and the folder writable, or choose another out_dir"
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
