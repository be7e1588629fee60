"""Labels in a memory, beside files of the same traces."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from calibrate_command import configured, one_line, reflact
from reflact import Trace
from reflact.cli.app import app
from reflact.memory import Action, Transition


def test_labels_that_do_not_count_are_told(tmp_path: Path) -> None:
    """Where `traces` names a folder its files count, so whoever labels in the memory is told."""
    memory, file = tmp_path / "memory.db", tmp_path / "learn" / "monday.jsonl"
    (tmp_path / "held out").mkdir()
    (tmp_path / "learn").mkdir()
    for folder, name in (("learn", "monday"), ("held out", "tuesday")):
        trace = Trace("Sort the mail.", id=name, path=tmp_path / folder / f"{name}.jsonl")
        trace.record(Transition(before="a", action=Action(name="sort"), after="b"))
        trace.finish()
    config = configured(tmp_path)
    for arguments in (["import", memory, file], ["label", memory, "monday", 0, "--after", 3]):
        before = reflact(config, "--dry-run").stderr
        assert "have gold in the memory" not in before
        done = CliRunner().invoke(app, ["memory", *map(str, arguments)])
        assert done.exit_code == 0, done.output
    said = one_line(reflact(config, "--dry-run").stderr)
    assert said.startswith("1 of these traces have gold in the memory that their files lack")
    assert "leave `traces` out" in said
