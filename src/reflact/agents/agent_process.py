"""An agent in a process of its own: its folder, its limits, and the end of all that it started."""

from __future__ import annotations

import fcntl
import json
import os
import select
import shutil
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import anyio
from anyio.abc import ByteReceiveStream, Process
from pydantic import Field

from reflact.agents.supervisor import (
    SupervisorReport,
    SupervisorRequest,
    build_command,
    describe_start_error,
)
from reflact.concurrency import open_task_group
from reflact.processes import sandbox
from reflact.types import FrozenModel

FOLDER_PREFIX = "reflact-rollout-"
LOCK_FILE = "lock"

# A younger folder of a rollout may not be locked yet.
STALE_SECONDS = 600.0

# The time that a supervisor gets to end all processes before it is killed itself.
SECONDS_TO_END = 10.0

# The time for the rest of an output at its end, which a process that was not found may keep open.
SECONDS_TO_READ = 1.0


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
    """How a command ended: its exit code, or the limit that it reached, with its output and its
    error output.

    ``problem`` is the reason why it could not be started.
    """

    how: int | str
    output: str
    errors: str
    problem: str | None


@asynccontextmanager
async def open_rollout_folder() -> AsyncIterator[Path]:
    """Make a folder with ``work``, ``home`` and ``tmp``; it is removed when the block ends.

    Folders whose process was killed before it could remove them are removed too.
    """
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
        try:
            state = folder.lstat()
            if (
                folder.is_symlink()
                or state.st_uid != os.getuid()
                or time.time() - state.st_mtime < STALE_SECONDS
            ):
                continue
            lock = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            continue
        finally:
            os.close(lock)


class LimitReached(Exception):
    """A command has to be ended; the message says at which limit."""


async def _receive(stream: ByteReceiveStream, parts: list[bytes], limit: int) -> None:
    """Add an output of a command to a list, until its end.

    Raises:
        LimitReached: There was more than is allowed.
    """
    left = limit
    with suppress(anyio.ClosedResourceError, anyio.BrokenResourceError):
        async for part in stream:
            parts.append(part)
            left -= len(part)
            if left < 0:
                raise LimitReached(f"was ended after {limit:,} bytes of output (`output_bytes`)")


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

    Args:
        command: The program and its arguments.
        text: Its standard input.
        folder: The rollout's folder.
        variables: All of its environment variables.
        limits: At which it is ended.
        confine: Whether it can write nothing outside the folder.
    """
    output: list[bytes] = []
    errors: list[bytes] = []
    limit = None
    reading, writing = os.pipe()
    request = SupervisorRequest(
        command=list(command),
        parent=os.getpid(),
        report=writing,
        memory=limits.memory_mib * 2**20,
        file_size=limits.file_mib * 2**20,
        processes=limits.processes,
        folder=str(folder) if confine else None,
        sandbox=sandbox.__file__ if confine or sandbox.can_confine() else None,
    )
    try:
        try:
            process = await _start(request, folder / "work", variables)
        except (OSError, ValueError) as error:
            return ProcessEnd("did not start", "", "", describe_start_error(error))
        finally:
            os.close(writing)
        try:
            try:
                with anyio.move_on_after(limits.seconds) as scope:
                    await _exchange(process, text, output, errors, limits.output_bytes)
                if scope.cancelled_caught:
                    limit = f"was ended after {limits.seconds:g} seconds (`seconds`)"
            finally:
                with anyio.CancelScope(shield=True):
                    await _end(process)
        except LimitReached as error:
            limit = str(error)
        finally:
            with anyio.CancelScope(shield=True):
                await process.aclose()
        report = _read_report(reading)
    finally:
        os.close(reading)
    code = report.code if report.code is not None else process.returncode
    how = limit or report.limit or (code if code is not None else "did not end")
    output_text = b"".join(output).decode("utf-8", "replace")
    errors_text = b"".join(errors).decode("utf-8", "replace")
    return ProcessEnd(how, output_text, errors_text, report.problem)


async def _start(request: SupervisorRequest, folder: Path, variables: Mapping[str, str]) -> Process:
    """Start a supervisor."""
    with tempfile.TemporaryFile() as file:
        file.write(json.dumps(request).encode("ascii"))
        file.seek(0)
        return await anyio.open_process(
            build_command(file.fileno()),
            cwd=folder,
            env=variables,
            start_new_session=True,
            pass_fds=(file.fileno(), request.report),
        )


async def _exchange(
    process: Process, text: str, output: list[bytes], errors: list[bytes], limit: int
) -> None:
    """Give a command its whole input, take its output, and wait for its end.

    Raises:
        LimitReached: It wrote too much.
    """
    assert process.stdout is not None
    assert process.stderr is not None
    async with open_task_group() as group:
        group.start_soon(_send, process, text)
        group.start_soon(_receive, process.stdout, output, limit)
        group.start_soon(_receive, process.stderr, errors, limit)
        await process.wait()
        group.cancel_scope.deadline = anyio.current_time() + SECONDS_TO_READ


async def _send(process: Process, text: str) -> None:
    """Write to the input and close it; what the command no longer reads is lost."""
    assert process.stdin is not None
    with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
        await process.stdin.send(text.encode("utf-8"))
    await process.stdin.aclose()


def _read_report(pipe: int) -> SupervisorReport:
    """Return the report of a supervisor that has ended; an empty one if it was killed."""
    os.set_blocking(pipe, False)
    try:
        return SupervisorReport(**json.loads(os.read(pipe, select.PIPE_BUF)))
    except (OSError, ValueError, TypeError):
        return SupervisorReport()


async def _end(process: Process) -> None:
    """Let the supervisor end everything; then kill what is left of it."""
    if process.returncode is None:
        process.terminate()
        with anyio.move_on_after(SECONDS_TO_END):
            await process.wait()
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
