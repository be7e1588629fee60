"""Slips: what is handed in as something else, in Python or in a file, is told there, with what to give."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import JsonValue

from memory_pairs import make_pair
from reflact import Calibrator, Critic, Trace
from reflact.errors import ConfigError, DataError
from reflact.llm import ModelConfig
from reflact.memory.models import Action, Evaluation, Transition
from reflact.memory.store import MemoryStore
from served import reflact

WRONG: Any = None
STEP = Transition(before="open", action=Action(name="pay"), after="paid")
SAID = Evaluation(progress_before=0, progress_after=1, reasoning="It is paid.")


def huge(text: str) -> Transition:
    """Return a step whose state holds a number that no JSON text can."""
    return STEP.model_copy(update={"after": {text: 10**5000}})


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Trace("p", id=" "), "the id of a trace is ' '; give it letters"),
        (lambda: Trace("p", id="a\nb"), "on one line"),
        (lambda: Trace("p", id="\ud800"), "on one line"),
        (lambda: Trace("p", id="t").record(huge("n")), "step 0 of trace t cannot be written: "),
    ],
)
def test_a_trace_says_what_it_needs(make: Callable[[], object], said: str) -> None:
    """Whatever is no purpose, id, step, score or gold is refused in a sentence that says what is."""
    with pytest.raises(DataError) as refused:
        make()
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("who", ["a critic", "a calibrator"])
@pytest.mark.parametrize("model", [None, "gpt", ModelConfig(model="m")])
async def test_a_model_has_to_be_connected(tmp_path: Path, who: str, model: Any) -> None:
    """A name or a configuration answers nothing; the message shows how to connect one."""
    async with MemoryStore(tmp_path / "memory.db") as memory:
        with pytest.raises(
            ConfigError, match=rf"{who} needs a connected model and got .*: use `async with connect"
        ):
            Critic(model) if who == "a critic" else Calibrator(model, memory)


def refused(*arguments: object) -> str:
    """Run a command that has to end with code 2, and return its one sentence."""
    result = reflact(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stderr.count("\n") == 1
    return result.stderr


def configured(folder: Path, **more: JsonValue) -> Path:
    """Write the configuration of a calibration."""
    path = folder / "calibrate.yaml"
    model: JsonValue = {"critic": {"model": "m", "api_key_env": None}}
    path.write_text(json.dumps({"memory": str(folder / "memory.db"), "models": model, **more}), "utf-8")
    return path


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"purpose": "p"', "it is not complete JSON"),
        ('{"purpose": 4}', "`purpose`: input should be a valid string, got 4"),
        ('{"purpose": "p"}', "`transition`: is missing"),
    ],
)
def test_a_line_that_is_no_anchor_is_named(tmp_path: Path, line: str, said: str) -> None:
    """The file of gold pairs is named with line and field; empty lines are none."""
    pair = make_pair(1)
    pair = pair.model_copy(update={"reason": "Line\u2028separators are text."})
    anchors = tmp_path / "anchors.jsonl"
    anchors.write_text(f"{pair.model_dump_json()}\n\n{line}\n", encoding="utf-8")
    Trace("p", id="t", path=tmp_path / "traces" / "t.jsonl").finish()
    path = configured(tmp_path, traces=str(tmp_path / "traces"), anchors=str(anchors))
    assert f"anchors.jsonl, line 3, is no contrast pair: {said}; correct the line, which must be" in refused(
        "calibrate", path
    )


def test_files_that_are_not_whole_are_told(tmp_path: Path) -> None:
    """What a recording that was cut off has lost is said by every command that reads its file."""
    path = tmp_path / "traces" / "t.jsonl"
    Trace("p", id="t", path=path).record(STEP, SAID)
    path.write_bytes(path.read_bytes()[:-9])
    config = configured(tmp_path, traces=str(tmp_path / "traces"))
    said = r"trace t: left out \d+ incomplete bytes of its file\n"
    foreseen = reflact("calibrate", config, "--dry-run")
    assert foreseen.exit_code == 0
    assert re.fullmatch(said, foreseen.stderr)
    kept = reflact("memory", "import", tmp_path / "memory.db", path)
    assert re.match(said, kept.stdout)
