"""Processes that tests look at, as the kernel sees them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import anyio


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


async def until(holds: Callable[[], bool]) -> None:
    """Wait until a condition holds, and fail if it does not for long."""
    with anyio.fail_after(60):
        while not holds():  # noqa: ASYNC110 - the kernel sets no event
            await anyio.sleep(0.01)
