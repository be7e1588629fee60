"""A small learnable world with known outcomes that needs no model.

An item asks for a rule by name and for a number to apply it to, such as ``double 7``. ``ToyTarget``
answers rightly if and only if the skill holds the line of that rule, or a worked example of it. The
environment's feedback names the missing rule, and ``toy_optimizer`` proposes its line.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from anyio.lowlevel import checkpoint
from pydantic import JsonValue

from reflact.data import DataSet
from reflact.environments.dataset import DatasetEnvironment
from reflact.messages import CallId, RenderedPrompt, ReplyModel, Text
from reflact.stages.execution_notes import CompactReply, LapseReply, ReminderReply
from reflact.stages.reply_models import (
    AnalystReply,
    MergeReply,
    ReasonedRankReply,
    ReasonedSuccessReply,
)
from reflact.stages.select import ReasonedStepSizeReply
from reflact.stages.slow_update import GuidanceReply, MemoryReply
from reflact.stages.update import RewriteReply
from reflact.testing.llm import (
    Script,
    add_reasoning,
    append_edit,
    append_reply,
    describe_pattern,
    find_bounds,
)
from reflact.types import Grade, Item, Score, Skill, Turn, canonical_json, digest_json

UNKNOWN_ANSWER = "unknown"

_EXAMPLE = re.compile(r"^Task: (\w+) \d+$", re.MULTILINE)


class ToyRule(NamedTuple):
    """A rule: the line that a skill must contain, and the answer for a number."""

    line: str
    answer: Callable[[int], str]


_ANSWERS: Mapping[str, tuple[str, Callable[[int], str]]] = {
    "double": ("twice the number", lambda n: str(2 * n)),
    "square": ("the number times itself", lambda n: str(n * n)),
    "negate": ("the number after a minus sign", lambda n: str(-n)),
    "parity": ("even or odd", lambda n: "odd" if n % 2 else "even"),
    "reverse": ("the digits from last to first", lambda n: str(n)[::-1]),
    "length": ("the number of digits", lambda n: str(len(str(n)))),
}

TOY_RULES: Mapping[str, ToyRule] = MappingProxyType(
    {
        name: ToyRule(f"- {name}: answer with {words}.", answer)
        for name, (words, answer) in _ANSWERS.items()
    }
)
"""All rules by name, in the order in which worlds use them."""


class ToyEnvironment(DatasetEnvironment):
    """A world of as many rules and items as a test needs; the rules take turns within each split.

    Args:
        train, val, test: The number of items in each split.
        rules: How many of ``TOY_RULES`` there are, 1 to 6.
    """

    def __init__(self, *, train: int = 8, val: int = 8, test: int = 8, rules: int = 4) -> None:
        if not 1 <= rules <= len(TOY_RULES):
            raise ValueError(f"there are 1 to {len(TOY_RULES)} rules, not {rules}")
        names = list(TOY_RULES)[:rules]
        splits: dict[str, list[Item]] = {}
        number = 10  # two digits, so that the rules differ on each number
        for split, size in {"train": train, "val": val, "test": test}.items():
            splits[split] = []
            for n in range(size):
                name = names[n % len(names)]
                splits[split].append(
                    Item(
                        id=f"{split}-{n:03}",
                        input=f"{name} {number}",
                        task_type=name,
                        reference=TOY_RULES[name].answer(number),
                    )
                )
                number += 1
        super().__init__(DataSet.model_validate(splits), grade=grade_toy, name="toy")


def grade_toy(item: Item, answer: str) -> Grade:
    """Compare with the reference; the feedback on a wrong answer names the rule."""
    right = answer == item.reference
    return Grade(
        score=Score.of(right),
        answer=answer,
        feedback=None if right else f"missing rule: {item.task_type}",
    )


@dataclass(eq=False)
class ToyTarget:
    """A ``protocols.Target`` that answers by the rules in the skill, and ``unknown`` otherwise.

    Args:
        noise: Share of rollouts, 0..1, in which it does the opposite: knows what the skill does not
            say, or not what it says. Drawn from the seed and the rollout's key, so trials of an
            item differ.
        seed: Root of the noise.
    """

    _: KW_ONLY
    noise: float = 0.0
    seed: int = 0

    @property
    def identity(self) -> str:
        """Noise and seed, as canonical JSON."""
        return canonical_json({"target": "toy", "noise": self.noise, "seed": self.seed})

    def session(self, skill: Skill, *, rollout: str) -> ToySession:
        """Start a conversation under a skill."""
        drawn = int(digest_json([self.seed, rollout])[:13], 16) / 16**13
        return ToySession(skill, slips=drawn < self.noise)


class ToySession:
    """A conversation with a ``ToyTarget``; ``slips`` turns its knowledge round."""

    def __init__(self, skill: Skill, *, slips: bool) -> None:
        self._lines = skill.text.splitlines()
        self._shown = {match[1] for match in _EXAMPLE.finditer(skill.text)}
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
        if rule is not None:
            is_known = rule.line in self._lines or name in self._shown
            if is_known is not self._slips:
                answer = rule.answer(int(number))
        self._turns += (Turn(role="user", content=message), Turn(role="assistant", content=answer))
        return answer


def toy_optimizer(*, edits: int = 1) -> Script:
    """Return a script for ``ScriptedLLM`` that does every part of an optimizer in the toy world.

    The failure analyst proposes the missing rules that its cases name, most frequent first, and
    rules that stand in the document last. The success analyst has nothing to add. Merges join equal
    proposals, rankings take the first ones, and all offered edits are applied. Rewrites hold the
    lines of the document and of the missing rules; guidance holds the lines of missing rules.
    ``edits`` is the most rules that an analyst proposes.
    """

    def analyse(reply_type: type[ReplyModel], shown: str) -> dict[str, JsonValue]:
        document = shown.splitlines()
        lines = sorted(_list_missing_lines(shown), key=lambda line: line in document)
        most = find_bounds(reply_type, "edits")[1]
        proposed = [append_edit(reply_type, line) for line in lines[:edits][:most]]
        return {"patterns": _reply_patterns(reply_type, shown), "edits": [*proposed]}

    parts: Mapping[type[ReplyModel], Callable[[Any, str], dict[str, JsonValue]]] = {
        ReasonedSuccessReply: lambda kind, _: append_reply(kind),
        Text: lambda _, shown: {"text": f"```markdown\n{_reply_document(shown)}\n```"},
        AnalystReply: analyse,
        MergeReply: lambda kind, shown: {"edits": _reply_merge(kind, shown)},
        ReasonedRankReply: _reply_ranking,
        ReasonedStepSizeReply: _reply_step_size,
        RewriteReply: lambda _, shown: {
            "summary": "Rules added.",
            "document": _reply_document(shown),
        },
        LapseReply: lambda _, shown: {"lapses": _reply_lapses(shown)},
        ReminderReply: lambda *_: {"reminders": []},
        CompactReply: _reply_notes,
        GuidanceReply: _reply_guidance,
        MemoryReply: lambda *_: {"memory": "Add the lines of rules."},
    }

    def answer(
        prompt: RenderedPrompt, reply_type: type[ReplyModel], call_id: CallId
    ) -> JsonValue | Exception:
        shown = "\n".join(message.content for message in prompt.messages if message.role == "user")
        for kind, part in parts.items():
            if issubclass(reply_type, kind):
                return add_reasoning(reply_type, part(reply_type, shown))
        return TypeError(f"the toy optimizer has no {reply_type.__name__} for {call_id.label}")

    return answer


_MISSING = re.compile(r"missing rule: (\w+)")
_TAGGED = r"<({}_*)>\n(.*?)\n</\1>"
_PROPOSAL = re.compile(r"<(proposal_(\d+)_*)>\n(.*?)\n</\1>", re.DOTALL)
_CASE = re.compile(r"<(case_(\d+)_*)>\n(.*?)\n</\1>", re.DOTALL)
DEFAULT_GUIDANCE = "Answer every task."


def _find_missing_rules(shown: str) -> list[tuple[str, int]]:
    """Return the rules that feedback names, most frequent first, and how often it does."""
    return Counter(_MISSING.findall(shown)).most_common()


def _list_missing_lines(shown: str) -> list[str]:
    return [TOY_RULES[name].line for name, _ in _find_missing_rules(shown)]


def _read_tag(tag: str, shown: str) -> str:
    found = re.search(_TAGGED.format(tag), shown, re.DOTALL)
    return found[2] if found else ""


def _reply_patterns(reply_type: type[ReplyModel], shown: str) -> list[JsonValue]:
    counted = _find_missing_rules(shown) or [("unknown", 1)]
    return [
        describe_pattern(reply_type, name, count, f"It does not know the rule {name}.")
        for name, count in counted[: find_bounds(reply_type, "patterns")[1]]
    ]


def _reply_merge(reply_type: type[ReplyModel], shown: str) -> list[JsonValue]:
    sources: dict[str, list[JsonValue]] = {}
    for _, number, text in _PROPOSAL.findall(shown):
        for line in _list_rules(text):
            sources.setdefault(line, []).append(int(number))
    return [
        {**append_edit(reply_type, line), "sources": numbers} for line, numbers in sources.items()
    ]


def _reply_ranking(reply_type: type[ReplyModel], _: str) -> dict[str, JsonValue]:
    fewest = find_bounds(reply_type, "selected")[0]
    return {"selected": list(range(1, 1 + fewest))}


def _reply_step_size(reply_type: type[ReplyModel], _: str) -> dict[str, JsonValue]:
    most = reply_type.model_json_schema()["properties"]["count"]["maximum"]
    return {"count": most, "confidence": 1.0, "risks": ""}


def _reply_document(shown: str) -> str:
    lines = [line for line in _read_tag("document", shown).splitlines() if line.strip()]
    for _, _, text in _PROPOSAL.findall(shown):
        lines += _list_rules(text)
    lines += _list_missing_lines(shown)
    return "\n".join(dict.fromkeys(lines)) or DEFAULT_GUIDANCE


def _list_rules(text: str) -> Sequence[str]:
    return [rule.line for rule in TOY_RULES.values() if rule.line in text]


def _reply_lapses(shown: str) -> list[JsonValue]:
    document = _read_tag("document", shown)
    lapses: list[JsonValue] = []
    for _, number, text in _CASE.findall(shown):
        for name in _MISSING.findall(text)[:1]:
            line = TOY_RULES[name].line
            if line in document:
                reminder = f"Mind the rule {name}."
                lapses.append({"case": int(number), "rule": line, "reminder": reminder})
    return lapses


def _reply_notes(reply_type: type[ReplyModel], shown: str) -> dict[str, JsonValue]:
    notes = [line.removeprefix("- ") for line in _read_tag("notes", shown).splitlines()]
    return {"notes": [*notes[: find_bounds(reply_type, "notes")[1]]]}


def _reply_guidance(_: type[ReplyModel], shown: str) -> dict[str, JsonValue]:
    document = _read_tag("document", shown)
    lines = [line for line in _list_missing_lines(shown) if line not in document]
    return {"helped": "unclear", "guidance": "\n".join(lines) or DEFAULT_GUIDANCE}
