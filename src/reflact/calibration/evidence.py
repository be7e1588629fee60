"""Whether evidence is there: what an evaluation quotes must occur in what it speaks of. Pure.

Texts are compared word by word, so that quotation marks, case, spacing and the spelling of a field (``status:
"paid"``, ``status = paid``) do not matter, and once more without words that only connect (``status changed
from open to paid``). Scripts that write without spaces are compared letter by letter, emoji one by one.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence

from reflact.calibration.changes import changes, show_change, show_state
from reflact.memory import Transition

_ESCAPE = re.compile(r'\\[nrt"\\/]')
_WORD = re.compile(
    r"-?\d+(?:[.,]\d+)*|(?=[\u0e00-\U0010ffff])\w|[\u2600-\u27bf\U0001f000-\U0001faff]|[^\W\d\u0e00-\U0010ffff]+"
)
_CONNECTING = frozenset(
    {
        "a",
        "an",
        "and",
        "are",
        "as",
        "at",
        "became",
        "been",
        "changed",
        "contains",
        "equals",
        "field",
        "from",
        "has",
        "have",
        "in",
        "into",
        "is",
        "it",
        "its",
        "new",
        "now",
        "of",
        "old",
        "set",
        "shows",
        "state",
        "the",
        "to",
        "updated",
        "value",
        "was",
        "went",
        "were",
        "with",
    }
)


class Grounds:
    """What evidence about a transition may quote: the state after, and what changed."""

    def __init__(self, transition: Transition) -> None:
        self._before = _Words(show_state(transition.before))
        self._after = _Words(show_state(transition.after))
        self._changes = [_Words(text) for text in _changes(transition)]

    def unfounded(self, evidence: Sequence[str]) -> tuple[str, ...]:
        """Return those pieces of evidence that are not there, or quote nothing."""
        return tuple(quote for quote in evidence if not self._hold(_Words(quote)))

    def new(self, evidence: Sequence[str]) -> bool:
        """Whether any piece of evidence speaks of what changed, not only of what was there before."""
        return any(self._changed(_Words(quote)) for quote in evidence)

    def _hold(self, quote: _Words) -> bool:
        return quote.tells and (self._after.holds(quote) or self._in_changes(quote))

    def _changed(self, quote: _Words) -> bool:
        return self._in_changes(quote) or self._before.holds(quote) != self._after.holds(quote)

    def _in_changes(self, quote: _Words) -> bool:
        return any(source.holds(quote) for source in self._changes)


class _Words:
    """A text as its words in order: all of them, and those that do not only connect."""

    def __init__(self, text: str) -> None:
        plain = _ESCAPE.sub(" ", unicodedata.normalize("NFKC", text).casefold())
        found = _WORD.findall(plain)
        telling = [word for word in found if word not in _CONNECTING]
        self.tells = bool(telling)
        self._views = (_joined(found), _joined(telling))

    def holds(self, other: _Words) -> bool:
        """Whether the other text's words stand here side by side."""
        return any(theirs in mine for mine, theirs in zip(self._views, other._views, strict=True))


def _changes(transition: Transition) -> Iterator[str]:
    yield show_change(transition.before, transition.after)
    for change in changes(transition.before, transition.after):
        yield f"{change.path} {change.after or ''}"


def _joined(words: Sequence[str]) -> str:
    return "\x1f" + "".join(f"{word}\x1f" for word in words)
