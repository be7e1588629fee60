"""Which pairs a critic is shown: the relevant ones, the kinds of mistakes balanced. Pure.

The choice depends on the pairs and on what is scored alone: not on the order in which pairs come, nor on
anything that differs between processes.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from reflact.calibration.changes import Seen, seen
from reflact.calibration.memo import Kept
from reflact.calibration.showing import show_action
from reflact.memory import ContrastPair, Transition

_WORD = re.compile(r"[\u0e00-\U0010ffff]|[^\W_\u0e00-\U0010ffff]+")
_READ = 4000


class Read(NamedTuple):
    """What ranking goes by: a pair, its id, the hash of what it speaks of, and in which words."""

    pair: ContrastPair
    id: str
    subject: str
    words: frozenset[str]


def read(pairs: Sequence[ContrastPair]) -> tuple[Read, ...]:
    """Return what ranking needs to know of pairs, each once."""
    return Reader()(pairs)


class Reader:
    """Reads pairs for ranking, each once: rounds are scored with the same, a memory gives equal ones.

    Args:
        size: Pairs that are remembered, or as many as are read at a time where that is more; the one that
            was longest not asked for goes first.
    """

    def __init__(self, size: int = 4096) -> None:
        self._known: Kept[Read] = Kept(size)
        self._last: tuple[tuple[ContrastPair, ...], tuple[Read, ...]] = (), ()

    def __call__(self, pairs: Sequence[ContrastPair]) -> tuple[Read, ...]:
        """Return what ranking needs to know of pairs, each once."""
        (last, reads), given = self._last, tuple(pairs)
        if given != last:
            self._known.grow(len(given))
            reads = tuple({pair.id: self._read(pair) for pair in given}.values())
        self._last = given, reads  # these very objects, which are found equal without a look into them
        return reads

    def unread(self, pairs: Sequence[ContrastPair]) -> tuple[ContrastPair, ...]:
        """Return those that were not read yet, or are forgotten."""
        if self._last[0] == tuple(pairs):
            return ()
        return tuple(pair for pair in pairs if self._known.get(pair) is None)

    def _read(self, pair: ContrastPair) -> Read:
        found = self._known.get(pair)
        if found is None:
            words = _words(pair.purpose, Seen(pair.transition))
            found = Read(pair, pair.id, pair.hashes.subject, words)
            self._known.keep(pair, found)
        return found


def ranked(
    pairs: Sequence[ContrastPair],
    transition: Transition | Seen,
    *,
    purpose: str,
    show_same: bool = False,
    read: Callable[[Sequence[ContrastPair]], Sequence[Read]] = read,
) -> Iterator[ContrastPair]:
    """Yield pairs, each once, the best example first.

    Kinds of mistakes take turns, so that any beginning of the result holds them in equal numbers, as far as
    there are as many. Pairs whose right side gives credit and pairs whose right side gives none balance each
    other where kinds leave a choice: examples of one sort alone teach to say always the same. Beyond that the
    more relevant comes first; ties go by id. Relevance is the cosine of the sets of words in purpose, action
    and change.

    Args:
        pairs: The candidates.
        transition: What is to be scored.
        purpose: Under which purpose.
        show_same: Keep pairs of the same transition under the same purpose, which give the answer away.
        read: Reads pairs; a ``Reader`` where the same ones come again.
    """
    texts = seen(transition)
    asked, own = _words(purpose, texts), texts.subject(purpose)
    order = sorted(
        (-_cosine(asked, one.words), one.id, one.pair)
        for one in read(pairs)
        if show_same or one.subject != own
    )
    return _in_turns([pair for _, _, pair in order])


def _in_turns(pairs: Sequence[ContrastPair]) -> Iterator[ContrastPair]:
    """Yield pairs, given with the best first, so that kinds take turns and credit and no credit balance."""
    queues: dict[tuple[str, bool], deque[tuple[int, ContrastPair]]] = defaultdict(deque)
    for place, pair in enumerate(pairs):
        queues[pair.mistake, pair.right.delta > 0].append((place, pair))
    credited, shown = 0, 0
    turn: set[str] = set()
    while queues:
        turn = turn or {kind for kind, _ in queues}
        heads = [(queue[0][0], key) for key, queue in queues.items() if key[0] in turn]
        wanted = [head for head in heads if 2 * credited != shown and head[1][1] is (2 * credited < shown)]
        _, key = min(wanted or heads)
        _, pair = queues[key].popleft()
        if not queues[key]:
            del queues[key]
        credited, shown = credited + key[1], shown + 1
        turn = {kind for kind in turn - {key[0]} if any(kind == left for left, _ in queues)}
        yield pair


def _words(purpose: str, texts: Seen) -> frozenset[str]:
    action = show_action(texts.transition.action)
    text = f"{purpose[:_READ]}\n{action[:_READ]}\n{texts.change[:_READ]}"
    return frozenset(_WORD.findall(unicodedata.normalize("NFKC", text).casefold()))


def _cosine(some: frozenset[str], others: frozenset[str]) -> float:
    if not some or not others:
        return 0.0
    return len(some & others) / math.sqrt(len(some) * len(others))
