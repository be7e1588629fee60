"""A process that runs a model's code in the sandbox."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from typing import IO

from reflact.processes.sandbox import VARIABLES, SandboxRequest, build_command

# Maximum size of what is read of the report and of the error output, in bytes.
MAX_ERROR_BYTES = 1_000_000


@dataclass
class ConfinedProcess:
    """Code in a process and a session of its own; ``close`` ends it, and so does ``parent``'s end.

    ``tests`` is code that runs after it. ``stdin`` and ``stdout`` are open files, or
    ``subprocess.PIPE``; the error output goes to a file, because pipes fill up. ``folder`` is the
    current one. ``seconds`` limit processor time; ``memory`` and ``output``, of each output, are in
    bytes. ``variables`` are environment variables beside ``VARIABLES``.
    """

    code: str
    tests: str | None
    _: KW_ONLY
    stdin: IO[bytes] | int
    stdout: IO[bytes] | int
    folder: str | None
    seconds: int | None
    memory: int
    output: int
    confine: bool
    parent: int | None
    variables: Mapping[str, str]

    def __post_init__(self) -> None:
        """Start the process."""
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - close() closes it
        self._report = tempfile.TemporaryFile()  # noqa: SIM115
        with tempfile.TemporaryFile() as program:
            program.write(json.dumps({"answer": self.code, "tests": self.tests}).encode())
            program.seek(0)
            request = SandboxRequest(
                parent=self.parent,
                program=program.fileno(),
                report=self._report.fileno(),
                seconds=self.seconds,
                memory=self.memory,
                output=self.output,
                confine=self.confine,
            )
            self.popen = subprocess.Popen(  # noqa: S603 - our own script
                build_command(request),
                bufsize=0,
                stdin=self.stdin,
                stdout=self.stdout,
                stderr=self._errors,
                cwd=self.folder,
                env={**VARIABLES, **self.variables},
                start_new_session=True,
                pass_fds=(request.program, request.report),
            )

    def read_report(self) -> bytes:
        """Return the marks of the sandbox."""
        return read_all(self._report)

    def read_errors(self) -> str:
        """Return the error output so far."""
        return read_all(self._errors).decode(errors="replace")

    def kill(self) -> None:
        """End the process and all that it started, also while another thread waits for it."""
        with suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signal.SIGKILL)

    def close(self) -> None:
        """End the process, and close its files."""
        self.kill()
        for file in (self.popen.stdin, self.popen.stdout, self._errors, self._report):
            if file is not None:
                with suppress(BrokenPipeError):
                    file.close()
        self.popen.wait()


def read_all(file: IO[bytes]) -> bytes:
    """Return the content of a file from its beginning, up to ``MAX_ERROR_BYTES``."""
    file.seek(0)
    return file.read(MAX_ERROR_BYTES)


def find_last_line(text: str) -> str:
    """Return the last line that is not blank; empty if there is none."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")
