"""The grader of programs: an answer is right when it does what the item's reference says.

Programs come from models, so each runs in a process of its own that is locked in by the kernel (see
``confined``): it reads nothing but the interpreter's libraries, writes nothing but its output, reaches no
network, starts no process, knows nothing of the environment's variables, and ends with its time. Where the
system cannot do that the grader refuses to work, unless it is told to go without.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import IO, ClassVar, NamedTuple

import anyio
from anyio.abc import Process
from pydantic import Field, JsonValue, PrivateAttr, ValidationError

from reflact.environments.graders import CheckedGrader, quote_json
from reflact.environments.sandbox import PASSED, READY, SandboxRequest, can_confine
from reflact.errors import ConfigError, DataError, EnvironmentFailure
from reflact.types import FrozenModel, Grade, Item, Score

SCRIPT = Path(__file__).with_name("sandbox.py")

MAX_OUTPUT_BYTES = 1_000_000
"""Bytes that a program may write, to standard output and to standard error each."""

MIB = 1 << 20


class AssertionCase(FrozenModel):
    """A reference that is met when Python code, run after the answer in its module, raises nothing."""

    tests: str


class OutputCase(FrozenModel):
    """A reference that is met when the answer, run as a program, reads ``stdin`` and prints ``stdout``."""

    stdin: str = ""
    stdout: str


ProgramCase = AssertionCase | OutputCase


class ProgramResult(NamedTuple):
    """What came of a program: its exit code (None: its time on the clock ran out) and what it wrote."""

    code: int | None
    report: bytes
    output: str
    errors: str


class ProgramFiles(NamedTuple):
    """What a process is given instead of pipes: files without names, which nobody has to empty in time."""

    program: IO[bytes]
    stdin: IO[bytes]
    output: IO[bytes]
    errors: IO[bytes]
    report: IO[bytes]


class PythonGrader(CheckedGrader):
    """Runs answers as Python programs, with this interpreter and its libraries.

    A reference is an object or a list of them, and all must hold: ``{"tests": "assert add(1, 2) == 3"}``,
    or ``{"stdin": "1 2", "stdout": "3"}``. Output is compared line by line; white space at the ends of
    lines and blank lines at the end do not count. Soft is the share of cases that hold, hard is 1 where
    all do. The answer is run as it stands: a code fence around it is a syntax error.

    The answer and its tests share a process, so an answer that is made to deceive its tests can do so;
    the output that is expected is never shown to it.

    Args:
        seconds: Processor time that a program may take.
        patience: How many times as long it may take on the clock, where it waits or the machine is busy.
        mebibytes: Memory that it may take.
        confined: Whether programs are locked in; ``python_grader`` finds out whether they can be.
    """

    name: ClassVar[str] = "python"
    seconds: int = Field(5, ge=1)
    patience: int = Field(10, ge=1)
    mebibytes: int = Field(1024, ge=64)
    confined: bool = True
    _slots: anyio.CapacityLimiter = PrivateAttr(
        default_factory=lambda: anyio.CapacityLimiter(os.cpu_count() or 1)
    )

    @property
    def identity(self) -> JsonValue:
        """Name, version, settings, and the interpreter's version."""
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        return {
            "grader": self.name,
            "version": self.version,
            "settings": self.model_dump(mode="json"),
            "python": version,
        }

    def check(self, item: Item) -> None:
        """Raise DataError, naming the item, where its reference is none that programs can be tried on."""
        self._parse_cases(item)

    async def __call__(self, item: Item, answer: str) -> Grade:
        """Run an answer on all cases of an item.

        Raises:
            DataError: The item's reference is none that programs can be tried on.
            EnvironmentFailure: The process could not be started or locked in.
        """
        cases = self._parse_cases(item)
        wrong = [why for case in cases if (why := await self._run_case(case, answer)) is not None]
        soft = 1 - len(wrong) / len(cases)
        score = Score(hard=float(not wrong), soft=soft)
        return Grade(score=score, answer=answer, feedback=wrong[0] if wrong else None)

    def _parse_cases(self, item: Item) -> list[ProgramCase]:
        given = item.reference if isinstance(item.reference, list) else [item.reference]
        try:
            cases = [_parse_case(reference) for reference in given]
        except ValueError as error:
            raise DataError(f"item {item.id!r} cannot be graded by {self.name}: {error}") from None
        if not cases:
            raise DataError(f"item {item.id!r} cannot be graded by {self.name}: it has no case at all")
        return cases

    async def _run_case(self, case: ProgramCase, answer: str) -> str | None:
        async with self._slots:
            ran = await self._run_program(case, answer)
        return find_fault(case, ran, self.seconds)

    async def _run_program(self, case: ProgramCase, answer: str) -> ProgramResult:
        tests, stdin = (case.tests, "") if isinstance(case, AssertionCase) else (None, case.stdin)
        program = json.dumps({"answer": answer, "tests": tests})
        with ExitStack() as stack:
            files = ProgramFiles(
                *(stack.enter_context(_open_unnamed_file(text)) for text in (program, stdin, "", "", ""))
            )
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="reflact-"))
            order = SandboxRequest(
                parent=os.getpid(),
                program=files.program.fileno(),
                report=files.report.fileno(),
                seconds=self.seconds,
                memory=self.mebibytes * MIB,
                output=MAX_OUTPUT_BYTES,
                confine=self.confined,
            )
            async with _start_process(order, files, folder) as process:
                with anyio.move_on_after(self.seconds * self.patience):
                    await process.wait()
                code = process.returncode
            told, output, errors = map(_read_all, (files.report, files.output, files.errors))
            return ProgramResult(code, told, output.decode(errors="replace"), errors.decode(errors="replace"))


def build_python_grader(
    *, seconds: int, mebibytes: int, allow_unconfined: bool, is_available: Callable[[], bool] = can_confine
) -> PythonGrader:
    """Return the grader for this system; ``able`` says whether programs can be locked in here.

    Raises:
        ConfigError: This system cannot lock programs in, and going without is not allowed.
    """
    confined = is_available()
    if not confined and not allow_unconfined:
        raise ConfigError(
            "environment.grader: python runs code that a model wrote, and this system cannot lock it in: "
            "that takes Linux with Landlock on x86_64 or aarch64, as most distributions have it; use such a "
            "system, or set environment.allow_unconfined: true where everything in reach may be lost"
        )
    return PythonGrader(seconds=seconds, mebibytes=mebibytes, confined=confined)


def find_fault(case: ProgramCase, ran: ProgramResult, seconds: int) -> str | None:
    """Return what is wrong with what a program did, None where it did what it should.

    Raises:
        EnvironmentFailure: The answer was never run: the fault is not its own.
    """
    if READY not in ran.report:
        reason = find_last_line(ran.errors) or f"exit code {ran.code}"
        raise EnvironmentFailure(f"the process for answers did not start as it should: {reason}")
    if ran.code is None:
        return f"it waited too long: it has {seconds} seconds of processor time"
    if -ran.code in {signal.SIGXCPU, signal.SIGKILL}:
        return f"it took more than {seconds} seconds of processor time"
    if ran.code != 0:
        reason = find_last_line(ran.errors) or f"exit code {ran.code}"
        return f"it ended with an error: {quote_json(reason)}"
    if isinstance(case, AssertionCase):
        return None if PASSED in ran.report else "it ended before its tests had run"
    if split_output(ran.output) == split_output(case.stdout):
        return None
    wanted, given = quote_json(case.stdout), quote_json(ran.output)
    return f"for the input {quote_json(case.stdin)} it should print {wanted}, and printed {given}"


def split_output(output: str) -> Sequence[str]:
    """Return the lines of an output as they are compared."""
    return [line.rstrip() for line in output.rstrip().splitlines()]


def find_last_line(text: str) -> str:
    """Return the last line that is not blank; empty where there is none."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def _parse_case(reference: JsonValue) -> ProgramCase:
    if not isinstance(reference, dict):
        raise ValueError(f"the reference {quote_json(reference)} is not an object with tests, or with stdout")  # noqa: TRY004
    kind: type[ProgramCase] = AssertionCase if "tests" in reference else OutputCase
    try:
        return kind.model_validate(reference, strict=True)
    except ValidationError as error:
        problem = error.errors(include_input=False)[0]
        where = ".".join(str(part) for part in problem["loc"])
        raise ValueError(f"the field {where!r} of the reference is wrong: {problem['msg']}") from None


@contextmanager
def _open_unnamed_file(text: str) -> Iterator[IO[bytes]]:
    """Give a file without a name that holds a text, to be read from its beginning."""
    with tempfile.TemporaryFile() as file:
        file.write(text.encode())
        file.seek(0)
        yield file


def _read_all(file: IO[bytes]) -> bytes:
    file.seek(0)
    return file.read(MAX_OUTPUT_BYTES)


@asynccontextmanager
async def _start_process(order: SandboxRequest, files: ProgramFiles, folder: str) -> AsyncIterator[Process]:
    """Start the process in a session of its own; whatever of it is left at the end is killed.

    Its variables are these alone, its path has nothing but the interpreter's libraries, and its hashes are
    the same each time, so that a score does not change from run to run.
    """
    process = await anyio.open_process(
        [sys.executable, "-P", "-s", "-B", "-X", "utf8", str(SCRIPT), json.dumps(order)],
        stdin=files.stdin,
        stdout=files.output,
        stderr=files.errors,
        cwd=folder,
        env={"PYTHONHASHSEED": "0"},
        start_new_session=True,
        pass_fds=(files.program.fileno(), files.report.fileno()),
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with anyio.CancelScope(shield=True):
            await process.aclose()
