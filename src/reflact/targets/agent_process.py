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

from reflact.concurrency import open_task_group
from reflact.processes import sandbox
from reflact.targets.supervisor import SupervisorReport, SupervisorRequest, build_command
from reflact.types import FrozenModel

FOLDER_PREFIX = "reflact-rollout-"
LOCK_FILE = "lock"
STALE_SECONDS = 600.0
"""A younger folder of a rollout may not be locked yet."""

SECONDS_TO_END = 1.0
"""The time that a supervisor gets to end all processes before it is killed itself."""


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
    """How a command ended: its exit code, or the limit that it reached, with its output and its error output.

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


async def run_process(
    command: Sequence[str],
    text: str | None,
    *,
    folder: Path,
    variables: Mapping[str, str],
    limits: CommandLimits,
    confine: bool,
) -> ProcessEnd:
    """Run a command in the folder of a rollout, and end all that it started.

    Args:
        command: The program and its arguments.
        text: Its standard input; None for an empty one.
        folder: The rollout's folder.
        variables: All of its environment variables.
        limits: At which it is ended.
        confine: Whether it can write nothing outside the folder.
    """
    outputs: dict[str, bytes] = {}
    limit: list[str] = []
    reading, writing = os.pipe()
    request = SupervisorRequest(
        command=list(command),
        parent=os.getpid(),
        report=writing,
        memory=limits.memory_mib * 2**20,
        file_size=limits.file_mib * 2**20,
        processes=limits.processes,
        folder=str(folder) if confine else None,
        sandbox=sandbox.__file__ if sandbox.can_confine() else None,
    )
    try:
        try:
            process = await anyio.open_process(
                build_command(request),
                cwd=folder / "work",
                env=variables,
                start_new_session=True,
                pass_fds=(writing,),
            )
        finally:
            os.close(writing)
        try:
            async with open_task_group() as group:

                async def read(kind: str, stream: ByteReceiveStream | None) -> None:
                    assert stream is not None
                    pieces, size = [], 0
                    async for piece in stream:
                        pieces.append(piece)
                        size += len(piece)
                        if size > limits.output_bytes:
                            limit.append(
                                f"was ended after {limits.output_bytes:,} bytes of output (`output_bytes`)"
                            )
                            group.cancel_scope.cancel()
                    outputs[kind] = b"".join(pieces)

                group.start_soon(read, "output", process.stdout)
                group.start_soon(read, "errors", process.stderr)
                group.start_soon(_feed, process, text or "")
                with anyio.move_on_after(limits.seconds) as scope:
                    await process.wait()
                if scope.cancelled_caught:
                    limit.append(f"was ended after {limits.seconds:g} seconds (`seconds`)")
                    group.cancel_scope.cancel()
        finally:
            with anyio.CancelScope(shield=True):
                await _end(process)
        report = _read_report(reading)
    finally:
        os.close(reading)
    code = report.code if report.code is not None else process.returncode
    how = limit[0] if limit else report.limit or (code if code is not None else "did not end")
    texts = [outputs.get(kind, b"").decode("utf-8", "replace") for kind in ("output", "errors")]
    return ProcessEnd(how, texts[0], texts[1], report.problem)


async def _feed(process: Process, text: str) -> None:
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
    await process.aclose()
