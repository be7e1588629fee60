"""The dataset environment: what the target is asked, how references are checked, what identifies it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from pydantic import JsonValue

from reflact.config.fields import FieldsConfig
from reflact.config.training import DataConfig, EnvironmentConfig, TrainerConfig
from reflact.data import DataSet
from reflact.environments.dataset import DatasetEnvironment, build_environment
from reflact.environments.graders import ExactGrader, Grader, NormalizedGrader, NumericGrader, TokenF1Grader
from reflact.errors import ConfigError, DataError
from reflact.targets import ChatTarget
from reflact.testing import ScriptedLLM
from reflact.types import Grade, Item, Score, Skill, Split


def _data(*items: Item) -> DataSet:
    return DataSet(train=items, val=(), test=())


@pytest.mark.parametrize(
    ("template", "given_", "message"),
    [
        ("{input}|{input}", "{input}", "{input}|{input}"),
        ("{x} {input} $y", "{} $x \\1 \x00", "{x} {} $x \\1 \x00 $y"),
        ("%s {0} {input.id} {{input}}", "a", "%s {0} {input.id} {a}"),
        ("{input}", {"b": [1], "a": "é"}, '{\n  "a": "é",\n  "b": [\n    1\n  ]\n}'),
        ("{level}: {input} {other}", "{level}", "3: {level} {other}"),
    ],
)
def test_holes_are_filled_in_one_pass(template: str, given_: JsonValue, message: str) -> None:
    """Those of the input and of named columns are filled, and none that came in with the data."""
    environment = DatasetEnvironment(_data(), grade=ExactGrader(), template=template)
    item = Item(id="q", input=given_, metadata={"level": 3, "source": "secret"})
    assert environment.render_message(item) == message


def test_data_without_references_names_the_line_that_mends_it(tmp_path: Path) -> None:
    """If no row has a reference, the error guesses its column before anything is asked."""
    path = tmp_path / "all.csv"
    path.write_text("question,label,note\n" + "".join(f"q{n},{n},x\n" for n in range(6)), encoding="utf-8")
    config = TrainerConfig(data=DataConfig(path=path))
    with pytest.raises(DataError, match=r"all.csv: no item has a reference.* data.fields.reference: COLUMN"):
        build_environment(config)
    mended = DataConfig(path=path, fields=FieldsConfig(reference="label"))
    assert len(build_environment(TrainerConfig(data=mended)).items(Split.val)) == 2


async def test_an_item_is_asked_once_and_its_answer_graded() -> None:
    """One message goes out, and the grader, also an async function, gets what came back."""
    item = Item(id="q", input="2 + 2", reference="4")
    llm = ScriptedLLM(lambda *_: "55")
    session = ChatTarget(llm).session(Skill(text=""), rollout="r")
    environment = DatasetEnvironment(_data(item), grade=ExactGrader(), template="Q: {input}")
    graded = await environment.run(item, session, seed=0)
    assert [call.prompt.messages[-1].content for call in llm.calls] == ["Q: 2 + 2"]
    assert graded == Grade(score=Score.of(0), answer="55", feedback='expected "4", got "55"')

    async def short(item: Item, answer: str) -> float:
        return 1 / len(answer)

    own = DatasetEnvironment(_data(item), grade=short)
    assert (await own.run(item, session, seed=0)).score == Score.of(0.5)


@pytest.mark.parametrize("split", [Split.train, Split.test])
def test_references_are_checked_before_anything_is_asked(split: Split) -> None:
    bad = Item(id="bad", input="x", reference="many")
    good = Item(id="good", input="y", reference=1)
    data = DataSet.model_validate({s.value: (good, bad) if s is split else (good,) for s in Split})
    with pytest.raises(DataError, match=r"item 'bad'.*many.*begins with"):
        DatasetEnvironment(data, grade=NumericGrader())
    DatasetEnvironment(data, grade=lambda item, answer: True)


@pytest.mark.parametrize("grade", [NormalizedGrader(), TokenF1Grader()])
def test_a_grader_that_takes_two_labels_for_one_is_refused(grade: Grader) -> None:
    """Both names are told with the grader that tells them apart; texts that do not repeat may differ in case."""
    items = [Item(id=f"q{n}", input=n, reference=("us", "US")[n % 2]) for n in range(12)]
    with pytest.raises(DataError, match=r"'US' and 'us' for one: set environment.grader: exact"):
        DatasetEnvironment(_data(*items), grade=grade)
    DatasetEnvironment(_data(*items), grade=ExactGrader())
    DatasetEnvironment(_data(*items[:4]), grade=grade)


def _own(item: Item, answer: str) -> bool:
    return True


def test_identity_holds_all_that_scores_depend_on() -> None:
    """Name, version, template, grader and its settings each make a difference; the text is pinned."""
    graders: tuple[Grader, ...] = (ExactGrader(), NumericGrader(), NumericGrader(tolerance=1), _own)
    changes: tuple[dict[str, Any], ...] = ({}, {"version": 2}, {"name": "other"}, {"template": "{input}?"})
    identities = [DatasetEnvironment(_data(), grade=g, **c).identity for g in graders for c in changes]
    assert len(set(identities)) == 16
    assert identities[-4] == DatasetEnvironment(_data(), grade=_own).identity
    assert identities[4] == (
        '{"environment":"dataset","grader":{"grader":"numeric","settings":{"relative_tolerance":null,'
        '"tolerance":0.0},"version":1},"template":"{input}","version":1}'
    )


def _config(path: Path | None) -> TrainerConfig:
    return TrainerConfig(data=DataConfig(path=path), environment=EnvironmentConfig(grader="numeric"))


def _write(path: Path, references: Sequence[JsonValue]) -> Path:
    rows = [{"id": f"q{n}", "input": f"{n}?", "reference": r} for n, r in enumerate(references)]
    path.write_text(json.dumps(rows), encoding="utf-8")
    return path


def test_bad_data_is_refused(tmp_path: Path) -> None:
    """No path, no place for the input, an empty split and a useless reference are errors."""
    with pytest.raises(ConfigError, match="input"):
        DatasetEnvironment(_data(), grade=ExactGrader(), template="Solve it.")
    with pytest.raises(ConfigError, match=r"data\.path is required"):
        build_environment(_config(None))
    with pytest.raises(DataError, match="split is empty"):
        build_environment(_config(_write(tmp_path / "few.json", [1])))
    with pytest.raises(DataError, match="item 'q9'"):
        build_environment(_config(_write(tmp_path / "bad.json", [*range(9), "x"])))
