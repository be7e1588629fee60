"""The memory of a critic: contrast pairs, traces, and the store that keeps them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reflact.lazy import load_exports

if TYPE_CHECKING:
    from reflact.memory.cards import build_cards
    from reflact.memory.models import (
        Action,
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
    "build_cards",
]

__getattr__ = load_exports(
    __name__,
    {
        "memory.cards": ("build_cards",),
        "memory.models": (
            "Action",
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
