"""`reflact calibrate`: traces of a folder or a memory, a model, a table of before and after."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import anyio
import pytest
from typer.testing import CliRunner, Result

from flattered_world import PURPOSE, answer, steps
from reflact import MemoryStore, Trace
from reflact.calibration.comparing import JudgeReply
from reflact.calibration.critic import CriticReply
from reflact.calibration.mistakes import MistakenReply, PurposeReply
from reflact.calibration.results import CalibrationReport
from reflact.calls import Message, Rendered
from reflact.cli.app import app
from reflact.memory import Evaluation
from served import serving

REPLIES = {kind.__name__: kind for kind in (CriticReply, JudgeReply, MistakenReply, PurposeReply)}
CONFIG = """
memory: {folder}/memory.db
traces: learn
heldout: held out
models:
  critic: {{model: small, base_url: "{url}", api_key_env: null, max_retries: 0, mode: json_schema}}
calibrator:
  contrast: {{judges: 0, per_event: 1}}
  curriculum: {{rounds: 1}}
"""


def reflact(*arguments: object) -> Result:
    """Run a command in this process."""
    return CliRunner().invoke(app, ["calibrate", *map(str, arguments)], terminal_width=200)


@contextmanager
def flattering() -> Iterator[tuple[str, list[bytes]]]:
    """Serve the flattered model; gives the address and what was asked."""
    asked: list[bytes] = []

    def play(handler: BaseHTTPRequestHandler) -> None:
        asked.append(handler.rfile.read(int(handler.headers["content-length"])))
        body = json.loads(asked[-1])
        messages = tuple(Message(role=m["role"], content=m["content"]) for m in body["messages"][:2])
        reply_type = REPLIES[body["response_format"]["json_schema"]["name"]]
        said = answer(Rendered(name="x", version=1, messages=messages), reply_type)
        message = {"role": "assistant", "content": json.dumps(said)}
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


def record(folder: Path, number: int) -> None:
    """Write traces of one step each, of which every second one flattered its critic."""
    folder.mkdir()
    for n in range(number):
        trace = Trace(PURPOSE, id=f"{folder.name} {n}", path=folder / f"{n:03}.jsonl")
        ((step, gold),) = steps(trace.id, n, count=1, claims=[n % 2 == 0])
        said = gold.phi_after + 3 * (n % 2 == 0)
        reasoning = "The agent says that all is finished."
        evaluation = Evaluation(phi_before=0, phi_after=said, reasoning=reasoning, evidence=("filed",))
        trace.record(step, evaluation, gold=gold)
        trace.finish()


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
    assert "held-out traces: 24 traces, 24 steps" in result.stdout
    assert "mean absolute error" in result.stdout
    assert "1.50 [" in result.stdout
    assert "0.00 [0.00, 0.00]" in result.stdout
    assert ": promoted." in result.stdout
    assert re.search(r"Replies took [1-9]\d* calls, [1-9]\d* tokens in", result.stdout)
    assert asked


def test_started_again_it_pays_for_nothing_twice(folder: Path) -> None:
    """The same command asks nothing that was answered before, and finds the critic as it was left."""
    with flattering() as (url, asked):
        path = configured(folder, url)
        first = CalibrationReport.model_validate_json(reflact(path, "--json").stdout)
        paid = len(asked)
        second = CalibrationReport.model_validate_json(reflact(path, "--json").stdout)
    assert len(set(asked)) == len(asked)
    assert paid >= 48
    assert first.held_out.after is not None
    assert second.held_out.before == first.held_out.after


def test_traces_of_the_memory_are_taken_where_no_folder_is_named(folder: Path) -> None:
    """What agents kept in the memory is calibrated on; a slice of it is held out."""

    async def keep() -> None:
        async with MemoryStore(folder / "memory.db") as store:
            for path in sorted((folder / "held out").glob("*.jsonl")):
                await Trace.load(path).keep(store)

    anyio.run(keep)
    with flattering() as (url, _):
        settings = ("--set", "traces=null", "--set", "heldout=null", "--json")
        report = CalibrationReport.model_validate_json(reflact(configured(folder, url), *settings).stdout)
    assert report.held_out_name.startswith("slice ")
    assert 0 < report.learned_from < 24
    assert report.not_tested is not None


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["models.critic.model=''"], "models.critic.model is required"),
        (["traces=nowhere"], "is not a folder of traces"),
        (["calibrator.slice=3"], "did you mean slices?"),
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
