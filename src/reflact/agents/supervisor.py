"""The process around an agent's command, a script: holds the command to its limits and ends it.

On Linux it adopts the processes that the command leaves behind, so that it finds each descendant,
in any group or session. It ends them all when the command ends, when a limit is reached, when it is
told to, and when its own parent ends. Elsewhere it ends only the command's process group, and
memory and processes have no limit. If the kernel allows it, the command can neither signal this
process nor read the variables of another one, and the signals of this process reach its descendants
alone. So one signal ends them all, however fast they multiply.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import json
import os
import resource
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

# Options of prctl.
SET_DEATH_SIGNAL = 1
SET_CHILD_SUBREAPER = 36

# Seconds between two looks at the command, and how many of them make one at all processes and their
# memory.
INTERVAL = 0.1
LOOKS = 5

# The most threads of a command for each process of its limit; the kernel counts both together for
# users and groups.
THREADS_OF_PROCESS = 16

IS_LINUX = sys.platform == "linux"

# What to do if a program cannot be started, by the number of the error; EINVAL is an argument with
# a NUL.
START_ADVICE = {
    errno.ENOENT: "give its full path, or install it",
    errno.EACCES: "allow its execution",
    errno.E2BIG: "leave out {task}, so that the task goes to standard input",
    errno.EINVAL: "leave out {task}, so that the task goes to standard input",
}


class SupervisorRequest(NamedTuple):
    """What a supervisor is to do, as JSON in an open file, since arguments are limited to 128 KiB.

    It ends with the process ``parent``, and writes its report to the open file ``report``.
    ``sandbox`` is the file whose function isolates the command, and ``folder`` the only one in
    which it can write; both may be None. The limits are those of ``CommandLimits``.
    """

    command: list[str]
    parent: int
    report: int
    folder: str | None
    sandbox: str | None
    output_bytes: int
    memory_mib: int
    processes: int
    file_mib: int


class SupervisorReport(NamedTuple):
    """How a command ended; ``problem`` is the reason why it could not be started."""

    code: int | None = None
    limit: str | None = None
    problem: str | None = None


def build_command(request: int) -> list[str]:
    """Return the command of a supervisor; ``request`` is the open file with its request."""
    return [sys.executable, "-I", "-S", "-B", "-X", "utf8", __file__, str(request)]


def describe_start_error(error: OSError | ValueError) -> str:
    """Return why a program cannot be started, and what to do."""
    number: int | None = errno.EINVAL
    reason = str(error)
    if isinstance(error, OSError):
        number = error.errno
        reason = error.strerror or reason
    advice = START_ADVICE.get(number or 0)
    return f"cannot be started: {reason}" + (f"; {advice}" if advice else "")


def main(request: SupervisorRequest) -> None:
    """Run a command to its end, and write the report."""
    stops: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: stops.append(number))
    libc = ctypes.CDLL(None)
    isolate = None
    if request.sandbox is not None:
        isolate = runpy.run_path(request.sandbox)["isolate_command"]
    file_size = request.file_mib * 2**20
    most = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    if most != resource.RLIM_INFINITY:
        file_size = min(file_size, most)

    def prepare() -> None:
        if IS_LINUX:
            libc.prctl(SET_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_size, file_size))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if isolate is not None:
            isolate(request.folder)

    process = None
    is_scoped = isolate is not None and _scope_signals(request.parent, isolate)
    try:
        if IS_LINUX:
            libc.prctl(SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        process = subprocess.Popen(  # noqa: S603 - the user's own command
            request.command,
            process_group=0,  # so that `kill 0` of a command does not end this process
            preexec_fn=prepare,  # noqa: PLW1509 - there are no threads
        )
        report = _watch(process, request, stops)
    except (OSError, ValueError) as error:
        report = SupervisorReport(problem=f"{request.command[0]} {describe_start_error(error)}")
    except subprocess.SubprocessError:
        report = SupervisorReport(problem=f"{request.command[0]} cannot be confined by this system")
    _end_all(process, is_scoped=is_scoped)
    os.write(request.report, json.dumps(report).encode())


def _scope_signals(outside: int, isolate: Callable[[str | None], bool]) -> bool:
    """Let the signals of this process reach its descendants alone; return whether that holds.

    It is tried on a process outside, since a signal to all processes is sent only if it holds.
    """
    with contextlib.suppress(OSError):
        os.kill(outside, 0)
        if isolate(None):
            try:
                os.kill(outside, 0)
            except PermissionError:
                return True
    return False


def _watch(
    process: subprocess.Popen[bytes], request: SupervisorRequest, stops: Sequence[int]
) -> SupervisorReport:
    """Wait for the end of the command, or for a reason to end it."""
    before = _count_processes()
    for look in itertools.count(1):
        if stops or os.getppid() != request.parent:
            break
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(INTERVAL)
            return SupervisorReport(code, _find_flood(request))
        flood = _find_flood(request)
        if flood is not None:
            return SupervisorReport(limit=flood)
        is_many = _count_processes() - before > request.processes
        if not IS_LINUX or not (is_many or look % LOOKS == 0):
            continue
        found = _find_descendants()
        memory = sum(size for size, _ in found.values())
        threads = sum(count for _, count in found.values())
        for pid in found:
            _reap(pid, process)
        if len(found) > request.processes:
            return SupervisorReport(
                limit=f"was ended with more than {request.processes:,} processes (`processes`)"
            )
        if threads > THREADS_OF_PROCESS * request.processes:
            return SupervisorReport(
                limit=f"was ended with {threads:,} threads, more than {THREADS_OF_PROCESS} for "
                f"each of {request.processes:,} processes (`processes`)"
            )
        if memory > request.memory_mib * 2**20:
            return SupervisorReport(
                limit=f"was ended with more than {request.memory_mib:,} MiB of memory "
                "(`memory_mib`)"
            )
    return SupervisorReport(limit="was ended by reflact, or with it")


def _find_flood(request: SupervisorRequest) -> str | None:
    """Return in words that an output is too large; None if both are not."""
    if max(os.fstat(1).st_size, os.fstat(2).st_size) <= request.output_bytes:
        return None
    return f"was ended after {request.output_bytes:,} bytes of output (`output_bytes`)"


def _count_processes() -> int:
    """Return the number of all processes of the system, at almost no cost; 0 if it is not Linux."""
    return os.stat("/proc").st_nlink if IS_LINUX else 0  # noqa: PTH116 - starts faster


def _find_descendants() -> dict[int, tuple[int, int]]:
    """Return all processes below this one, each with its memory in bytes and its threads."""
    parents = {}
    sizes = {}
    page = os.sysconf("SC_PAGE_SIZE")
    for name in os.listdir("/proc"):  # noqa: PTH208 - starts faster
        if name.isdecimal():
            try:
                with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:  # noqa: PTH123
                    fields = file.read().rpartition(")")[2].split()
            except OSError:
                continue
            parents[int(name)] = int(fields[1])
            sizes[int(name)] = int(fields[21]) * page, int(fields[17])
    found: dict[int, tuple[int, int]] = {}
    below = {os.getpid()}
    while below:
        below = {pid for pid, parent in parents.items() if parent in below and pid not in found}
        found |= {pid: sizes[pid] for pid in below}
    return found


def _reap(pid: int, process: subprocess.Popen[bytes] | None) -> None:
    """Take notice of the end of an adopted process."""
    if process is None or pid != process.pid:
        try:
            os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            return


def _end_all(process: subprocess.Popen[bytes] | None, *, is_scoped: bool) -> None:
    """Kill the command and all processes that it started, until there is none."""
    if is_scoped:
        with contextlib.suppress(OSError):
            os.kill(-1, signal.SIGKILL)  # reaches descendants alone
        with contextlib.suppress(ChildProcessError):
            while True:
                os.waitpid(-1, 0)
        return
    if process is not None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    while IS_LINUX and (found := _find_descendants()):
        for pid in found:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        for pid in found:
            _reap(pid, process)
        if process is not None:
            process.poll()
        time.sleep(0.001)


if __name__ == "__main__":
    with os.fdopen(int(sys.argv[1]), encoding="utf-8") as file:
        order = SupervisorRequest(*json.load(file))
    main(order)
