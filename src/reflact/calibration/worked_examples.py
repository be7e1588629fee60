"""Worked examples for a critic: which pairs are shown, the kinds of mistakes balanced, and how, in
a budget of tokens.

The choice does not depend on the order in which pairs come, nor on anything that differs between
processes.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from typing import NamedTuple

from reflact.calibration.transition_view import (
    TokenCounter,
    TransitionView,
    estimate_tokens,
    show_action,
    show_state,
    show_transition,
)
from reflact.memory.cards import compute_subject_hash
from reflact.memory.models import ContrastPair, Direction, Evaluation
from reflact.prompts import fence

_WORD = re.compile(r"[\u0e00-\U0010ffff]|[^\W_\u0e00-\U0010ffff]+")
_MAX_INDEXED_CHARS = 4000

# The line above the worked examples.
EXAMPLES_HEADER = "Other transitions. Each has an evaluation that is right and one that is wrong:"

# Pairs in a row that may not fit before a room counts as full.
MAX_PAIRS_TRIED = 32


class ShownExamples(NamedTuple):
    """The worked examples as text, and the pairs that it holds."""

    text: str
    pairs: tuple[ContrastPair, ...]


def rank_pairs(
    pairs: Iterable[ContrastPair],
    view: TransitionView,
    *,
    purpose: str,
    words_by_pair: MutableMapping[str, frozenset[str]] | None = None,
) -> Iterator[ContrastPair]:
    """Yield pairs, each once, the best example first; pairs of the same transition and purpose are
    left out.

    Kinds of mistakes take turns. Pairs whose right side gives credit and pairs whose right side
    gives none balance each other, and among the latter those that stay and those that fall:
    examples of one sort alone teach to say always the same. Beyond that the more relevant comes
    first; ties go by id. Relevance is the cosine of the sets of words in purpose, action and
    change.

    ``words_by_pair`` keeps the words of pairs by their ids, since a critic ranks the same pairs at
    each step.
    """
    known = {} if words_by_pair is None else words_by_pair
    asked = _word_set(purpose, view)
    subject = compute_subject_hash(purpose, view.transition)
    ranked: list[tuple[float, str, ContrastPair]] = []
    for pair in {pair.id: pair for pair in pairs}.values():
        if pair.hashes.subject == subject:
            continue
        if pair.id not in known:
            known[pair.id] = _word_set(pair.purpose, TransitionView(pair.transition))
        ranked.append((-_cosine_similarity(asked, known[pair.id]), pair.id, pair))
    ranked.sort(key=lambda one: one[:2])
    return _balance_mistakes([pair for _, _, pair in ranked])


def _balance_mistakes(pairs: Sequence[ContrastPair]) -> Iterator[ContrastPair]:
    """Yield pairs so that kinds take turns and what the right sides say balances."""
    queues: dict[tuple[str, Direction], deque[tuple[int, ContrastPair]]] = defaultdict(deque)
    for rank, pair in enumerate(pairs):
        queues[pair.mistake, pair.right.direction].append((rank, pair))
    shown: Counter[Direction] = Counter()
    turn: set[str] = set()
    while queues:
        turn &= {mistake for mistake, _ in queues}
        turn = turn or {mistake for mistake, _ in queues}
        heads = [key for key in queues if key[0] in turn]
        key = min(_choose_direction(heads, shown), key=lambda key: queues[key][0][0])
        _, pair = queues[key].popleft()
        if not queues[key]:
            del queues[key]
        turn.remove(key[0])
        shown[key[1]] += 1
        yield pair


def _choose_direction(
    heads: Sequence[tuple[str, Direction]], shown: Counter[Direction]
) -> Sequence[tuple[str, Direction]]:
    """Return the heads of the direction that is shown too little, or all if there is none."""
    lead = 2 * shown["rises"] - shown.total()
    wanted = heads
    if lead != 0:
        wanted = [head for head in heads if (head[1] == "rises") is (lead < 0)]
        if not wanted:
            return heads
    without_credit = [shown[direction] for _, direction in wanted if direction != "rises"]
    fewest = min(without_credit, default=0)
    return [head for head in wanted if head[1] == "rises" or shown[head[1]] == fewest]


def _word_set(purpose: str, view: TransitionView) -> frozenset[str]:
    parts = (purpose, show_action(view.transition.action), view.change_text)
    text = "\n".join(part[:_MAX_INDEXED_CHARS] for part in parts)
    return frozenset(_WORD.findall(unicodedata.normalize("NFKC", text).casefold()))


def _cosine_similarity(words: frozenset[str], others: frozenset[str]) -> float:
    if not words or not others:
        return 0.0
    return len(words & others) / math.sqrt(len(words) * len(others))


def show_examples(
    pairs: Iterable[ContrastPair],
    *,
    max_tokens: int,
    max_pairs: int,
    max_state_tokens: int,
    count_tokens: TokenCounter = estimate_tokens,
) -> ShownExamples:
    """Return as many of the pairs as fit, in their order; one that does not fit is passed over
    whole.

    Once ``MAX_PAIRS_TRIED`` in a row do not fit, the room counts as full. The text, with its
    heading and all tags, never exceeds ``max_tokens``. Each part of a transition takes at most
    ``max_state_tokens``.
    """
    shown = ShownExamples("", ())
    n_passed = 0
    for pair in pairs:
        is_full = count_tokens(shown.text or EXAMPLES_HEADER) >= max_tokens
        if len(shown.pairs) == max_pairs or n_passed == MAX_PAIRS_TRIED or is_full:
            break
        example = _format_example(pair, max_state_tokens, count_tokens)
        fenced = fence(f"example_{len(shown.pairs) + 1}", example)
        text = f"{shown.text or EXAMPLES_HEADER}\n\n{fenced}"
        if count_tokens(text) <= max_tokens:
            shown = ShownExamples(text, (*shown.pairs, pair))
            n_passed = 0
        else:
            n_passed += 1
    return shown


def _format_example(pair: ContrastPair, max_tokens: int, count_tokens: TokenCounter) -> str:
    view = TransitionView(pair.transition)
    parts = (
        show_transition(pair.purpose, view, max_tokens=max_tokens, count_tokens=count_tokens),
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
