"""`reflact calibrate`: traces of a folder or a memory, a model, a table of before and after."""

from __future__ import annotations

import json
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import anyio
import pytest
from typer.testing import CliRunner, Result

from flattered_world import PURPOSE, answer, steps
from reflact import MemoryStore, Trace
from reflact.calibration.cost_estimate import CalibrationCostEstimate
from reflact.calibration.critic import CriticReply
from reflact.calibration.events import (
    CALIBRATION_EVENT_ADAPTER,
    CalibrationFinished,
    CalibrationStarted,
    PairsGenerated,
)
from reflact.calibration.judges import JudgeReply
from reflact.calibration.mistakes import MistakenReply, PurposeReply
from reflact.calibration.report import CalibrationReport
from reflact.cli.app import app
from reflact.memory.models import Evaluation
from reflact.messages import Message, RenderedPrompt
from served import HANGS, reflact_process, serving

REPLIES = {kind.__name__: kind for kind in (CriticReply, JudgeReply, MistakenReply, PurposeReply)}
CONFIG = """
memory: {folder}/memory.db
traces: learn
heldout: held out
models:
  critic: {{model: small, base_url: "{url}", api_key_env: null, max_retries: 0, mode: json_schema,
           call_id_header: x-sample}}
calibrator:
  contrast: {{n_judges: 0, candidates_per_event: 1}}
  curriculum: {{max_rounds: 1}}
"""


def reflact(*arguments: object) -> Result:
    """Run a command in this process."""
    return CliRunner().invoke(app, ["calibrate", *map(str, arguments)], terminal_width=200)


@contextmanager
def flattering(hold: Hold | None = None, *, first: str = "") -> Iterator[tuple[str, list[bytes]]]:
    """Serve the flattered model; gives the address and what was asked, each with the sample before it.

    Args:
        hold: Holds some answers back.
        first: What the first answer to each sample's first attempt is instead, if not empty.
    """
    asked: list[bytes] = []

    def play(handler: BaseHTTPRequestHandler) -> None:
        text = handler.rfile.read(int(handler.headers["content-length"]))
        call_id = handler.headers["x-sample"]
        asked.append(call_id.encode() + text)
        if hold is not None:
            hold.wait(len(asked))
        body = json.loads(text)
        messages = tuple(Message(role=m["role"], content=m["content"]) for m in body["messages"][:2])
        reply_type = REPLIES[body["response_format"]["json_schema"]["name"]]
        said = answer(RenderedPrompt(name="x", version=1, messages=messages), reply_type)
        refused = first and call_id.endswith("attempt=0")
        message = {"role": "assistant", "content": first if refused else json.dumps(said)}
        usage = {"prompt_tokens": 10, "completion_tokens": 3, "total_tokens": 13}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        about = {"id": "x", "object": "chat.completion", "created": 0, "model": "small"}
        content = json.dumps({**about, "choices": [choice], "usage": usage}).encode()
        handler.send_response(200)
        handler.send_header("content-type", "application/json")
        handler.send_header("content-length", str(len(content)))
        handler.end_headers()
        handler.wfile.write(content)

    with serving(play) as url:
        yield url, asked


class Hold:
    """Holds back every answer after so many, until it may go on."""

    def __init__(self, after: int) -> None:
        self.reached = threading.Event()
        self.go_on = threading.Event()
        self._after = after

    def wait(self, asked: int) -> None:
        """Wait, where it is one of these."""
        if asked > self._after:
            self.reached.set()
            self.go_on.wait(HANGS)


def record(folder: Path, number: int) -> None:
    """Write traces of one step each, of which every second one flattered its critic."""
    folder.mkdir()
    for n in range(number):
        trace = Trace(PURPOSE, id=f"{folder.name} {n}", path=folder / f"{n:03}.jsonl")
        ((step, gold),) = steps(trace.id, n, count=1, claims=[n % 2 == 0])
        said = gold.progress_after + 3 * (n % 2 == 0)
        reasoning = "The agent says that all is finished."
        evaluation = Evaluation(
            progress_before=0, progress_after=said, reasoning=reasoning, evidence=("filed",)
        )
        trace.record(step, evaluation, label=gold)
        trace.finish()


def one_line(text: str) -> str:
    """Return a text without its line breaks, which depend on the terminal."""
    return " ".join(text.split())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with traces to learn from and others that are held out."""
    record(tmp_path / "learn", 6)
    record(tmp_path / "held out", 24)
    return tmp_path


def configured(folder: Path, url: str = "http://127.0.0.1:9/v1") -> Path:
    """Write a configuration and return its path."""
    path = folder / "calibrate.yaml"
    path.write_text(CONFIG.format(folder=folder, url=url), encoding="utf-8")
    return path


def test_before_and_after_stand_side_by_side(folder: Path) -> None:
    """The table shows each measure with its interval, and the batch that was promoted."""
    with flattering() as (url, asked):
        result = reflact(configured(folder, url))
    assert result.exit_code == 0, result.output
    assert "held-out traces: 24 traces, 24 steps; mean absolute error 1.50 -> 0.00" in result.stdout
    assert "Averaged within each trace, the error fell by 1.50 points [" in one_line(result.stdout)
    assert "mean absolute error" in result.stdout
    assert "1.50 [" in result.stdout
    assert "0.00 [0.00, 0.00]" in result.stdout
    assert ": promoted." in result.stdout
    calls = len(asked)
    assert f"questions took {calls} calls, {10 * calls} tokens in, {3 * calls} out" in one_line(result.stdout)
    assert f"paid by this start: {calls} calls, {10 * calls} tokens in" in result.stdout


def test_started_again_it_pays_for_nothing_twice(folder: Path) -> None:
    """The same command asks nothing that was answered before, and finds the critic as it was left."""
    with flattering() as (url, asked):
        path = configured(folder, url)
        first = CalibrationReport.model_validate_json(reflact(path, "--json").stdout)
        paid = len(asked)
        second = CalibrationReport.model_validate_json(reflact(path, "--json", "--again").stdout)
    assert len(set(asked)) == len(asked)
    assert paid >= 48
    assert first.held_out.after is not None
    assert second.held_out.before == first.held_out.after


def test_traces_of_the_memory_are_taken_where_no_folder_is_named(folder: Path) -> None:
    """What agents kept in the memory is calibrated on; a slice of it is held out."""

    async def keep() -> None:
        async with MemoryStore(folder / "memory.db") as store:
            for path in sorted((folder / "held out").glob("*.jsonl")):
                await Trace.load(path).save_to(store)

    anyio.run(keep)
    with flattering() as (url, _):
        settings = ("--set", "traces=null", "--set", "heldout=null", "--json", "--anyway")
        report = CalibrationReport.model_validate_json(reflact(configured(folder, url), *settings).stdout)
    assert report.held_out_name == "1 slice of 4"
    assert 0 < report.n_training_traces < 24
    assert report.not_tested_reason is not None


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["models.critic.model=''"], "models.critic.model is required"),
        (["traces=nowhere"], "is not a folder of traces"),
        (["calibrator.holdout_fold=3"], "did you mean holdout_folds?"),
        (["budget.max_tokens=100"], "budget.max_tokens needs models.critic.max_tokens"),
        (["traces=null"], "the memory holds no trace"),
    ],
    ids=["no model", "no folder", "a wrong key", "no cap", "an empty memory"],
)
def test_what_is_wrong_is_one_sentence(folder: Path, overrides: list[str], words: str) -> None:
    """A wrong setting ends with code 2, says what to do, and asks nothing."""
    options = [part for one in overrides for part in ("--set", one)]
    result = reflact(configured(folder), *options)
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("error: ")
    assert words in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_budget_holds_over_all_starts(folder: Path) -> None:
    """Reaching it is a clean stop; started again with the same one, nothing more is asked."""
    with flattering() as (url, asked):
        path = configured(folder, url)
        for _ in range(2):
            result = reflact(path, "--set", "budget.max_calls=10")
            assert result.exit_code == 1, result.output
            assert "max_calls" in result.stderr
            assert len(asked) == 10


# ------------------------------------------------------------------------------ before, during and after


def test_a_dry_run_asks_and_writes_nothing(folder: Path) -> None:
    """How many calls it takes is printed; no call is made, no file appears."""
    before = sorted(folder.rglob("*"))
    with flattering() as (url, asked):
        path = configured(folder, url)
        result = reflact(path, "--dry-run")
        as_json = reflact(path, "--dry-run", "--json")
        assert result.exit_code == 0, result.output
        assert asked == []
        assert sorted(folder.rglob("*")) == sorted([*before, path])
        reflact(path)
    shown = one_line(result.stdout)
    assert "6 traces to learn from; held out: 24 traces with 24 known steps; anchors: 0 steps" in shown
    assert "24 held-out traces show with 95% power" in shown
    estimate = CalibrationCostEstimate.model_validate_json(as_json.stdout)
    assert f"It takes {estimate.min_calls:,} to {estimate.max_calls:,} calls" in shown
    assert estimate.min_calls <= len(asked) <= estimate.max_calls


def test_a_dry_run_says_that_nothing_can_be_tested(folder: Path) -> None:
    """With too few held-out traces it is said before anything is paid for, and what is paid already."""
    for path in sorted((folder / "held out").glob("*"))[:5]:
        path.unlink()
    with flattering() as (url, asked):
        path = configured(folder, url)
        first = one_line(reflact(path, "--dry-run").stdout)
        refused = reflact(path)
        assert (refused.exit_code, refused.stdout, asked) == (2, "", [])
        reflact(path, "--anyway")
        paid = len(asked)
        second = one_line(reflact(path, "--dry-run").stdout)
        assert len(asked) == paid
    assert "Nothing can be tested or promoted: 19 held-out traces have steps with a gold score" in first
    assert "so 1 more is missing: hold out more traces with gold" in first
    assert "nothing was asked: 19 held-out traces have steps with a gold score" in refused.stderr
    assert "paid for" not in first
    assert f"{paid} calls are paid for already" in second


def test_progress_is_told_on_standard_error(folder: Path) -> None:
    """Rounds, pairs, tests and measurements are lines there, with calls so far; the report is apart."""
    with flattering() as (url, asked):
        path = configured(folder, url)
        shown = reflact(path, "--set", "models.critic.price={input: 1, output: 2}")
        calls = len(asked)
        quiet = reflact(path, "--show", "quiet")
    lines = shown.stderr.splitlines()
    starts = [line[:9].strip() for line in lines]
    assert starts == ["began", "before", "round 1", *["pairs"] * 6, "test", "after"]
    assert "6 of 6 candidates" in lines[-3]
    assert lines[-1].endswith("so far)")
    assert f"({calls} calls, $" in lines[-1]
    assert "began" not in shown.stdout
    assert quiet.stderr == ""
    assert "mean absolute error" in quiet.stdout


def test_events_are_lines_of_json(folder: Path) -> None:
    """With --show json each line of standard output is an event, and the last one holds the report."""
    with flattering() as (url, _):
        result = reflact(configured(folder, url), "--show", "json")
    told = [CALIBRATION_EVENT_ADAPTER.validate_json(line) for line in result.stdout.splitlines()]
    assert isinstance(told[0], CalibrationStarted)
    assert isinstance(told[-1], CalibrationFinished)
    made = [event for event in told if isinstance(event, PairsGenerated)]
    assert sum(event.n_candidates for event in made) == told[-1].report.n_candidates
    assert result.stderr == ""


def test_refused_replies_are_printed(folder: Path) -> None:
    """What was refused was paid for: it counts, by purpose, and is said."""
    with flattering(first="no JSON") as (url, asked):
        result = reflact(configured(folder, url))
    shown = one_line(result.stdout)
    questions = len(asked) // 2
    assert f"{questions} questions took {len(asked)} calls" in shown
    assert f"{questions} replies were refused, 0 questions got no valid one" in shown
    assert "critic, score: 48 questions, 96 calls, 960 tokens in, 288 out, 48 refused" in shown
    assert f"paid by this start: {len(asked)} calls" in shown


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGTERM to hear")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_stopped_it_says_what_is_kept(folder: Path, number: signal.Signals, code: int) -> None:
    """Calls under way at a signal finish and are kept; started again, nothing is asked twice."""
    hold = Hold(after=30)
    with flattering(hold) as (url, asked):
        path = configured(folder, url)
        with reflact_process("calibrate", path) as process:
            assert hold.reached.wait(HANGS)
            process.send_signal(number)
            assert process.stderr is not None
            said = ""
            while "goes on" not in said:
                said = process.stderr.readline()
            hold.go_on.set()
            out, errors = process.communicate(timeout=HANGS)
        assert process.returncode == code, errors
        assert "what is under way may finish" in said
        assert f"the answers of the {len(asked)} calls that were paid for are in the store" in errors
        assert out == ""
        report = CalibrationReport.model_validate_json(reflact(path, "--json").stdout)
    assert report.n_promoted > 0
    assert len(set(asked)) == len(asked)
