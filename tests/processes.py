"""Processes that tests look at, as the kernel sees them."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path

import anyio

PRELOADED = [
    "reflact.cli.app",
    "reflact.llm.client",
    "reflact.memory.store",
    "reflact.store.runs",
    "reflact.targets.chat",
    "reflact.testing.toy",
    "training_process",
]

HANG_SECONDS = 600
"""Ends a program that hangs; no test depends on how long it takes."""


@cache
def get_context() -> ForkServerContext:
    """Return what starts processes that have imported reflact already: a second less for each."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


class Program:
    """Python code that runs in a process of its own, as ``python -c`` does; ``output`` has standard error, too."""

    def __init__(self, code: str, *arguments: str, folder: Path | None = None) -> None:
        context = get_context()
        ours, theirs = context.Pipe(duplex=False)
        self._process = context.Process(target=_run, args=(code, ["-c", *arguments], folder, theirs))
        self._process.start()
        theirs.close()
        self.output = os.fdopen(os.dup(ours.fileno()), encoding="utf-8")
        ours.close()

    def kill(self) -> None:
        """Send SIGKILL."""
        self._process.kill()

    def wait(self) -> tuple[int | None, str]:
        """Return the exit code and the rest of the output once the process has ended."""
        with self.output:
            rest = self.output.read()
        self._process.join()
        return self._process.exitcode, rest


def _run(code: str, argv: Sequence[str], folder: Path | None, output: Connection) -> None:
    for number in (1, 2):
        os.dup2(output.fileno(), number)
    output.close()
    sys.stdout, sys.stderr = (os.fdopen(number, "w", encoding="utf-8", closefd=False) for number in (1, 2))
    if folder is not None:
        os.chdir(folder)
        sys.path.insert(0, str(folder))
    sys.argv = [*argv]
    faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
    exec(compile(code, "<program>", "exec"), {"__name__": "__main__"})


def list_children(process: int | str = "self") -> set[str]:
    """Return the ids of a process's children."""
    tasks = Path(f"/proc/{process}/task").glob("*/children")
    return {child for task in tasks for child in task.read_text(encoding="utf-8").split()}


def status(process: str) -> str:
    """Return what the kernel says of a process; empty where there is none."""
    try:
        return Path(f"/proc/{process}/status").read_text(encoding="utf-8")
    except (FileNotFoundError, ProcessLookupError):
        return ""


def is_gone(process: str) -> bool:
    """Whether a process has ended."""
    return "State:" not in status(process) or "(zombie)" in status(process)


def is_busy(process: str) -> bool:
    """Whether a process computes."""
    return "State:\tR" in status(process)


def is_locked_in(process: str) -> bool:
    """Whether a process has a filter of system calls."""
    return "Seccomp:\t2" in status(process)


class Stopwatch:
    """Measures seconds from its making on, less those in which threads of this process waited for a processor."""

    def __init__(self) -> None:
        self._since, self._waited = time.monotonic(), _read_waiting_time()

    def read(self) -> float:
        """Return the seconds so far; on a busy machine they may be fewer than none."""
        return time.monotonic() - self._since - (_read_waiting_time() - self._waited)


def _read_waiting_time() -> float:
    waits = 0
    for path in Path("/proc/self/task").glob("*/schedstat"):
        with suppress(FileNotFoundError, ProcessLookupError):
            waits += int(path.read_text(encoding="ascii").split()[1])
    return waits / 1e9


async def until(holds: Callable[[], bool]) -> None:
    """Wait until a condition holds, and fail if it does not for long."""
    with anyio.fail_after(60):
        while not holds():  # noqa: ASYNC110 - the kernel sets no event
            await anyio.sleep(0.01)
