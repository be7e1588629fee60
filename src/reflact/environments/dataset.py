"""The environment of a data set: one question to the target for each item, and one graded
answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Mapping, Sequence
from itertools import combinations
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
    ExactGrader,
    Grader,
    JsonFieldsGrader,
    NormalizedGrader,
    NumericGrader,
    ReferenceGrader,
    RegexGrader,
    TokenF1Grader,
    apply_grader,
    identify_grader,
    list_right_answers,
    parse_number,
)
from reflact.errors import ConfigError, DataError, EnvironmentFailure
from reflact.protocols import Session
from reflact.records import CriticDescription
from reflact.types import Grade, Item, Split, canonical_json

INPUT_VARIABLE = "{input}"

# The mean length above which references are graded by the overlap of words.
LONG_ANSWER_WORDS = 6

FORGIVEN = "Case, spaces, quotes around it and punctuation at its end do not count."

# A text that is read as a number and looks like a code, such as 00501 or 1E2.
CODE = re.compile(r"[+-]?0\d.*|\d+E\d+", re.IGNORECASE)

# The graders that need nothing but a reference.
PLAIN_GRADERS: Mapping[str, type[ReferenceGrader[Any]]] = {
    grader.name: grader
    for grader in (
        ExactGrader,
        NormalizedGrader,
        TokenF1Grader,
        NumericGrader,
        RegexGrader,
        JsonFieldsGrader,
    )
}

MAX_LABELS = 20

# Answers are labels if there are at most so many, each used so often on average.
LABEL_USES = 5


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

    def with_grader(self, grade: Grader) -> DatasetEnvironment:
        """Return the environment with another grader."""
        return DatasetEnvironment(
            self._data, grade=grade, template=self._template, name=self._name, version=self._version
        )

    def items(self, split: Split) -> Sequence[Item]:
        """Return a split's items in the data set's order."""
        return self._data.items(split)

    def list_right_answers(self, item: Item) -> Sequence[str]:
        """Return the item's right answers; empty if its references are no answers, or a critic
        grades.
        """
        return () if self.scored_by is not None else list_right_answers(self._grade, item)

    async def run(self, item: Item, session: Session, *, seed: int) -> Grade:
        """Ask the item's question and grade the answer; the seed is not used.

        Raises:
            EnvironmentFailure: The grader returned no score, or the target no text.
            InterfaceError: ``reply`` of the session is not async.
            ModelError: The target gave no answer.
        """
        replying = session.reply(self.render_message(item))
        if not isinstance(replying, Awaitable):
            raise describe_not_async(session, Session.reply, replying)
        answer = await replying
        if not isinstance(answer, str):
            raise EnvironmentFailure(
                f"the agent failed on item {item.id}: `reply` of {type(session).__name__} returned "
                f"a value of type {type(answer).__name__}; let it return the answer as text, or "
                "raise an exception if there is none"
            )
        return await apply_grader(self._grade, item, answer)

    def render_message(self, item: Item) -> str:
        """Return the message to the target: the template with the item's input."""
        values = {**item.metadata, "input": item.input}
        # one pass, so that variables in a value are text
        names = "|".join(map(re.escape, sorted(values, key=len, reverse=True)))
        return re.sub(rf"\{{({names})\}}", lambda match: _show(values[match[1]]), self._template)


def _check_references(grade: CheckedGrader[Any], data: DataSet) -> None:
    """Raise DataError if the grader cannot use an item's reference; it names the items, with their
    rows if known.
    """
    wrong: dict[str, tuple[Item, str]] = {}
    for split in Split:
        for item in data.items(split):
            try:
                grade.check(item)
            except DataError as error:
                wrong[item.id] = item, str(error)
    if wrong:
        ids = [item_id for item_id in data.rows if item_id in wrong] or [*wrong]
        item, reason = wrong[ids[0]]
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

    references = [item.reference for split in Split for item in data.items(split)]
    joined = _find_joined_labels(grade, references)
    if joined is not None:
        raise DataError(
            f"{grade.name} takes the references {joined[0]!r} and {joined[1]!r} for one: set "
            "environment.grader: exact, or write them alike if they mean the same"
        )


def _is_labels(texts: Sequence[str]) -> bool:
    """Whether the texts are a few ones that repeat, such as the names of classes."""
    return 2 <= len(set(texts)) <= min(MAX_LABELS, len(texts) / LABEL_USES)


def _find_joined_labels(
    grade: CheckedGrader[Any], references: Sequence[JsonValue]
) -> tuple[str, str] | None:
    """Return two labels that a grader of texts takes for one, although only one of them is an
    item's right answer.
    """
    texts = [text.strip() for text in _list_answers(references) if isinstance(text, str)]
    if not isinstance(grade, NormalizedGrader | TokenF1Grader) or not _is_labels(texts):
        return None
    for one, other in combinations(sorted(set(texts)), 2):
        if grade(Item(id="-", input="-", reference=one), other).score.soft == 1:
            return one, other
    return None


def _list_answers(references: Sequence[JsonValue]) -> list[JsonValue]:
    answers = [one for ref in references for one in (ref if isinstance(ref, list) else [ref])]
    return [one for one in answers if one is not None and one != ""]


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
        fields=config.data.fields,
        needs_test=config.test.enabled,
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
    """Return a configuration's grader with its settings.

    Raises:
        ConfigError: The tables of ``sql`` are missing, or this system cannot confine programs for
            ``python``.
    """
    if config.environment.grader == "critic":
        return _PendingCriticGrader(config)
    return find_grader(config.environment.grader).from_config(config.environment)


def find_grader(name: str) -> type[CheckedGrader[Any]]:
    """Return the class of a grader that a configuration names; those with processes are imported at
    their use.
    """
    if name == "sql":
        from reflact.environments.sql_grader import SQLGrader

        return SQLGrader
    if name == "python":
        from reflact.environments.python_grader import PythonGrader

        return PythonGrader
    return PLAIN_GRADERS[name]


def guess_grader(references: Sequence[JsonValue]) -> tuple[str, str] | None:
    """Return the name of a grader that fits the references, and the reason; None if there
    are none.
    """
    answers = _list_answers(references)
    texts = [str(one) for one in answers]
    numbers = [None if isinstance(one, bool) else parse_number(str(one)) for one in answers]
    if not answers:
        return None
    if all(isinstance(one, dict) for one in answers):
        if all(isinstance(one, dict) and {"tests", "stdout"} & one.keys() for one in answers):
            guess = "python", "The references are tests or expected outputs of programs."
        else:
            guess = (
                "json_fields",
                "The references are objects: an answer needs their fields and values.",
            )
    elif None not in numbers:
        guess = _choose_for_numbers(answers, numbers)
    elif all(text.lstrip().lower().startswith(("select ", "with ")) for text in texts):
        guess = "sql", "The references are queries: an answer must return the same rows."
    elif _is_labels(texts):
        guess = _choose_for_labels(texts)
    elif sum(len(text.split()) for text in texts) > LONG_ANSWER_WORDS * len(texts):
        guess = "token_f1", "The references are long: the score is the overlap of words."
    elif all(_is_capitals(text) for text in texts):
        guess = (
            "exact",
            "The letters of the references are capitals, as in codes, so an answer must be equal "
            "to the letter.",
        )
    else:
        guess = (
            "normalized",
            f"The references are short texts. {FORGIVEN} If that counts, choose exact.",
        )
    lists = " A list holds several right answers: one of them is enough."
    has_choice = guess[0] != "python" and any(isinstance(ref, list) for ref in references)
    return guess[0], guess[1] + (lists if has_choice else "")


def _choose_for_labels(texts: Sequence[str]) -> tuple[str, str]:
    words = (
        f"The references are {len(set(texts))} labels: an answer must be the right one and "
        "nothing else"
    )
    if all(map(_is_capitals, texts)):
        return "exact", f"{words}, to the letter, because they are in capitals."
    if (joined := _find_joined_labels(NormalizedGrader(), texts)) is not None:
        return (
            "exact",
            f"{words}, to the letter, because {joined[0]} and {joined[1]} are nearly equal.",
        )
    return "normalized", f"{words}. {FORGIVEN}"


def _choose_for_numbers(
    answers: Sequence[JsonValue], numbers: Sequence[float | None]
) -> tuple[str, str]:
    """Return `exact` if a text is a code, or if two are the same number (3.1 and 3.10); else
    `numeric`.
    """
    first: dict[float | None, str] = {}
    for answer, number in zip(answers, numbers, strict=True):
        plain = str(answer).strip().lstrip("+").replace(",", "")
        is_other = first.setdefault(number, plain) != plain
        if isinstance(answer, str) and (is_other or CODE.fullmatch(plain)):
            words = (
                f"References such as {plain} may be codes, so an answer must be equal to the "
                "letter."
            )
            return "exact", f"{words} If they are numbers, choose numeric."
    rounding = "" if all(isinstance(number, int) for number in numbers) else ", up to rounding,"
    return (
        "numeric",
        f"The references are numbers: an answer must be that number{rounding} and nothing else.",
    )


def _is_capitals(text: str) -> bool:
    """Whether most letters of a text are capitals, such as those of a code; a single letter is a
    label.
    """
    letters = [letter for letter in text if letter.isalpha()]
    return len(letters) > 1 and 2 * sum(letter.isupper() for letter in letters) > len(letters)
