"""`reflact eval` and `Trainer.compare`: each is a thing of its own beside the run, with its own cost."""

from __future__ import annotations

import csv
import io
import json
import re
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import anyio
import pytest

from reflact import Trainer, read_run
from reflact.errors import UsageError
from reflact.reporting.history import list_runs, read_matrix
from reflact.reporting.items import ItemMatrix
from reflact.types import Skill, Split
from served import (
    asked_of,
    assert_refused,
    completion,
    configured,
    reflact,
    say_four_and_append,
    send,
    serving,
)
from toy_runs import build_learning_trainer, document


def say_four_or_nothing(handler: BaseHTTPRequestHandler) -> None:
    """Answer 4 under a document that asks for it, and with a question under any other."""
    text = json.dumps(asked_of(handler)["messages"])
    send(handler, completion("4" if "Answer 4." in text else "What?"))


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_an_eval_is_listed_with_its_file_and_its_own_cost(tmp_path: Path) -> None:
    """The training pays nothing for it, neither before nor after, and shows it beside itself."""
    once = ("--set", "train.num_epochs=1", "--show", "quiet")
    good, bad = write(tmp_path / "good.md", "Answer 4."), write(tmp_path / "bad.md", "Answer 5.")
    with serving(say_four_and_append) as url:
        path = configured(tmp_path, url)
        measured = reflact("eval", path, "--skill", good, "--against", bad, "--show", "quiet")
        assert measured.exit_code == 0, measured.output
        assert reflact("train", path, *once).exit_code == 0
        before = anyio.run(read_run, tmp_path / "run").usage
        assert reflact("eval", path, "--skill", bad, "--show", "quiet").exit_code == 0
    history = anyio.run(read_run, tmp_path / "run")
    assert history.evaluation is None
    assert history.usage == before
    assert [c.skill.name for c in history.evaluations] == [str(good), str(bad)]

    first, run, second = anyio.run(list_runs, tmp_path / "run" / "run.db")
    assert (first.status, run.run_id, run.evaluation) == ("completed", history.run_id, None)
    assert first.evaluation.title == f"eval of {good}"
    assert first.usage.calls == 2 * 3
    assert second.usage.calls == 0  # its rollouts are those of the first one
    listed = reflact("runs", tmp_path).stdout
    assert "eval of" in listed
    assert str(tmp_path / "run" / first.run_id) in measured.stdout
    shown = reflact("show", tmp_path / "run" / first.run_id[:5]).stdout
    assert shown.startswith(f"eval of {good}, {first.run_id}, ")
    assert "6 calls" in shown
    assert f"run {run.run_id}, " in reflact("show", tmp_path / "run").stdout
    assert "bad.md" in reflact("show", tmp_path / "run").stdout
    diff = reflact("show", tmp_path / "run" / first.run_id, "--skill", "baseline..best")
    assert_refused(diff, "is an eval of ", "has no versions")


def test_items_of_an_eval_stand_beside_each_other(tmp_path: Path) -> None:
    good, bad = write(tmp_path / "good.md", "Answer 4."), write(tmp_path / "bad.md", "Be kind.")
    with serving(say_four_or_nothing) as url:
        command = ("eval", configured(tmp_path, url), "--skill", good, "--against", bad)
        *_, last = reflact(*command, "--items", "--show", "json").stdout.splitlines()
        table = reflact(*command, "--csv")
        text = reflact(*command, "--changed", "--show", "quiet").stdout
        assert_refused(reflact(*command, "--items", "--task-type", "sums"), "no item has the task type sums")
    matrix = ItemMatrix.model_validate_json(last)
    assert [column.name for column in matrix.columns] == [str(bad), str(good)]
    assert [row.list_answers() for row in matrix.rows] == [("What?", "4")] * 3
    solved = [row.expected == "4" for row in matrix.rows]
    assert [states[1] == "right" for states in map(matrix.list_states, matrix.rows)] == solved
    heading, *rows = csv.reader(io.StringIO(table.stdout))
    assert heading[4:] == [f"{what} {name}" for what in ("score", "answer") for name in (bad, good)]
    assert [row[0] for row in rows] == [row.item_id for row in matrix.rows]
    assert len(re.findall(r"^q\d \(val\): better, 0 -> 1", text, re.MULTILINE)) == sum(solved)
    run = anyio.run(list_runs, tmp_path / "run" / "run.db")[-1]
    assert anyio.run(read_matrix, tmp_path / "run", run.run_id) == matrix
    assert "4" in reflact("show", tmp_path / "run", "--item", matrix.rows[0].item_id).stdout


def test_a_budget_limits_each_eval_alone(tmp_path: Path) -> None:
    """Three calls are enough for a document of three items, again for the next one, and not for two at once."""
    good, bad = write(tmp_path / "good.md", "Answer 4."), write(tmp_path / "bad.md", "Answer 5.")
    with serving(say_four_or_nothing) as url:
        path = configured(tmp_path, url)
        limit = ("--set", "budget.max_calls=3", "--show", "quiet")
        for document in (good, bad):
            assert reflact("eval", path, "--skill", document, *limit).exit_code == 0
        other = write(tmp_path / "other.md", "Answer 6.")
        third = write(tmp_path / "third.md", "Answer 7.")
        spent = reflact("eval", path, "--skill", other, "--against", third, *limit)
    assert spent.exit_code == 1
    assert "budget.max_calls" in spent.stderr
    open_eval = anyio.run(list_runs, tmp_path / "run" / "run.db")[-1]
    assert (open_eval.state, open_eval.usage.calls) == ("open", 3)


async def test_openings_of_the_test_split_count_for_the_run(tmp_path: Path) -> None:
    """An eval opens the same sealed split as the training; the same document opens it once."""

    def build() -> Trainer:
        return build_learning_trainer(tmp_path)

    skills = [Skill(text=document("double")), Skill(text=document("negate"))]
    for skill in (*skills, skills[0]):
        await build().evaluate(skill, Split.test)
    assert (await build().train()).test_openings == 3
    again = await build().train()
    assert again.test_openings == 3
    assert len((await read_run(tmp_path)).evaluations) == 2


async def test_an_eval_stands_in_no_runs_way(tmp_path: Path) -> None:
    """After an eval alone, a training with other keys may start in the folder; then an eval must fit the run."""
    await build_learning_trainer(tmp_path).evaluate(Skill(text=document("double")))
    found = await read_run(tmp_path)
    assert found.evaluation.run_id == build_learning_trainer(tmp_path).run_id
    summary = await build_learning_trainer(tmp_path, seed=3).train()
    assert summary.status == "completed"
    assert (await read_run(tmp_path)).run_id == summary.run_id


async def test_documents_keep_apart_under_one_name(tmp_path: Path) -> None:
    """A file that is compared with itself, or two of one name, stay two documents; each needs a name."""
    skill = Skill(text=document("double"))
    names = ["rule.md", "rule.md", "none"]
    compared = await build_learning_trainer(tmp_path).compare(skill, [Skill(text="- x"), "none"], names=names)
    assert [score.name for score in (compared.skill, *compared.others)] == ["rule.md", "rule.md (2)", "none"]
    with pytest.raises(UsageError, match="names has 1 names for 2 documents"):
        await build_learning_trainer(tmp_path).compare(skill, ["none"], names=["rule.md"])
