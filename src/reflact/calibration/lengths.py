"""How long the texts of a calibration's calls are, about, from the steps that they will show. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from reflact.calibration.showing import Renderer, show_transition
from reflact.calibration.tokens import estimate
from reflact.critic_config import CriticSettings
from reflact.memory import ContrastPair, Evaluation, Transition

EVALUATION = 250
"""Bytes of an evaluation with its reasoning, about."""

LOOKED_AT = 64
"""Steps whose length is looked at."""

Place: TypeAlias = tuple[str, Transition]
"""A step with the purpose that it is seen under."""


def shown_bytes(places: Sequence[Place], room: int) -> float:
    """Return the mean length of steps as prompts show them, in bytes; ``room`` is theirs, in tokens."""
    return mean([len(show_transition(*place, room=room).encode()) for place in _some(places)])


def example_bytes(places: Sequence[Place], critic: CriticSettings) -> float:
    """Return the length of the worked examples of such steps in a critic's prompt, as many as find room."""
    render = Renderer(critic.example_state_tokens)
    texts = [render(_example(*place), 1) for place in _some(places)]
    tokens = mean([estimate(text) for text in texts])
    if not tokens:
        return 0.0
    return min(critic.examples, critic.example_tokens // tokens) * mean([len(t.encode()) for t in texts])


def mean(values: Sequence[int]) -> float:
    """Return the mean; 0 of none."""
    return sum(values) / len(values) if values else 0.0


def _some(places: Sequence[Place]) -> Sequence[Place]:
    """Return a part of many, evenly spaced."""
    return places[:: max(1, len(places) // LOOKED_AT)][:LOOKED_AT]


def _example(purpose: str, transition: Transition) -> ContrastPair:
    said = Evaluation(phi_before=2, phi_after=4, reasoning="x" * (EVALUATION - 50))
    return ContrastPair(
        purpose=purpose,
        transition=transition,
        right=said,
        wrong=said,
        why="One sentence that says what is wrong about it.",
        mistake="inflated_score",
        construction="observed",
        label="program",
    )
