"""`reflact calibrate` where nobody listens: it says that it tries again, and gives up after one call."""

from __future__ import annotations

from pathlib import Path

import pytest

from reflact.cli.calibrate_output import PausePrinter, choose_pause_printer
from reflact.cli.common import ShowMode
from reflact.llm.rate_limit import LimitChange
from test_calibrate_cli import configured, record, reflact


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A configuration whose endpoint is a closed port."""
    record(tmp_path / "learn", 6)
    record(tmp_path / "held out", 24)
    return configured(tmp_path)


def test_it_is_told_once_that_it_is_tried_again(path: Path) -> None:
    """Eight calls at a time make one line, and it stands before the end."""
    result = reflact(path, "--set", "models.critic.max_retries=1")
    assert result.exit_code == 1
    began, tries, kept, error = result.stderr.splitlines()
    assert began.startswith("began ")
    assert tries == "retry     http://127.0.0.1:9/v1 cannot be reached; trying again"
    assert kept.endswith("no call was answered, so there is nothing to keep")
    assert "models.critic.base_url" in error


@pytest.mark.parametrize("options", [["--show", "quiet"], ["--json"], ["--show", "json"]])
def test_it_is_told_only_among_lines(path: Path, options: list[str]) -> None:
    """Where lines are not asked for and no terminal is there, nothing is."""
    result = reflact(path, "--set", "models.critic.max_retries=1", *options)
    assert result.exit_code == 1
    assert "trying again" not in result.output


def test_beside_the_report_as_json_a_terminal_is_told() -> None:
    """Whoever looks on sees why nothing comes; who asked for quiet does not."""
    assert isinstance(choose_pause_printer(None, as_json=True, terminal=True), PausePrinter)
    assert choose_pause_printer(None, as_json=True, terminal=False) is None
    assert choose_pause_printer(ShowMode.quiet, as_json=True, terminal=True) is None


def test_a_line_cannot_steer_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """An address is shown letter by letter; the same back-off is told once."""
    tell = PausePrinter()
    for _ in range(2):
        tell(LimitChange("http://\x1b[2J", 429, 9.0, 2.5))
    assert (
        capsys.readouterr().err == "limit     http://\\x1b[2J answered 429; waiting 9 s, then 2.5 calls/s\n"
    )
