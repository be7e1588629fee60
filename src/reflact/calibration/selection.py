"""Which pairs a critic is shown: the relevant ones, the kinds of mistakes balanced. Pure.

The choice depends on the pairs and on what is scored alone: not on the order in which pairs come, nor on
anything that differs between processes.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections import defaultdict
from collections.abc import Sequence
from itertools import zip_longest

from reflact.calibration.changes import show_change
from reflact.calibration.showing import show_action
from reflact.memory import ContrastPair, Transition
from reflact.types import digest

_WORD = re.compile(r"[\u0e00-\U0010ffff]|[^\W_\u0e00-\U0010ffff]+")
_READ = 4000
_SEARCHED = 200


def ranked(
    pairs: Sequence[ContrastPair], transition: Transition, *, purpose: str, show_same: bool = False
) -> tuple[ContrastPair, ...]:
    """Return pairs, each once, the best example first.

    Kinds of mistakes take turns, the kind with the most relevant pair first, so that any beginning of the
    result holds them in equal numbers, as far as there are as many. Within a kind the more relevant comes
    first; ties go by id. Relevance is the cosine of the sets of words in purpose, action and change.

    Args:
        pairs: The candidates.
        transition: What is to be scored.
        purpose: Under which purpose.
        show_same: Keep pairs of the same transition under the same purpose, which give the answer away.
    """
    asked = _words(purpose, transition)
    own = _place(purpose, transition)
    order = sorted(
        (-_cosine(asked, _words(pair.purpose, pair.transition)), pair_id, pair)
        for pair_id, pair in {pair.id: pair for pair in pairs}.items()
        if show_same or _place(pair.purpose, pair.transition) != own
    )
    kinds: dict[str, list[ContrastPair]] = defaultdict(list)
    for _, _, pair in order:
        kinds[pair.mistake].append(pair)
    turns = zip_longest(*kinds.values())
    return tuple(pair for turn in turns for pair in turn if pair is not None)


def search_text(purpose: str, transition: Transition) -> str:
    """Return what a memory is searched with: the action, the beginning of the change, the purpose."""
    change = show_change(transition.before, transition.after)[:_SEARCHED]
    return f"{transition.action.name}\n{change}\n{purpose}"


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
