"""The lock of a run's folder, between real processes, and what others may do beside a run under way."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple

import pytest
from typer.testing import CliRunner, Result

from reflact.cli.app import app
from reflact.errors import RunConflict
from reflact.store.lock import Ownership, own_run
from served import HANGS, Endpoint, reflact_process, world

HOLD = """
import sys
from pathlib import Path
from reflact.store.lock import own_run

with own_run(Path(sys.argv[1]), Path(sys.argv[1], "run.db"), "r1"):
    print("held", flush=True)
    sys.stdin.read()
"""


def holder(folder: Path) -> subprocess.Popen[str]:
    child = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "held\n"
    return child


def own(folder: Path) -> AbstractContextManager[Ownership]:
    return own_run(folder, folder / "run.db", "r1")


@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGKILL")
def test_a_killed_process_holds_nothing(tmp_path: Path) -> None:
    with holder(tmp_path) as child:
        child.send_signal(signal.SIGKILL)
        child.wait()
        assert f"process {child.pid} " in (tmp_path / "run.lock").read_text()
        with own(tmp_path):
            assert f"process {os.getpid()} " in (tmp_path / "run.lock").read_text()


def test_an_identity_is_owned_once_in_a_store(tmp_path: Path) -> None:
    (tmp_path / "link.db").symlink_to(tmp_path / "runs.db")
    with own_run(tmp_path / "a", tmp_path / "runs.db", "r1"):
        for store in ("runs.db", "link.db"):
            with pytest.raises(RunConflict) as refusal, own_run(tmp_path / "b", tmp_path / store, "r1"):
                pass
            assert f"run r1 of {tmp_path / store} is in use by process {os.getpid()} " in str(refusal.value)
        with (
            own_run(tmp_path / "c", tmp_path / "runs.db", "r2"),
            own_run(tmp_path / "d", tmp_path / "x.db", "r1"),
        ):
            pass
    with own_run(tmp_path / "b", tmp_path / "runs.db", "r1"):
        pass


FORKED = """
import os, sys
from pathlib import Path
from reflact.store.lock import own_run

with own_run(Path(sys.argv[1]), Path(sys.argv[1], "run.db"), "r1"):
    child = os.fork()
    if child:
        os.write(1, f"{child}\\n".encode())
    sys.stdin.read()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="there is no fork")
def test_a_fork_of_the_owner_owns_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-c", FORKED, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        fork = int(owner.stdout.readline())
        with pytest.raises(RunConflict), own(tmp_path):
            pass
        owner.kill()
        owner.wait()
        os.kill(fork, 0)
        with own(tmp_path):
            pass


# ------------------------------------------------------------------------------------------ a run under way


class Busy(NamedTuple):
    """A run under way: its configuration, its folder, and the process that it runs in."""

    config: Path
    out_dir: Path
    pid: int


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Busy]:
    """A run that has committed a step and waits for an answer."""
    folder, endpoint = (
        tmp_path_factory.mktemp("busy"),
        Endpoint(lambda call_id, before: "/step=2/" in call_id),
    )
    with world(folder, endpoint, train=6) as config, reflact_process("train", config) as process:
        try:
            assert endpoint.held.wait(HANGS)
            yield Busy(config, folder / "run", process.pid)
        finally:
            process.kill()


def reflact(*arguments: object) -> Result:
    """Run a command in this process, at a wide terminal."""
    wide = {"COLUMNS": "200"}
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env=wide, prog_name="reflact")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="processes are ended by signals")
@pytest.mark.parametrize("command", ["train", "eval", "record"])
def test_a_second_process_is_told_who_is_at_work(busy: Busy, command: str, tmp_path: Path) -> None:
    skill, cassette = tmp_path / "s.md", tmp_path / "c.jsonl"
    skill.write_text("Answer.\n", encoding="utf-8")
    arguments: dict[str, tuple[object, ...]] = {
        "train": (busy.config,),
        "eval": (busy.config, "--skill", skill),
        "record": (busy.config, "--record", cassette),
    }
    done = reflact(command.replace("record", "train"), *arguments[command])
    assert done.exit_code == 2, done.output
    who = (
        rf"is in use by process {busy.pid} on {re.escape(socket.gethostname())} since \d{{4}}-\d\d-\d\d \d\d:"
    )
    assert re.fullmatch(rf"error: {re.escape(str(busy.out_dir))} {who}.*UTC; wait .*\n", done.stderr), (
        done.stderr
    )
    assert not cassette.exists()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="processes are ended by signals")
def test_a_run_under_way_can_be_looked_at(busy: Busy) -> None:
    listed, shown = reflact("runs", busy.out_dir), reflact("show", busy.out_dir)
    assert (listed.exit_code, shown.exit_code) == (0, 0), listed.output + shown.output
    assert re.search(r" running +1 ", listed.stdout)
    assert "running: 1 committed step, not ended" in shown.stdout
    step = reflact("show", busy.out_dir, 1)
    assert step.exit_code == 0, step.output
    assert "verdict: " in step.stdout
    left = reflact("check", busy.config, "--dry-run")
    assert left.exit_code == 0, left.output
    assert "1 steps to take, 1 taken" in left.stdout
