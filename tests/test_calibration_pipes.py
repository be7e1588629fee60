"""Whoever reads what a calibration prints may go away: the calibration goes on, and nothing is lost."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from reflact.calibration.report import CalibrationReport
from served import HANGS, MAIN
from test_calibrate_cli import configured, flattering, record, reflact

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform == "win32", reason="pipes break otherwise there"),
]


@pytest.mark.parametrize(
    ("options", "both"),
    [([], False), ([], True), (["--json"], False), (["--show", "json"], False)],
    ids=["a report", "lines too", "json", "events"],
)
def test_a_reader_that_goes_away_loses_nothing_but_lines(
    tmp_path: Path, options: list[str], both: bool
) -> None:
    """It goes on to its end with code 0 and without a traceback: page and memory are as they would be."""
    record(tmp_path / "learn", 6)
    record(tmp_path / "held out", 24)
    page = tmp_path / "report.html"
    with flattering() as (url, asked):
        path = configured(tmp_path, url)
        arguments = [sys.executable, "-c", MAIN, "calibrate", str(path), "--html", str(page), *options]
        errors = subprocess.STDOUT if both else subprocess.PIPE
        with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=errors, text=True) as process:
            assert process.stdout is not None
            process.stdout.close()
            said = "" if process.stderr is None else process.stderr.read()
            assert process.wait(HANGS) == 0, said
        paid = len(asked)
        report = CalibrationReport.model_validate_json(reflact(path, "--json").stdout)
        assert len(asked) == paid
    assert "Traceback" not in said
    assert "Broken" not in said
    assert page.is_file()
    assert report.is_earlier_result
    assert report.n_promoted > 0
