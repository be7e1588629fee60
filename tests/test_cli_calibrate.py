"""`reflact calibrate`: traces of a folder or a memory, a model, a table of before and after."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from typer.testing import Result

from calibrate_command import Hold, configured, flattering, one_line, record, reflact
from memory_pairs import make_pair
from reflact.calibration.report import CalibrationCostEstimate, CalibrationReport
from reflact.cli.calibrate_output import CalibrationDisplay
from reflact.cli.common import ShowMode
from reflact.llm.rate_limit import LimitChange
from reflact.memory.cards import compute_alpha
from reflact.reporting.html.calibration import render_calibration_page
from served import HANGS, MAIN, assert_refused, reflact_process


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    record(tmp_path / "learn", 6)
    record(tmp_path / "held out", 24)
    return tmp_path


class Course(NamedTuple):
    """What the command printed at each of its starts over one folder, and how many calls were made till then."""

    folder: Path
    files: tuple[set[Path], set[Path]]
    asked: list[bytes]
    paid: int
    estimate: Result
    estimate_json: Result
    first: Result
    second_estimate: Result
    second: Result
    as_json: Result
    again: Result


@pytest.fixture(scope="module")
def course(tmp_path_factory: pytest.TempPathFactory) -> Course:
    folder = tmp_path_factory.mktemp("course")
    record(folder / "learn", 6)
    record(folder / "held out", 24)
    price = ("--set", "models.critic.price={input: 1, output: 2}")
    with flattering() as (url, asked):
        path = configured(folder, url)
        before = set(folder.rglob("*"))
        estimates = reflact(path, "--dry-run"), reflact(path, "--dry-run", "--json")
        assert asked == []
        files = before, set(folder.rglob("*"))
        first = reflact(path, *price, "--html", folder / "pages" / "first.html")
        paid = len(asked)
        found = Course(
            folder,
            files,
            asked,
            paid,
            *estimates,
            first,
            reflact(path, "--dry-run"),
            reflact(path),
            reflact(path, "--json", "--html", folder / "json.html"),
            reflact(path, "--show", "json", "--again", "--html", folder / "again.html"),
        )
    assert all(one.exit_code == 0 for one in found if isinstance(one, Result))
    return found


def test_a_dry_run_asks_and_writes_nothing(course: Course) -> None:
    """How many calls it takes is printed; no call is made, no file appears."""
    assert course.files[0] == course.files[1]
    shown = one_line(course.estimate.stdout)
    assert "6 traces to learn from; held out: 24 traces with 24 labelled steps; anchors: 0 steps" in shown
    assert "24 held-out traces show with 95% power" in shown
    estimate = CalibrationCostEstimate.model_validate_json(course.estimate_json.stdout)
    assert f"It takes {estimate.min_calls:,} to {estimate.max_calls:,} calls" in shown
    assert estimate.min_calls <= course.paid <= estimate.max_calls


def test_while_nothing_has_changed_the_report_is_printed_again(course: Course) -> None:
    estimate = one_line(course.second_estimate.stdout)
    left = f"1 batch was tested on these held-out traces: another one passes at p of at most {compute_alpha(1):.2g}"
    assert left not in one_line(course.estimate.stdout)
    assert left in one_line(course.first.stdout)
    assert left in estimate
    assert "The command makes no call, opens no test" in estimate
    assert one_line(course.second.stdout).startswith(
        "Nothing has changed since this calibration, so no call was made"
    )
    assert "--again makes further pairs" in one_line(course.second.stdout)
    assert course.second.stderr == ""


def test_the_page_is_written_beside_what_is_printed(course: Course) -> None:
    page = course.folder / "pages" / "first.html"
    assert course.first.stdout.splitlines()[-1] == f"{page} shows this as a page."
    report = CalibrationReport.model_validate_json(course.as_json.stdout)
    assert page.read_text(encoding="utf-8") == render_calibration_page(report)
    assert (course.folder / "json.html").read_bytes() == page.read_bytes()
    assert (course.folder / "again.html").is_file()
    assert [path.name for path in page.parent.iterdir()] == ["first.html"]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["models.critic.model=''"], "models.critic.model is required"),
        (["traces=nowhere"], "is not a folder of traces"),
        (["budget.max_tokens=100"], "budget.max_tokens needs models.critic.max_tokens"),
        (["traces=null"], "the memory has no traces"),
    ],
    ids=["no model", "no folder", "no cap", "an empty memory"],
)
def test_what_is_wrong_is_one_sentence(folder: Path, overrides: list[str], words: str) -> None:
    options = [part for one in overrides for part in ("--set", one)]
    result = reflact(configured(folder), *options)
    assert_refused(result, words)


@pytest.mark.slow
def test_a_budget_holds_over_all_starts_and_what_is_kept_is_said(folder: Path) -> None:
    with flattering() as (url, asked):
        path, small = configured(folder, url), ("--set", "budget.max_calls=30")
        stopped, stopped_again = reflact(path, *small), reflact(path, *small)
        assert len(asked) == 30
        estimate = one_line(reflact(path, "--dry-run").stdout)
        assert reflact(path).exit_code == 0
        assert len(set(asked)) == len(asked) > 30
    assert (stopped.exit_code, stopped_again.exit_code) == (1, 1)
    *_, kept, error = stopped.stderr.splitlines()
    assert kept.startswith("stopped in round 1: all pairs are in the memory")
    assert "the replies of 30 paid calls are in the store; run the same command again" in kept
    assert error.startswith("error: budget.max_calls is 30: 30 are used")
    assert "was stopped, and the command resumes it" in estimate


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGTERM to hear")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_stopped_it_says_what_is_kept(folder: Path, number: signal.Signals, code: int) -> None:
    hold = Hold(after=30)
    with flattering(hold) as (url, asked):
        path = configured(folder, url)
        with reflact_process("calibrate", path) as process:
            hold.until_held()
            process.send_signal(number)
            said = ""
            while "to resume" not in said:
                said = process.stderr.readline()
            hold.go_on.set()
            out, errors = process.communicate(timeout=HANGS)
        assert process.returncode == code, errors
        assert "work under way may finish" in said
        assert f"the replies of {len(asked)} paid calls are in the store" in errors
        assert out == ""
        report = CalibrationReport.model_validate_json(reflact(path, "--json").stdout)
    assert report.n_promoted > 0
    assert len(set(asked)) == len(asked)


def test_a_line_cannot_steer_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    lines, quiet, as_json = (
        CalibrationDisplay(show) for show in (ShowMode.lines, ShowMode.quiet, ShowMode.json)
    )
    for display in (lines, lines, quiet, as_json):
        display.show_pause(LimitChange("http://\x1b[2J", 429, 9.0, 2.5))
    assert (
        capsys.readouterr().err == "limit     http://\\x1b[2J answered 429; waiting 9 s, then 2.5 calls/s\n"
    )


@pytest.mark.parametrize("place", ["file/report.html", "learn"], ids=["below a file", "a folder"])
def test_a_page_that_cannot_be_written_is_refused_before_the_first_call(folder: Path, place: str) -> None:
    (folder / "file").write_text("", encoding="utf-8")
    before = sorted(folder.iterdir())
    with flattering() as (url, asked):
        path = configured(folder, url)
        result = reflact(path, "--anyway", "--html", folder / place)
    assert (result.exit_code, result.stdout, asked) == (2, "", [])
    assert result.stderr.startswith(f"error: cannot write --html {folder / place}: ")
    assert sorted(folder.iterdir()) == sorted([*before, path])


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="pipes break otherwise there")
@pytest.mark.parametrize(
    ("options", "both"), [([], True), (["--show", "json"], False)], ids=["a report and lines", "events"]
)
def test_a_reader_that_goes_away_loses_nothing_but_lines(
    tmp_path: Path, options: list[str], both: bool
) -> None:
    record(tmp_path / "learn", 6)
    record(tmp_path / "held out", 24)
    page = tmp_path / "report.html"
    with flattering() as (url, asked):
        path = configured(tmp_path, url)
        arguments = [sys.executable, "-c", MAIN, "calibrate", str(path), "--html", str(page), *options]
        errors = subprocess.STDOUT if both else subprocess.PIPE
        with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=errors, text=True) as process:
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


def test_a_line_that_is_no_anchor_is_named(folder: Path) -> None:
    pair = make_pair(1).model_copy(update={"reason": "Line\u2028separators are text."})
    anchors = folder / "anchors.jsonl"
    anchors.write_text(f'{pair.model_dump_json()}\n\n{{"purpose": 4}}\n', encoding="utf-8")
    result = reflact(configured(folder), "--set", f"anchors={anchors}")
    assert_refused(result, "anchors.jsonl, line 3, is no contrast pair: purpose: Input should be")
