"""Rules that an evaluation must keep whatever the model says. Pure.

They are applied in the order of ``GUARDS``. The first four take credit away and nothing gives it back; the
others lower confidence in what is left, which nothing raises. So none undoes what another did.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from reflact.calibration.changes import ABSENT, Change, Seen, seen
from reflact.memory import Evaluation, Transition

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


class Limits(NamedTuple):
    """What the guards go by; see ``CriticSettings``."""

    jump: float
    jump_confidence: float
    unsupported_confidence: float


class Case(NamedTuple):
    """A transition as guards see it.

    Args:
        changed: Whether its states differ.
        grounds: What evidence may quote.
        limits: What the guards go by.
        phi_before: What the state before is worth whatever an evaluation says; None: that is its to say.
    """

    changed: bool
    grounds: Grounds
    limits: Limits
    phi_before: float | None = None

    @classmethod
    def of(cls, transition: Transition | Seen, limits: Limits, *, phi_before: float | None = None) -> Case:
        """Return what the guards need to know of a transition."""
        texts = seen(transition)
        return cls(texts.transition.changed, Grounds(texts), limits, phi_before)


def no_change(said: Evaluation, case: Case) -> Evaluation:
    """Where nothing changed nothing was achieved: phi after is phi before."""
    return said if case.changed else _no_credit(said)


def invented_evidence(said: Evaluation, case: Case) -> Evaluation:
    """Evidence that is not there is struck out; what rests on it gets no credit and little confidence."""
    invented = case.grounds.unfounded(said.evidence) if case.changed else ()
    if not invented:
        return said
    kept = tuple(quote for quote in said.evidence if quote not in invented)
    return _at_most(_no_credit(said), case.limits.unsupported_confidence).model_copy(
        update={"evidence": kept}
    )


def no_evidence(said: Evaluation, case: Case) -> Evaluation:
    """A change that is judged without any evidence gets no credit and little confidence."""
    if not case.changed or said.evidence:
        return said
    return _at_most(_no_credit(said), case.limits.unsupported_confidence)


def vanished_evidence(said: Evaluation, case: Case) -> Evaluation:
    """A gain for which only what is gone is quoted gets no credit and little confidence: it shows a loss."""
    if not case.changed or not said.evidence or _bearing(said, case):
        return said
    return _at_most(_no_credit(said), case.limits.unsupported_confidence)


def old_evidence(said: Evaluation, case: Case) -> Evaluation:
    """A change of phi for which only what was there before is quoted gets little confidence."""
    if not case.changed or said.delta == 0 or case.grounds.new(_bearing(said, case)):
        return said
    return _at_most(said, case.limits.unsupported_confidence)


def jump(said: Evaluation, case: Case) -> Evaluation:
    """A large change of phi in one step gets limited confidence."""
    return _at_most(said, case.limits.jump_confidence) if abs(said.delta) > case.limits.jump else said


GUARDS: Final[tuple[Callable[[Evaluation, Case], Evaluation], ...]] = (
    no_change,
    invented_evidence,
    no_evidence,
    vanished_evidence,
    old_evidence,
    jump,
)


def guarded(said: Evaluation, case: Case) -> tuple[Evaluation, tuple[str, ...]]:
    """Return what is left of an evaluation, and the names of the guards that changed something."""
    said, names = _counted(said, case), list[str]()
    for guard in GUARDS:
        left = guard(said, case)
        if left != said:
            names.append(guard.__name__)
        said = left
    return said, tuple(names)


def objection(said: Evaluation, case: Case) -> str | None:
    """Return why an evaluation is to be asked for again, or None.

    A difference between two states that differ has to rest on evidence, and on none that is invented; a gain
    on more than what is gone.
    """
    said = _counted(said, case)
    if not case.changed or said.delta == 0:
        return None
    if not said.evidence:
        return f"evidence is empty: copy words from the state after or from the change, or {_withdrawn(case)}"
    invented = case.grounds.unfounded(said.evidence)
    if invented:
        return (
            f"evidence {_listed(invented)} stands neither in the state after nor in the change: copy words "
            "that do"
        )
    if _bearing(said, case):
        return None
    return (
        f"evidence {_listed(said.evidence)} is gone in the state after, which shows no gain: copy words from "
        f"the state after, or a change with both its sides, or {_withdrawn(case)}"
    )


def _bearing(said: Evaluation, case: Case) -> tuple[str, ...]:
    """Return the evidence that can bear the change of phi: what is gone bears a loss and no gain."""
    if said.delta <= 0:
        return said.evidence
    gone = case.grounds.gone(said.evidence)
    return tuple(quote for quote in said.evidence if quote not in gone)


def _listed(quotes: Sequence[str]) -> str:
    return ", ".join(repr(quote[:100]) for quote in quotes[:3])


def _counted(said: Evaluation, case: Case) -> Evaluation:
    """Return an evaluation from where it counts: the state before is worth what is known of it."""
    if case.phi_before is None or case.phi_before == said.phi_before:
        return said
    return said.model_copy(update={"phi_before": case.phi_before})


def _withdrawn(case: Case) -> str:
    """Return in words how an evaluation claims no change."""
    if case.phi_before is None:
        return "give equal numbers"
    return f"give {case.phi_before:g} as phi after, since the state before counts {case.phi_before:g} here"


def _no_credit(said: Evaluation) -> Evaluation:
    return said.model_copy(update={"phi_after": said.phi_before})


def _at_most(said: Evaluation, confidence: float) -> Evaluation:
    return said.model_copy(update={"confidence": min(said.confidence, confidence)})
