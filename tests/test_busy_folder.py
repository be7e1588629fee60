"""A folder in which a run is under way, seen from other processes: who may work there, who may look."""

from __future__ import annotations

import re
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from typer.testing import CliRunner, Result

from reflact.cli.app import app
from served import HANGS, Endpoint, reflact_process, world

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform == "win32", reason="processes are ended by signals"),
]


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


@pytest.mark.parametrize("command", ["train", "eval", "record", "replay"])
def test_a_second_process_is_told_who_is_at_work(busy: Busy, command: str, tmp_path: Path) -> None:
    """Whatever would write into the folder ends at once, and names the process, its host and since when."""
    skill, cassette = tmp_path / "s.md", tmp_path / "c.jsonl"
    skill.write_text("Answer.\n", encoding="utf-8")
    arguments: dict[str, tuple[object, ...]] = {
        "train": (busy.config,),
        "eval": (busy.config, "--skill", skill),
        "record": (busy.config, "--cassette", cassette),
        "replay": (busy.config, "--cassette", cassette),
    }
    done = reflact(command, *arguments[command])
    assert done.exit_code == 2, done.output
    who = (
        rf"is in use by process {busy.pid} on {re.escape(socket.gethostname())} since \d{{4}}-\d\d-\d\d \d\d:"
    )
    assert re.fullmatch(rf"error: {re.escape(str(busy.out_dir))} {who}.*UTC; wait .*\n", done.stderr), (
        done.stderr
    )
    assert not cassette.exists()


def test_a_run_under_way_can_be_looked_at(busy: Busy) -> None:
    """`runs`, `show` and the forecast read beside it what it has committed so far."""
    listed, shown = reflact("runs", busy.out_dir), reflact("show", busy.out_dir)
    assert (listed.exit_code, shown.exit_code) == (0, 0), listed.output + shown.output
    assert re.search(r" open +1 ", listed.stdout)
    assert "open: 1 steps committed, not ended" in shown.stdout
    step = reflact("show", busy.out_dir, 1)
    assert step.exit_code == 0, step.output
    assert "verdict: " in step.stdout
    left = reflact("train", busy.config, "--dry-run")
    assert left.exit_code == 0, left.output
    assert "1 steps to take, 1 taken" in left.stdout
