"""Whether evidence is there: what an evaluation quotes must occur in what it speaks of. Pure.

Texts are compared word by word, so that quotation marks, case, spacing and the spelling of a field (``status:
"paid"``, ``status = paid``) do not matter, and once more without words that only connect (``status changed
from open to paid``). Scripts that write without spaces are compared letter by letter, emoji one by one. A
number is one word with its sign, and 3.0 is 3.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence

from reflact.calibration.changes import ABSENT, Change, changes, show_change, show_state
from reflact.memory import Transition

_ESCAPE = re.compile(r'\\[nrt"\\/]')
_APART = "\x1e"
"""Stands between texts, so that no quote goes from one into the next."""

_WORD = re.compile(
    r"(?:(?<![^\W\u0e00-\U0010ffff])-)?\d+(?:[.,]\d+)*|(?=[\u0e00-\U0010ffff])\w"
    r"|[\u2600-\u27bf\U0001f000-\U0001faff]|[^\W\d\u0e00-\U0010ffff]+|\x1e"
)
"""A minus belongs to a number unless it joins it to what stands before, as in 5-7."""

_WHOLE = re.compile(r"(-?\d+)\.0+")
_SIGNED = re.compile(r"^-\d.*", re.MULTILINE)
"""A line that is gone and begins with a number, as a diff shows it: it looks like another number."""

_SIGN = re.compile(r"^[-+ ]", re.MULTILINE)
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
        before, after = transition.before, transition.after
        shown = show_change(before, after)
        self._before = _Words([show_state(before)])
        self._after = _Words([show_state(after)])
        if isinstance(before, str) and isinstance(after, str):
            signed = _SIGNED.findall(shown)
            self._old, self._new = _Words(signed), _Words([])
            self._shown = _Words([_SIGN.sub("", shown), *signed])
        else:
            fields = [*changes(before, after)]
            self._old, self._new = (_Words(_sides(fields, after=side)) for side in (False, True))
            absent = (f"{field.path} {ABSENT}" for field in fields if field.after is None)
            self._shown = _Words([shown, *absent])

    def unfounded(self, evidence: Sequence[str]) -> tuple[str, ...]:
        """Return those pieces of evidence that are not there, or quote nothing."""
        return tuple(quote for quote in evidence if not self._hold(_quoted(quote)))

    def gone(self, evidence: Sequence[str]) -> tuple[str, ...]:
        """Return those that stand nowhere but in what is gone: removed lines, values that a field had.

        What names both sides of a change (``status: open -> paid``), or says that a field is not there any
        more, speaks of the state after and is not among them.
        """
        return tuple(quote for quote in evidence if self._is_gone(_quoted(quote)))

    def new(self, evidence: Sequence[str]) -> bool:
        """Whether any piece of evidence speaks of what changed, not only of what was there before."""
        return any(self._changed(_quoted(quote)) for quote in evidence)

    def _hold(self, quote: _Words) -> bool:
        return quote.tells and (self._after.holds(quote) or self._in_changes(quote))

    def _is_gone(self, quote: _Words) -> bool:
        was_there = self._before.holds(quote) or self._old.holds(quote)
        return was_there and not self._after.holds(quote) and not self._new.holds(quote)

    def _changed(self, quote: _Words) -> bool:
        return self._in_changes(quote) or self._before.holds(quote) != self._after.holds(quote)

    def _in_changes(self, quote: _Words) -> bool:
        return self._shown.holds(quote) or self._new.holds(quote)


class _Words:
    """Texts as their words in order: all of them, and those that do not only connect."""

    def __init__(self, texts: Sequence[str]) -> None:
        found = words_of(_APART.join(texts))
        telling = [word for word in found if word not in _CONNECTING]
        self.tells = any(word != _APART for word in telling)
        self._views = (_joined(found), _joined(telling))

    def holds(self, other: _Words) -> bool:
        """Whether the other text's words stand here side by side."""
        return any(theirs in mine for mine, theirs in zip(self._views, other._views, strict=True))


def _quoted(quote: str) -> _Words:
    return _Words([quote.replace(_APART, " ")])


def words_of(text: str) -> list[str]:
    """Return a text's words in order, as they are compared."""
    plain = _ESCAPE.sub(" ", unicodedata.normalize("NFKC", text).casefold())
    return [_plain_number(found.group()) for found in _WORD.finditer(plain)]


def _plain_number(word: str) -> str:
    whole = _WHOLE.fullmatch(word) if word.endswith("0") else None
    return word if whole is None else whole[1]


def _sides(fields: Iterable[Change], *, after: bool) -> list[str]:
    """Return the fields with the value that they have on a side, as far as they are there."""
    sides = ((field.path, field.after if after else field.before) for field in fields)
    return [f"{path} {value}" for path, value in sides if value is not None]


def _joined(words: Sequence[str]) -> str:
    return "\x1f" + "".join(f"{word}\x1f" for word in words)
