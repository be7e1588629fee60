"""Rules that an evaluation must keep whatever the model says. Pure.

Some take credit away and nothing gives it back; the others lower confidence, which nothing raises.
So none undoes what another did.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple

from reflact.calibration.transition_view import ABSENT_TEXT, TransitionView
from reflact.memory.models import Evaluation

_ESCAPE = re.compile(r'\\[nrt"\\/]')

# Stands between texts, so that no quote goes from one into the next.
_SEPARATOR = "\x1e"

# A minus belongs to a number unless it joins it to what stands before, as in 5-7.
_WORD = re.compile(
    r"(?:(?<![^\W\u0e00-\U0010ffff])-)?\d+(?:[.,]\d+)*|(?=[\u0e00-\U0010ffff])\w"
    r"|[\u2600-\u27bf\U0001f000-\U0001faff]|[^\W\d\u0e00-\U0010ffff]+|\x1e"
)

_WHOLE_NUMBER = re.compile(r"^(-?\d+)\.0+$")

# What a diff has before each line; a minus makes another number of one that a line begins with.
_SIGN_WORDS = frozenset("-+ ")

_CONNECTING_TEXT = (
    "a an and are as at became been changed contains equals field from has have in into is it its "
    "new now of old set shows state the to updated value was went were with"
)
_CONNECTING_WORDS = frozenset(_CONNECTING_TEXT.split())


class QuotableTexts:
    """What evidence about a transition may quote: the state after, and what changed."""

    def __init__(self, view: TransitionView) -> None:
        self._before = _WordSequence([view.before_text])
        self._after = _WordSequence([view.after_text])
        if view.has_texts:
            lines = view.change_text.split("\n")
            # A removed line that begins with a digit: its sign may belong to the number.
            old = [line for line in lines if line[:1] == "-" and line[1:2].isdecimal()]
            new: list[str] = []
            unsigned = [line[1:] if line[:1] in _SIGN_WORDS else line for line in lines]
            shown = ["\n".join(unsigned), *old]
        else:
            fields = view.changed_fields
            old = [f"{one.path} {one.before}" for one in fields if one.before is not None]
            new = [f"{one.path} {one.after}" for one in fields if one.after is not None]
            gone = [f"{one.path} {ABSENT_TEXT}" for one in fields if one.after is None]
            shown = [view.change_text, *gone]
        self._old = _WordSequence(old)
        self._new = _WordSequence(new)
        self._shown = _WordSequence(shown)

    def find_invented(self, evidence: Sequence[str]) -> tuple[str, ...]:
        """Return those pieces of evidence that are not there, or quote nothing."""
        invented = []
        for piece in evidence:
            quote = _parse_quote(piece)
            if not quote.has_content or not quote.is_in(self._after, self._new, self._shown):
                invented.append(piece)
        return tuple(invented)

    def find_vanished(self, evidence: Sequence[str]) -> tuple[str, ...]:
        """Return those that stand nowhere but in what is gone: removed lines, values that a field
        had.

        What names both sides of a change, or says that a field is gone, speaks of the state after.
        """
        vanished = []
        for piece in evidence:
            quote = _parse_quote(piece)
            if quote.is_in(self._before, self._old) and not quote.is_in(self._after, self._new):
                vanished.append(piece)
        return tuple(vanished)

    def mentions_change(self, evidence: Sequence[str]) -> bool:
        """Whether any evidence speaks of what changed, not only of what was there before."""
        return any(
            quote.is_in(self._new, self._shown)
            or quote.is_in(self._before) != quote.is_in(self._after)
            for quote in map(_parse_quote, evidence)
        )


class _WordSequence:
    """Texts as their words in order: all of them, and those that do not only connect."""

    def __init__(self, texts: Sequence[str]) -> None:
        words = [word for text in texts for word in (_SEPARATOR, *split_words(text))][1:]
        telling = [word for word in words if word not in _CONNECTING_WORDS]
        self.has_content = bool(telling)
        self._views = tuple("\x1f".join(("", *view, "")) for view in (words, telling))

    def is_in(self, *others: _WordSequence) -> bool:
        """Whether these words stand side by side in any of the others."""
        return any(
            own in view
            for other in others
            for own, view in zip(self._views, other._views, strict=True)
        )


def _parse_quote(text: str) -> _WordSequence:
    return _WordSequence([text.replace(_SEPARATOR, " ")])


def split_words(text: str) -> list[str]:
    """Return a text's words in order, as they are compared; 5.0 is 5."""
    plain = _ESCAPE.sub(" ", unicodedata.normalize("NFKC", text).casefold())
    return [_WHOLE_NUMBER.sub(r"\1", word) for word in _WORD.findall(plain)]


# The largest change of progress in one step whose confidence is not limited.
MAX_JUMP = 4.0

# A larger change is as likely right as wrong, whatever the model says.
MAX_JUMP_CONFIDENCE = 0.5

# Without evidence, or with quotes that do not occur, little confidence is left.
MAX_UNSUPPORTED_CONFIDENCE = 0.2


class GuardCase(NamedTuple):
    """A transition as guards see it; ``progress_before`` is set if it is known by definition."""

    has_change: bool
    quotable: QuotableTexts
    progress_before: float | None = None

    def list_bearing_evidence(self, evaluation: Evaluation) -> tuple[str, ...]:
        """Return the evidence that can bear the change of progress: what is gone bears no gain."""
        if evaluation.delta <= 0:
            return evaluation.evidence
        gone = self.quotable.find_vanished(evaluation.evidence)
        return tuple(quote for quote in evaluation.evidence if quote not in gone)

    def set_progress_before(self, evaluation: Evaluation) -> Evaluation:
        """Return an evaluation with the known progress before, if it is known."""
        if self.progress_before is None:
            return evaluation
        return evaluation.model_copy(update={"progress_before": self.progress_before})


def deny_invented_evidence(evaluation: Evaluation, case: GuardCase) -> Evaluation:
    """Evidence that is not there is struck out, and what rests on it gets no credit."""
    invented = case.quotable.find_invented(evaluation.evidence)
    if not invented:
        return evaluation
    remaining = tuple(quote for quote in evaluation.evidence if quote not in invented)
    return _deny_credit(evaluation).model_copy(update={"evidence": remaining})


def deny_missing_evidence(evaluation: Evaluation, case: GuardCase) -> Evaluation:
    """A change that is judged without any evidence gets no credit and little confidence."""
    return evaluation if evaluation.evidence else _deny_credit(evaluation)


def deny_vanished_evidence(evaluation: Evaluation, case: GuardCase) -> Evaluation:
    """A gain for which only what is gone is quoted gets no credit."""
    if not evaluation.evidence or case.list_bearing_evidence(evaluation):
        return evaluation
    return _deny_credit(evaluation)


def doubt_old_evidence(evaluation: Evaluation, case: GuardCase) -> Evaluation:
    """A change for which only what was there before is quoted gets little confidence."""
    bearing = case.list_bearing_evidence(evaluation)
    if evaluation.delta == 0 or case.quotable.mentions_change(bearing):
        return evaluation
    return _cap_confidence(evaluation, MAX_UNSUPPORTED_CONFIDENCE)


def doubt_jump(evaluation: Evaluation, case: GuardCase) -> Evaluation:
    """A large change of progress in one step gets limited confidence."""
    if abs(evaluation.delta) <= MAX_JUMP:
        return evaluation
    return _cap_confidence(evaluation, MAX_JUMP_CONFIDENCE)


# The guards of a transition that changed something, by the names in scores, in the order of their
# application.
GUARDS: Final[Mapping[str, Callable[[Evaluation, GuardCase], Evaluation]]] = MappingProxyType(
    {
        "invented_evidence": deny_invented_evidence,
        "no_evidence": deny_missing_evidence,
        "vanished_evidence": deny_vanished_evidence,
        "old_evidence": doubt_old_evidence,
        "jump": doubt_jump,
    }
)


def apply_guards(evaluation: Evaluation, case: GuardCase) -> tuple[Evaluation, tuple[str, ...]]:
    """Return what is left of an evaluation, and the names of the guards that changed something.

    If nothing changed, nothing was achieved: the guard ``no_change`` makes progress after progress
    before.
    """
    evaluation = case.set_progress_before(evaluation)
    if not case.has_change:
        if evaluation.delta == 0:
            return evaluation, ()
        return _remove_credit(evaluation), ("no_change",)
    names = []
    for name, guard in GUARDS.items():
        left = guard(evaluation, case)
        if left != evaluation:
            names.append(name)
        evaluation = left
    return evaluation, tuple(names)


def find_objection(evaluation: Evaluation, case: GuardCase) -> str | None:
    """Return why an evaluation is to be asked for again, or None.

    A difference between two states that differ has to rest on evidence that exists; a gain on more
    than what is gone.
    """
    evaluation = case.set_progress_before(evaluation)
    if not case.has_change or evaluation.delta == 0:
        return None
    known = case.progress_before
    claim_no_change = "give equal numbers"
    if known is not None:
        claim_no_change = (
            f"give {known:g} as phi after, since the state before counts {known:g} here"
        )
    if not evaluation.evidence:
        return (
            "evidence is empty: copy words from the state after or from the change, or "
            f"{claim_no_change}"
        )
    invented = case.quotable.find_invented(evaluation.evidence)
    if invented:
        return (
            f"evidence {_join_quotes(invented)} stands neither in the state after nor in the "
            "change: copy words that do"
        )
    if case.list_bearing_evidence(evaluation):
        return None
    return (
        f"evidence {_join_quotes(evaluation.evidence)} is gone in the state after, which shows no "
        "gain: copy words from the state after, or a change with both its sides, or "
        f"{claim_no_change}"
    )


def _join_quotes(quotes: Sequence[str]) -> str:
    return ", ".join(repr(quote[:100]) for quote in quotes[:3])


def _remove_credit(evaluation: Evaluation) -> Evaluation:
    return evaluation.model_copy(update={"progress_after": evaluation.progress_before})


def _deny_credit(evaluation: Evaluation) -> Evaluation:
    return _cap_confidence(_remove_credit(evaluation), MAX_UNSUPPORTED_CONFIDENCE)


def _cap_confidence(evaluation: Evaluation, max_confidence: float) -> Evaluation:
    return evaluation.model_copy(update={"confidence": min(evaluation.confidence, max_confidence)})
