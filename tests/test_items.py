"""What the target answered to which item: read from a store, chosen, and shown."""

from __future__ import annotations

import csv
import io
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import anyio
import pytest
from rich.console import Console

from reflact import Trainer, read_run
from reflact.errors import StoreError, UsageError
from reflact.protocols import Environment
from reflact.records import DocumentResult
from reflact.reporting.history import compare_runs, read_matrix
from reflact.reporting.items import (
    CELL_MARKS,
    ItemMatrix,
    MatrixColumn,
    MatrixRow,
    TextPart,
    mark_differences,
)
from reflact.reporting.terminal import print_items, print_matrix
from reflact.testing import ScriptedLLM, ToyEnvironment, ToyTarget, toy_optimizer
from reflact.types import Item, Rollout, Score, Split
from served import assert_refused, reflact
from toy_runs import LEARNING, build_trainer

STEERING = "\x1b[2J\x1b]0;title\x07\r\u202e\u200b"


WORLD = ToyEnvironment(train=8, val=4, test=4, rules=4)


def write_items(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for split in Split:
        rows = "".join(item.model_dump_json() + "\n" for item in WORLD.items(split))
        (folder / f"{split}.jsonl").write_text(rows, encoding="utf-8")
    return folder


def train(folder: Path, *, environment: Environment | None = None, **settings: Any) -> Path:
    """Train in the toy world and return the run's folder; without an environment, on a data folder."""
    config = {
        "out_dir": folder / "run",
        "search": {"sources": ["edits"]},
        "train": {"num_epochs": 1, "batch_size": 2},
        "select": {"max_edits": 1, "min_edits": 1},
        **({} if environment else {"data": {"path": write_items(folder / "data")}}),
        **settings,
    }
    optimizer = ScriptedLLM(LEARNING)
    trainer = Trainer(config, environment=environment, target=ToyTarget(), optimizer=optimizer)
    assert anyio.run(trainer.train).status == "completed"
    return folder / "run"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("items"))


def test_items_have_question_right_answer_and_both_answers(folder: Path) -> None:
    history = anyio.run(lambda: read_run(folder, items=True))
    assert [i.item_id for i in history.items] == [i.id for i in WORLD.items(Split.test)]
    for item, source in zip(history.items, WORLD.items(Split.test), strict=True):
        assert (item.input, item.expected, item.split) == (source.input, source.reference, Split.test)
        assert item.baseline.answer == "unknown"
        assert (item.best.hard == 1) == (item.best.answer == source.reference) != item.wrong
        assert (item.category == "improved") == (item.best.hard == 1)
    assert "improved" in {item.category for item in history.items}
    best = history.summary.score("best", Split.test)
    assert sum(item.best.hard or 0 for item in history.items) == best.successes


@pytest.mark.parametrize("split", [Split.val, Split.test])
def test_items_from_python_are_found_again(tmp_path: Path, split: Split) -> None:
    run = train(tmp_path, environment=WORLD)
    stored = anyio.run(lambda: read_run(run, items=True, split=split))
    assert [(i.item_id, i.expected) for i in stored.items] == [
        (i.id, i.reference) for i in WORLD.items(split)
    ]
    with closing(sqlite3.connect(run / "run.db", isolation_level=None)) as database:
        database.execute("DELETE FROM outcomes WHERE kind = 'data'")
    with pytest.raises(StoreError, match="the items of a run are missing"):
        anyio.run(lambda: read_run(run, items=True, split=split))


def test_the_command_lists_items_in_80_columns(folder: Path) -> None:
    shown = reflact("show", folder, "--items")
    assert shown.exit_code == 0, shown.output
    assert max(map(len, shown.stdout.splitlines())) <= 80
    history = anyio.run(lambda: read_run(folder, items=True))
    for option, chosen in (
        ("--wrong", [i for i in history.items if i.wrong]),
        ("--changed", [i for i in history.items if i.category == "improved"]),
    ):
        lines = reflact("show", folder, option).stdout.splitlines()
        listed = [line.split()[0] for line in lines if line.strip().startswith("test-")]
        assert listed == [item.item_id for item in chosen]
        assert lines[-1].startswith(f"{len(history.items)} test items: ")
    assert f"{len(chosen)} better, 0 worse" in lines[-1]


def test_the_command_shows_one_item_in_full(folder: Path) -> None:
    item = WORLD.items(Split.val)[1]
    shown = reflact("show", folder, "--item", item.id).stdout
    assert shown.startswith(f"{item.id} (val, {item.task_type}): ")
    for text in (item.input, item.reference, "unknown"):
        assert f"    {text}\n" in shown
    refused = reflact("show", folder, "--item", "nobody")
    assert_refused(refused, "has an id that begins with nobody; --items lists the ids")
    several = reflact("show", folder, "--item", "val-")
    assert "no item is val-, and the ids of 4 begin with it: " in several.stderr


def test_items_steer_no_terminal(tmp_path: Path) -> None:
    def spoil(item: Item) -> Item:
        return item.model_copy(update={"id": f"{item.id}{STEERING}", "input": f"{STEERING}{item.input}"})

    class Spoilt(ToyEnvironment):
        def items(self, split: Split) -> list[Item]:
            return [spoil(item) for item in WORLD.items(split)]

    run = train(tmp_path, environment=Spoilt())
    item_id = f"test-000{STEERING}"
    for command in (("--items",), ("--item", item_id), ("--items", "--json"), ("--item", f"x{STEERING}")):
        shown = reflact("show", run, *command)
        assert not {"\x1b", "\x07", "\r", "\u202e", "\u200b"} & set(shown.output)
        assert "\\x1b[2J" in shown.output or "\\u001b[2J" in shown.output


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that learns four rules, one in each step."""
    out = tmp_path_factory.mktemp("versions") / "run"
    world = ToyEnvironment(train=16, val=12, test=8)
    config = {
        "out_dir": out,
        "train": {"num_epochs": 2, "batch_size": 4},
        "select": {"max_edits": 1, "min_edits": 1},
    }
    trainer = build_trainer(config, environment=world, script=toy_optimizer())
    assert anyio.run(trainer.train).status == "completed"
    return out


def test_a_matrix_has_each_item_under_each_version(versions: Path) -> None:
    """The cells agree with the scores of the versions; filters and order follow from the cells."""
    history = anyio.run(read_run, versions)
    matrix = anyio.run(read_matrix, versions)
    assert [column.name for column in matrix.columns] == [f"v{v.number}" for v in history.versions]
    assert matrix.columns[0].note == "baseline"
    assert [c.name for c in matrix.columns if c.in_focus] == [f"v{history.summary.best.number}"]
    assert len(matrix.rows) == 12
    for version, row in zip(history.versions, matrix.summarize(), strict=True):
        assert (row["score"], row["measured"]) == (f"{version.score:.3f}", "12")
    for row in matrix.rows:
        for result, state in zip(row.results, matrix.list_states(row), strict=True):
            (rollout,) = result.rollouts
            assert rollout.key
            assert (state == "right") == (rollout.answer == row.expected) == (state != "wrong")

    changed = matrix.select(changed=True)
    assert 0 < len(changed.rows) == sum(row.is_different for row in matrix.rows)
    wrong = matrix.select(wrong=True)
    assert len(wrong.rows) == 12 - int(matrix.summarize()[-1]["solved"])
    kind = matrix.rows[0].task_type
    assert {row.task_type for row in matrix.select(task_type=kind).rows} == {kind}
    with pytest.raises(UsageError, match=f"no item has the task type none; there are: .*{kind}"):
        matrix.select(task_type="none")

    few = matrix.choose_columns(3)
    assert few.columns[0].name == "v0"
    assert few.columns[-1].in_focus
    assert [len(row.results) for row in few.rows] == [3] * 12
    last = [few.find_state(row.results[-1]) for row in few.sort().rows]
    assert last == sorted(last, key=list(CELL_MARKS).index)


def test_a_matrix_is_a_table_csv_or_json(versions: Path) -> None:
    matrix = anyio.run(read_matrix, versions)
    shown = reflact("show", versions, "--matrix")
    assert shown.exit_code == 0, shown.output
    lines = shown.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert {line.split()[0] for line in lines if line.startswith("val-")} == {r.item_id for r in matrix.rows}
    assert sum(line.count(CELL_MARKS["right"]) for line in lines if line.startswith("val-")) == sum(
        matrix.list_states(row).count("right") for row in matrix.rows
    )
    assert ItemMatrix.model_validate_json(reflact("show", versions, "--matrix", "--json").stdout) == matrix

    heading, *rows = csv.reader(io.StringIO(reflact("show", versions, "--matrix", "--csv").stdout))
    names = [column.name for column in matrix.columns]
    assert heading[4:] == [*(f"score {name}" for name in names), *(f"answer {name}" for name in names)]
    for cells, row in zip(rows, matrix.rows, strict=True):
        assert cells[0] == row.item_id
        assert cells[4 + len(names) :] == list(row.list_answers())

    item = matrix.rows[0]
    full = reflact("show", versions, "--item", item.item_id, "--matrix").stdout
    assert [f"\n{name}, score " in full for name in names] == [True] * len(names)
    assert_refused(reflact("show", versions, "--matrix", "--task-type", "none"), "there are: ")
    ends = list(csv.reader(io.StringIO(reflact("show", versions, "--items", "--csv").stdout)))
    assert ends[0][4:6] == ["score baseline", "score best"]
    assert len(ends) == 1 + 8


def test_runs_are_compared_item_by_item(versions: Path, tmp_path: Path) -> None:
    """Items stand beside each other by id and input; what only one run has is not measured in the other."""
    short = tmp_path / "short"
    config = {"out_dir": short, "train": {"num_epochs": 1, "batch_size": 8}}
    world = ToyEnvironment(train=16, val=12, test=10)
    anyio.run(build_trainer(config, environment=world, script=toy_optimizer()).train)
    matrix = anyio.run(compare_runs, [versions, short]).items
    assert [column.name for column in matrix.columns] == [str(versions), str(short)]
    assert [row.item_id for row in matrix.rows] == [item.id for item in world.items(Split.test)]
    assert [matrix.list_states(row)[0] for row in matrix.rows[8:]] == ["unmeasured"] * 2

    shown = reflact("compare", versions, short, "--changed").stdout
    listed = [line.split()[0] for line in shown.splitlines() if line.startswith("test-")]
    assert listed == [row.item_id for row in matrix.select(changed=True).rows] != []
    assert shown.splitlines()[-1].startswith("10 test items: ")
    printed = reflact("compare", versions, short, "--items", "--wrong", "--json").stdout
    assert ItemMatrix.model_validate_json(printed) == matrix.select(wrong=True)
    heading, *rows = csv.reader(io.StringIO(reflact("compare", versions, short, "--csv").stdout))
    assert heading[-1] == f"answer {short}"
    assert rows[8][4] == ""


def test_answers_are_told_apart() -> None:
    """Parts that only one answer has are marked; without much in common, or if they are equal, none is."""
    old, new = "It is 41, as always.", "It is 42, as ever."
    parts = mark_differences(new, old)
    assert "".join(part.text for part in parts) == new
    assert [part.text for part in parts if part.is_different] == ["42", "ever"]
    assert mark_differences(old, old) == [TextPart(old)]
    assert mark_differences("Oslo", "No idea at all") == [TextPart("Oslo")]
    text = "The same words again and again. " * 20
    short = mark_differences(f"{text}yes {text}", f"{text}no {text}", 200)
    assert [part.text for part in short if part.is_different] == ["yes"]
    assert sum(len(part.text) for part in short) <= 200


def build_matrix() -> ItemMatrix:
    """Three items under five documents: right, wrong, in between and not measured."""

    def answer(text: str, score: float) -> DocumentResult:
        rollout = Rollout(
            key="k", item_id="q", skill_hash="h", answer=text, score=Score(hard=score, soft=score)
        )
        return DocumentResult(rollouts=(rollout,))

    query = "SELECT name FROM airports WHERE country = 'Norway' ORDER BY {} LIMIT 10"
    lost = DocumentResult(error="the endpoint is down")
    wrong = answer(query.format("name"), 0)
    right = answer(query.format("elevation DESC"), 1)
    rows = (
        MatrixRow(item_id="q1", task_type="sql", input="Which airports are highest?", results=(wrong, right)),
        MatrixRow(item_id="q2", task_type="sql", input="Which?", results=(answer("a", 0.5), answer("b", 0))),
        MatrixRow(item_id="q3", input="And why?", expected={"why": 1}, results=(answer("Because.", 1), lost)),
    )
    columns = [
        MatrixColumn(name=f"v{n}", skill_hash=str(n), note=f"step {n}", in_focus=n == 4) for n in range(5)
    ]
    matrix = ItemMatrix(split=Split.val, columns=tuple(columns), rows=rows)
    wide = [row.model_copy(update={"results": (*row.results[:1] * 4, row.results[1])}) for row in rows]
    return matrix.model_copy(update={"rows": tuple(wide)})


def test_items_beside_each_other_have_their_screens(snapshot: Callable[[str, str], None]) -> None:
    matrix = build_matrix()
    ends = matrix.choose_columns(2)
    blocks = []
    for width, is_terminal in ((80, True), (140, True), (100, False)):
        console = Console(file=io.StringIO(), width=width, force_terminal=is_terminal, color_system=None)
        print_matrix(console, matrix, 4)
        print_items(console, ends)
        text = console.file.getvalue()
        blocks.append(f"# {width} columns\n" + "\n".join(line.rstrip() for line in text.splitlines()))
    snapshot("items", "\n\n".join(blocks) + "\n")
