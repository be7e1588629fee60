"""The memory of a critic: contrast pairs, cards, traces, and the store that keeps them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reflact.lazy import load_exports

if TYPE_CHECKING:
    from reflact.memory.models import (
        Action,
        ContrastPair,
        Evaluation,
        Label,
        PromotionEvidence,
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
    "MemoryStore",
    "PromotionEvidence",
    "ScoreEvent",
    "StateScore",
    "Transition",
]

__getattr__ = load_exports(
    __name__,
    {
        "memory.models": (
            "Action",
            "ContrastPair",
            "Evaluation",
            "Label",
            "PromotionEvidence",
            "ScoreEvent",
            "StateScore",
            "Transition",
        ),
        "memory.store": ("MemoryStore",),
    },
)
