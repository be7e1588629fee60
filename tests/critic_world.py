"""Scored steps and pairs for tests of the critic, random stores of pairs, and models that play their parts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime
from random import Random
from typing import Any

from pydantic import JsonValue

from reflact.calibration.asked import KNOWN_MISTAKES
from reflact.calibration.critic import CRITIC_SCOPE, Critic
from reflact.config.critic import CriticSettings
from reflact.memory.cards import is_visible_to
from reflact.memory.models import (
    Action,
    CardStatus,
    ContrastPair,
    Evaluation,
    Label,
    Scope,
    ScoreEvent,
    StateScore,
    StoredPair,
    Transition,
)
from reflact.messages import CallId, RenderedPrompt, ReplyModel
from reflact.prompts import load_prompts
from reflact.testing import ScriptedLLM

PURPOSE = "Write the three chapters of the report."


def evaluation(before: float, after: float, reasoning: str = "Chapters were written.") -> Evaluation:
    return Evaluation(
        progress_before=before, progress_after=after, reasoning=reasoning, evidence=("chapters",)
    )


def event(
    step: int = 0,
    *,
    before: float = 2,
    after: float = 6,
    said: tuple[float, float] | None = None,
    gold: bool = True,
    changed: bool = True,
) -> ScoreEvent:
    states: list[dict[str, JsonValue]] = [
        {"chapters": f"{step}/{before:g}", "title": "Report"},
        {"chapters": f"{step}/{after:g}" if changed else f"{step}/{before:g}", "title": "Report"},
    ]
    own = evaluation(*(said or (before, after)), f"Step {step} was scored.")
    return ScoreEvent(
        step=step,
        transition=Transition(before=states[0], action=Action(name="write"), after=states[1]),
        evaluation=own,
        label=Label(progress_before=before, progress_after=after, source="program") if gold else None,
    )


def mistaken(prompt: RenderedPrompt, reply_type: type[ReplyModel], call_id: CallId) -> JsonValue:
    asked = prompt.messages[1].content.rsplit("Write the mistaken evaluation", 1)[1]
    found = re.search(r"\((\w+)\), with a number from ([\d.]+) to ([\d.]+)\.", asked)
    low, high = float(found[2]), float(found[3])
    return {
        "mistake": found[1],
        "reasoning": f"It looks like more, {call_id.part[:6]} and {call_id.trial}.",
        "phi_after": low + (high - low) / 2,
        "why": "The state shows something else.",
    }


class KnowingJudge:
    """Judges comparisons of known pairs; ``always`` is the side that it picks, whatever is there."""

    def __init__(self, *, always: str | None = None) -> None:
        self._always = always

    def __call__(self, prompt: RenderedPrompt, reply_type: type[ReplyModel], call_id: CallId) -> JsonValue:
        first = prompt.messages[1].content.split("<first>")[1].split("</first>")[0]
        right = "second" if "It looks like more" in first else "first"
        return {"reasoning": "By the states.", "better": self._always or right}


WORDS = (
    *("order", "paid", "shipped", "\u5b8c\u6210", "\u4efb\u52a1\u8fd8\u6ca1\u6709\u5b8c\u6210", "\U0001f389"),
    *("\U0001f468\u200d\U0001f469\u200d\U0001f467", "\u2705", "na\u00efve", "</example_1>", "<right>"),
    *("{{examples}}", "7.5", "lamp\nnext"),
)
STATUSES: tuple[CardStatus, ...] = ("quarantined", "promoted", "rejected", "archived")
SCOPES = (
    CRITIC_SCOPE,
    Scope(),
    Scope(roles=("critic", "coder")),
    Scope(roles=("coder",)),
    Scope(roles=("critic",), tools=("browser",)),
    Scope(roles=("critic",), user="alice"),
    Scope(task_categories=("shop",)),
)
EQUAL = {"reasoning": "r", "evidence": [], "phi_before": 1, "phi_after": 1, "confidence": 1}
"""What a critic says who sees no change."""

BOOK = load_prompts()
TIME = datetime(2026, 1, 1, tzinfo=UTC)


class Shelf:
    """A card store in a list, which gives pairs in whatever order, and keeps who asked."""

    def __init__(self, pairs: Sequence[StoredPair]) -> None:
        self.stored = list(pairs)
        self.asked: list[Scope] = []

    async def promoted_pairs(self, scope: Scope) -> tuple[ContrastPair, ...]:
        self.asked.append(scope)
        return tuple(
            one.pair
            for one in self.stored
            if one.status == "promoted" and is_visible_to(one.pair.scope, scope)
        )


def store_of(*pairs: ContrastPair) -> Any:
    return Shelf([stored(pair, "promoted") for pair in pairs])


def stored(pair: ContrastPair, status: CardStatus) -> StoredPair:
    return StoredPair(pair=pair, status=status, changed_at=TIME)


def text(random: Random, most: int = 12) -> str:
    return " ".join(random.choices(WORDS, k=random.randrange(1, most)))


def state(random: Random) -> JsonValue:
    if random.random() < 0.5:
        return text(random, 60)
    return {
        text(random, 3): text(random, 20),
        "items": [random.randrange(9) for _ in range(random.randrange(4))],
    }


def transition(random: Random) -> Transition:
    before = state(random)
    after = before if random.random() < 0.2 else state(random)
    return Transition(
        before=before, action=Action(name=text(random, 3), arguments={"a": text(random)}), after=after
    )


def pair(random: Random, purpose: str | None = None, of: Transition | None = None) -> ContrastPair:
    right, wrong = (
        Evaluation(
            progress_before=1,
            progress_after=random.randrange(11),
            reasoning=f"{side} {text(random)}",
            evidence=(text(random),),
        )
        for side in ("right", "wrong")
    )
    return ContrastPair(
        purpose=purpose or text(random),
        transition=of or transition(random),
        right=right,
        wrong=wrong,
        reason=f"why {text(random)}",
        mistake=random.choice((*(kind.name for kind in KNOWN_MISTAKES), "my own mistake")),
        construction="asked",
        label_source="human",
        scope=random.choice(SCOPES),
    )


class World:
    """One random store, a question and a budget."""

    def __init__(self, seed: int) -> None:
        random = Random(seed)
        self.purpose, self.transition = text(random), transition(random)
        pairs = [pair(random) for _ in range(random.randrange(12))]
        pairs += [pair(random, self.purpose, self.transition) for _ in range(random.randrange(2))]
        pairs += [
            one.model_copy(update={"scope": random.choice(SCOPES)}) for one in pairs if random.random() < 0.1
        ]
        self.stored = [
            stored(one, random.choice((*["promoted"] * 6, *STATUSES)))
            for one in {p.id: p for p in pairs}.values()
        ]
        self.settings = CriticSettings(
            example_tokens=random.choice((0, 20, 400, 1500, 4000, 4000, 20_000)),
            max_examples=random.choice((0, 1, 3, 8, 8, 100)),
            example_state_tokens=random.choice((32, 100, 500)),
            state_tokens=random.choice((32, 2000)),
        )

    async def ask(self, order: Sequence[StoredPair] | None = None) -> tuple[RenderedPrompt, StateScore]:
        llm = ScriptedLLM(lambda *_: EQUAL)
        memory: Any = Shelf(self.stored if order is None else order)
        critic = Critic(llm, memory=memory, settings=self.settings, prompts=BOOK)
        score = await critic.score(self.transition, purpose=self.purpose)
        (call,) = llm.calls
        return call.prompt, score
