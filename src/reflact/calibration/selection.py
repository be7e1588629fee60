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

from reflact.calibration.changes import show_change
from reflact.calibration.showing import show_action
from reflact.memory import ContrastPair, Transition
from reflact.types import digest

_WORD = re.compile(r"[\u0e00-\U0010ffff]|[^\W_\u0e00-\U0010ffff]+")
_READ = 4000


class Read(NamedTuple):
    """What ranking goes by: a pair, its id, what it speaks of, and in which words."""

    pair: ContrastPair
    id: str
    place: str
    words: frozenset[str]


def read(pair: ContrastPair) -> Read:
    """Return what ranking needs to know of a pair."""
    about = (pair.purpose, pair.transition)
    return Read(pair, pair.id, _place(*about), _words(*about))


class Reader:
    """Reads pairs as ``read`` does, each once: rounds are scored with the same, a memory gives equal ones.

    Of equal pairs the first is held and returned, so that what is known of it can be found by the object.

    Args:
        size: Pairs that are remembered; beyond it all are forgotten.
    """

    def __init__(self, size: int = 4096) -> None:
        self._size = size
        self._objects: dict[int, tuple[ContrastPair, Read]] = {}
        self._ids: dict[str, Read] = {}

    def __call__(self, pair: ContrastPair) -> Read:
        """Return what ranking needs to know of a pair."""
        known = self._objects.get(id(pair))
        if known is not None:
            return known[1]
        if len(self._objects) >= self._size:
            self._objects.clear()
            self._ids.clear()
        found = self._ids.get(pair.id)
        if found is None or found.pair != pair:
            found = self._ids[pair.id] = read(pair)
        self._objects[id(pair)] = (pair, found)  # held, so that no other object takes its place in memory
        return found


def ranked(
    pairs: Sequence[ContrastPair],
    transition: Transition,
    *,
    purpose: str,
    show_same: bool = False,
    read: Callable[[ContrastPair], Read] = read,
) -> tuple[ContrastPair, ...]:
    """Return pairs, each once, the best example first.

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
        read: Reads a pair; a ``Reader`` where the same ones come again.
    """
    asked = _words(purpose, transition)
    own = _place(purpose, transition)
    order = sorted(
        (-_cosine(asked, one.words), pair_id, one.pair)
        for pair_id, one in {one.id: one for one in map(read, pairs)}.items()
        if show_same or one.place != own
    )
    return tuple(_in_turns([pair for _, _, pair in order]))


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


def _place(purpose: str, transition: Transition) -> str:
    return digest([purpose, transition.model_dump(mode="json")])


def _words(purpose: str, transition: Transition) -> frozenset[str]:
    change = show_change(transition.before, transition.after)[:_READ]
    text = f"{purpose[:_READ]}\n{show_action(transition.action)[:_READ]}\n{change}"
    return frozenset(_WORD.findall(unicodedata.normalize("NFKC", text).casefold()))


def _cosine(some: frozenset[str], others: frozenset[str]) -> float:
    if not some or not others:
        return 0.0
    return len(some & others) / math.sqrt(len(some) * len(others))
