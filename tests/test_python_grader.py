"""The grader of programs: what counts as right, and what a program cannot do however it tries.

Attempts that do no harm are made twice: locked in, where they must fail, and free, where they must succeed,
so that each of them is known to be one.
"""

from __future__ import annotations

import json
import os
import re
import struct
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio
import pytest
from pydantic import JsonValue

from processes import is_gone, is_locked_in, list_children, until
from reflact.config.training import TrainerConfig
from reflact.environments import sandbox
from reflact.environments.dataset import build_environment
from reflact.environments.python_grader import (
    MAX_OUTPUT_BYTES,
    AssertionCase,
    ProgramResult,
    PythonGrader,
    build_python_grader,
    find_fault,
)
from reflact.environments.sandbox import (
    ALLOW,
    DENY,
    KILL,
    PROCESSORS,
    UNKNOWN,
    SandboxRequest,
    build_filter,
    can_confine,
)
from reflact.errors import ConfigError, DataError, EnvironmentFailure
from reflact.types import Grade, Item

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(not can_confine(), reason="this system cannot confine a process"),
]

LOCKED, FREE = PythonGrader(seconds=1, patience=60), PythonGrader(seconds=1, patience=60, confined=False)

SLEEPER = "import time; time.sleep(3600)"


def item(reference: JsonValue) -> Item:
    return Item(id="i", input="?", reference=reference)


async def graded(reference: JsonValue, answer: str, grade: PythonGrader = LOCKED) -> Grade:
    return await grade(item(reference), answer)


async def check_attempts(attempts: Mapping[str, str], grade: PythonGrader, *, succeed: bool) -> None:
    """Check that one program can make all attempts without an OSError, or none."""
    program = f"""
def succeeds(attempt):
    try:
        exec(attempt, {{}})
    except OSError:
        return False
    return True

print([name for name, attempt in {dict(attempts)!r}.items() if succeeds(attempt) is not {succeed}])
"""
    assert (await graded({"stdout": "[]"}, program, grade)).feedback is None


# ---------------------------------------------------------------------------------------- what is right


@pytest.mark.parametrize(
    ("reference", "answer", "soft"),
    [
        ({"tests": "assert add(1, 2) == 3"}, "def add(a, b):\n    return a + b", 1),
        ({"tests": "assert add(1, 2) == 3"}, "def add(a, b):\n    return a - b", 0),
        ({"tests": "assert __name__ == 'answer'"}, "", 1),
        ({"stdin": "1 2\n", "stdout": "3"}, "print(sum(map(int, input().split())))", 1),
        ({"stdout": "a\nb"}, "print('a  ')\nprint('b\\n\\n')", 1),
        ({"stdout": "a\nb"}, "print('b')\nprint('a')", 0),
        ({"stdout": "x"}, "if __name__ == '__main__':\n    print('x')", 1),
        ({"stdout": "ä"}, "print('ä')", 1),
        ([{"stdin": "1", "stdout": "1"}, {"stdin": "2", "stdout": "4"}], "print(int(input()) ** 2)", 1),
        ([{"stdin": "1", "stdout": "1"}, {"stdin": "2", "stdout": "4"}], "print(1)", 0.5),
    ],
)
async def test_what_a_program_does_decides(reference: JsonValue, answer: str, soft: float) -> None:
    """Tests run after the answer or output as expected: soft is the share that holds, hard needs all."""
    result = await graded(reference, answer)
    assert (result.score.soft, result.score.hard) == (soft, float(soft == 1))
    assert (result.feedback is None) == (soft == 1)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ("```python\nprint(1)\n```", "SyntaxError"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("raise SystemExit(3)", "exit code 3"),
        ("import ctypes; ctypes.string_at(0)", "exit code -11"),
        ("print(2)", 'for the input "" it should print "1", and printed "2\\n"'),
        ("x = bytearray(4 << 30)", "MemoryError"),
        pytest.param("while True: pass", "more than 1 seconds of processor time", marks=pytest.mark.slow),
        pytest.param(
            "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass",
            "processor time",
            marks=pytest.mark.slow,
        ),
    ],
)
async def test_what_is_wrong_is_said(answer: str, words: str) -> None:
    """The analyst learns what became of a program."""
    result = await graded({"stdout": "1"}, answer)
    assert result.score.hard == 0
    assert words in str(result.feedback)


@pytest.mark.parametrize("leave", ["raise SystemExit", "import os; os._exit(0)"])
async def test_leaving_early_passes_no_tests(leave: str) -> None:
    """A program that ends in order before its tests have run has not passed them."""
    result = await graded({"tests": "assert False"}, leave)
    assert result.score.hard == 0
    assert result.feedback in {"it ended before its tests had run", 'it ended with an error: "exit code 1"'}


async def test_a_score_does_not_hang_on_hashes() -> None:
    """The order of a set is the same in every process."""
    answers = [await graded({"stdout": "?"}, "print({'a', 'b', 'c', 'd', 'e'})") for _ in range(3)]
    assert len({answer.feedback for answer in answers}) == 1


def test_a_useless_reference_is_refused_by_name() -> None:
    """A reference on which no program can be tried is an error that names the item and the grader."""
    references: list[JsonValue] = [
        None, "3", [], {}, {"stdin": "1"}, {"stdout": 3}, {"tests": "1", "stdout": "1"}, [{}]
    ]  # fmt: skip
    for reference in references:
        with pytest.raises(DataError, match="item 'i' cannot be graded by python"):
            LOCKED.check(item(reference))


def test_a_configuration_names_the_grader(tmp_path: Path) -> None:
    """Its limits come from the configuration, its references are looked at before anything is asked."""
    rows = ",".join(f'{{"id": "{n}", "input": {n}, "reference": {{"stdout": "1"}}}}' for n in range(10))
    (tmp_path / "items.json").write_text(f"[{rows}]", encoding="utf-8")
    settings = {"grader": "python", "time_limit": 3, "memory_limit": 512}
    config = TrainerConfig.model_validate(
        {"data": {"path": tmp_path / "items.json"}, "environment": settings}
    )
    assert (
        '"settings":{"confined":true,"mebibytes":512,"patience":10,"seconds":3}'
        in build_environment(config).identity
    )
    (tmp_path / "items.json").write_text(f"[{rows}]".replace("stdout", "output"), encoding="utf-8")
    with pytest.raises(DataError, match="cannot be graded by python"):
        build_environment(config)


# --------------------------------------------------------------------------------------- what is refused

SECRET = "open('{folder}/run.db').read()"
HARMLESS = {
    "a file of the system": "open('/etc/passwd').read()",
    "the run's database": SECRET,
    "a way around": "open('/usr/lib/../../{folder}/run.db').read()",
    "the parent folder": "import os; os.listdir('..')",
    "the root": "import os; os.listdir('/')",
    "its own folder": "import os; os.listdir('.')",
    "its environment": "open('/proc/self/environ').read()",
    "the parent's environment": "import os; open(f'/proc/{{os.getppid()}}/environ').read()",
    "a file of its own": "open('note.txt', 'w').write('x')",
    "a file in /tmp": "import os\nos.close(os.open('/tmp/x-{name}', os.O_CREAT | os.O_WRONLY))\n"
    "os.remove('/tmp/x-{name}')",
    "a folder": "import os; os.mkdir('new')",
    "a link": "import os; os.symlink('/etc/passwd', 'link')",
    "the database's mode": "import os; os.chmod('{folder}/run.db', 0o644)",
    "the database's times": "import os; os.utime('{folder}/run.db')",
    "the database's length": "import os; os.truncate('{folder}/run.db', 6)",
    "a socket": "import socket; socket.socket().close()",
    "a datagram": "import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM).close()",
    "a local socket": "import socket; socket.socket(socket.AF_UNIX).close()",
    "a pair of datagram sockets": "import socket; [s.close() for s in socket.socketpair(type=2)]",
    "memory as a file": "import os; os.close(os.memfd_create('x'))",
    "another process's existence": "import os; os.kill(os.getppid(), 0)",
    "another process's limits": "import os, resource; resource.prlimit(os.getppid(), resource.RLIMIT_CORE)",
    "another process's priority": "import os; os.setpriority(os.PRIO_PROCESS, os.getppid(), "
    "os.getpriority(os.PRIO_PROCESS, os.getppid()))",
}


async def test_what_is_out_of_reach(tmp_path: Path) -> None:
    """Locked in, a program is kept from what it can do when it is free."""
    database = tmp_path / "run.db"
    database.write_text("canary", encoding="utf-8")
    name = f"{os.getpid()}-{tmp_path.name}"
    attempts = {what: attempt.format(folder=tmp_path, name=name) for what, attempt in HARMLESS.items()}
    await check_attempts(attempts, LOCKED, succeed=False)
    assert database.read_text(encoding="utf-8") == "canary"
    await check_attempts(attempts, FREE, succeed=True)


HARMFUL = {
    "a fork": "import os\nif os.fork() == 0: os._exit(0)",
    "a spawned program": "import os; os.posix_spawn('/bin/true', ['true'], {})",
    "another program": "import os; os.execv('/bin/true', ['true'])",
    "a child": "import subprocess; subprocess.run(['/bin/true'])",
    "a forked worker": "import multiprocessing\nmultiprocessing.get_context('fork').Process(target=print).start()",
    "a session": "import os; os.setsid()",
    "a signal to all": "import os; os.kill(-1, 0)",
    "a truncated file": "import os; os.open('/usr/lib/os-release', os.O_RDONLY | os.O_TRUNC)",
    "a namespace": "import ctypes, os\nif ctypes.CDLL(None).unshare(0x10000000): raise OSError",
    "tracing": "import ctypes, os\nif ctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0): raise OSError",
    "its death signal": "import ctypes, os\nif ctypes.CDLL(None).prctl(1, 0): raise OSError",
    "a ring of calls": "import ctypes, os\nif ctypes.CDLL(None).syscall(425, 1, 0) < 0: raise OSError",
    "shared memory": "import ctypes, os\nif ctypes.CDLL(None).shmget(0, 4096, 0o1600) < 0: raise OSError",
    "a mount": "import ctypes, os\nif ctypes.CDLL(None).mount(0, b'/', 0, 4096, 0): raise OSError",
}


async def test_what_would_do_harm_is_refused_too() -> None:
    """Processes, other programs, privileges and what would outlive the process are refused."""
    await check_attempts(HARMFUL, LOCKED, succeed=False)


async def test_a_program_has_threads_and_a_loop_of_its_own() -> None:
    """What stays within the process is allowed."""
    answer = """
        import asyncio, threading
        async def main(): await asyncio.to_thread(print, "x", end="")
        asyncio.run(main())
        thread = threading.Thread(target=print, args=("y",)); thread.start(); thread.join()
    """
    result = await graded({"stdout": "xy"}, textwrap.dedent(answer))
    assert result.score.hard == 1, result.feedback


async def test_threads_without_end_are_bounded_by_memory() -> None:
    """A program that starts threads for ever fails."""
    answer = """
        import threading
        stop = threading.Event()
        started = 0
        try:
            while started < 5000:
                threading.Thread(target=stop.wait, daemon=True).start()
                started += 1
        except RuntimeError:
            pass
        print(started < 1000)
    """
    result = await graded({"stdout": "True"}, textwrap.dedent(answer))
    assert result.score.hard == 1, result.feedback


async def test_the_environment_is_empty() -> None:
    """No variable of this process reaches a program; two of its own say how text is coded and hashed."""
    own = "{'PYTHONHASHSEED', 'LC_CTYPE'}"
    result = await graded({"stdout": "set()"}, f"import os\nprint(set(os.environ) - {own})")
    assert result.score.hard == 1, result.feedback
    assert set(os.environ) - {"PYTHONHASHSEED", "LC_CTYPE"}


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
async def test_a_gigabyte_of_output_ends_early(stream: str) -> None:
    """What a program writes is cut at a limit, and it fails there."""
    answer = f"import sys\nfor _ in range(1000): sys.{stream}.write('x' * 1000000); sys.{stream}.flush()"
    result = await graded({"stdout": "x"}, answer)
    assert result.score.hard == 0
    assert len(str(result.feedback)) < 1000
    free = await graded({"tests": "print('x' * 100)"}, f"print('y' * {MAX_OUTPUT_BYTES - 1000})")
    assert free.score.hard == 1


# -------------------------------------------------------------------------------------- time and leftovers


@pytest.mark.slow
async def test_a_program_that_waits_is_ended() -> None:
    """Waiting takes no processor time, and ends all the same."""
    others = list_children()
    with anyio.fail_after(60):
        result = await graded({"stdout": "x"}, SLEEPER, PythonGrader(seconds=1, patience=1))
    assert "waited too long" in str(result.feedback)
    assert list_children() <= others


@pytest.mark.slow
async def test_the_event_loop_goes_on() -> None:
    """While a program burns its time, other tasks of this process run."""
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await anyio.sleep(0.01)
            ticks += 1

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(tick)
        await graded({"stdout": "x"}, "while True: pass")
        tasks.cancel_scope.cancel()
    assert ticks > 0


async def test_cancelling_ends_the_program() -> None:
    """A grader that is cancelled leaves no process."""
    others = list_children()
    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(graded, {"stdout": "x"}, SLEEPER)
            await until(lambda: bool(list_children() - others))
            tasks.cancel_scope.cancel()
    assert list_children() <= others


async def test_a_free_program_leaves_no_process_either() -> None:
    """Where programs are not locked in, their whole group is killed at the end."""
    result = await graded(
        {"stdout": "?"},
        "import os, sys, time\n"
        "try: child = os.fork()\n"
        "except OSError: child = None\n"
        "if child == 0: time.sleep(3600)\n"
        "print(child)",
        FREE,
    )
    found = re.search(r"printed \"(\d+)", str(result.feedback))
    if found is None:
        assert "None" in str(result.feedback)
        return
    await until(lambda: is_gone(found[1]))


async def test_a_program_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    """Where that one is killed, nothing is left running."""
    starter = textwrap.dedent("""
        import anyio
        from reflact.environments.python_grader import PythonGrader
        from reflact.types import Item
        sleeper = "import time; time.sleep(3600)"
        anyio.run(PythonGrader(seconds=900), Item(id="i", input="?", reference={"stdout": "x"}), sleeper)
    """)
    variables = {**os.environ, "TMPDIR": str(tmp_path)}
    async with await anyio.open_process([sys.executable, "-c", starter], env=variables) as process:
        await until(lambda: any(is_locked_in(child) for child in list_children(process.pid)))
        (sleeper,) = list_children(process.pid)
        process.kill()
        await process.wait()
    await until(lambda: is_gone(sleeper))


# ----------------------------------------------------------------------------------------- failing closed


def test_a_system_that_cannot_lock_in_is_refused() -> None:
    """Without confinement there is no grader, unless that is allowed; and then its scores are others."""
    limits: dict[str, Any] = {"seconds": 5, "mebibytes": 1024, "is_available": lambda: False}
    with pytest.raises(ConfigError, match=r"environment\.allow_unconfined: true"):
        build_python_grader(**limits, allow_unconfined=False)
    free = build_python_grader(**limits, allow_unconfined=True)
    assert not free.confined
    assert free.identity != build_python_grader(seconds=5, mebibytes=1024, allow_unconfined=True).identity


def test_an_answer_is_not_run_where_locking_in_fails(tmp_path: Path) -> None:
    """The process ends before it looks at the answer; here the parent it is told of is not its own."""
    program = tmp_path / "program.json"
    program.write_text('{"answer": "print(12345)", "tests": null}', encoding="utf-8")
    order = SandboxRequest(1, program=0, report=1, seconds=1, memory=1 << 30, output=1000, confine=True)
    with program.open() as file:
        done = subprocess.run(
            [sys.executable, sandbox.__file__, json.dumps(order)],
            stdin=file,
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 1
    assert "ended" in done.stderr
    assert done.stdout == ""


def test_a_process_that_did_not_start_is_no_wrong_answer() -> None:
    """An answer that was never run has no score."""
    with pytest.raises(EnvironmentFailure, match="did not start as it should: OSError: no"):
        find_fault(AssertionCase(tests=""), ProgramResult(1, b"", "", "Traceback\nOSError: no\n"), 5)


def outcome(program: bytes, mark: int, number: int, *arguments: int) -> int:
    """Run a filter on a system call as the kernel would."""
    steps = list(struct.iter_unpack("=HBBI", program))
    call = struct.pack("=IIQ6Q", number, mark, 0, *arguments, *[0] * (6 - len(arguments)))
    place, value = 0, 0
    while True:
        code, yes, no, operand = steps[place]
        place += 1
        match code:
            case 0x20:
                (value,) = struct.unpack_from("=I", call, operand)
            case 0x06:
                return operand
            case 0x15 | 0x35 | 0x45:
                holds = {0x15: value == operand, 0x35: value >= operand, 0x45: bool(value & operand)}[code]
                place += yes if holds else no


@pytest.mark.parametrize("name", PROCESSORS)
def test_the_filter_of_each_machine(name: str) -> None:
    """On processors that this test does not run on, the filter decides as it should, too."""
    machine = PROCESSORS[name]
    program = b"".join(build_filter(machine, 77))

    def decided(number: int, *arguments: int) -> int:
        return outcome(program, machine.mark, number, *arguments)

    fork_like, socket = {"x86_64": (59, 41), "aarch64": (221, 198)}[name]
    assert decided(fork_like) == decided(socket) == DENY
    assert decided(425) == decided(0x40000000 + 57) == UNKNOWN
    assert decided(machine.clone, 0x10000) == ALLOW
    assert decided(machine.clone, 0x11) == DENY
    assert decided(machine.kill, 77) == ALLOW
    assert {decided(machine.kill, target) for target in (76, 2**32 - 1, 2**64 - 1)} == {DENY}
    assert decided(machine.openat, 0, 0, os.O_RDONLY) == ALLOW
    assert decided(machine.openat, 0, 0, os.O_TRUNC) == DENY
    assert decided(machine.prctl, 1) == DENY
    assert decided({"x86_64": 0, "aarch64": 63}[name]) == ALLOW
    assert outcome(program, 0x40000003, 3) == KILL
