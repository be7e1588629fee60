"""The grader of programs: what counts as right, and what becomes of a program that does not end.

``test_sandbox.py`` has the escapes that a program may try.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import anyio
import pytest
from pydantic import JsonValue

from doubles import check_beside_loop
from processes import is_gone, is_locked_in, list_children, until
from reflact.config.training import EnvironmentConfig
from reflact.environments.python_grader import MAX_OUTPUT_BYTES, MAX_THREADS, PythonGrader
from reflact.errors import ConfigError, DataError
from reflact.processes import sandbox
from reflact.processes.sandbox import SandboxRequest, can_confine
from reflact.types import Grade, Item

pytestmark = [pytest.mark.skipif(not can_confine(), reason="this system cannot confine a process")]

LOCKED, FREE = PythonGrader(seconds=1, patience=60), PythonGrader(seconds=1, patience=60, confined=False)

SLEEPER = "import time; time.sleep(3600)"


async def graded(reference: JsonValue, answer: str, grade: PythonGrader = LOCKED) -> Grade:
    return await grade(Item(id="i", input="?", reference=reference), answer)


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
    result = await graded({"tests": "assert False"}, leave)
    assert result.score.hard == 0
    assert result.feedback in {"it ended before its tests had run", 'it ended with an error: "exit code 1"'}


def test_a_useless_reference_is_refused_by_name() -> None:
    references: list[JsonValue] = [
        None, "3", [], {}, {"stdin": "1"}, {"stdout": 3}, {"tests": "1", "stdout": "1"}, [{}]
    ]  # fmt: skip
    for reference in references:
        with pytest.raises(DataError, match="item 'i' cannot be graded by python"):
            LOCKED.check(Item(id="i", input="?", reference=reference))


async def test_a_program_has_threads_and_a_loop_of_its_own() -> None:
    """What stays within the process is allowed; its hashes are the same in every process."""
    answer = """
        import asyncio, threading
        async def main(): await asyncio.to_thread(print, "x", end="")
        asyncio.run(main())
        thread = threading.Thread(target=print, args=("y",)); thread.start(); thread.join()
        print({'a', 'b', 'c', 'd', 'e'})
    """
    results = [await graded({"stdout": "xy"}, textwrap.dedent(answer)) for _ in range(2)]
    assert 'printed "xy\\n' in str(results[0].feedback)
    assert results[0] == results[1]


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted on Linux alone")
async def test_small_threads_are_counted() -> None:
    """Threads that take no memory end a program once they are too many, and the next program has the usual number."""
    answer = """
        import threading
        threading.stack_size(2**15)
        stop = threading.Event()
        for _ in range({}): threading.Thread(target=stop.wait, daemon=True).start()
        stop.wait({})
        stop.set()
        print("done")
    """
    many = await graded({"stdout": "done"}, textwrap.dedent(answer.format(MAX_THREADS + 20, 60)))
    assert many.score.hard == 0
    assert many.feedback == f"it had more than {MAX_THREADS} threads"
    some = await graded({"stdout": "done"}, textwrap.dedent(answer.format(MAX_THREADS - 50, 0.1)))
    assert some.score.hard == 1, some.feedback


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
    await check_beside_loop(lambda: graded({"stdout": "x"}, "while True: pass"))


async def test_cancelling_ends_the_program() -> None:
    others = list_children()
    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(graded, {"stdout": "x"}, SLEEPER)
            await until(lambda: bool(list_children() - others))
            tasks.cancel_scope.cancel()
    assert list_children() <= others


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
        assert not is_gone(sleeper)
        process.kill()
        await process.wait()
    await until(lambda: is_gone(sleeper))


def test_a_system_that_cannot_lock_in_is_refused() -> None:
    """Without confinement there is no grader, unless that is allowed; its scores are others."""
    with pytest.raises(ConfigError, match=r"environment\.allow_unconfined: true"):
        PythonGrader.from_config(EnvironmentConfig(), is_available=lambda: False)
    allowed = EnvironmentConfig(allow_unconfined=True, time_limit=3)
    free = PythonGrader.from_config(allowed, is_available=lambda: False)
    assert (free.confined, free.seconds) == (False, 3)
    assert free.identity != PythonGrader.from_config(allowed, is_available=lambda: True).identity


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
