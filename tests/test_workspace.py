"""Tasks on files for a command: files in, checks on the answer and on files out."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from reflact import Trainer
from reflact.config.models import ModelConfig
from reflact.errors import DataError
from reflact.integrations.workspace import FileCheck, WorkspaceEnvironment, WorkspaceTarget
from reflact.records import RunSummary
from reflact.types import Item, Skill, Split
from test_command_target import AGENT, MODEL, RULE, Endpoint, Sender

MODEL_CONFIG = ModelConfig(model="m")
SIZES = {"train": 1, "val": 1, "test": 1}


def write_evals(folder: Path, **changes: Any) -> Path:
    """Write an evals.json of three cases with one file, and return its path."""
    (folder / "evals" / "files").mkdir(parents=True)
    (folder / "evals" / "files" / "note.txt").write_text("a note", encoding="utf-8")
    cases = [
        {
            "id": n,
            "prompt": f"Say {word}",
            "expected_output": f"{word} in capitals",
            "files": ["evals/files/note.txt"],
            "assertions": ["The word is shouted"],
            "checks": [
                {"equals": word.upper()},
                {"file": "answer.txt", "contains": word.upper()},
                {"file": "note.txt"},
            ],
            **changes,
        }
        for n, word in enumerate(("red", "green", "blue"), 1)
    ]
    path = folder / "evals" / "evals.json"
    path.write_text(json.dumps({"skill_name": "shout", "evals": cases}), encoding="utf-8")
    return path


async def test_a_command_is_trained_on_files(tmp_path: Path) -> None:
    """A configuration names both; the agent gets the files, and a run learns what the checks want."""
    config = {
        "out_dir": str(tmp_path / "run"),
        "environment": {
            "name": "reflact.integrations.workspace:WorkspaceEnvironment",
            "options": {"evals": str(write_evals(tmp_path)), **SIZES},
        },
        "target": {
            "kind": "reflact.integrations.workspace:WorkspaceTarget",
            "options": {"command": AGENT, "skill_file": "SKILL.md"},
        },
        "models": {"target": MODEL},
        "search": {"sources": ["edits"]},
        "train": {"num_epochs": 1},
        "gate": {"policy": "strict"},
        "report": False,
    }
    endpoint = Endpoint()
    summary: RunSummary = await Trainer(config, transport=endpoint).train()
    assert (summary.status, summary.best.score) == ("completed", 1.0)
    asked = json.dumps([body for body in endpoint.bodies if "response_format" in body])
    assert "the answer is not '" in asked
    assert "The word is shouted" in asked


async def test_checks_see_answer_and_files(tmp_path: Path) -> None:
    environment = WorkspaceEnvironment(write_evals(tmp_path), **SIZES)
    item = environment.items(Split.val)[0]
    target: Any = WorkspaceTarget(AGENT, skill_file="SKILL.md").connect(Sender(), MODEL_CONFIG)
    for text, hard, soft in ((RULE, 1, 1), ("", 0, 1 / 3)):
        session = target.session_for(item, Skill(text=text), rollout="r")
        score = (await environment.run(item, session, seed=0)).score
        assert (score.hard, score.soft) == (hard, pytest.approx(soft))
    assert FileCheck(file="a").explain_failure("", {}) == "a does not exist"
    assert FileCheck(equals="x").explain_failure(" x\n", {}) is None


async def test_a_file_of_an_item_stays_in_the_folder() -> None:
    """A name that leads out of the rollout's folder is refused before anything is written there."""
    target: Any = WorkspaceTarget(AGENT, skill_file="SKILL.md").connect(Sender(), MODEL_CONFIG)
    files = {"../../out.txt": base64.b64encode(b"x").decode()}
    item = Item(id="i", input="Say red", metadata={"files": files})
    with pytest.raises(Exception, match=r"leaves the folder: rename it"):
        await target.session_for(item, Skill(text=""), rollout="r").reply("Say red")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"checks": []}, r"evals\.0\.checks: .*each case needs id, prompt and checks"),
        ({"checks": [{}]}, "a check needs file, contains or equals"),
        ({"files": ["../secret.txt"]}, "there is no file"),
        ({"id": 1}, "an id is used twice"),
    ],
)
def test_cases_that_cannot_be_used_are_named(tmp_path: Path, changes: Any, words: str) -> None:
    with pytest.raises(DataError, match=words):
        WorkspaceEnvironment(write_evals(tmp_path, **changes), **SIZES)
