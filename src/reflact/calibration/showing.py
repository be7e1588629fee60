"""How transitions and worked examples are shown to a critic: fenced, in a budget, every cut marked. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeAlias

from pydantic import JsonValue

from reflact.calibration.changes import Seen, seen, show_state
from reflact.calibration.memo import Kept
from reflact.memory import Action, ContrastPair, Evaluation, Transition
from reflact.prompts import fence

Count: TypeAlias = Callable[[str], int]
"""Returns how many tokens a text takes, at least 0; longer texts take no fewer."""

_DENSE = b" ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_LETTERS_PER_TOKEN = 3


def estimate(text: str) -> int:
    """Return how many tokens a text takes at most, or nearly so.

    ASCII letters and spaces count three to a token; English has more than four. Digits, signs and line
    breaks count one each. Everything else counts one for each byte of its UTF-8, which is the most that
    any tokenizer with bytes to fall back on can take: three for a Chinese character, four for most emoji.
    """
    encoded = text.encode("utf-8", "surrogatepass")
    others = len(encoded.translate(None, _DENSE))
    return others - (others - len(encoded)) // _LETTERS_PER_TOKEN


def cut(text: str, room: int, *, count: Count = estimate) -> str:
    """Return a text in at most ``room`` tokens: two thirds from its beginning, one from its end.

    Between them stands a mark with the number of characters that are missing. Where the room does not even
    hold the mark, the mark stands alone: what is missing is never left unsaid.
    """
    if count(text) <= room:
        return text
    least, most = 0, len(text) - 1
    while least < most:
        kept = (least + most + 1) // 2
        if count(_cut_to(text, kept)) <= room:
            least = kept
        else:
            most = kept - 1
    return _cut_to(text, least)


def _cut_to(text: str, kept: int) -> str:
    tail = kept // 3
    head, end = text[: kept - tail], text[len(text) - tail :]
    parts = (head, f"[... {len(text) - kept:,} characters cut ...]", end)
    return "\n".join(part for part in parts if part)


ABOVE = "Other transitions. Each has an evaluation that is right and one that is wrong:"
"""The line above the worked examples."""

_BARE = 0
"""What stands for the number of an example that has none yet."""

TRIED = 32
"""Pairs in a row that may not fit before a room counts as full."""


class Shown(NamedTuple):
    """The worked examples as text, and the pairs that it holds; both empty where there is room for none."""

    text: str
    pairs: tuple[ContrastPair, ...]


def show_transition(
    purpose: str, transition: Transition | Seen, *, room: int, count: Count = estimate
) -> str:
    """Return purpose, state before, action, state after and what changed, each fenced.

    Args:
        purpose: What the agent is to achieve.
        transition: What it did.
        room: Tokens for each of the five, the tags around it aside; what is longer is cut with a mark.
        count: Counts tokens.
    """
    texts = seen(transition)
    parts = {
        "purpose": show_state(purpose),
        "before": texts.before,
        "action": show_action(texts.transition.action),
        "after": texts.after,
        "change": texts.change if count(texts.change) <= room else texts.brief_change,
    }
    return "\n\n".join(fence(tag, cut(text, room, count=count)) for tag, text in parts.items())


def show_action(action: Action) -> str:
    """Return an action's name and, where there are any, its arguments below."""
    return action.name if action.arguments is None else f"{action.name}\n{show_state(action.arguments)}"


class Renderer:
    """Renders worked examples, each pair once.

    Args:
        each: Tokens for each part of a transition; what is longer is cut with a mark.
        count: Counts tokens.
        size: Examples that are remembered; the one that was longest not asked for goes first.
    """

    def __init__(self, each: int, count: Count = estimate, size: int = 4096) -> None:
        self._each = each
        self._count = count
        self._known: Kept[dict[int, str]] = Kept(size)

    def __call__(self, pair: ContrastPair, number: int) -> str:
        """Return a pair as the example of a number, fenced."""
        texts = self._known.get(pair)
        if texts is None:
            texts = {_BARE: _example(pair, self._each, self._count)}
            self._known.keep(pair, texts)
        if number not in texts:
            texts[number] = fence(f"example_{number}", texts[_BARE])
        return texts[number]


def show_examples(
    pairs: Iterable[ContrastPair],
    *,
    room: int,
    most: int,
    each: int,
    count: Count = estimate,
    render: Callable[[ContrastPair, int], str] | None = None,
) -> Shown:
    """Return as many of the pairs as fit, in their order; one that does not fit is passed over whole.

    Once ``TRIED`` in a row do not fit the room counts as full, and no further one is looked at.

    Args:
        pairs: The candidates, the best first; no more are taken than are looked at.
        room: Tokens for all of the text, the line above it and all tags included. Never exceeded.
        most: Pairs at most.
        each: Tokens for each part of a transition; what is longer is cut with a mark.
        count: Counts tokens.
        render: Renders an example, as a ``Renderer`` for so many tokens each does; None: one of its own.
    """
    shown, render, passed = Shown("", ()), render or Renderer(each, count), 0
    for pair in pairs:
        if len(shown.pairs) == most or passed == TRIED or count(shown.text or ABOVE) >= room:
            break
        text = f"{shown.text or ABOVE}\n\n{render(pair, len(shown.pairs) + 1)}"
        fits = count(text) <= room
        shown = Shown(text, (*shown.pairs, pair)) if fits else shown
        passed = 0 if fits else passed + 1
    return shown


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
