"""The environment of a data set: one question to the target for each item, and one graded answer."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import JsonValue

from reflact.config.training import TrainerConfig
from reflact.data import MAX_SHOWN_ROWS, DataSet, check_dataset, guess_column, has_made_id, load_dataset
from reflact.environments.graders import (
    PLAIN_GRADERS,
    CheckedGrader,
    Grader,
    NumericGrader,
    TokenF1Grader,
    apply_grader,
    identify_grader,
    list_right_answers,
)
from reflact.environments.python_grader import build_python_grader
from reflact.environments.sql_grader import SQLGrader, read_tables
from reflact.errors import ConfigError, DataError
from reflact.protocols import CriticBacked, Session
from reflact.records import CriticDescription
from reflact.types import Grade, Item, Split, canonical_json

INPUT_VARIABLE = "{input}"

SCORE_WORDS: Mapping[str, str] = {
    "exact": "An answer is right if it equals the reference, character by character, apart from spaces around it.",
    "normalized": "An answer is right if it equals the reference, apart from case, punctuation and spaces.",
    "token_f1": "The score of an answer is the F1 of its words and those of the reference, so missing and needless "
    "words both cost.",
    "numeric": "An answer is right if its number equals the reference's, within a tolerance.",
    "regex": "An answer is right if the whole of it matches the reference, which is a regular expression.",
    "json_fields": "An answer is a JSON object; it is right if it has the reference's fields with their values.",
    "sql": "An answer is a query; it is right if it returns the same rows as the reference.",
    "python": "An answer is a Python program; it is right if it passes the reference's tests.",
}
"""What the graders of a configuration measure, in words for the optimizer."""


class DatasetEnvironment:
    """Items of a data set, each one message to the target and one graded answer.

    Args:
        data: The items.
        grade: A grader of ``reflact.environments.graders``, or any function of an item and an answer.
        template: The message to the target. ``{input}`` is the item's input, and ``{NAME}`` the metadata of that name,
            if the item has it. Text is inserted as it is, any other value as indented JSON with sorted keys.
        name: The environment's name; part of its identity.
        version: Raise it if ``grade`` is your own function and its scores change, so that older scores are
            not reused.

    Raises:
        ConfigError: The template has no ``{input}``, or the grader has no name.
        DataError: The grader cannot use a reference; names the item.
    """

    def __init__(
        self,
        data: DataSet,
        *,
        grade: Grader,
        template: str = INPUT_VARIABLE,
        name: str = "dataset",
        version: int = 1,
    ) -> None:
        if INPUT_VARIABLE not in template:
            raise ConfigError(f"the template {template!r} has no {INPUT_VARIABLE} for the item's input")
        self._data = data
        self._grade = grade
        self._template = template
        self._name = name
        self._version = version
        self._critic = grade if isinstance(grade, CriticBacked) else None
        self._identity = canonical_json(
            {"environment": name, "version": version, "template": template, "grader": identify_grader(grade)}
        )
        if isinstance(grade, CheckedGrader):
            _check_references(grade, data)

    @property
    def identity(self) -> str:
        """Name, version, template and grader with its settings, as canonical JSON."""
        return self._identity

    @property
    def description(self) -> str:
        """What the grader measures; empty for an own function."""
        return SCORE_WORDS.get(getattr(self._grade, "name", ""), "")

    @property
    def scored_by(self) -> CriticDescription | None:
        """The critic, if one grades."""
        return None if self._critic is None else self._critic.scored_by

    def with_grader(self, grade: Grader) -> DatasetEnvironment:
        """Return the environment with another grader."""
        return DatasetEnvironment(
            self._data, grade=grade, template=self._template, name=self._name, version=self._version
        )

    def items(self, split: Split) -> Sequence[Item]:
        """Return a split's items in the data set's order."""
        return self._data.items(split)

    def list_right_answers(self, item: Item) -> Sequence[str]:
        """Return the item's right answers; empty if its references are no answers, or a critic grades."""
        return () if self.scored_by is not None else list_right_answers(self._grade, item)

    async def run(self, item: Item, session: Session, *, seed: int) -> Grade:
        """Ask the item's question and grade the answer; the seed is not used.

        Raises:
            EnvironmentFailure: The grader returned no score.
            ModelError: The target gave no answer.
        """
        answer = await session.reply(self.render_message(item))
        return await apply_grader(self._grade, item, answer)

    def render_message(self, item: Item) -> str:
        """Return the message to the target: the template with the item's input."""
        values = {**item.metadata, "input": item.input}
        # one pass, so that variables in a value are text
        names = "|".join(map(re.escape, sorted(values, key=len, reverse=True)))
        return re.sub(rf"\{{({names})\}}", lambda match: _show(values[match[1]]), self._template)


def _check_references(grade: CheckedGrader[Any], data: DataSet) -> None:
    """Raise DataError if the grader cannot use an item's reference; it names the items, with their rows if known."""
    wrong: list[tuple[Item, DataError]] = []
    for item in (item for split in Split for item in data.items(split)):
        try:
            grade.check(item)
        except DataError as caught:
            wrong.append((item, caught))
    if not wrong:
        return
    places = {item_id: number for number, item_id in enumerate(data.rows)}
    wrong.sort(key=lambda each: places.get(each[0].id, 0))
    item, error = wrong[0]
    begin = " ".join(_show(item.input).split())[:80]
    where = f"{data.rows[item.id]}: " if item.id in data.rows else ""
    said = str(error)
    if where and has_made_id(item):
        said = said.replace(f"item {item.id!r}", "the item", 1)
    others = ", ".join(data.rows.get(item.id, repr(item.id)) for item, _ in wrong[1 : MAX_SHOWN_ROWS + 1])
    dots = ", ..." if len(wrong) > MAX_SHOWN_ROWS + 1 else ""
    more = f"; {len(wrong) - 1} more cannot be graded: {others}{dots}" if others else ""
    raise DataError(f"{where}{said}; the item's input begins with {begin!r}{more}")


def _show(value: JsonValue) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(value, sort_keys=True, indent=2, ensure_ascii=False, allow_nan=False)


def _require_references(dataset: DataSet, path: Path) -> None:
    """Raise DataError, with the line that mends it, if no item has a reference."""
    items = [item for split in Split for item in dataset.items(split)]
    if any(item.reference is not None for item in items):
        return
    columns = list(items[0].metadata)
    listed = f"; the other columns are {', '.join(columns)}" if columns else ""
    raise DataError(
        f"{path}: no item has a reference, so no answer can be graded; name the column of right answers: "
        f"data.fields.reference: {guess_column('reference', columns) or 'COLUMN'}{listed}"
    )


def build_environment(config: TrainerConfig) -> DatasetEnvironment:
    """Load and check the data set that a configuration describes, and return its environment.

    Raises:
        ConfigError: ``data.path`` is not set.
        DataError: The data is not fit for a run, or the grader cannot use a reference.
    """
    if config.data.path is None:
        raise ConfigError("data.path is required: a folder with train, val and test, or one file")
    dataset = load_dataset(
        config.data.path,
        config.data.ratio,
        config.data.split_seed,
        fields=config.data.fields,
        needs_test=config.test.enabled,
    )
    check_dataset(dataset, config.data.train_size)
    if config.environment.grader != "critic":
        _require_references(dataset, config.data.path)
    return DatasetEnvironment(dataset, grade=build_grader(config), template=config.environment.template)


class _PendingCriticGrader:
    """Stands for a configuration's critic until the run has pinned its worked examples."""

    def __init__(self, config: TrainerConfig) -> None:
        self.identity: JsonValue = {
            "grader": "critic",
            "model": config.models.critic.model,
            "passes_at": config.critic.pass_threshold,
            "settings": config.critic.settings.model_dump(mode="json", exclude={"cache_size"}),
        }

    def __call__(self, item: Item, answer: str) -> Grade:
        raise ConfigError(
            "the critic of a configuration is pinned by a run: train, or pass a CriticGrader as `grade`"
        )


def build_grader(config: TrainerConfig) -> Grader:
    """Return a configuration's grader with its settings.

    Raises:
        ConfigError: The tables of ``sql`` are missing, or this system cannot confine programs for ``python``.
    """
    settings = config.environment
    match settings.grader:
        case "token_f1":
            return TokenF1Grader(threshold=settings.threshold)
        case "numeric":
            return NumericGrader(tolerance=settings.tolerance, relative_tolerance=settings.relative_tolerance)
        case "critic":
            return _PendingCriticGrader(config)
        case "python":
            return build_python_grader(
                seconds=settings.time_limit,
                mebibytes=settings.memory_limit,
                allow_unconfined=settings.allow_unconfined,
            )
        case "sql":
            if settings.tables is None:
                raise ConfigError(
                    "environment.tables is required for grader: sql; name a folder of .csv files"
                )
            return SQLGrader(tables=read_tables(settings.tables))
        case name:
            return PLAIN_GRADERS[name]()
