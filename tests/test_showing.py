"""The options that say what a command shows of a run."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from reflact.cli.app import app
from reflact.cli.common import ShowMode, resolve_show_mode
from reflact.errors import UsageError
from reflact.events import EVENT_ADAPTER, RunFinished, StepCommitted
from reflact.records import SkillScore
from served import Endpoint, world


def reflact(*arguments: object) -> Result:
    """Run a command in this process, where there is no terminal."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments], prog_name="reflact")


@pytest.mark.parametrize(
    ("show", "as_json", "expected"),
    [(ShowMode.live, False, "live"), (ShowMode.live, True, "json"), (ShowMode.json, True, "json")],
)
def test_json_is_a_short_form(show: ShowMode, as_json: bool, expected: str) -> None:
    """`--json` stands for `--show json`, also beside it."""
    assert resolve_show_mode(show, as_json=as_json) == expected


def test_contradicting_options_are_refused() -> None:
    """Nobody has to guess which of two counts."""
    with pytest.raises(UsageError, match="--json and --show quiet contradict"):
        resolve_show_mode(ShowMode.quiet, as_json=True)


def test_a_run_is_shown_as_asked(tmp_path: Path) -> None:
    """Lines where there is no terminal, with times where asked; JSON alone; the end alone."""
    with world(tmp_path, Endpoint()) as path:

        def run(name: str, *arguments: str) -> str:
            result = reflact("train", path, "--set", f"out_dir={tmp_path / name}", *arguments)
            assert result.exit_code == 0, result.output
            return result.stdout

        told = run("a", "--times")
        happened = [EVENT_ADAPTER.validate_json(line) for line in run("b", "--show", "json").splitlines()]
        quiet = run("c", "--show", "quiet")
    assert re.search(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d step 1 ", told, re.MULTILINE)
    assert "\x1b" not in told
    assert isinstance(happened[-1], RunFinished)
    assert any(isinstance(event, StepCommitted) for event in happened)
    assert quiet.startswith("completed: ")


def test_a_measurement_is_shown_as_asked(tmp_path: Path) -> None:
    """As JSON each line is an event but the last, which is the score; quietly there is only the table."""
    skill = tmp_path / "s.md"
    skill.write_text("- rule alpha.\n", encoding="utf-8")
    with world(tmp_path, Endpoint()) as path:
        lines = reflact("eval", path, "--skill", skill, "--show", "json").stdout.splitlines()
        quiet = reflact("eval", path, "--skill", skill, "--show", "quiet").stdout
    *happened, last = lines
    assert all(EVENT_ADAPTER.validate_json(line).run_id for line in happened)
    assert happened
    assert SkillScore.model_validate(json.loads(last)).n == 3
    assert re.match(r"\s*document +split", quiet)
