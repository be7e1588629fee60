"""How transitions and worked examples are shown to a critic: fenced, in a budget, every cut marked. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from pydantic import JsonValue

from reflact.calibration.changes import show_change, show_state
from reflact.calibration.tokens import Count, cut, estimate
from reflact.memory import Action, ContrastPair, Evaluation, Transition
from reflact.prompts import fence

ABOVE = "Other transitions. Each has an evaluation that is right and one that is wrong:"
"""The line above the worked examples."""


class Shown(NamedTuple):
    """The worked examples as text, and the pairs that it holds; both empty where there is room for none."""

    text: str
    pairs: tuple[ContrastPair, ...]


def show_transition(purpose: str, transition: Transition, *, room: int, count: Count = estimate) -> str:
    """Return purpose, state before, action, state after and what changed, each fenced.

    Args:
        purpose: What the agent is to achieve.
        transition: What it did.
        room: Tokens for each of the five, the tags around it aside; what is longer is cut with a mark.
        count: Counts tokens.
    """
    parts = {
        "purpose": show_state(purpose),
        "before": show_state(transition.before),
        "action": show_action(transition.action),
        "after": show_state(transition.after),
        "change": _change(transition, room, count),
    }
    return "\n\n".join(fence(tag, cut(text, room, count=count)) for tag, text in parts.items())


def show_action(action: Action) -> str:
    """Return an action's name and, where there are any, its arguments below."""
    return action.name if action.arguments is None else f"{action.name}\n{show_state(action.arguments)}"


class Renderer:
    """Renders worked examples, each object once.

    Args:
        each: Tokens for each part of a transition; what is longer is cut with a mark.
        count: Counts tokens.
        size: Examples that are remembered; beyond it all are forgotten.
    """

    def __init__(self, each: int, count: Count = estimate, size: int = 4096) -> None:
        self._each = each
        self._count = count
        self._size = size
        self._known: dict[tuple[int, int], tuple[ContrastPair, str]] = {}

    def __call__(self, pair: ContrastPair, number: int) -> str:
        """Return a pair as the example of a number, fenced."""
        known = self._known.get((id(pair), number))
        if known is None:
            if len(self._known) >= self._size:
                self._known.clear()
            text = fence(f"example_{number}", _example(pair, self._each, self._count))
            known = self._known[id(pair), number] = (pair, text)
        return known[1]


def show_examples(
    pairs: Sequence[ContrastPair],
    *,
    room: int,
    most: int,
    each: int,
    count: Count = estimate,
    render: Callable[[ContrastPair, int], str] | None = None,
) -> Shown:
    """Return as many of the pairs as fit, in their order; one that does not fit is passed over whole.

    Args:
        pairs: The candidates, the best first.
        room: Tokens for all of the text, the line above it and all tags included. Never exceeded.
        most: Pairs at most.
        each: Tokens for each part of a transition; what is longer is cut with a mark.
        count: Counts tokens.
        render: Renders an example, as a ``Renderer`` for so many tokens each does; None: one of its own.
    """
    shown, render = Shown("", ()), render or Renderer(each, count)
    for pair in pairs:
        if len(shown.pairs) == most:
            break
        text = f"{shown.text or ABOVE}\n\n{render(pair, len(shown.pairs) + 1)}"
        if count(text) <= room:
            shown = Shown(text, (*shown.pairs, pair))
    return shown


def _change(transition: Transition, room: int, count: Count) -> str:
    whole = show_change(transition.before, transition.after)
    return whole if count(whole) <= room else show_change(transition.before, transition.after, brief=True)


def _example(pair: ContrastPair, each: int, count: Count) -> str:
    parts = (
        show_transition(pair.purpose, pair.transition, room=each, count=count),
        fence("right", _evaluation(pair.right)),
        fence("wrong", _evaluation(pair.wrong)),
        fence("why", show_state(f"{pair.mistake}: {pair.why}")),
    )
    return "\n\n".join(parts)


def _evaluation(evaluation: Evaluation) -> str:
    lines: list[JsonValue] = [
        f"reasoning: {evaluation.reasoning}",
        *(f"evidence: {quote}" for quote in evaluation.evidence),
        f"phi before: {evaluation.phi_before:g}",
        f"phi after: {evaluation.phi_after:g}",
    ]
    return show_state("\n".join(map(str, lines)))
