"""Null answers: constants that are graded in place of the target's answers, as a control.

No model is called; the environment grades as always.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from anyio.lowlevel import checkpoint

from reflact.adapters import adapt_environment
from reflact.errors import ContextOverflow
from reflact.protocols import Environment
from reflact.records import SkillScore
from reflact.text import describe_constant
from reflact.types import Item, Skill, Turn, canonical_json

REFUSAL = "I cannot help with that"

# A constant with at least this mean hard score on train items is worth a warning.
WARNING_SHARE = 0.5

# The most replies of a constant in one conversation.
MAX_REPLIES = 200


class NullAnswer(NamedTuple):
    """A constant answer, and its name among the scores of a run."""

    name: str
    text: str

    @property
    def document(self) -> Skill:
        """A document that stands for the constant, so that its scores are nobody else's."""
        return Skill(text=f"Null answer: {canonical_json(self.text)}")


def list_null_answers(environment: Environment, train: Sequence[Item]) -> tuple[NullAnswer, ...]:
    """Return the constants: empty, a refusal, and the most frequent right answer, if any."""
    constants = [NullAnswer("null_empty", ""), NullAnswer("null_refusal", REFUSAL)]
    frequent = find_frequent_answer(environment, train)
    if frequent is not None and all(frequent != constant.text for constant in constants):
        constants.append(NullAnswer("null_frequent", frequent))
    return tuple(constants)


def find_frequent_answer(environment: Environment, items: Sequence[Item]) -> str | None:
    """Return the answer that is right for most items; None if none is known or right twice."""
    adapted = adapt_environment(environment)
    counts = Counter[str]()
    for item in items:
        counts.update(dict.fromkeys(adapted.list_right_answers(item), 1))
    answer, count = max(counts.items(), key=lambda entry: entry[1], default=("", 0))
    return answer if count > 1 else None


def describe_high_scores(scores: Sequence[SkillScore]) -> str | None:
    """Return a warning about the best constant if it has a high score on train items."""
    best = max(scores, key=lambda score: score.hard or 0.0, default=None)
    if best is None or best.hard is None or best.hard < WARNING_SHARE:
        return None
    return (
        f"{describe_constant(best.answer or '')} scores {best.hard:.3f} on {best.n} train items: a "
        "skill can gain by making the target answer so, without learning the task"
    )


class ConstantTarget:
    """Implements ``protocols.Target``: replies with the same text to every message."""

    def __init__(self, text: str) -> None:
        self._text = text

    @property
    def identity(self) -> str:
        """The text, as canonical JSON."""
        return canonical_json({"target": "constant", "version": 1, "text": self._text})

    def session(self, skill: Skill, *, rollout: str) -> ConstantSession:
        """Start a conversation in which every reply is the text."""
        return ConstantSession(self._text)


class ConstantSession:
    """A conversation in which every reply is the same text."""

    def __init__(self, text: str) -> None:
        self._text = text
        self.turns: tuple[Turn, ...] = ()

    async def reply(self, message: str) -> str:
        """Return the text."""
        await checkpoint()
        if len(self.turns) >= 2 * MAX_REPLIES:
            raise ContextOverflow(f"the conversation did not end after {MAX_REPLIES} equal replies")
        answer = Turn(role="assistant", content=self._text)
        self.turns += (Turn(role="user", content=message), answer)
        return self._text
