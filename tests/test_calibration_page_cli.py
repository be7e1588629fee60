"""`reflact calibrate --html` and `reflact demo --calibrate`: the page beside what is printed."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from html_page import read
from reflact.calibration.report import CalibrationReport
from reflact.cli.app import app
from reflact.reporting.html.calibration import render_calibration_page
from test_calibrate_cli import configured, flattering, record, reflact


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with traces to learn from and too few that are held out."""
    record(tmp_path / "learn", 2)
    record(tmp_path / "held out", 3)
    return tmp_path


def test_the_page_is_written_beside_what_is_printed(folder: Path) -> None:
    """The last line names the file; the page is that of the report that `--json` prints."""
    page = folder / "pages" / "report.html"
    with flattering() as (url, _):
        result = reflact(configured(folder, url), "--anyway", "--html", page)
        assert result.exit_code == 0, result.output
        assert result.stdout.splitlines()[-1] == f"{page} shows this as a page."
        printed = reflact(configured(folder, url), "--anyway", "--json", "--set", f"memory={folder}/other.db")
    report = CalibrationReport.model_validate_json(printed.stdout)
    assert page.read_text(encoding="utf-8") == render_calibration_page(report)
    assert [path.name for path in page.parent.iterdir()] == ["report.html"]


def test_json_stays_alone(folder: Path) -> None:
    """With `--json` or events nothing but JSON is printed, and the page is written all the same."""
    with flattering() as (url, _):
        for options in (["--json"], ["--show", "json"]):
            page = folder / f"{len(options)}.html"
            result = reflact(configured(folder, url), *options, "--anyway", "--html", page)
            assert all(line.startswith("{") for line in result.stdout.splitlines())
            assert "3 held-out traces" in read(page.read_text(encoding="utf-8")).text


@pytest.mark.parametrize("place", ["file/report.html", "learn"], ids=["below a file", "a folder"])
def test_a_page_that_cannot_be_written_is_refused_before_the_first_call(folder: Path, place: str) -> None:
    """The error is one sentence that names the file; nothing is asked and nothing is left behind."""
    (folder / "file").write_text("", encoding="utf-8")
    before = sorted(folder.iterdir())
    with flattering() as (url, asked):
        path = configured(folder, url)
        result = reflact(path, "--anyway", "--html", folder / place)
    assert (result.exit_code, result.stdout, asked) == (2, "", [])
    assert result.stderr.startswith(f"error: --html {folder / place} cannot be written: ")
    assert sorted(folder.iterdir()) == sorted([*before, path])


def test_the_demo_leaves_its_page(tmp_path: Path) -> None:
    """It stands beside the memory, and the last line says so."""
    result = CliRunner().invoke(app, ["demo", "--calibrate", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert result.output.splitlines()[-1] == f"{tmp_path / 'calibration.html'} shows this as a page."
    assert read((tmp_path / "calibration.html").read_text(encoding="utf-8"))
