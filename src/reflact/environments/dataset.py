"""The environment of a data set: one question for each item, and one graded answer."""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import JsonValue

from reflact.adapters import describe_not_async, find_critic
from reflact.config.training import TrainerConfig
from reflact.data import (
    MAX_SHOWN_ROWS,
    TRAINING_SPLITS,
    DataSet,
    check_dataset,
    has_made_id,
    list_first,
    load_dataset,
)
from reflact.environments.graders import (
    CheckedGrader,
    ContainsGrader,
    ExactGrader,
    Grader,
    NormalizedGrader,
    NumericGrader,
    ReferenceGrader,
    RegexGrader,
    SimilarityGrader,
    TokenF1Grader,
    apply_grader,
    identify_grader,
    list_right_answers,
)
from reflact.environments.guess import find_joined_labels
from reflact.environments.json_graders import (
    JsonFieldsGrader,
    JsonSchemaGrader,
    JsonSubsetGrader,
)
from reflact.environments.python_grader import PythonGrader
from reflact.environments.rubric import ChecksGrader, build_rubric_grader
from reflact.environments.sql_grader import SQLGrader
from reflact.errors import ConfigError, DataError, EnvironmentFailure
from reflact.protocols import Session
from reflact.records import CriticDescription
from reflact.skill_evals import hide_forged_files, show_case_files
from reflact.types import Grade, Item, Split, canonical_json

INPUT_VARIABLE = "{input}"

GRADERS: Mapping[str, type[CheckedGrader[Any]]] = {
    grader.name: grader
    for grader in (
        *(ExactGrader, NormalizedGrader, TokenF1Grader, NumericGrader, RegexGrader),
        *(ContainsGrader, SimilarityGrader, JsonFieldsGrader, JsonSubsetGrader, JsonSchemaGrader),
        *(SQLGrader, PythonGrader, ChecksGrader),
    )
}

# The graders that need nothing but a reference.
PLAIN_GRADERS: Mapping[str, type[ReferenceGrader[Any]]] = {
    name: grader for name, grader in GRADERS.items() if issubclass(grader, ReferenceGrader)
}


class DatasetEnvironment:
    """Items of a data set, each one message to the target and one graded answer.

    Args:
        data: The items.
        grade: A grader of ``reflact.environments.graders``, or any function of an item and an
            answer.
        template: The message to the target. ``{input}`` is the item's input, and ``{NAME}`` the
            metadata of that name, if the item has it. Text is inserted as it is, any other value as
            indented JSON with sorted keys.
        name: The environment's name; part of its identity.
        version: Raise it if the scores of your own ``grade`` change although its code does not, for
            example with a new version of a package, so that older scores are not reused.

    Raises:
        ConfigError: The template has no ``{input}``.
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
            raise ConfigError(
                f"the template {template!r} has no {INPUT_VARIABLE} for the item's input"
            )
        self._data = data
        self._grade = grade
        self._template = template
        self._name = name
        self._version = version
        self._identity = canonical_json(
            {
                "environment": name,
                "version": version,
                "template": template,
                "grader": identify_grader(grade),
            }
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
        return self._grade.meaning if isinstance(self._grade, CheckedGrader) else ""

    @property
    def scored_by(self) -> CriticDescription | None:
        """The critic, if one grades."""
        return find_critic(self._grade)

    @property
    def notes(self) -> Sequence[str]:
        """What a person should know of the files of the data set, a sentence each."""
        return self._data.notes

    @property
    def grader(self) -> Grader:
        """What grades."""
        return self._grade

    def with_grader(self, grade: Grader) -> DatasetEnvironment:
        """Return the environment with another grader."""
        return DatasetEnvironment(
            self._data, grade=grade, template=self._template, name=self._name, version=self._version
        )

    def items(self, split: Split) -> Sequence[Item]:
        """Return a split's items in the data set's order."""
        return self._data.items(split)

    def list_right_answers(self, item: Item) -> Sequence[str]:
        """Return the item's right answers, if its references are answers."""
        return () if self.scored_by is not None else list_right_answers(self._grade, item)

    async def run(self, item: Item, session: Session, *, seed: int) -> Grade:
        """Ask the item's question and grade the answer; the seed is not used."""
        has_files = getattr(session, "has_files", False)
        message = self._fill_template(item) if has_files else self.render_message(item)
        replying = session.reply(message)
        if not isinstance(replying, Awaitable):
            raise describe_not_async(session, Session.reply, replying)
        answer = await replying
        if not isinstance(answer, str):
            raise EnvironmentFailure(
                f"the agent failed on item {item.id}: `reply` of {type(session).__name__} returned "
                f"a value of type {type(answer).__name__}; let it return the answer as text, or "
                "raise an exception if there is none"
            )
        if not has_files:
            answer = hide_forged_files(answer)
        return await apply_grader(self._grade, item, answer)

    def render_message(self, item: Item) -> str:
        """Return the message to a chat model: the template with the item's input, and its files."""
        files = show_case_files(item)
        message = self._fill_template(item)
        return f"{message}\n\n{files}" if files else message

    def _fill_template(self, item: Item) -> str:
        values = {**item.metadata, "input": item.input}
        # one pass, so that variables in a value are text
        names = "|".join(map(re.escape, sorted(values, key=len, reverse=True)))
        return re.sub(rf"\{{({names})\}}", lambda match: _show(values[match[1]]), self._template)


def _check_references(grade: CheckedGrader[Any], data: DataSet) -> None:
    """Raise DataError, with the items and their rows, if the grader cannot use references."""
    items = {item.id: item for split in Split for item in data.items(split)}
    wrong = {}
    for item in items.values():
        try:
            grade.check(item)
        except DataError as error:
            wrong[item.id] = str(error)
    if wrong:
        ids = [item_id for item_id in data.rows if item_id in wrong] or [*wrong]
        item = items[ids[0]]
        reason = wrong[item.id]
        if item.id in data.rows:
            if has_made_id(item):
                reason = reason.replace(f"item {item.id!r}", "the item", 1)
            reason = f"{data.rows[item.id]}: {reason}"
        begin = " ".join(_show(item.input).split())[:80]
        others = [data.rows.get(item_id, repr(item_id)) for item_id in ids[1:]]
        more = ""
        if others:
            more = f"; {len(others)} more cannot be graded: {list_first(others, MAX_SHOWN_ROWS)}"
        raise DataError(f"{reason}; the item's input begins with {begin!r}{more}")

    joined = find_joined_labels(grade, [item.reference for item in items.values()])
    if joined is not None:
        raise DataError(
            f"{grade.name} takes the references {joined[0]!r} and {joined[1]!r} for one: set "
            "environment.grader: exact, or write them alike if they mean the same"
        )


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
        f"{path}: no item has a reference, so no answer can be graded; name the column of right "
        f"answers: data.fields.reference: COLUMN{listed}"
    )


def build_environment(
    config: TrainerConfig, needed: Sequence[Split] = TRAINING_SPLITS
) -> DatasetEnvironment:
    """Load and check the data that a configuration describes; return its environment."""
    if config.data.path is None:
        raise ConfigError("data.path is required: a folder with train, val and test, or one file")
    dataset = load_dataset(
        config.data.path,
        config.data.ratio,
        fields=config.data.fields,
        needs_test=config.test.enabled,
        skip_unanswered=config.data.skip_unanswered,
    )
    check_dataset(dataset, needed)
    if config.environment.grader != "critic":
        _require_references(dataset, config.data.path)
    return DatasetEnvironment(
        dataset, grade=build_grader(config), template=config.environment.template
    )


class _PendingCriticGrader:
    """Stands for a configuration's critic until the run has pinned its worked examples."""

    def __init__(self, config: TrainerConfig) -> None:
        self.identity: JsonValue = {
            "grader": "critic",
            "model": config.models.critic.model,
            "passes_at": config.critic.pass_threshold,
            "settings": config.critic.settings.model_dump(mode="json"),
        }

    def __call__(self, item: Item, answer: str) -> Grade:
        raise ConfigError(
            "the critic of a configuration is pinned by a run: train, or pass a CriticGrader as "
            "`grade`"
        )


def build_grader(config: TrainerConfig) -> Grader:
    """Return a configuration's grader with its settings."""
    if config.environment.grader == "critic":
        return _PendingCriticGrader(config)
    if config.environment.grader == "rubric":
        return build_rubric_grader(config)
    return GRADERS[config.environment.grader].from_config(config.environment)
