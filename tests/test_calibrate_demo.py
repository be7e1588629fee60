"""`reflact demo --calibrate`: a recorded round of calibration on real traces, replayed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from reflact.calibration.report import CalibrationReport
from reflact.cli.app import app
from reflact.prompts import find_data_folder
from served import reflact

FOLDER = find_data_folder("calibration")
PAGE = Path(__file__).parents[1] / "docs" / "demo.md"


def calibrate(memory: Path, *overrides: str) -> str:
    settings = [f"memory={json.dumps(str(memory))}", *overrides]
    arguments = ["calibrate", str(FOLDER / "calibrate.yaml"), "--json"]
    for setting in settings:
        arguments += ["--set", setting]
    return reflact(*arguments).output


def recorded() -> CalibrationReport:
    return CalibrationReport.model_validate_json((FOLDER / "report.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo")


@pytest.fixture(scope="module")
def shown(out: Path) -> str:
    result = CliRunner(env={"COLUMNS": "80"}).invoke(app, ["demo", "--calibrate", "--out", str(out)])
    assert result.exit_code == 0, result.output
    return result.output.replace(str(out), "demo-run")


def test_the_docs_show_what_the_demo_prints(shown: str, out: Path) -> None:
    lines = [line.rstrip() for line in shown.strip().splitlines()]
    assert "\n".join(["```", *lines, "```"]) in PAGE.read_text(encoding="utf-8")
    assert lines[-1] == "demo-run/calibration.html shows this as a page."
    assert (out / "calibration.html").is_file()


def test_the_report_is_the_recorded_one_and_no_endpoint_is_asked(tmp_path: Path) -> None:
    found = calibrate(tmp_path / "memory.db", "models.critic.base_url=http://127.0.0.1:9/v1")
    assert "127.0.0.1:9/" in found
    moved = found.replace("127.0.0.1:9/", "127.0.0.1:8123/")
    assert CalibrationReport.model_validate_json(moved) == recorded()
