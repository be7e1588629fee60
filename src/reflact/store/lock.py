"""One process for each run: an operating-system lock on a file in the run's folder.

The system releases it when the process ends, however it ends; the file stays, and its text serves only
to word the message that a second process gets.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

from reflact.errors import RunConflict, StoreError

if sys.platform == "win32":
    import msvcrt

    def _lock(file: IO[str]) -> None:
        file.seek(1 << 30)
        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)

else:
    import fcntl

    def _lock(file: IO[str]) -> None:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


@contextmanager
def run_lock(folder: Path) -> Iterator[None]:
    """Hold a run's folder, which is made where missing, for as long as the block lasts.

    Raises:
        RunConflict: Another process, or another trainer of this one, holds it; says who and since when.
        StoreError: The lock file cannot be made.
    """
    path = folder / "run.lock"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = path.open("a+", encoding="utf-8")
    except OSError as error:
        raise StoreError(
            f"cannot make the lock file {path}: {error.strerror or error}; "
            "make the folder writable or choose another out_dir"
        ) from error
    with file:
        try:
            _lock(file)
        except (BlockingIOError, PermissionError):
            raise RunConflict(_taken(folder, file)) from None
        except OSError as error:
            raise StoreError(
                f"cannot lock {path}: {error.strerror or error}; choose an out_dir on a disk with file locks"
            ) from error
        _sign(file)
        yield


def _sign(file: IO[str]) -> None:
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()} since {now}")
    file.flush()


def _taken(folder: Path, file: IO[str]) -> str:
    file.seek(0)
    holder = file.read().strip() or "another process"
    return f"{folder} is in use by {holder}; wait until it has ended, or choose another out_dir"
