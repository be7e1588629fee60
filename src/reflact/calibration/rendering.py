"""How transitions and worked examples are shown to a critic: fenced, in a budget, every cut marked. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeAlias

from reflact.calibration.cache import PairCache
from reflact.calibration.state_diff import TransitionView, show_state
from reflact.memory.models import Action, ContrastPair, Evaluation
from reflact.prompts import fence

TokenCounter: TypeAlias = Callable[[str], int]
"""Returns how many tokens a text takes, at least 0; longer texts take no fewer."""

_DENSE_LETTERS = b" ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_LETTERS_PER_TOKEN = 3


def estimate_tokens(text: str) -> int:
    """Return how many tokens a text takes at most, or nearly so.

    ASCII letters and spaces count three to a token, other ASCII characters one each, and everything else one for each
    byte of its UTF-8, which is the most that a tokenizer with a byte fallback can take.
    """
    encoded = text.encode("utf-8", "surrogatepass")
    others = len(encoded.translate(None, _DENSE_LETTERS))
    return others - (others - len(encoded)) // _LETTERS_PER_TOKEN


def truncate_to_tokens(text: str, max_tokens: int, *, count_tokens: TokenCounter = estimate_tokens) -> str:
    """Return a text in at most ``max_tokens`` tokens: two thirds from its beginning, one from its end.

    Between them stands a mark with the number of missing characters; without room, the mark stands alone.
    """
    if count_tokens(text) <= max_tokens:
        return text
    least, most = 0, len(text) - 1
    while least < most:
        kept = (least + most + 1) // 2
        if count_tokens(_truncate_to_chars(text, kept)) <= max_tokens:
            least = kept
        else:
            most = kept - 1
    return _truncate_to_chars(text, least)


def _truncate_to_chars(text: str, n_chars: int) -> str:
    tail = n_chars // 3
    head, end = text[: n_chars - tail], text[len(text) - tail :]
    parts = (head, f"[... {len(text) - n_chars:,} characters cut ...]", end)
    return "\n".join(part for part in parts if part)


EXAMPLES_HEADER = "Other transitions. Each has an evaluation that is right and one that is wrong:"
"""The line above the worked examples."""

_NO_NUMBER = 0

MAX_PAIRS_TRIED = 32
"""Pairs in a row that may not fit before a room counts as full."""


class ShownExamples(NamedTuple):
    """The worked examples as text, and the pairs that it holds; both empty if there is room for none."""

    text: str
    pairs: tuple[ContrastPair, ...]


def show_transition(
    purpose: str, view: TransitionView, *, max_tokens: int, count_tokens: TokenCounter = estimate_tokens
) -> str:
    """Return purpose, state before, action, state after and what changed, each fenced and cut to ``max_tokens``."""
    change_fits = count_tokens(view.change_text) <= max_tokens
    parts = {
        "purpose": show_state(purpose),
        "before": view.before_text,
        "action": show_action(view.transition.action),
        "after": view.after_text,
        "change": view.change_text if change_fits else view.short_change_text,
    }
    return "\n\n".join(
        fence(tag, truncate_to_tokens(text, max_tokens, count_tokens=count_tokens))
        for tag, text in parts.items()
    )


def show_action(action: Action) -> str:
    """Return an action's name and, if there are any, its arguments below."""
    return action.name if action.arguments is None else f"{action.name}\n{show_state(action.arguments)}"


class ExampleRenderer:
    """Renders worked examples, each pair once; ``max_tokens`` is for each part of a transition."""

    def __init__(self, max_tokens: int, count_tokens: TokenCounter = estimate_tokens) -> None:
        self._max_tokens = max_tokens
        self._count_tokens = count_tokens
        self._texts: PairCache[dict[int, str]] = PairCache(4096)

    def render(self, pair: ContrastPair, number: int) -> str:
        """Return a pair as the example of a number, fenced."""
        texts = self._texts.get(pair)
        if texts is None:
            texts = {_NO_NUMBER: self._format_example(pair)}
            self._texts.put(pair, texts)
        if number not in texts:
            texts[number] = fence(f"example_{number}", texts[_NO_NUMBER])
        return texts[number]

    def show(self, pairs: Iterable[ContrastPair], *, max_tokens: int, max_pairs: int) -> ShownExamples:
        """Return as many of the pairs as fit, in their order; one that does not fit is passed over whole.

        Once ``MAX_PAIRS_TRIED`` in a row do not fit, the room counts as full. The text, with its heading and all tags,
        never exceeds ``max_tokens``.
        """
        shown, passed = ShownExamples("", ()), 0
        for pair in pairs:
            is_full = self._count_tokens(shown.text or EXAMPLES_HEADER) >= max_tokens
            if len(shown.pairs) == max_pairs or passed == MAX_PAIRS_TRIED or is_full:
                break
            text = f"{shown.text or EXAMPLES_HEADER}\n\n{self.render(pair, len(shown.pairs) + 1)}"
            fits = self._count_tokens(text) <= max_tokens
            shown = ShownExamples(text, (*shown.pairs, pair)) if fits else shown
            passed = 0 if fits else passed + 1
        return shown

    def _format_example(self, pair: ContrastPair) -> str:
        view, limit, count = TransitionView(pair.transition), self._max_tokens, self._count_tokens
        parts = (
            show_transition(pair.purpose, view, max_tokens=limit, count_tokens=count),
            fence("right", _format_evaluation(pair.right)),
            fence("wrong", _format_evaluation(pair.wrong)),
            fence("why", show_state(f"{pair.mistake}: {pair.reason}")),
        )
        return "\n\n".join(parts)


def _format_evaluation(evaluation: Evaluation) -> str:
    lines = (
        f"reasoning: {evaluation.reasoning}",
        *(f"evidence: {quote}" for quote in evaluation.evidence),
        f"phi before: {evaluation.progress_before:g}",
        f"phi after: {evaluation.progress_after:g}",
    )
    return show_state("\n".join(lines))
