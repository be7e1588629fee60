"""Controls: a placebo document and null answers, before the training and at its end."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest
from rich.console import Console

from pure_world import PureNetwork, differences, left_by, write_world
from pure_world import settings as pure_settings
from reflact import Trainer, events
from reflact.data import DataSet
from reflact.environments import (
    DatasetEnvironment,
    ExactGrader,
    Grader,
    Item,
    JsonFieldsGrader,
    NormalizedGrader,
    NumericGrader,
    RegexGrader,
    TokenF1Grader,
)
from reflact.records import RunSummary
from reflact.reporting.history import read_run
from reflact.reporting.live import EventLines
from reflact.reporting.terminal import print_summary
from reflact.stages.null_answers import REFUSAL, find_frequent_answer
from reflact.stages.reply_models import AnalystReply
from reflact.testing import append_reply
from reflact.types import Split
from toy_runs import Actor, build_trainer, playing, run, settings

ON: dict[str, Any] = {"test": {"enabled": True, "placebo": True, "null_answers": True}}
APPENDING = playing((AnalystReply, lambda kind, _: append_reply(kind, "Answer.")))
NAMES = ["baseline", "placebo", "null_empty", "null_refusal", "null_frequent", "best", "final"]


def items(split: str, references: Sequence[Any]) -> tuple[Item, ...]:
    return tuple(
        Item(id=f"{split}-{number}", input=f"{split} {number}", reference=reference)
        for number, reference in enumerate(references)
    )


def questions(references: Sequence[Any], grade: Grader | None = None) -> DatasetEnvironment:
    splits = {split.value: items(split.value, references) for split in Split}
    return DatasetEnvironment(DataSet.model_validate(splits), grade=grade or ExactGrader())


async def test_constants_are_graded_beside_baseline_and_best(tmp_path: Path) -> None:
    """On the last split alone, by the environment and without the target; records, events and summary have them."""
    done = await run(tmp_path, **ON)
    test = [score for score in done.summary.scores if score.split is Split.test]
    assert [score.name for score in test] == NAMES
    assert [s.name for s in done.summary.scores if s.split is Split.val] == ["baseline", "best", "final"]
    answers = {score.name: (score.answer, score.hard, score.n) for score in test if score.answer is not None}
    assert answers == {
        "null_empty": ("", 0.0, 4),
        "null_refusal": (REFUSAL, 0.0, 4),
        "null_frequent": ("odd", 0.25, 4),
    }
    assert all(score.low is not None and score.high is not None for score in test)
    assert {text for text, _ in done.actor.asked}.isdisjoint({REFUSAL, "odd"})
    told = [event.score for event in done.events if event.kind == "final_score_measured"]
    assert sorted(told, key=str) == sorted(done.summary.scores, key=str)
    read = await read_run(tmp_path)
    assert read.summary is not None
    assert read.summary.score("null_frequent", Split.test) == test[4]
    assert "answer" not in json.loads(done.summary.model_dump_json())["scores"][0]


async def test_a_task_that_a_constant_solves_says_so_before_anything_is_asked(tmp_path: Path) -> None:
    asked_before: list[int] = []
    actor = Actor(lambda *_: "no")
    trainer = build_trainer(
        settings(tmp_path, **ON), environment=questions(["yes", "yes", "no", "yes"]), target=actor
    )
    lines, printed = EventLines(), list[str | None]()
    async with trainer.stream() as stream:
        async for event in stream:
            if isinstance(event, events.NullAnswersGraded):
                asked_before.append(len(actor.asked))
            printed.append(lines.format_event(event))
            if isinstance(event, events.RunFinished):
                summary = event.summary
    warning = (
        'always answering "yes" scores 0.750 on 4 train items: a skill can gain by making the target answer so, '
        "without learning the task"
    )
    assert asked_before == [0]
    assert printed.count(f"warning   {warning}") == 1
    assert summary.warnings == (warning,)
    text = io.StringIO()
    print_summary(Console(file=text, width=80), summary, tmp_path)
    assert f"warning: {warning}" in text.getvalue()
    assert 'The best document is not better than always answering "yes": 0.25 against 0.75' in text.getvalue()
    assert 'frequent is always answering "yes", the most frequent right answer' in text.getvalue()
    again = await trainer.train()
    assert again.warnings == (warning,)
    assert again.scores == summary.scores


@pytest.mark.parametrize(
    ("grade", "references", "frequent"),
    [
        (ExactGrader(), ["b", "a", " a ", "b", "c"], "b"),
        (ExactGrader(), ["a", "b"], None),
        (ExactGrader(), ["c", ["a", "b"], ["b", "a", "a"]], "a"),
        (NormalizedGrader(), ["Yes.", "no", "yes", "No!", "YES"], "yes"),
        (TokenF1Grader(), ["The end", "the end!", "x"], "the end"),
        (NumericGrader(), ["2", 1, "1.0", 1.5], "1"),
        (JsonFieldsGrader(), [{"b": 1, "a": "é"}, {"a": "é", "b": 1}], '{"a": "é", "b": 1}'),
        (RegexGrader(), ["a+", "a+"], None),
    ],
    ids=["tie", "once", "lists", "normalized", "words", "numbers", "fields", "patterns"],
)
def test_the_most_frequent_right_answer(grade: Grader, references: list[Any], frequent: str | None) -> None:
    world = questions(references, grade)
    assert find_frequent_answer(world, world.items(Split.train)) == frequent


async def test_constants_are_not_graded_again_by_a_resumed_run(tmp_path: Path) -> None:
    graded: list[str] = []

    def grade(item: Item, answer: str) -> float:
        graded.append(answer)
        return float(answer == item.reference)

    world = questions(["a", "a", "b", "c"], grade)
    first = await run(tmp_path, environment=world, script=APPENDING, **ON)
    assert graded.count(REFUSAL) == 8
    graded.clear()
    second = await run(tmp_path, environment=world, script=APPENDING, **ON)
    assert graded == []
    assert second.events == first.events
    assert (second.summary.scores, second.summary.warnings) == (first.summary.scores, first.summary.warnings)


@pytest.mark.slow
def test_a_budget_that_ends_at_the_placebo_leaves_the_other_scores(tmp_path: Path) -> None:
    world = write_world(tmp_path / "world", train=6, val=3, test=2)

    def train(folder: str, calls: int | None) -> RunSummary:
        short = {
            "search": {"sources": ["edits"]},
            "train": {"num_epochs": 1, "batch_size": 6, "accumulation": 1},
            "budget": {"max_calls": calls},
        }
        plain = pure_settings(world, tmp_path / folder, **short)
        return anyio.run(Trainer(plain, transport=PureNetwork()).train)

    whole = train("whole", None)
    calls = sum(entry.usage.calls for entry in whole.spend)
    stopped = train("again", calls - 1)
    assert stopped.status == "budget"
    assert stopped.scores == tuple(s for s in whole.scores if s.name != "placebo")
    assert (stopped.improvements, stopped.claim) == (whole.improvements, whole.claim)
    assert train("again", calls).scores == whole.scores
    assert differences(left_by(tmp_path / "again"), left_by(tmp_path / "whole")) == []
