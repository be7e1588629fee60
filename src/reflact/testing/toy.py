"""A small world whose every outcome is known beforehand: learnable, fast, without a model.

An item asks for a rule by name and for a number to apply it to, such as ``double 7``. ``ToyTarget``
answers rightly if and only if the skill holds the line of that rule, so a skill is worth exactly the
rules that are written in it. The environment's feedback names the missing rule, and ``toy_optimizer``
(see ``reflact.testing.optimizer``) reads it there and proposes the line.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from anyio.lowlevel import checkpoint

from reflact.data import DataSet
from reflact.environments.dataset import DatasetEnvironment
from reflact.types import Grade, Item, Score, Skill, Turn, canonical_json, digest_json

UNKNOWN_ANSWER = "unknown"


class ToyRule(NamedTuple):
    """A rule: the line that a skill must hold, and what it makes of a number."""

    line: str
    answer: Callable[[int], str]


TOY_RULES: Mapping[str, ToyRule] = MappingProxyType(
    {
        "double": ToyRule("- double: answer with twice the number.", lambda n: str(2 * n)),
        "square": ToyRule("- square: answer with the number times itself.", lambda n: str(n * n)),
        "negate": ToyRule("- negate: answer with the number after a minus sign.", lambda n: str(-n)),
        "parity": ToyRule("- parity: answer with even or odd.", lambda n: "odd" if n % 2 else "even"),
        "reverse": ToyRule("- reverse: answer with the digits from last to first.", lambda n: str(n)[::-1]),
        "length": ToyRule("- length: answer with the number of digits.", lambda n: str(len(str(n)))),
    }
)
"""All rules by name, in the order in which worlds take them."""


class ToyEnvironment(DatasetEnvironment):
    """A world of as many rules and items as a test needs; the rules take turns within each split.

    Args:
        train: Items of the train split.
        val: Items of the validation split.
        test: Items of the test split.
        rules: How many of ``TOY_RULES`` there are, 1 to 6.
    """

    def __init__(self, *, train: int = 8, val: int = 8, test: int = 8, rules: int = 4) -> None:
        if not 1 <= rules <= len(TOY_RULES):
            raise ValueError(f"there are 1 to {len(TOY_RULES)} rules, not {rules}")
        names = list(TOY_RULES)[:rules]

        def items(split: str, size: int, first: int) -> tuple[Item, ...]:
            return tuple(_item(f"{split}-{n:03}", names[n % len(names)], first + n) for n in range(size))

        data = DataSet(
            train=items("train", train, 10),
            val=items("val", val, 10 + train),
            test=items("test", test, 10 + train + val),
        )
        super().__init__(data, grade=grade_toy, name="toy")


def grade_toy(item: Item, answer: str) -> Grade:
    """Compare with the reference; the feedback on a wrong answer names the rule."""
    right = answer == item.reference
    return Grade(
        score=Score.of(right), answer=answer, feedback=None if right else f"missing rule: {item.task_type}"
    )


class ToyTarget:
    """Implements ``ports.Target``: answers by the rules that the skill holds, and ``unknown`` otherwise.

    Args:
        noise: Share of rollouts, 0..1, in which it does the opposite: knows what the skill does not say,
            or not what it says. Drawn from the seed and the rollout's key, so trials of an item differ.
        seed: Root of the noise.
    """

    def __init__(self, *, noise: float = 0.0, seed: int = 0) -> None:
        self._noise = noise
        self._seed = seed

    @property
    def identity(self) -> str:
        """Noise and seed, as canonical JSON."""
        return canonical_json({"target": "toy", "noise": self._noise, "seed": self._seed})

    def session(self, skill: Skill, *, rollout: str) -> ToySession:
        """Start a conversation under a skill."""
        drawn = int(digest_json([self._seed, rollout])[:13], 16) / 16**13
        return ToySession(skill, slips=drawn < self._noise)


class ToySession:
    """A conversation with a ``ToyTarget``; ``slips`` turns its knowledge round."""

    def __init__(self, skill: Skill, *, slips: bool) -> None:
        self._lines = skill.text.splitlines()
        self._slips = slips
        self._turns: tuple[Turn, ...] = ()

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The conversation so far."""
        return self._turns

    async def reply(self, message: str) -> str:
        """Answer a question such as ``double 7``; anything else is ``unknown``."""
        await checkpoint()
        name, _, number = message.partition(" ")
        rule = TOY_RULES.get(name)
        answer = UNKNOWN_ANSWER
        if rule is not None and (rule.line in self._lines) is not self._slips:
            answer = rule.answer(int(number))
        self._turns += (Turn(role="user", content=message), Turn(role="assistant", content=answer))
        return answer


def _item(item_id: str, name: str, number: int) -> Item:
    return Item(
        id=item_id, input=f"{name} {number}", task_type=name, reference=TOY_RULES[name].answer(number)
    )
