"""The memory of a critic: contrast pairs, cards, traces, and the store that keeps them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reflact.lazy import load_exports

if TYPE_CHECKING:
    from reflact.memory.cards import create_card
    from reflact.memory.models import (
        Action,
        CardQuery,
        ContrastPair,
        Evaluation,
        Label,
        MemoryCard,
        PromotionEvidence,
        Scope,
        ScoreEvent,
        StateScore,
        Transition,
    )
    from reflact.memory.store import MemoryStore

__all__ = [
    "Action",
    "CardQuery",
    "ContrastPair",
    "Evaluation",
    "Label",
    "MemoryCard",
    "MemoryStore",
    "PromotionEvidence",
    "Scope",
    "ScoreEvent",
    "StateScore",
    "Transition",
    "create_card",
]

__getattr__ = load_exports(
    __name__,
    {
        "memory.cards": ("create_card",),
        "memory.models": (
            "Action",
            "CardQuery",
            "ContrastPair",
            "Evaluation",
            "Label",
            "MemoryCard",
            "PromotionEvidence",
            "Scope",
            "ScoreEvent",
            "StateScore",
            "Transition",
        ),
        "memory.store": ("MemoryStore",),
    },
)
