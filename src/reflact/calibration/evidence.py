"""Whether evidence is there: what an evaluation quotes must occur in what it speaks of. Pure.

Texts are compared word by word, so that quotation marks, case, spacing and the spelling of a field (``status:
"paid"``, ``status = paid``) do not matter, and once more without words that only connect (``status changed
from open to paid``). Scripts that write without spaces are compared letter by letter, emoji one by one. A
number is one word with its sign, and 3.0 is 3.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from reflact.calibration.changes import ABSENT, Change
from reflact.calibration.seen import Seen, seen
from reflact.memory import Transition

_ESCAPE = re.compile(r'\\[nrt"\\/]')
_APART = "\x1e"
"""Stands between texts, so that no quote goes from one into the next."""

_WORD = re.compile(
    r"(?:(?<![^\W\u0e00-\U0010ffff])-)?\d+(?:[.,]\d+)*|(?=[\u0e00-\U0010ffff])\w"
    r"|[\u2600-\u27bf\U0001f000-\U0001faff]|[^\W\d\u0e00-\U0010ffff]+|\x1e"
)
"""A minus belongs to a number unless it joins it to what stands before, as in 5-7."""

_PART = 10_000
"""Characters that are compared at a time: a function of C lets nobody else compute until it returns."""

_BREAK = re.compile(r"[\s\"{}\[\]]")
_WHOLE = re.compile(r"(-?\d+)\.0+")
_SIGNS = frozenset("-+ ")
"""What a diff has before each line; a minus makes another number of one that a line begins with."""

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

    def __init__(self, transition: Transition | Seen) -> None:
        texts = seen(transition)
        self._known: dict[str, _Standing] = {}
        self._before = _Words([texts.before])
        self._after = _Words([texts.after])
        if all(isinstance(side, str) for side in texts.sides):
            lines = texts.change.split("\n")
            numbers = [line for line in lines if line[:1] == "-" and line[1:2].isdecimal()]
            unsigned = "\n".join(line[1:] if line[:1] in _SIGNS else line for line in lines)
            self._old, self._new = _Words(numbers), _Words([])
            self._shown = _Words([unsigned, *numbers])
        else:
            self._old, self._new = (_Words(_sides(texts.fields, after=side)) for side in (False, True))
            absent = (f"{field.path} {ABSENT}" for field in texts.fields if field.after is None)
            self._shown = _Words([texts.change, *absent])

    def unfounded(self, evidence: Sequence[str]) -> tuple[str, ...]:
        """Return those pieces of evidence that are not there, or quote nothing."""
        return tuple(quote for quote in evidence if not self._standing(quote).there)

    def gone(self, evidence: Sequence[str]) -> tuple[str, ...]:
        """Return those that stand nowhere but in what is gone: removed lines, values that a field had.

        What names both sides of a change (``status: open -> paid``), or says that a field is not there any
        more, speaks of the state after and is not among them.
        """
        return tuple(quote for quote in evidence if self._standing(quote).gone)

    def new(self, evidence: Sequence[str]) -> bool:
        """Whether any piece of evidence speaks of what changed, not only of what was there before."""
        return any(self._standing(quote).new for quote in evidence)

    def _standing(self, quote: str) -> _Standing:
        """Return where a quote stands; each is looked for once."""
        if quote not in self._known:
            self._known[quote] = self._looked_for(_Words([quote.replace(_APART, " ")]))
        return self._known[quote]

    def _looked_for(self, quote: _Words) -> _Standing:
        after, named = self._after.holds(quote), self._new.holds(quote)
        changed = named or self._shown.holds(quote)
        return _Standing(
            there=quote.tells and (after or changed),
            gone=not (after or named) and (self._before.holds(quote) or self._old.holds(quote)),
            new=changed or self._before.holds(quote) != after,
        )


class _Standing(NamedTuple):
    """Where a quote stands: after the step or in the change, only in what is gone, in what changed."""

    there: bool
    gone: bool
    new: bool


class _Words:
    """Texts as their words in order: all of them, and those that do not only connect."""

    def __init__(self, texts: Sequence[str]) -> None:
        whole: list[str] = []
        telling: list[str] = []
        for number, text in enumerate(texts):
            for words in ([_APART] if number else [], *_words_by_part(text)):
                whole += _run(words)
                telling += _run([word for word in words if word not in _CONNECTING])
        self.tells = bool(telling)
        self._views = (_joined(whole), _joined(telling))

    def holds(self, other: _Words) -> bool:
        """Whether the other text's words stand here side by side."""
        return any(theirs in mine for mine, theirs in zip(self._views, other._views, strict=True))


def words_of(text: str) -> list[str]:
    """Return a text's words in order, as they are compared."""
    return [word for words in _words_by_part(text) for word in words]


def _words_by_part(text: str) -> Iterator[list[str]]:
    for part in _parts(text):
        plain = _ESCAPE.sub(" ", unicodedata.normalize("NFKC", part).casefold())
        words = _WORD.findall(plain)
        yield [*map(_plain_number, words)] if ".0" in plain else words


def _plain_number(word: str) -> str:
    whole = _WHOLE.fullmatch(word) if word[-1] == "0" else None
    return word if whole is None else whole[1]


def _parts(text: str) -> Iterator[str]:
    """Yield a text in parts that end before a space, a quotation mark or a bracket: no word holds one."""
    start = 0
    while start < len(text):
        found = _BREAK.search(text, start + _PART)
        end = len(text) if found is None else found.start()
        yield text[start:end]
        start = end


def _sides(fields: Iterable[Change], *, after: bool) -> list[str]:
    """Return the fields with the value that they have on a side, as far as they are there."""
    sides = ((field.path, field.after if after else field.before) for field in fields)
    return [f"{path} {value}" for path, value in sides if value is not None]


def _run(words: Sequence[str]) -> list[str]:
    return ["\x1f".join(words)] if words else []


def _joined(runs: Sequence[str]) -> str:
    return "\x1f".join(("", *runs, ""))
