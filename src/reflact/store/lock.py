"""The locks of a run: operating-system locks on files, which end with their process.

A run has two of them. One is in its folder, which it writes its files into. The other is beside its store and belongs
to the run's identity there, so that no second folder continues the same run. The first line of a file names the
process, for the error message of others. The second line of the other file counts the run's commits, which reveals a
store that is missing, was replaced by an older copy, or lost its write-ahead log.
"""

from __future__ import annotations

import os
import socket
import stat
import sys
import time
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
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
READER_SECONDS = 0.02
"""A reader that asks whether a run is at work holds its lock for less."""

OPEN_FLAGS = os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0)


class RunLock:
    """A locked file while this process owns it; a fork of the process owns nothing."""

    def __init__(self, path: Path, file: int) -> None:
        self.path = path.absolute()
        self._file = file
        self._pid = os.getpid()
        self._identity = _identify(os.fstat(file))
        now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        self.holder = f"process {self._pid} on {socket.gethostname()} since {now}"
        self._commits = read_commit_count(_read_text(file))
        self._write()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=partial(_close_in_fork, weakref.ref(self)))

    def check(self) -> None:
        """Check that the lock still protects the run; StoreError otherwise."""
        if os.getpid() != self._pid:
            raise StoreError(
                f"{self.path} is locked by process {self._pid}, and this process is a fork of it, which does not own the "
                "run; start the run in one process"
            )
        try:
            unchanged = _identify(self.path.stat(follow_symlinks=False)) == self._identity
        except OSError:
            unchanged = False
        if not unchanged:
            raise StoreError(
                f"the lock file {self.path} was removed or moved during the run, so another process may work "
                "there; put back what was moved, and start again to resume"
            )

    def record_commits(self, commits: int) -> None:
        """Write down the number of the run's commits."""
        self._commits = commits
        self._write()

    def remove_unused(self) -> None:
        """Remove the file if no commit was counted, as after a refused start; not in a fork of the process."""
        if self._commits is None and os.getpid() == self._pid:
            with suppress(OSError):  # a folder without permission, or a system that keeps open files
                if _identify(self.path.stat(follow_symlinks=False)) == self._identity:
                    self.path.unlink()

    def close(self) -> None:
        """Close the file once, which releases the lock; in a fork, the lock of the parent stays."""
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)

    def _write(self) -> None:
        count = "" if self._commits is None else f"{self._commits}\n"
        with suppress(OSError):  # a full disk: the lock works without its text
            os.ftruncate(self._file, 0)
            os.lseek(self._file, 0, os.SEEK_SET)
            os.write(self._file, f"{self.holder}\n{count}".encode())


@dataclass(frozen=True)
class Ownership:
    """The two locks of a run that this process owns."""

    folder: RunLock
    identity: RunLock

    def check(self) -> None:
        """Check that both locks still protect the run; StoreError otherwise."""
        self.folder.check()
        self.identity.check()


@contextmanager
def own_run(folder: Path, store: Path, run_id: str) -> Iterator[Ownership]:
    """Own a run while the block runs: lock its folder and its identity in its store; see ``lock_run``."""
    with lock_run(folder) as own, lock_identity(store, run_id) as identity:
        yield Ownership(own, identity)


@contextmanager
def lock_run(folder: Path) -> Iterator[RunLock]:
    """Lock a run's folder while the block runs; the folder is created if it is missing.

    Raises:
        RunConflict: Another process, or another trainer of this process, has the lock; names it.
        StoreError: The lock file cannot be created.
    """
    with _lock_file(folder, "run.lock", str(folder), "out_dir") as lock:
        yield lock


@contextmanager
def lock_identity(store: Path, run_id: str) -> Iterator[RunLock]:
    """Lock the identity of a run in its store while the block runs; errors are those of ``lock_run``."""
    path = Path(os.path.realpath(store))
    subject = f"run {run_id} of {store}"
    with _lock_file(path.parent, f"{path.name}-{run_id}.lock", subject, "store") as lock:
        try:
            yield lock
        finally:
            lock.remove_unused()


def is_owned(store: Path, run_id: str) -> bool:
    """Whether a process works on a run of a store; False if its lock file cannot be read."""
    path = Path(os.path.realpath(store))
    try:
        file = os.open(path.parent / f"{path.name}-{run_id}.lock", OPEN_FLAGS & ~os.O_CREAT)
    except OSError:
        return False
    try:
        _lock(file)
    except OSError:
        return True
    finally:
        os.close(file)
    return False


def read_commit_counts(store: Path) -> Mapping[Path, tuple[str, int]]:
    """Return the runs of a store and the numbers of their commits, by the lock files that count them."""
    path = Path(os.path.realpath(store))
    start, end, found = f"{path.name}-", ".lock", {}
    with suppress(OSError):
        for file in sorted(path.parent.iterdir()):
            if file.name.startswith(start) and file.name.endswith(end) and file.is_file():
                text = file.read_bytes()[:MAX_LOCK_BYTES].decode("utf-8", "replace")
                if (count := read_commit_count(text)) is not None:
                    found[file] = file.name[len(start) : -len(end)], count
    return found


def read_commit_count(text: str) -> int | None:
    """Return the number of commits in the text of a lock file; None if there is none."""
    count = text.partition("\n")[2].strip()
    return int(count) if count.isascii() and count.isdecimal() and len(count) < 20 else None


@contextmanager
def _lock_file(folder: Path, name: str, subject: str, key: str) -> Iterator[RunLock]:
    """Lock a file while the block runs; ``subject`` is what it protects, and ``key`` the setting to change."""
    path = resolve_inside(folder, name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = os.open(path, OPEN_FLAGS, 0o644)
    except OSError as error:
        raise StoreError(
            f"cannot create the lock file {path}: {error.strerror or error}; "
            f"free some space, make the folder writable, or choose another {key}"
        ) from error
    lock = None
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise StoreError(f"cannot lock {path}: it is no regular file; remove it or choose another {key}")
        try:
            try:
                _lock(file)
            except (BlockingIOError, PermissionError):
                time.sleep(READER_SECONDS)
                _lock(file)
        except (BlockingIOError, PermissionError):
            raise RunConflict(_describe_holder(subject, file, key)) from None
        except OSError as error:
            raise StoreError(
                f"cannot lock {path}: {error.strerror or error}; choose another {key}, on a disk with file locks"
            ) from error
        lock = RunLock(path, file)
        yield lock
    finally:
        os.close(file) if lock is None else lock.close()


def _close_in_fork(reference: weakref.ref[RunLock]) -> None:
    """Close the file in a forked process, so that the lock ends with the process that owns it."""
    if (lock := reference()) is not None:
        lock.close()


def _describe_holder(subject: str, file: int, key: str) -> str:
    holder = _read_text(file).partition("\n")[0].strip() or "another process"
    own = holder.startswith(f"process {os.getpid()} on {socket.gethostname()} ")
    wait = "that is this one: leave its `async with trainer.stream()`" if own else "wait until it has ended"
    return f"{subject} is in use by {holder}; {wait}, or choose another {key}"


def _identify(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino


def _read_text(file: int) -> str:
    os.lseek(file, 0, os.SEEK_SET)
    return os.read(file, MAX_LOCK_BYTES).decode("utf-8", "replace")
