"""The grader of Python programs: runs each answer on the cases of the item's reference.

Models write these programs, so each runs in a separate process that the kernel confines (see
``sandbox``).
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from subprocess import TimeoutExpired
from typing import ClassVar, NamedTuple, Self

import anyio
from pydantic import Field, JsonValue, PrivateAttr, ValidationError

from reflact.concurrency import run_in_thread
from reflact.config.training import EnvironmentConfig
from reflact.environments.comparison import quote_json
from reflact.environments.graders import CheckedGrader
from reflact.errors import ConfigError, EnvironmentFailure
from reflact.jsonutil import describe_problems
from reflact.processes.confined import ConfinedProcess, find_last_line, read_all
from reflact.processes.sandbox import CONFINED_MARK, TESTS_PASSED_MARK, can_confine
from reflact.types import FrozenModel, Grade, Item, Score

# Maximum length of an answer, in characters.
MAX_PROGRAM_CHARS = 1_000_000

# Maximum size of standard output and of standard error, in bytes.
MAX_OUTPUT_BYTES = 1_000_000

# The most threads of a program, and the seconds between two looks; a kernel counts threads of users
# and groups alone.
MAX_THREADS = 256
THREADS_SECONDS = 0.02


class AssertionCase(FrozenModel):
    """A case that passes if code, run after the answer in its module, raises no exception."""

    tests: str


class OutputCase(FrozenModel):
    """A case that passes if the answer, run as a program with ``stdin``, prints ``stdout``."""

    stdin: str = ""
    stdout: str


ProgramCase = AssertionCase | OutputCase


class ProgramResult(NamedTuple):
    """The result of a program: its exit code (None: out of wall-clock time) and its output.

    ``is_crowded``: it was ended because it had more than ``MAX_THREADS`` threads.
    """

    code: int | None
    report: bytes
    output: str
    errors: str
    is_crowded: bool = False


class PythonGrader(CheckedGrader[ProgramCase]):
    """Runs answers as Python programs, with this interpreter and its libraries.

    A reference is one case or a list of cases: ``{"tests": "assert add(1, 2) == 3"}``,
    or ``{"stdin": "1 2", "stdout": "3"}``. Output is compared line by line; trailing white space
    and blank lines at the end do not count. Soft is the share of cases that pass; hard is 1 if all
    pass. The answer is run as it is: a code fence around it is a syntax error.

    The answer and its tests share a process, so an answer can deceive its tests. It never sees the
    expected output.

    Args:
        seconds: Limit of processor time for a program.
        patience: Limit of wall-clock time, as a multiple of ``seconds``.
        mebibytes: Memory limit in MiB.
        confined: Whether programs are confined; ``from_config`` checks whether that is possible.
    """

    name: ClassVar[str] = "python"
    meaning: ClassVar[str] = (
        "An answer is a Python program; it is right if it passes the reference's tests."
    )
    seconds: int = Field(default=5, ge=1)
    patience: int = Field(default=10, ge=1)
    mebibytes: int = Field(default=1024, ge=64)
    confined: bool = True
    _slots: anyio.CapacityLimiter = PrivateAttr(
        default_factory=lambda: anyio.CapacityLimiter(os.cpu_count() or 1)
    )

    @classmethod
    def from_config(
        cls, config: EnvironmentConfig, *, is_available: Callable[[], bool] = can_confine
    ) -> Self:
        """Return the grader; ConfigError if this system cannot confine programs, but must."""
        confined = is_available()
        if not confined and not config.allow_unconfined:
            raise ConfigError(
                "environment.grader: python runs code that a model wrote, and this system cannot "
                "confine it. Use Linux with Landlock on x86_64 or aarch64. Or set "
                "environment.allow_unconfined: true if the code may read, change and delete "
                "everything that you can"
            )
        return cls(seconds=config.time_limit, confined=confined)

    @property
    def identity(self) -> dict[str, JsonValue]:
        """Name, version, settings, and the interpreter's version."""
        return {**super().identity, "python": f"{sys.version_info.major}.{sys.version_info.minor}"}

    async def __call__(self, item: Item, answer: str) -> Grade:
        """Run an answer on all cases of an item."""
        cases = self._list_accepted(item)
        if len(answer) > MAX_PROGRAM_CHARS:
            feedback = f"the program has more than {MAX_PROGRAM_CHARS} characters"
            return Grade(score=Score.of(0), answer=answer, feedback=feedback)
        faults = []
        for case in cases:
            result = await anyio.to_thread.run_sync(
                partial(self._run_program, case, answer), limiter=self._slots
            )
            fault = await run_in_thread(
                partial(find_fault, case, result, self.seconds), result.output, result.errors
            )
            faults += [] if fault is None else [fault]
        score = Score(hard=float(not faults), soft=1 - len(faults) / len(cases))
        return Grade(score=score, answer=answer, feedback=faults[0] if faults else None)

    def _read(self, reference: JsonValue) -> ProgramCase:
        has_tests = isinstance(reference, dict) and "tests" in reference
        kind: type[ProgramCase] = AssertionCase if has_tests else OutputCase
        try:
            return kind.model_validate(reference, strict=True)
        except ValidationError as error:
            raise ValueError(
                f"the reference {quote_json(reference)} has neither `tests` alone, nor `stdout` "
                f"with or without `stdin`: {describe_problems(error)}"
            ) from None

    def _run_program(self, case: ProgramCase, answer: str) -> ProgramResult:
        """Run an answer on a case, on a worker thread; a cancelled caller ends the process."""
        tests = case.tests if isinstance(case, AssertionCase) else None
        with ExitStack() as stack:
            stdin = stack.enter_context(tempfile.TemporaryFile())
            if isinstance(case, OutputCase):
                stdin.write(case.stdin.encode())
                stdin.seek(0)
            output = stack.enter_context(tempfile.TemporaryFile())
            process = ConfinedProcess(
                answer,
                tests,
                stdin=stdin,
                stdout=output,
                folder=stack.enter_context(tempfile.TemporaryDirectory(prefix="reflact-")),
                seconds=self.seconds,
                memory=self.mebibytes * 2**20,
                output=MAX_OUTPUT_BYTES,
                confine=self.confined,
                parent=os.getpid(),
                variables={},
            )
            stack.callback(process.close)
            end = time.monotonic() + self.seconds * self.patience
            is_crowded = False
            while process.popen.poll() is None and time.monotonic() < end and not is_crowded:
                with suppress(TimeoutExpired):
                    process.popen.wait(THREADS_SECONDS)
                anyio.from_thread.check_cancelled()
                with suppress(OSError):  # it has ended, or this is not Linux
                    links = os.stat(f"/proc/{process.popen.pid}/task").st_nlink  # noqa: PTH116 - a count, no file
                    is_crowded = links - 2 > MAX_THREADS
            code = None if is_crowded else process.popen.poll()
            return ProgramResult(
                code,
                process.read_report(),
                read_all(output).decode(errors="replace"),
                process.read_errors(),
                is_crowded,
            )


def find_fault(  # noqa: PLR0911 - one for each fault
    case: ProgramCase, result: ProgramResult, seconds: int
) -> str | None:
    """Return the fault of a program, if any; EnvironmentFailure if it was not run."""
    reason = find_last_line(result.errors) or f"exit code {result.code}"
    if CONFINED_MARK not in result.report:
        raise EnvironmentFailure(f"the process for answers did not start as it should: {reason}")
    if result.is_crowded:
        return f"it had more than {MAX_THREADS} threads"
    if result.code is None:
        return f"it waited too long: it has {seconds} seconds of processor time"
    if -result.code in {signal.SIGXCPU, signal.SIGKILL}:
        return f"it took more than {seconds} seconds of processor time"
    if result.code != 0:
        return f"it ended with an error: {quote_json(reason)}"
    if isinstance(case, AssertionCase):
        return None if TESTS_PASSED_MARK in result.report else "it ended before its tests had run"
    if split_output(result.output) == split_output(case.stdout):
        return None
    expected = quote_json(case.stdout)
    printed = quote_json(result.output)
    return (
        f"for the input {quote_json(case.stdin)} it should print {expected}, and printed {printed}"
    )


def split_output(output: str) -> Sequence[str]:
    """Return the lines of an output in the form used for comparison."""
    return [line.rstrip() for line in output.rstrip().splitlines()]
