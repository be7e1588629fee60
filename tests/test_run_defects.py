"""Defects that users met when they started and looked at runs: one test for each."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from doubles import Endpoint, ask, config
from reflact import Trainer, read_run
from reflact.errors import ModelError, RunConflict
from reflact.messages import Text
from reflact.testing import ToyEnvironment, ToyTarget
from reflact.testing.llm import Script
from served import configured, reflact, say_four, serving
from toy_runs import build_trainer


def build_short_trainer(
    folder: Path, *, target: ToyTarget | None = None, script: Script | None = None, **settings: Any
) -> Trainer:
    return build_trainer(
        {
            "out_dir": folder,
            "report": False,
            "search": {"sources": ["edits"]},
            "train": {"num_epochs": 1, "batch_size": 4},
            **settings,
        },
        target=target,
        script=script,
    )


def read_files(folder: Path) -> dict[str, bytes]:
    named = ("best_skill.md", "summary.json", "report.html")
    paths = (*(folder / name for name in named), *sorted((folder / "skills").glob("*.md")))
    return {path.name: path.read_bytes() for path in paths}


@pytest.mark.parametrize("shared", [False, True])
def test_a_fork_keeps_the_files_of_the_first_run(tmp_path: Path, shared: bool) -> None:
    out = tmp_path / "run"
    where = {"report": True, **({"store": tmp_path / "all.db"} if shared else {"fork": True})}
    first = build_short_trainer(out, **where)
    anyio.run(first.train)
    before = read_files(out)
    second = build_short_trainer(out, seed=1, select={"max_edits": 1, "min_edits": 1}, **where)
    summary = anyio.run(second.train)
    assert read_files(out) == before
    own = read_files(out / second.run_id)
    assert json.loads(own["summary.json"])["run_id"] == second.run_id
    assert own["best_skill.md"] != b""
    anyio.run(build_short_trainer(out, **where).train)
    assert json.loads(read_files(out)["summary.json"])["run_id"] == first.run_id
    assert read_files(out / second.run_id) == own
    assert anyio.run(read_run, out / second.run_id).summary == summary
    if not shared:
        assert f"{out / second.run_id / 'best_skill.md'}" in reflact("show", out / second.run_id).stdout


def test_a_document_is_measured_on_items_of_another_file(tmp_path: Path) -> None:
    (tmp_path / "s.md").write_text("Answer 4.\n", encoding="utf-8")
    (tmp_path / "t.md").write_text("Answer 5.\n", encoding="utf-8")
    rows = [{"input": f"What is {k} + {k}?", "reference": str(2 * k)} for k in range(5)]
    (tmp_path / "new.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    with serving(say_four) as url:
        path = configured(tmp_path, url)
        command = (
            "eval",
            path,
            "--skill",
            tmp_path / "s.md",
            "--data",
            tmp_path / "new.jsonl",
            "--show",
            "quiet",
        )
        shown = reflact(*command, "--against", tmp_path / "t.md", "--against", "null")
    assert shown.exit_code == 0, shown.output
    assert f"all 5 items of {tmp_path / 'new.jsonl'}, as the split val" in shown.stdout
    assert re.search(r"^\S+/s\.md +val +5 ", shown.stdout, re.M)
    assert re.search(r"^\S+/t\.md +val +5 ", shown.stdout, re.M)
    assert len(anyio.run(read_run, tmp_path / "run" / "eval-new").evaluations) == 1
    assert not (tmp_path / "run" / "run.db").exists()
    assert "leave --split out" in reflact(*command, "--split", "val").stderr
    assert "needs one data file" in reflact(*command[:-3], tmp_path).stderr


def test_a_conflict_advises_what_its_cause_needs(tmp_path: Path) -> None:
    anyio.run(build_short_trainer(tmp_path).train)
    for changed, advice in (
        ({"prompts": {"versions": {"analyst_failure": 1}}}, "the same prompts (a new version of reflact, "),
        ({"seed": 1}, "to resume it, put the old value of seed back; to start another run"),
        ({"target": ToyTarget(noise=0.5)}, "to resume it, pass the same target; to start another run"),
        (
            {"preset": "skillopt", "seed": 1, "select": {"max_edits": 9, "min_edits": 2}},
            "; and 1 more; to resume",
        ),
    ):
        with pytest.raises(RunConflict, match=re.escape(advice)):
            anyio.run(build_short_trainer(tmp_path, **changed).train)
    other = build_trainer(
        build_short_trainer(tmp_path).config, environment=ToyEnvironment(train=8, val=4, test=5)
    )
    with pytest.raises(RunConflict, match="to resume it, restore the items of the data"):
        anyio.run(other.train)


def test_a_mute_optimizer_fails_the_run(tmp_path: Path) -> None:
    with serving(say_four) as url:
        path = configured(tmp_path, url)
        alone = ("--set", "search.sources=[edits]", "--set", "train.num_epochs=1")
        result = reflact("train", path, *alone, "--show", "quiet")
    assert result.exit_code == 1, result.output
    assert "then start another run, since these steps are decided: add --fork" in result.output
    assert "no analyst gave a valid reply in 1 step" in result.stderr
    assert "models.optimizer.model" in result.stderr
    history = anyio.run(read_run, tmp_path / "run")
    assert (history.status, len(history.steps)) == ("failed", 1)
    shown = reflact("show", tmp_path / "run", 1).stdout
    call = "analyst of minibatch 1 of the failures in step 1"
    words = f"minibatch 1 of the failures: models.optimizer gave no valid reply in 3 attempts ({call}); the last reason: "
    assert f"no report on {words}" in shown
    assert "part=" not in shown + result.output


@pytest.mark.parametrize(("path", "advice"), [("", "/v1"), ("/v1", None)])
async def test_an_address_without_its_version_is_mended_in_the_message(path: str, advice: str | None) -> None:
    words = "check models.optimizer.base_url"
    if advice is not None:
        words = "set models.optimizer.base_url to http://127.0.0.1:8080/v1: Not Found"
    endpoint = Endpoint(httpx.Response(404, text="Not Found"))
    with pytest.raises(ModelError, match=re.escape(f"at this address (404); {words}")):
        await ask(Text, endpoint, config(base_url=f"http://127.0.0.1:8080{path}"))
