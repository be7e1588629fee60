"""An agent in a process of its own: its folder, its limits, and the end of all that it started."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import IO, NamedTuple

import anyio
from anyio.abc import Process
from pydantic import Field

from reflact.agents.supervisor import (
    SupervisorReport,
    SupervisorRequest,
    build_command,
    describe_start_error,
)
from reflact.processes import sandbox
from reflact.types import FrozenModel

FOLDER_PREFIX = "reflact-rollout-"
LOCK_FILE = "lock"

# A younger folder of a rollout may not be locked yet.
STALE_SECONDS = 600.0

# The time that a supervisor gets to end all processes before it is killed itself.
SECONDS_TO_END = 10.0


class CommandLimits(FrozenModel):
    """The limits of a command and of all that it starts, in one rollout.

    Attributes:
        seconds: Time, in seconds.
        output_bytes: Standard output, and error output, in bytes.
        memory_mib: Resident memory of all processes together, in MiB; Linux alone.
        processes: The number of processes at a time; Linux alone.
        file_mib: The size of each file, in MiB.
    """

    seconds: float = Field(default=300.0, gt=0)
    output_bytes: int = Field(default=2**22, gt=0)
    memory_mib: int = Field(default=4096, gt=0)
    processes: int = Field(default=512, gt=0)
    file_mib: int = Field(default=1024, gt=0)


class ProcessEnd(NamedTuple):
    """How a command ended; ``problem`` is the reason why it could not be started."""

    how: int | str
    output: str
    errors: str
    problem: str | None


@asynccontextmanager
async def open_rollout_folder() -> AsyncIterator[Path]:
    """Make a folder that is removed when the block ends; old ones of killed processes go, too."""
    made, folder, lock = await anyio.to_thread.run_sync(_make_folder)
    try:
        yield folder
    finally:
        os.close(lock)
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(made.cleanup)


def _make_folder() -> tuple[tempfile.TemporaryDirectory[str], Path, int]:
    remove_stale_folders(Path(tempfile.gettempdir()))
    made = tempfile.TemporaryDirectory(prefix=FOLDER_PREFIX, ignore_cleanup_errors=True)
    folder = Path(made.name).resolve()
    lock = os.open(folder / LOCK_FILE, os.O_CREAT | os.O_RDWR, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    return made, folder, lock


def remove_stale_folders(parent: Path) -> None:
    """Remove folders of rollouts that no living process has locked: own ones, that are not new."""
    for folder in parent.glob(f"{FOLDER_PREFIX}*"):
        with suppress(OSError):
            state = folder.lstat()
            is_own = state.st_uid == os.getuid() and not folder.is_symlink()
            if not is_own or time.time() - state.st_mtime < STALE_SECONDS:
                continue
            lock = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)


async def run_process(
    command: Sequence[str],
    text: str,
    *,
    folder: Path,
    variables: Mapping[str, str],
    limits: CommandLimits,
    confine: bool,
) -> ProcessEnd:
    """Run a command in the folder of a rollout, and end all that it started.

    Input and outputs are files and not pipes, so no process that was not found keeps the rollout.
    """
    writable = str(folder) if confine else None
    isolation = sandbox.__file__ if confine or sandbox.can_confine() else None
    with ExitStack() as stack:
        stdin, output, errors, request, report = (
            stack.enter_context(tempfile.TemporaryFile()) for _ in range(5)
        )
        order = SupervisorRequest(
            command=list(command),
            parent=os.getpid(),
            report=report.fileno(),
            folder=writable,
            sandbox=isolation,
            **limits.model_dump(exclude={"seconds"}),
        )
        _write(stdin, text)
        _write(request, json.dumps(order))
        try:
            process = await anyio.open_process(
                build_command(request.fileno()),
                stdin=stdin,
                stdout=output,
                stderr=errors,
                cwd=folder / "work",
                env=variables,
                start_new_session=True,
                pass_fds=(request.fileno(), report.fileno()),
            )
        except (OSError, ValueError) as error:
            return ProcessEnd("did not start", "", "", describe_start_error(error))

        try:
            with anyio.move_on_after(limits.seconds) as scope:
                await process.wait()
        finally:
            with anyio.CancelScope(shield=True):
                await _end(process)
                await process.aclose()
        result = SupervisorReport()
        with suppress(ValueError):  # the supervisor was killed
            result = SupervisorReport(*json.loads(_read(report, limits.output_bytes)))
        limit = result.limit
        if scope.cancelled_caught:
            limit = f"was ended after {limits.seconds:g} seconds (`seconds`)"
        code = process.returncode if result.code is None else result.code
        return ProcessEnd(
            limit or ("did not end" if code is None else code),
            _read(output, limits.output_bytes),
            _read(errors, limits.output_bytes),
            result.problem,
        )


def _write(file: IO[bytes], text: str) -> None:
    file.write(text.encode("utf-8"))
    file.seek(0)


def _read(file: IO[bytes], limit: int) -> str:
    file.seek(0)
    return file.read(limit).decode("utf-8", "replace")


async def _end(process: Process) -> None:
    """Let the supervisor end everything; then kill what is left of it."""
    if process.returncode is None:
        process.terminate()
        with anyio.move_on_after(SECONDS_TO_END):
            await process.wait()
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
