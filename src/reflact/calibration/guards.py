"""Rules that an evaluation must keep whatever the model says. Pure.

They are applied in the order of ``GUARDS``. The first four take credit away and nothing gives it back; the
others lower confidence in what is left, which nothing raises. So none undoes what another did.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from reflact.calibration.state_diff import ABSENT_TEXT, FieldChange, TransitionView, view_transition
from reflact.memory.models import Evaluation, Transition

_ESCAPE = re.compile(r'\\[nrt"\\/]')
_SEPARATOR = "\x1e"
"""Stands between texts, so that no quote goes from one into the next."""

_WORD = re.compile(
    r"(?:(?<![^\W\u0e00-\U0010ffff])-)?\d+(?:[.,]\d+)*|(?=[\u0e00-\U0010ffff])\w"
    r"|[\u2600-\u27bf\U0001f000-\U0001faff]|[^\W\d\u0e00-\U0010ffff]+|\x1e"
)
"""A minus belongs to a number unless it joins it to what stands before, as in 5-7."""

_PART_CHARS = 10_000
"""Characters that are compared at a time: a function of C lets nobody else compute until it returns."""

_PART_BREAK = re.compile(r"[\s\"{}\[\]]")
_WHOLE_NUMBER = re.compile(r"(-?\d+)\.0+")
_SIGN_WORDS = frozenset("-+ ")
"""What a diff has before each line; a minus makes another number of one that a line begins with."""

_CONNECTING_WORDS = frozenset(
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


class QuotableTexts:
    """What evidence about a transition may quote: the state after, and what changed."""

    def __init__(self, transition: Transition | TransitionView) -> None:
        texts = view_transition(transition)
        self._locations: dict[str, _QuoteLocation] = {}
        self._before = _WordSequence([texts.before_text])
        self._after = _WordSequence([texts.after_text])
        if all(isinstance(side, str) for side in texts.states):
            lines = texts.change_text.split("\n")
            numbers = [line for line in lines if line[:1] == "-" and line[1:2].isdecimal()]
            unsigned = "\n".join(line[1:] if line[:1] in _SIGN_WORDS else line for line in lines)
            self._old, self._new = _WordSequence(numbers), _WordSequence([])
            self._shown = _WordSequence([unsigned, *numbers])
        else:
            self._old, self._new = (
                _WordSequence(_list_field_values(texts.changed_fields, after=side)) for side in (False, True)
            )
            absent = (f"{field.path} {ABSENT_TEXT}" for field in texts.changed_fields if field.after is None)
            self._shown = _WordSequence([texts.change_text, *absent])

    def find_invented(self, evidence: Sequence[str]) -> tuple[str, ...]:
        """Return those pieces of evidence that are not there, or quote nothing."""
        return tuple(quote for quote in evidence if not self._locate_quote(quote).is_present)

    def find_vanished(self, evidence: Sequence[str]) -> tuple[str, ...]:
        """Return those that stand nowhere but in what is gone: removed lines, values that a field had.

        What names both sides of a change, or says that a field is gone, speaks of the state after.
        """
        return tuple(quote for quote in evidence if self._locate_quote(quote).is_removed)

    def mentions_change(self, evidence: Sequence[str]) -> bool:
        """Whether any piece of evidence speaks of what changed, not only of what was there before."""
        return any(self._locate_quote(quote).is_changed for quote in evidence)

    def _locate_quote(self, quote: str) -> _QuoteLocation:
        """Return the position of a quote; each is searched once."""
        if quote not in self._locations:
            self._locations[quote] = self._search_quote(_WordSequence([quote.replace(_SEPARATOR, " ")]))
        return self._locations[quote]

    def _search_quote(self, quote: _WordSequence) -> _QuoteLocation:
        after, named = self._after.contains(quote), self._new.contains(quote)
        changed = named or self._shown.contains(quote)
        return _QuoteLocation(
            is_present=quote.has_content and (after or changed),
            is_removed=not (after or named) and (self._before.contains(quote) or self._old.contains(quote)),
            is_changed=changed or self._before.contains(quote) != after,
        )


class _QuoteLocation(NamedTuple):
    """If a quote stands: after the step or in the change, only in what is gone, in what changed."""

    is_present: bool
    is_removed: bool
    is_changed: bool


class _WordSequence:
    """Texts as their words in order: all of them, and those that do not only connect."""

    def __init__(self, texts: Sequence[str]) -> None:
        whole: list[str] = []
        telling: list[str] = []
        for number, text in enumerate(texts):
            for words in ([_SEPARATOR] if number else [], *_split_words_by_part(text)):
                whole += _format_run(words)
                telling += _format_run([word for word in words if word not in _CONNECTING_WORDS])
        self.has_content = bool(telling)
        self._views = (_join_runs(whole), _join_runs(telling))

    def contains(self, other: _WordSequence) -> bool:
        """Whether the other text's words stand here side by side."""
        return any(theirs in mine for mine, theirs in zip(self._views, other._views, strict=True))


def split_words(text: str) -> list[str]:
    """Return a text's words in order, as they are compared."""
    return [word for words in _split_words_by_part(text) for word in words]


def _split_words_by_part(text: str) -> Iterator[list[str]]:
    for part in _split_parts(text):
        plain = _ESCAPE.sub(" ", unicodedata.normalize("NFKC", part).casefold())
        words = _WORD.findall(plain)
        yield [*map(_normalize_number, words)] if ".0" in plain else words


def _normalize_number(word: str) -> str:
    whole = _WHOLE_NUMBER.fullmatch(word) if word[-1] == "0" else None
    return word if whole is None else whole[1]


def _split_parts(text: str) -> Iterator[str]:
    """Yield a text in parts that end before a space, a quotation mark or a bracket: no word holds one."""
    start = 0
    while start < len(text):
        found = _PART_BREAK.search(text, start + _PART_CHARS)
        end = len(text) if found is None else found.start()
        yield text[start:end]
        start = end


def _list_field_values(fields: Iterable[FieldChange], *, after: bool) -> list[str]:
    """Return the fields with the value that they have on a side, as far as they are there."""
    sides = ((field.path, field.after if after else field.before) for field in fields)
    return [f"{path} {value}" for path, value in sides if value is not None]


def _format_run(words: Sequence[str]) -> list[str]:
    return ["\x1f".join(words)] if words else []


def _join_runs(runs: Sequence[str]) -> str:
    return "\x1f".join(("", *runs, ""))


class GuardLimits(NamedTuple):
    """What the guards go by; see ``CriticSettings``."""

    max_jump: float
    max_jump_confidence: float
    max_unsupported_confidence: float


class GuardCase(NamedTuple):
    """A transition as guards see it; ``progress_before``: what the state before is worth, None: the evaluation says."""

    has_change: bool
    quotable: QuotableTexts
    limits: GuardLimits
    progress_before: float | None = None

    @classmethod
    def from_transition(
        cls,
        transition: Transition | TransitionView,
        limits: GuardLimits,
        *,
        progress_before: float | None = None,
    ) -> GuardCase:
        """Return what the guards need to know of a transition."""
        texts = view_transition(transition)
        return cls(texts.transition.changes_state, QuotableTexts(texts), limits, progress_before)


def no_change(evaluation: Evaluation, case: GuardCase) -> Evaluation:
    """If nothing changed nothing was achieved: progress after is progress before."""
    return evaluation if case.has_change else _remove_credit(evaluation)


def invented_evidence(evaluation: Evaluation, case: GuardCase) -> Evaluation:
    """Evidence that is not there is struck out; what rests on it gets no credit and little confidence."""
    invented = case.quotable.find_invented(evaluation.evidence) if case.has_change else ()
    if not invented:
        return evaluation
    remaining = tuple(quote for quote in evaluation.evidence if quote not in invented)
    return _cap_confidence(_remove_credit(evaluation), case.limits.max_unsupported_confidence).model_copy(
        update={"evidence": remaining}
    )


def no_evidence(evaluation: Evaluation, case: GuardCase) -> Evaluation:
    """A change that is judged without any evidence gets no credit and little confidence."""
    if not case.has_change or evaluation.evidence:
        return evaluation
    return _cap_confidence(_remove_credit(evaluation), case.limits.max_unsupported_confidence)


def vanished_evidence(evaluation: Evaluation, case: GuardCase) -> Evaluation:
    """A gain for which only what is gone is quoted gets no credit and little confidence: it shows a loss."""
    if not case.has_change or not evaluation.evidence or _select_bearing_evidence(evaluation, case):
        return evaluation
    return _cap_confidence(_remove_credit(evaluation), case.limits.max_unsupported_confidence)


def old_evidence(evaluation: Evaluation, case: GuardCase) -> Evaluation:
    """A change of phi for which only what was there before is quoted gets little confidence."""
    if (
        not case.has_change
        or evaluation.delta == 0
        or case.quotable.mentions_change(_select_bearing_evidence(evaluation, case))
    ):
        return evaluation
    return _cap_confidence(evaluation, case.limits.max_unsupported_confidence)


def jump(evaluation: Evaluation, case: GuardCase) -> Evaluation:
    """A large change of phi in one step gets limited confidence."""
    return (
        _cap_confidence(evaluation, case.limits.max_jump_confidence)
        if abs(evaluation.delta) > case.limits.max_jump
        else evaluation
    )


GUARDS: Final[tuple[Callable[[Evaluation, GuardCase], Evaluation], ...]] = (
    no_change,
    invented_evidence,
    no_evidence,
    vanished_evidence,
    old_evidence,
    jump,
)


def apply_guards(evaluation: Evaluation, case: GuardCase) -> tuple[Evaluation, tuple[str, ...]]:
    """Return what is left of an evaluation, and the names of the guards that changed something."""
    evaluation, names = _set_progress_before(evaluation, case), list[str]()
    for guard in GUARDS:
        left = guard(evaluation, case)
        if left != evaluation:
            names.append(guard.__name__)
        evaluation = left
    return evaluation, tuple(names)


def find_objection(evaluation: Evaluation, case: GuardCase) -> str | None:
    """Return why an evaluation is to be asked for again, or None.

    A difference between two states that differ has to rest on evidence that exists; a gain on more than what is gone.
    """
    evaluation = _set_progress_before(evaluation, case)
    if not case.has_change or evaluation.delta == 0:
        return None
    if not evaluation.evidence:
        return f"evidence is empty: copy words from the state after or from the change, or {_describe_no_change(case)}"
    invented = case.quotable.find_invented(evaluation.evidence)
    if invented:
        return (
            f"evidence {_join_quotes(invented)} stands neither in the state after nor in the change: copy words "
            "that do"
        )
    if _select_bearing_evidence(evaluation, case):
        return None
    return (
        f"evidence {_join_quotes(evaluation.evidence)} is gone in the state after, which shows no gain: copy words from "
        f"the state after, or a change with both its sides, or {_describe_no_change(case)}"
    )


def _select_bearing_evidence(evaluation: Evaluation, case: GuardCase) -> tuple[str, ...]:
    """Return the evidence that can bear the change of phi: what is gone bears a loss and no gain."""
    if evaluation.delta <= 0:
        return evaluation.evidence
    gone = case.quotable.find_vanished(evaluation.evidence)
    return tuple(quote for quote in evaluation.evidence if quote not in gone)


def _join_quotes(quotes: Sequence[str]) -> str:
    return ", ".join(repr(quote[:100]) for quote in quotes[:3])


def _set_progress_before(evaluation: Evaluation, case: GuardCase) -> Evaluation:
    """Return an evaluation whose progress before is the known value, if there is one."""
    if case.progress_before is None or case.progress_before == evaluation.progress_before:
        return evaluation
    return evaluation.model_copy(update={"progress_before": case.progress_before})


def _describe_no_change(case: GuardCase) -> str:
    """Return in words how an evaluation claims no change."""
    if case.progress_before is None:
        return "give equal numbers"
    return f"give {case.progress_before:g} as phi after, since the state before counts {case.progress_before:g} here"


def _remove_credit(evaluation: Evaluation) -> Evaluation:
    return evaluation.model_copy(update={"progress_after": evaluation.progress_before})


def _cap_confidence(evaluation: Evaluation, max_confidence: float) -> Evaluation:
    return evaluation.model_copy(update={"confidence": min(evaluation.confidence, max_confidence)})
