"""The locks of a run: operating-system locks on files, which end with their process.

A run has two of them. One is in its folder, which it writes its files into. The other is beside its
store and belongs to the run's identity there, so that no second folder continues the same run. The
first line of a file names the process, for the error message of others.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from filelock import FileLock, Timeout

from reflact.errors import RunConflict, StoreError
from reflact.store.artifacts import resolve_inside

# A reader that asks whether a run is at work holds its lock for less.
READER_SECONDS = 0.02


@dataclass(frozen=True)
class Ownership:
    """A run that this process owns.

    Attributes:
        owner: This process, for messages to others.
        files: The lock files, and others of the run, with their device and number.
    """

    owner: str
    files: tuple[tuple[Path, tuple[int, int]], ...] = ()

    def check(self) -> None:
        """Check that the files are still those that were opened; StoreError otherwise."""
        for path, identity in self.files:
            is_same = False
            with suppress(OSError):
                is_same = _identify(path) == identity
            if not is_same:
                raise StoreError(
                    f"{path} was removed, moved or replaced during the run, so others would not "
                    "find what it writes; put back what was moved, and start again to resume"
                )

    def including(self, path: Path) -> Ownership:
        """Return an ownership that a further file of the run belongs to."""
        return Ownership(self.owner, (*self.files, (path, _identify(path))))


@contextmanager
def own_run(folder: Path, store: Path, run_id: str) -> Iterator[Ownership]:
    """Own a run while the block runs: lock its folder, and its identity in its store.

    Raises:
        RunConflict: Another process, or another trainer of this process, has a lock; names it.
        StoreError: A lock file cannot be created.
    """
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    owner = f"{_describe_process()} since {now}"
    folder_file = resolve_inside(folder, "run.lock")
    identity_file = _find_identity_file(store, run_id)
    with (
        _hold(folder_file, owner, str(folder), "out_dir"),
        _hold(identity_file, owner, f"run {run_id} of {store}", "store"),
    ):
        ownership = Ownership(owner).including(folder_file).including(identity_file)
        try:
            yield ownership
        except RunConflict:
            # A refused start leaves nothing. Other files stay: readers find the store by them.
            with suppress(OSError):
                identity_file.unlink()
            raise


def is_owned(store: Path, run_id: str) -> bool:
    """Whether a process works on a run of a store; False if its lock file cannot be read."""
    path = _find_identity_file(store, run_id)
    if not path.is_file():
        return False
    try:
        with FileLock(path, timeout=0, fallback_to_soft=False):
            return False
    except Timeout:
        return True
    except OSError:
        return False


def _identify(path: Path) -> tuple[int, int]:
    """Return the device and the number of a file, which tell it from another one under its name."""
    status = path.stat()
    return status.st_dev, status.st_ino


def _find_identity_file(store: Path, run_id: str) -> Path:
    path = Path(os.path.realpath(store))
    return path.with_name(f"{path.name}-{run_id}.lock")


@contextmanager
def _hold(path: Path, owner: str, subject: str, key: str) -> Iterator[None]:
    """Lock a file; ``subject`` is what it protects, and ``key`` the setting to change."""

    def write_owner(file: int) -> None:
        with suppress(OSError):  # a full disk: the lock works without its text
            os.ftruncate(file, 0)
            os.write(file, f"{owner}\n".encode())

    lock = FileLock(
        path,
        timeout=2 * READER_SECONDS,
        poll_interval=READER_SECONDS,
        mode=0o644,
        fallback_to_soft=False,
        preserve_lock_file=True,
        thread_local=False,
        on_acquired=write_owner,
    )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not path.is_file():
            raise StoreError(
                f"cannot lock {path}: it is no regular file; remove it or choose another {key}"
            )
        lock.acquire()
    except Timeout:
        raise RunConflict(_describe_holder(path, subject, key)) from None
    except OSError as error:
        raise StoreError(
            f"cannot create the lock file {path}: {error.strerror or error}; free some space, make "
            f"the folder writable, or choose another {key}, on a disk with file locks"
        ) from error
    try:
        yield
    finally:
        lock.release()


def _describe_process() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"


def _describe_holder(path: Path, subject: str, key: str) -> str:
    text = ""
    with suppress(OSError):
        text = path.read_bytes()[:1000].decode("utf-8", "replace").partition("\n")[0].strip()
    advice = "wait until it has ended"
    if text.startswith(f"{_describe_process()} "):
        advice = "that is this one: leave its `async with trainer.stream()`"
    return f"{subject} is in use by {text or 'another process'}; {advice}, or choose another {key}"
