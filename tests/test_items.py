"""What the target answered to which item: read from a store, chosen, and shown."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import anyio
import pytest

from reflact import Trainer, read_run
from reflact.errors import StoreError
from reflact.protocols import Environment
from reflact.testing import ScriptedLLM, ToyEnvironment, ToyTarget
from reflact.types import Item, Split
from served import assert_refused, reflact
from toy_runs import LEARNING

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
    assert history.items_note is None
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
