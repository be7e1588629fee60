"""An environment of the families of reasoning-gym: generated questions with scorers; ``reflact[reasoning-gym]``.

    ReasoningGymEnvironment(families=["calendar_arithmetic", "number_sorting"], train=20, val=40, test=40)

Its traps are handled here. Neighbouring seeds share nearly all questions, so all splits come from one seed and no
question is in two of them. Some scorers raise on answers that they cannot read. Some questions have many right
answers and so no reference.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from typing import Any

from pydantic import JsonValue

from reflact.environments.graders import parse_number, quote_json
from reflact.errors import ConfigError
from reflact.protocols import Session
from reflact.types import Grade, Item, Score, Split, canonical_json

EVALUATING = frozenset(
    [
        "binary_matrix",
        "composite",
        "countdown",
        "intermediate_integration",
        "n_queens",
        "polynomial_multiplication",
        "puzzle24",
        "simple_integration",
        "spiral_matrix",
        "string_insertion",
    ]
)
"""Families whose scorers run the model's answer as Python code; ``composite`` may hold any of them."""


class ReasoningGymEnvironment:
    """Questions of several families of reasoning-gym, each one message to the target and one scored answer.

    Args:
        families: Names of families, or names with the settings of each.
        train: Questions of each family in the train split.
        val: Questions of each family in the validation split.
        test: Questions of each family in the test split.
        seed: The seed of all questions.
        passes_at: The score from which an answer is right; the score itself is the soft score.
        allow_evaluation: Allow families whose scorers run the model's answer as Python code, in this process.

    Raises:
        ConfigError: reasoning-gym is not installed, there is no such family, a family has too few different
            questions, or its scorer runs answers as code.
    """

    def __init__(
        self,
        families: Sequence[str] | Mapping[str, Mapping[str, JsonValue] | None],
        *,
        train: int,
        val: int,
        test: int,
        seed: int = 0,
        passes_at: float = 1.0,
        allow_evaluation: bool = False,
    ) -> None:
        settings = {
            name: dict((families[name] if isinstance(families, Mapping) else {}) or {}) for name in families
        }
        sizes = {Split.train: train, Split.val: val, Split.test: test}
        if not settings or min(sizes.values()) < 1:
            raise ConfigError("reasoning-gym needs at least one family, and one question of it in each split")
        evaluating = sorted(EVALUATING & settings.keys())
        if evaluating and not allow_evaluation:
            raise ConfigError(
                f"the scorer of {', '.join(evaluating)} runs the model's answer as Python code, without a sandbox; "
                "choose other families, or set allow_evaluation if you trust the model"
            )
        self._passes_at = passes_at
        self._families = tuple(settings)
        self._datasets: dict[str, Any] = {}
        self._entries: dict[str, Mapping[str, Any]] = {}
        seen: set[str] = set()
        drawn = [self._draw(name, settings[name], sum(sizes.values()), seed, seen) for name in settings]
        self._items: dict[Split, tuple[Item, ...]] = {}
        first = 0
        for split, size in sizes.items():
            rows = zip(*(items[first : first + size] for items in drawn), strict=True)
            self._items[split] = tuple(item for row in rows for item in row)
            first += size
        self._identity = canonical_json(
            {
                "environment": "reasoning-gym",
                "version": version("reasoning-gym"),
                "families": {**settings},
                "sizes": [train, val, test],
                "seed": seed,
                "passes_at": passes_at,
            }
        )

    def _draw(
        self, family: str, settings: Mapping[str, JsonValue], count: int, seed: int, seen: set[str]
    ) -> list[Item]:
        """Return questions of a family that are not among those seen, and add them there."""
        try:
            from reasoning_gym import create_dataset
        except ImportError as error:
            raise ConfigError("this needs reasoning-gym: pip install 'reflact[reasoning-gym]'") from error
        try:
            dataset = create_dataset(family, **{"seed": seed, "size": 3 * count + 10, **settings})
        except Exception as error:  # generators of tasks raise anything on their arguments
            raise ConfigError(f"reasoning-gym cannot make {family}: {error}") from error
        self._datasets[family] = dataset
        items: list[Item] = []
        for item, entry in _list_items(family, dataset):
            question = " ".join(str(item.input).split())
            if question not in seen and len(items) < count:
                seen.add(question)
                items.append(item)
                self._entries[item.id] = entry
        if len(items) < count:
            raise ConfigError(
                f"{family} has {len(items)} different questions in {len(dataset)} draws, and {count} are needed: "
                "ask for fewer, or change its settings"
            )
        return items

    @property
    def identity(self) -> str:
        """Version of reasoning-gym, families with settings, sizes and seed, as canonical JSON."""
        return self._identity

    @property
    def description(self) -> str:
        """What the tasks are, and that the form of an answer counts."""
        return (
            f"The tasks are generated puzzles of these families: {', '.join(self._families)}. An answer is right if the "
            "whole of it has the expected content and form."
        )

    def items(self, split: Split) -> Sequence[Item]:
        """Return a split's questions, the families in turn."""
        return self._items[split]

    def list_right_answers(self, item: Item) -> Sequence[str]:
        """Return the item's right answer; empty if it has many."""
        return () if item.reference is None else (str(item.reference),)

    async def run(self, item: Item, session: Session, *, seed: int) -> Grade:
        """Ask the question and score the reply without spaces around it; the seed is not used.

        A scorer that raises gives 0: it could not read the reply.
        """
        reply = await session.reply(str(item.input))
        entry = self._entries[item.id]
        reason = ""
        try:
            score = float(self._datasets[str(item.task_type)].score_answer(reply.strip(), entry))
        except Exception as error:  # noqa: BLE001  # scorers raise anything on replies that they cannot read
            score, reason = 0.0, f"the scorer cannot read the reply: {type(error).__name__}: {error}"
        passed = score >= self._passes_at
        return Grade(
            score=Score(hard=float(passed), soft=score),
            answer=reply,
            feedback=None if passed else _describe_fault(item, reply, score, reason),
        )


def _describe_fault(item: Item, reply: str, score: float, reason: str) -> str:
    """Return what is wrong with a reply, in the words of reflact's graders if one answer is right."""
    if item.reference is None:
        return reason or f"the scorer gives {score:.2g} of 1"
    form = "a single number" if parse_number(str(item.reference)) is not None else "exactly this"
    must = f"the answer must be {form} and nothing else"
    return f"expected {quote_json(item.reference)}, got {quote_json(reply)}: {reason or must}"


def _list_items(family: str, dataset: Any) -> Iterator[tuple[Item, Mapping[str, Any]]]:
    """Yield each entry of a family's data with its item; an answer that is None stays None."""
    for index in range(len(dataset)):
        entry = dataset[index]
        answer = entry["answer"]
        yield (
            Item(
                id=f"{family}-{index}",
                input=entry["question"],
                task_type=family,
                reference=None if answer is None else str(answer),
            ),
            entry,
        )
