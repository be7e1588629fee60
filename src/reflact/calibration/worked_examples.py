"""Which pairs a critic is shown: the relevant ones, the kinds of mistakes balanced.

The choice does not depend on the order in which pairs come, nor on anything that differs between processes.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from reflact.calibration.cache import PairCache
from reflact.calibration.rendering import show_action
from reflact.calibration.state_diff import TransitionView
from reflact.memory.models import ContrastPair, Direction

_WORD = re.compile(r"[\u0e00-\U0010ffff]|[^\W_\u0e00-\U0010ffff]+")
_MAX_INDEXED_CHARS = 4000


class RankingEntry(NamedTuple):
    """What ranking goes by."""

    pair: ContrastPair
    id: str
    subject_hash: str
    words: frozenset[str]


class RankingIndex:
    """Reads pairs for ranking, each once; keeps ``size`` of them, or as many as are read at a time if that is more."""

    def __init__(self, size: int = 4096) -> None:
        self._entries: PairCache[RankingEntry] = PairCache(size)
        self._last_pairs: tuple[tuple[ContrastPair, ...], tuple[RankingEntry, ...]] = (), ()

    def __call__(self, pairs: Sequence[ContrastPair]) -> tuple[RankingEntry, ...]:
        """Return what ranking needs to know of pairs, each once."""
        (last, reads), requested = self._last_pairs, tuple(pairs)
        if requested != last:
            self._entries.ensure_size(len(requested))
            reads = tuple({pair.id: self._index_pair(pair) for pair in requested}.values())
        self._last_pairs = (
            requested,
            reads,
        )  # these very objects, which compare equal without a look into them
        return reads

    def list_unindexed(self, pairs: Sequence[ContrastPair]) -> tuple[ContrastPair, ...]:
        """Return those that were not read yet, or are forgotten."""
        if self._last_pairs[0] == tuple(pairs):
            return ()
        return tuple(pair for pair in pairs if self._entries.get(pair) is None)

    def _index_pair(self, pair: ContrastPair) -> RankingEntry:
        entry = self._entries.get(pair)
        if entry is None:
            words = _word_set(pair.purpose, TransitionView(pair.transition))
            entry = RankingEntry(pair, pair.id, pair.hashes.subject, words)
            self._entries.put(pair, entry)
        return entry


def rank_pairs(
    pairs: Sequence[ContrastPair],
    view: TransitionView,
    *,
    purpose: str,
    include_same: bool = False,
    index: RankingIndex | None = None,
) -> Iterator[ContrastPair]:
    """Yield pairs, each once, the best example first.

    Kinds of mistakes take turns. Pairs whose right side gives credit and pairs whose right side gives none balance each
    other, and among the latter those that stay and those that fall: examples of one sort alone teach to say always the
    same. Beyond that the more relevant comes first; ties go by id. Relevance is the cosine of the sets of words in purpose, action and change.

    ``include_same`` keeps pairs of the same transition under the same purpose, which give the answer away.
    """
    index = index or RankingIndex()
    asked, own = _word_set(purpose, view), view.subject_hash(purpose)
    order = sorted(
        (-_cosine_similarity(asked, one.words), one.id, one.pair)
        for one in index(pairs)
        if include_same or one.subject_hash != own
    )
    return _balance_mistakes([pair for _, _, pair in order])


def _balance_mistakes(pairs: Sequence[ContrastPair]) -> Iterator[ContrastPair]:
    """Yield pairs, given with the best first, so that kinds take turns and what the right sides say balances."""
    queues: dict[tuple[str, Direction], deque[tuple[int, ContrastPair]]] = defaultdict(deque)
    for index, pair in enumerate(pairs):
        queues[pair.mistake, pair.right.direction].append((index, pair))
    shown: Counter[Direction] = Counter()
    turn: set[str] = set()
    while queues:
        turn = turn or {kind for kind, _ in queues}
        heads = [(queue[0][0], key) for key, queue in queues.items() if key[0] in turn]
        lead = 2 * shown["rises"] - shown.total()
        wanted = [head for head in heads if lead * ((head[1][1] == "rises") - 0.5) < 0]
        if wanted or lead == 0:
            still = [shown[direction] for _, (_, direction) in wanted or heads if direction != "rises"]
            fewest = min(still, default=0)
            heads = [head for head in wanted or heads if head[1][1] == "rises" or shown[head[1][1]] == fewest]
        _, key = min(heads)
        _, pair = queues[key].popleft()
        if not queues[key]:
            del queues[key]
        shown[key[1]] += 1
        turn = {kind for kind in turn - {key[0]} if any(kind == left for left, _ in queues)}
        yield pair


def _word_set(purpose: str, texts: TransitionView) -> frozenset[str]:
    action = show_action(texts.transition.action)
    text = f"{purpose[:_MAX_INDEXED_CHARS]}\n{action[:_MAX_INDEXED_CHARS]}\n{texts.change_text[:_MAX_INDEXED_CHARS]}"
    return frozenset(_WORD.findall(unicodedata.normalize("NFKC", text).casefold()))


def _cosine_similarity(words: frozenset[str], others: frozenset[str]) -> float:
    if not words or not others:
        return 0.0
    return len(words & others) / math.sqrt(len(words) * len(others))
