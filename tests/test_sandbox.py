"""The sandbox: each escape is refused by its rules, and by nothing else, so a rule that goes missing is noticed.

``escapes.py`` lists the escapes.
"""

from __future__ import annotations

import json
import os
import platform
import re
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import NamedTuple

import pytest

import escapes
from escapes import DONE, ESCAPES, LIMITS, Escape
from reflact.environments.python_grader import PythonGrader
from reflact.processes import sandbox
from reflact.processes.sandbox import (
    ALLOW,
    CHECKED_CALLS,
    DENY,
    KILL,
    PORTS_VERSION,
    PROCESSORS,
    REFUSED_CALLS,
    RULES,
    SCOPES_VERSION,
    UNKNOWN,
    build_filter,
    can_confine,
    read_calls,
    read_landlock_version,
)
from reflact.types import Item

REFUSALS = {"EPERM", "EACCES", "ENOSYS", "ENOMEM", "EMFILE", "EFBIG", "EAGAIN"}
PLACEHOLDER = re.compile(r"\{(\w+)\}")
LAYERED = [escape for escape in ESCAPES if len(escape.rules) > 1]

needs_confinement = pytest.mark.skipif(not can_confine(), reason="this system cannot confine a process")


class World(NamedTuple):
    """What escapes aim at: a folder, a process, a port, and an abstract socket's name."""

    folder: Path
    victim: subprocess.Popen[bytes]
    port: int
    name: str


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """Return a world: a folder with a database, a process that sleeps, and servers that listen."""
    (tmp_path / "run.db").write_text("canary", encoding="utf-8")
    (tmp_path / "own").write_text("x", encoding="utf-8")
    name = f"{os.getpid()}-{tmp_path.name}"
    victim = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(3600)"])
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as abstract:
        abstract.bind(f"\0{name}")
        abstract.listen()
        yield World(tmp_path, victim, server.getsockname()[1], name)
    victim.kill()
    victim.wait()


def fill_in(world: World, codes: Sequence[str], output: int) -> list[str]:
    """Return the code of attempts with the names of the world's things and the numbers of calls."""
    places: dict[str, object] = {**world._asdict(), "victim": world.victim.pid, "output": output}
    for calls in (escapes.MORE_CALLS, *REFUSED_CALLS.values()):
        places |= read_calls(calls, PROCESSORS[platform.machine()])
    return [PLACEHOLDER.sub(lambda match: str(places[match[1]]), code) for code in codes]


def attempt(world: World, codes: Sequence[str], without: Collection[str] = ()) -> list[str]:
    """Return the outcome of each attempt in a process without some rules; its death is the last outcome."""
    with TemporaryFile() as output, (world.folder / "own").open("rb") as own:
        order = {
            "sandbox": sandbox.__file__,
            "without": sorted(without),
            "attempts": fill_in(world, codes, output.fileno()),
        }
        done = subprocess.run(
            [sys.executable, "-P", "-s", "-B", escapes.__file__, json.dumps(order)],
            stdin=own,
            capture_output=True,
            cwd=world.folder,
            pass_fds=(output.fileno(),),
            check=False,
        )
    outcomes = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(outcomes) == len(codes) or done.returncode < 0, done.stderr.decode()[-1000:]
    return outcomes if len(outcomes) == len(codes) else [*outcomes, signal.Signals(-done.returncode).name]


def list_layers(escape: Escape) -> tuple[str, ...]:
    """Return the rules of an escape that this kernel can enforce."""
    version = read_landlock_version()
    missing = {"ports"} if version < PORTS_VERSION else set()
    missing |= {"scopes"} if version < SCOPES_VERSION else set()
    missing |= set() if os.getuid() == 0 else {"capabilities"}
    return tuple(rule for rule in escape.rules if rule not in missing)


@needs_confinement
def test_every_escape_is_refused(world: World) -> None:
    """With all rules, one process tries all escapes and succeeds with none."""
    outcomes = attempt(world, [escape.code for escape in ESCAPES])
    assert len(outcomes) == len(ESCAPES)
    wrong = {e.name: outcome for e, outcome in zip(ESCAPES, outcomes, strict=True) if outcome not in REFUSALS}
    assert wrong == {}
    assert (world.folder / "run.db").read_text(encoding="utf-8") == "canary"
    assert world.victim.poll() is None


@needs_confinement
async def test_no_answer_escapes(world: World) -> None:
    attempts = dict(zip((e.name for e in ESCAPES), fill_in(world, [e.code for e in ESCAPES], 1), strict=True))
    answer = f"""
{escapes.PRELUDE}
def succeeds(attempt):
    try:
        exec(attempt, dict(globals()))
    except (OSError, MemoryError):
        return False
    return True

print([name for name, attempt in {attempts!r}.items() if succeeds(attempt)])
"""
    item = Item(id="i", input="?", reference={"stdout": "[]"})
    assert (await PythonGrader(seconds=60)(item, answer)).feedback is None
    assert (world.folder / "run.db").read_text(encoding="utf-8") == "canary"
    assert world.victim.poll() is None


@pytest.mark.slow
@needs_confinement
@pytest.mark.parametrize("escape", ESCAPES, ids=lambda escape: escape.name)
def test_an_escape_succeeds_without_its_rules(escape: Escape, world: World) -> None:
    if escape.needs_root and os.getuid() != 0:
        pytest.skip("the kernel refuses it to this user as well")
    (outcome,) = attempt(world, [escape.code], escape.rules)
    if outcome == "ENOSYS" and "ENOSYS" in escape.reaches:
        pytest.skip("this kernel has no such call")
    assert outcome in {DONE, *escape.reaches}


@pytest.mark.slow
@needs_confinement
@pytest.mark.parametrize("escape", LAYERED, ids=lambda escape: escape.name)
def test_each_of_several_rules_is_enough(escape: Escape, world: World) -> None:
    for rule in list_layers(escape):
        (outcome,) = attempt(world, [escape.code], set(escape.rules) - {rule})
        assert outcome in REFUSALS, rule


SEND_SIGNAL = """
a, b = socket.socketpair()
for step in (
    lambda: fcntl.fcntl(a, fcntl.F_SETOWN, {victim}),
    lambda: fcntl.ioctl(a, 0x8901, struct.pack('i', {victim})),
    lambda: fcntl.fcntl(a, 10, 9),
    lambda: fcntl.fcntl(a, fcntl.F_SETFL, 0x2000),
    lambda: fcntl.ioctl(a, 0x5452, struct.pack('i', 1)),
):
    try:
        step()
    except OSError:
        pass
b.send(b'x')
"""
SIGNAL_RULES = {"fcntl commands", "asynchronous files", "ioctl commands", "scopes"}


@needs_confinement
@pytest.mark.parametrize("left", [None, "scopes", "asynchronous files"])
def test_no_signal_reaches_another_process_through_a_file(left: str | None, world: World) -> None:
    if left == "scopes" and "scopes" not in list_layers(Escape("", ("scopes",), "")):
        pytest.skip("this kernel has no scopes of signals")
    without = SIGNAL_RULES - {left}
    without -= {"ioctl commands"} if left == "asynchronous files" else set()
    attempt(world, [SEND_SIGNAL], without)
    if left is None:
        assert world.victim.wait(60) == -signal.SIGKILL
    else:
        assert world.victim.poll() is None


FOREIGN = """
code = mmap.mmap(-1, 4096, prot=7)
code.write(bytes([0xB8, 20, 0, 0, 0, 0xCD, 0x80, 0xC3]))
ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))()
"""


@needs_confinement
@pytest.mark.skipif(platform.machine() != "x86_64", reason="calls of 32 bits are tried on x86_64")
def test_calls_of_another_processor_end_the_process(world: World) -> None:
    """A call of 32 bits, whose numbers mean others, ends the process; without the rule it does not."""
    assert attempt(world, [FOREIGN]) == ["SIGSYS"]
    assert attempt(world, [FOREIGN], ["foreign calls"])[-1] != "SIGSYS"


def decide(program: bytes, mark: int, number: int, *arguments: int) -> int:
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
@pytest.mark.parametrize("rule", REFUSED_CALLS)
def test_each_call_is_refused_by_its_rule_alone(name: str, rule: str) -> None:
    machine = PROCESSORS[name]
    whole, rest = (b"".join(build_filter(machine, 77, without)) for without in ((), (rule,)))
    numbers = read_calls(REFUSED_CALLS[rule], machine).values()
    assert {decide(whole, machine.mark, number) for number in numbers} == {DENY}
    assert {decide(rest, machine.mark, number) for number in numbers} == {ALLOW}


@pytest.mark.parametrize("name", PROCESSORS)
def test_arguments_decide_on_each_processor(name: str) -> None:
    machine = PROCESSORS[name]
    program = b"".join(build_filter(machine, 77))
    allowed = f"""
        read; clone {0x10000}; kill 77; openat 0 0 {os.O_RDONLY}; fcntl 0 4 {os.O_NONBLOCK}; fcntl 0 1030
        ioctl 0 {0x5401}; prlimit 0; prctl 15; socketpair 1 1; fcntl 0 3 {0x2000}
    """
    denied = f"""
        clone {0x11}; kill 76; kill {2**32 - 1}; kill {2**64 - 1}; tgkill 76; prlimit 76; prctl 1
        openat 0 0 {os.O_TRUNC}; fcntl 0 8; fcntl 0 {2**32 + 8}; fcntl 0 4 {0x2000 | os.O_NONBLOCK}
        ioctl 0 {0x5452}; ioctl 0 {0x8901}; socketpair 1 2
    """
    numbers = read_calls(f"{CHECKED_CALLS} read 0 63", machine)
    for calls, outcome in ((allowed, ALLOW), (denied, DENY)):
        for call in re.split(r"[;\n]", calls.strip()):
            called, *arguments = call.split()
            assert decide(program, machine.mark, numbers[called], *map(int, arguments)) == outcome, call
    assert {decide(program, machine.mark, number) for number in (425, 0x40000000 + 57)} == {UNKNOWN}
    assert decide(program, 0x40000003, 3) == KILL


def test_every_rule_has_an_escape() -> None:
    assert len(ESCAPES) >= 70
    assert len({escape.name for escape in ESCAPES}) == len(ESCAPES)
    used = {rule for escape in ESCAPES for rule in escape.rules}
    assert used == {*RULES, *LIMITS} - {"foreign calls"}
