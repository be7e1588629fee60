"""Ctrl-C and SIGTERM at a terminal: real processes, real signals, at bad moments."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import anyio
import pytest

from pure_world import rows
from reflact import Trainer
from reflact.events import EVENT_ADAPTER, RunFinished
from served import HANGS, MAIN, Endpoint, configured, reflact_process, world

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGTERM to hear"),
]

BOTH = pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
HUNG_UP = (getattr(signal, "SIGHUP", signal.SIGTERM), 129)


def hold_all(call_id: str, before: list[str]) -> bool:
    return True


def hold_later(call_id: str, before: list[str]) -> bool:
    return len(before) >= 3


def hold_gate(call_id: str, before: list[str]) -> bool:
    """Hold the rollouts that come after the first step's edits were chosen."""
    return call_id.startswith("target/") and any(earlier.startswith("optimizer/merge") for earlier in before)


def assert_in_order(process: subprocess.Popen[str], errors: str, code: int, *, signals: int = 1) -> None:
    """Check how a process ended, and that it told each of one or two signals in a line."""
    assert process.returncode == code, errors
    assert errors.count("\n") == signals, errors
    assert errors.count("again: the run ends at once") == signals - 1, errors
    assert "work under way may finish" in errors
    assert "to resume" in errors


@BOTH
@pytest.mark.parametrize("grace", [0.3, HANGS])
def test_calls_that_hang_are_cut_off(tmp_path: Path, number: signal.Signals, code: int, grace: float) -> None:
    """The run is cancelled after its grace, or at a second signal whatever the grace, with a reason."""
    endpoint = Endpoint(hold_all)
    with world(tmp_path, endpoint, grace=grace) as path, reflact_process("train", path) as process:
        assert endpoint.held.wait(HANGS)
        process.send_signal(number)
        said = process.stderr.readline()
        if grace == HANGS:
            process.send_signal(number)
        shown, errors = process.communicate(timeout=HANGS / 2)
    assert_in_order(process, said + errors, code, signals=2 if grace == HANGS else 1)
    reason = f"stopped by {'Ctrl-C' if number is signal.SIGINT else number.name}"
    assert rows(tmp_path / "run", "SELECT status, reason FROM runs") == (("cancelled", reason),)
    if grace < HANGS:
        assert "Stopped after 0 steps: " in shown
        assert json.loads((tmp_path / "run" / "summary.json").read_text("utf-8"))["reason"] == reason


@pytest.mark.parametrize(
    ("hold", "number", "code"),
    [(hold_later, signal.SIGINT, 130), (hold_gate, signal.SIGTERM, 143), (hold_later, *HUNG_UP)],
)
def test_what_is_under_way_is_kept(
    tmp_path: Path, hold: Callable[[str, list[str]], bool], number: signal.Signals, code: int
) -> None:
    endpoint = Endpoint(hold)
    with world(tmp_path, endpoint, grace=HANGS) as path:
        with reflact_process("train", path, "--show", "json") as process:
            assert endpoint.held.wait(HANGS)
            process.send_signal(number)
            said = process.stderr.readline()
            endpoint.go_on.set()
            shown, errors = process.communicate(timeout=HANGS / 2)
        assert_in_order(process, said + errors, code)
        last = EVENT_ADAPTER.validate_json(shown.splitlines()[-1])
        assert isinstance(last, RunFinished)
        assert last.summary.status == "cancelled"
        assert rows(tmp_path / "run", "SELECT count(*) FROM outcomes WHERE kind = 'response'") == (
            (len(endpoint.samples),),
        )
        assert rows(tmp_path / "run", "SELECT count(*) FROM calls WHERE state <> 'settled'") == ((0,),)
        assert anyio.run(Trainer(path).train).status == "completed"
    assert len(set(endpoint.samples)) == len(endpoint.samples)


@BOTH
def test_a_signal_before_the_run_is_known(tmp_path: Path, number: signal.Signals, code: int) -> None:
    """While the configuration is still being read, a signal ends the process at once, without a traceback."""
    os.mkfifo(tmp_path / "run.yaml")
    with (
        reflact_process("train", tmp_path / "run.yaml") as process,
        (tmp_path / "run.yaml").open("w", encoding="utf-8"),  # possible once the process reads from it
    ):
        process.send_signal(number)
        _, errors = process.communicate(timeout=HANGS)
    assert process.returncode in {code, -number}
    assert "Traceback" not in errors
    assert errors.count("\n") <= 1


def test_a_signal_while_the_store_is_being_opened(tmp_path: Path) -> None:
    """While another process keeps the database locked at the start, a signal still ends the process soon."""
    path = configured(tmp_path)
    (tmp_path / "run").mkdir()
    with closing(sqlite3.connect(tmp_path / "run" / "run.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with reflact_process("train", path, "--set", "train.grace_seconds=0") as process:
            while not (tmp_path / "run" / "run.lock").exists():
                time.sleep(0.01)
            process.send_signal(signal.SIGTERM)
            _, errors = process.communicate(timeout=HANGS / 2)
        other.execute("ROLLBACK")
    assert_in_order(process, errors, 143)


BLOCKED = """
    import time
    import anyio
    from reflact.cli.common import InterruptHandler

    async def main(interrupts):
        interrupts.bind(stop=print, cancel=print)
        print("ready", flush=True)
        time.sleep(600)

    with InterruptHandler(0.0) as interrupts:
        anyio.run(main, interrupts)
"""


def test_a_blocked_event_loop_does_not_keep_the_process() -> None:
    command = [sys.executable, "-c", textwrap.dedent(BLOCKED)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=HANGS / 2)
    assert_in_order(process, errors, 143)


def test_a_signal_while_a_person_is_asked(tmp_path: Path) -> None:
    """Whoever is asked about a candidate and interrupts instead waits for no grace, and need not answer."""
    terminal, keyboard = os.openpty()
    with (
        world(tmp_path, Endpoint(), grace=HANGS) as path,
        reflact_process("train", path, "--review", "--set", "gate.policy=strict", stdin=keyboard) as process,
    ):
        said = ""
        while "take it?" not in said:
            said += process.stderr.read(1)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=HANGS / 2)
    os.close(terminal)
    os.close(keyboard)
    assert process.returncode == 130
    assert "work under way may finish" in errors
    assert rows(tmp_path / "run", "SELECT status, reason FROM runs") == (("cancelled", "stopped by Ctrl-C"),)


@pytest.mark.parametrize("show", ["live", "lines"])
def test_a_closed_terminal_ends_the_run_with_grace(tmp_path: Path, show: str) -> None:
    """If the terminal is gone, work under way finishes and is stored, though nothing can be written any more."""
    endpoint = Endpoint(hold_later)
    ours, theirs = os.openpty()
    with world(tmp_path, endpoint, grace=HANGS) as path:
        command = [sys.executable, "-c", MAIN, "train", str(path), "--show", show]
        process = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
        )
        os.close(theirs)
        assert endpoint.held.wait(HANGS)
        os.close(ours)
        process.send_signal(signal.SIGHUP)
        while not rows(tmp_path / "run", "SELECT status FROM runs WHERE status IS NOT NULL"):
            endpoint.go_on.set()
            time.sleep(0.05)
        assert process.wait(HANGS) == 129
    assert rows(tmp_path / "run", "SELECT status, reason FROM runs") == (
        ("cancelled", "stopped by the end of its terminal"),
    )
    assert rows(tmp_path / "run", "SELECT count(*) FROM calls WHERE state <> 'settled'") == ((0,),)


LEAVING = """
import asyncio, sys
from reflact.testing import ToyEnvironment

class Leaving(ToyEnvironment):
    async def run(self, item, session, *, seed):
        async def leave():
            raise {error}
        await {leaving}
"""


@pytest.mark.parametrize(
    ("error", "leaving"),
    [
        ("SystemExit(3)", "asyncio.create_task(leave())"),
        ("KeyboardInterrupt", "asyncio.create_task(leave())"),
        ("KeyboardInterrupt", "leave()"),
    ],
)
def test_code_that_ends_the_event_loop_ends_the_process(tmp_path: Path, error: str, leaving: str) -> None:
    (tmp_path / "leaving.py").write_text(LEAVING.format(error=error, leaving=leaving), encoding="utf-8")
    path = tmp_path / "run.yaml"
    plain = {
        "out_dir": str(tmp_path / "run"),
        "environment": {"name": "leaving:Leaving"},
        "target": {"kind": "reflact.testing:ToyTarget"},
        "models": {"optimizer": {"model": "m", "api_key_env": None}},
    }
    path.write_text(json.dumps(plain), encoding="utf-8")
    with reflact_process("train", path, "--show", "quiet") as process:
        _, errors = process.communicate(timeout=HANGS)
    told = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert process.returncode == 1, errors
    assert len(told) == 1
    assert f"code of yours raised {error.partition('(')[0]}(" in told[0]
    assert rows(tmp_path / "run", "SELECT status FROM runs") == (("cancelled",),)
    assert (tmp_path / "run" / "summary.json").exists()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no device that is always full")
@pytest.mark.parametrize("show", ["quiet", "lines", "json"])
def test_an_output_that_is_full_is_one_sentence(tmp_path: Path, show: str) -> None:
    """If standard output cannot be written, the command says so, and what is stored can be read."""
    with world(tmp_path, Endpoint()) as path, Path("/dev/full").open("w", encoding="utf-8") as full:
        command = [sys.executable, "-c", MAIN, "train", str(path), "--show", show]
        done = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=HANGS, check=False
        )
    assert done.returncode == 1, done.stderr
    assert (
        done.stderr
        == "error: the output cannot be written: No space left on device; what the command stored is safe\n"
    )
