"""The environment that asks one question an item and grades the answer."""

from __future__ import annotations

import json
from collections.abc import Sequence

from pydantic import JsonValue

from reflact.config.critic import CriticConfig
from reflact.config.training import EnvironmentConfig, TrainerConfig
from reflact.data import DataSet, check_dataset, load_dataset
from reflact.environments.graders import CheckedGrader, Grader, apply_grader, build_grader, identify_grader
from reflact.environments.python_grader import build_python_grader
from reflact.environments.sql_grader import SQLGrader, read_tables
from reflact.errors import ConfigError
from reflact.protocols import CriticBacked, Session
from reflact.records import CriticDescription
from reflact.types import Grade, Item, Split, canonical_json

INPUT_VARIABLE = "{input}"


class DatasetEnvironment:
    """Items of a data set, each one message to the target and one graded answer.

    Args:
        data: The items.
        grade: A grader of ``reflact.environments.graders``, or any function of an item and an answer.
        template: The message to the target; ``{input}`` stands for the item's input and is the only hole.
            Text goes in as it is, any other input as indented JSON with sorted keys.
        name: What the environment is called; part of its identity.
        version: Raise it whenever ``grade`` is a function of your own and begins to judge otherwise, so
            that scores of the older one are not used again.
        check_references: Whether to look at all references now, before anything is asked; a function
            of your own is not asked about them.

    Raises:
        ConfigError: The template has no hole, or the grader no name.
        DataError: A reference is none that the grader can use; names the item.
    """

    def __init__(
        self,
        data: DataSet,
        *,
        grade: Grader,
        template: str = INPUT_VARIABLE,
        name: str = "dataset",
        version: int = 1,
        check_references: bool = True,
    ) -> None:
        if INPUT_VARIABLE not in template:
            raise ConfigError(
                f"the template {template!r} has no {INPUT_VARIABLE}: say where the item's input goes"
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
        if check_references and isinstance(grade, CheckedGrader):
            for split in Split:
                for item in data.items(split):
                    grade.check(item)

    @property
    def identity(self) -> str:
        """Name, version, template and grader with its settings, as canonical JSON."""
        return self._identity

    @property
    def scored_by(self) -> CriticDescription | None:
        """The critic that grades, where one does."""
        return self._grade.scored_by if isinstance(self._grade, CriticBacked) else None

    def with_grader(self, grade: Grader) -> DatasetEnvironment:
        """Return the environment with another grader, which is asked about no reference beforehand."""
        return DatasetEnvironment(
            self._data,
            grade=grade,
            template=self._template,
            name=self._name,
            version=self._version,
            check_references=False,
        )

    def items(self, split: Split) -> Sequence[Item]:
        """Return a split's items in the data set's order."""
        return self._data.items(split)

    async def run(self, item: Item, session: Session, *, seed: int) -> Grade:
        """Ask the item's question and grade the answer; the seed has no use here.

        Raises:
            EnvironmentFailure: The grader returned something that is no score.
            ModelError: The target gave no answer.
        """
        answer = await session.reply(self.render_message(item))
        return await apply_grader(self._grade, item, answer)

    def render_message(self, item: Item) -> str:
        """Return what the target is asked: the template with the input put in, in one pass."""
        return self._template.replace(INPUT_VARIABLE, _format_input(item.input))


def build_environment(config: TrainerConfig) -> DatasetEnvironment:
    """Load and check the data set that a configuration describes, and return its environment.

    Raises:
        ConfigError: ``data.path`` is not set.
        DataError: The data is not fit for a run, or a reference not for the grader.
    """
    if config.data.path is None:
        raise ConfigError("data.path is required: a folder with train, val and test, or one file")
    dataset = load_dataset(config.data.path, config.data.ratio, config.data.split_seed)
    check_dataset(dataset, config.data.train_size)
    grade = (
        _PendingCriticGrader(config)
        if config.environment.grader == "critic"
        else _build_grader(config.environment)
    )
    return DatasetEnvironment(dataset, grade=grade, template=config.environment.template)


class _PendingCriticGrader:
    """Stands for a configuration's critic until the run has pinned it: known by all but its pairs."""

    def __init__(self, config: TrainerConfig) -> None:
        own: CriticConfig = config.critic
        self.identity: JsonValue = {
            "grader": "critic",
            "model": config.models.critic.model,
            "passes_at": own.pass_threshold,
            "settings": own.settings.model_dump(mode="json", exclude={"cache_size"}),
        }

    def __call__(self, item: Item, answer: str) -> Grade:
        raise ConfigError(
            "the critic of a configuration is pinned by a run: train, or pass a CriticGrader as `grade`"
        )


def _build_grader(config: EnvironmentConfig) -> Grader:
    if config.grader == "python":
        return build_python_grader(
            seconds=config.time_limit,
            mebibytes=config.memory_limit,
            allow_unconfined=config.allow_unconfined,
        )
    if config.grader != "sql":
        return build_grader(config)
    if config.tables is None:
        raise ConfigError("environment.tables is required for grader: sql; name the folder of .csv tables")
    return SQLGrader(tables=read_tables(config.tables))


def _format_input(value: JsonValue) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(value, sort_keys=True, indent=2, ensure_ascii=False, allow_nan=False)
