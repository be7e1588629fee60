"""Graders: they compare an answer with an item's reference.

A reference is one accepted answer or a list of accepted answers; with a list the best match counts. Each
grader's docstring states the references that it accepts; ``check`` refuses all others.

An environment also accepts any function ``(item, answer)``, plain or async, that returns a ``Grade``, a
``Score``, a number in 0..1 or a truth value.
"""

from __future__ import annotations

import inspect
import json
import math
import re
import unicodedata
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NoReturn, Self, TypeAlias, TypeVar

from pydantic import Field, JsonValue

from reflact.concurrency import INLINE_LIMIT, run_in_thread
from reflact.config.training import EnvironmentConfig
from reflact.errors import ConfigError, DataError, EnvironmentFailure
from reflact.types import FrozenModel, Grade, Item, Score

if TYPE_CHECKING:
    from regex import Pattern


PART_CHARS = 2_000
"""Longer texts are normalized in parts of about this length, in characters."""

MAX_NUMBER_CHARS = 10_000
"""Maximum length of a number, in characters."""

MAX_JSON_CHARS = 500_000
"""Maximum length of an answer in JSON, in characters."""

SHOWN_CHARS = 300
"""Maximum length of ``quote_json``, in characters."""


def normalize(text: str) -> str:
    r"""Return a text as the ``normalized`` grader compares it.

    In this order: Unicode NFKC, case folding, NFKC; runs of white space become one space; white space and
    punctuation (Unicode category P, and the backtick) are stripped at both ends. Exceptions are
    ``% # @ & / \``, and a dash or a leading full stop next to a letter or a digit, because they carry
    meaning (``-5``, ``.5``, ``5%``, ``C#``).
    """
    return _strip_edges(_fold_text(text))


def tokenize(text: str) -> tuple[str, ...]:
    """Return the words of a text, as the ``token_f1`` grader counts them.

    The text is split at white space and each word is normalized. ``a``, ``an`` and ``the`` are left out,
    unless the text has no other words.
    """
    return tuple(_iter_words(text))


def _iter_words(text: str) -> Iterator[str]:
    articles, others = [], False
    for match in _WORD.finditer(_fold_text(text)):
        word = _strip_edges(match[0])
        if word in {"a", "an", "the"}:
            if not others:
                articles.append(word)
        elif word:
            others = True
            yield word
    if not others:
        for word in articles:  # unlike `yield from`, a loop lets other threads run
            yield word


def _fold_text(text: str) -> str:
    """Return a text in NFKC and case-folded, each run of white space as one space."""
    pieces: list[str] = []
    is_gap = False
    for part in _split_text(text):
        folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", part).casefold())
        words = folded.split()
        if words and pieces and (is_gap or folded[0].isspace()):
            pieces.append(" ")
        pieces.append(" ".join(words))
        is_gap = folded[-1:].isspace() or (is_gap and not words)
    return "".join(pieces).strip()


def _split_text(text: str) -> Iterator[str]:
    """Yield a text in parts, because the time for NFKC grows with the square of the marks on one letter.

    A part ends before a character that joins no other, if there is one.
    """
    start = 0
    while len(text) - start > PART_CHARS:
        match = _SEPARATE.search(text, start + PART_CHARS // 2, start + PART_CHARS)
        end = start + PART_CHARS if match is None else match.start()
        yield text[start:end]
        start = end
    yield text[start:]


def _strip_edges(text: str) -> str:
    start, end = 0, len(text)
    while start < end and _is_edge(text[start], text[start + 1 : min(start + 2, end)], keeps_point=True):
        start += 1
    while start < end and _is_edge(text[end - 1], text[max(start, end - 2) : end - 1], keeps_point=False):
        end -= 1
    return text[start:end]


def _is_edge(char: str, neighbour: str, *, keeps_point: bool) -> bool:
    if char == "`" or char.isspace():
        return True
    category = unicodedata.category(char)
    if not category.startswith("P") or char in "%#@&/\\":
        return False
    carries_meaning = category == "Pd" or (keeps_point and char == ".")
    return not (carries_meaning and neighbour.isalnum())


_WORD = re.compile("[^ ]+")
_SEPARATE = re.compile("[\x00-\x7f\u3400-\u4dbf\u4e00-\u9fff]")
"""ASCII and Chinese characters; none of them joins the character before it."""

_NUMBER = re.compile(
    r"(?P<sign>[+-])?(?P<digits>(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+)"
    r"(?P<exponent>e[+-]?[0-9]+)?\s*(?P<percent>%)?",
    re.IGNORECASE,
)


def parse_number(text: str) -> float | None:
    """Return a text as a number; None if it is anything else.

    White space at both ends is ignored. A number is decimal digits with, each optional: a sign (``+``,
    ``-`` or the minus sign U+2212), commas between groups of three digits before the decimal point, a
    decimal point, an exponent, and a per cent sign, which divides by 100 (``12.5%`` is 0.125). Never a
    number: ``1,5``, ``1.234,5``, ``$5``, ``5 km``, ``1/2``, ``0x10``, NaN, infinity, what overflows, and a text
    of more than ``MAX_NUMBER_CHARS``.
    """
    bare = text.strip()
    match = None if len(bare) > MAX_NUMBER_CHARS else _NUMBER.fullmatch(bare.replace("\u2212", "-"))
    if match is None:
        return None
    digits = match["digits"].replace(",", "")
    value = float(f"{match['sign'] or ''}{digits}{match['exponent'] or ''}")
    return to_finite(value / 100 if match["percent"] else value)


def to_finite(value: float) -> float | None:
    """Return a number as a float; None if that is not finite."""
    try:
        real = float(value)
    except OverflowError:
        return None
    return real if math.isfinite(real) else None


def parse_strict_json(text: str) -> Any:
    """Return the value of a JSON text, without any tolerance.

    Raises:
        ValueError: It is not JSON, repeats a name, or holds NaN, infinity or a number out of range.
        RecursionError: It is nested too deeply.
    """
    return json.loads(
        text, object_pairs_hook=_build_object, parse_constant=_refuse_number, parse_float=_parse_finite
    )


def _build_object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        raise ValueError("an object has a name twice")
    return result


def _parse_finite(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _refuse_number(text)


def _refuse_number(text: str) -> NoReturn:
    raise ValueError(f"{text[:20]} is not a finite number")


def json_equal(one: JsonValue, other: JsonValue) -> bool:
    """Return whether two JSON values are equal; 1 equals 1.0, but not true."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(
            json_equal(value, other[name]) for name, value in one.items()
        )
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(json_equal, one, other))
    return isinstance(one, bool) == isinstance(other, bool) and one == other


def quote_json(value: JsonValue) -> str:
    """Return a value as JSON for a message: cut to ``SHOWN_CHARS``, lone surrogates escaped."""
    if isinstance(value, str) and len(value) > SHOWN_CHARS:
        return f"{quote_json(value[:SHOWN_CHARS])[:SHOWN_CHARS]}… ({len(value)} characters)"
    text = json.dumps(value, ensure_ascii=False).encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}… ({len(text)} characters)"


GraderOutput: TypeAlias = Grade | Score | float | bool
"""The results that a grader may return; a number is a share of success in 0..1."""

Grader: TypeAlias = Callable[[Item, str], Awaitable[GraderOutput] | GraderOutput]
"""Grades an answer to an item."""

E = TypeVar("E")
MATCH_SECONDS = 0.25
"""Time limit of ``RegexGrader`` for one pattern on one answer, in seconds."""


class CheckedGrader(FrozenModel, ABC, Generic[E]):
    """Base of the graders with an identity and a check of references.

    Attributes:
        name: The name in a configuration.
        meaning: What the grader measures, in words for the optimizer.
        version: Raised if scores change their meaning.
    """

    name: ClassVar[str]
    meaning: ClassVar[str] = ""
    version: ClassVar[int] = 1

    @classmethod
    def from_config(cls, config: EnvironmentConfig) -> Self:
        """Return the grader with the settings of a configuration."""
        return cls()

    @abstractmethod
    def __call__(self, item: Item, answer: str) -> Awaitable[GraderOutput] | GraderOutput:
        """Grade an answer to an item."""

    @property
    def identity(self) -> dict[str, JsonValue]:
        """Name, version and settings: everything that a score depends on beside item and answer."""
        return {"grader": self.name, "version": self.version, "settings": self.model_dump(mode="json")}

    def check(self, item: Item) -> None:
        """Raise DataError, which names the item, if this grader cannot use its reference."""
        self._list_accepted(item)

    def list_right_answers(self, item: Item) -> tuple[str, ...]:
        """Return the item's right answers, equal ones as equal texts; empty if its references are no answers."""
        return ()

    def _list_accepted(self, item: Item) -> list[E]:
        if item.reference is None or item.reference == "":
            raise DataError(
                f"item {item.id!r} cannot be graded by {self.name}: it has no reference; write its right answer, or remove it"
            )
        try:
            accepted = [self._read(reference) for reference in _references(item)]
        except ValueError as error:
            raise DataError(f"item {item.id!r} cannot be graded by {self.name}: {error}") from None
        if not accepted:
            raise DataError(
                f"item {item.id!r} cannot be graded by {self.name}: the list of references is empty; write its right "
                "answer, or remove it"
            )
        return accepted

    @abstractmethod
    def _read(self, reference: JsonValue) -> E:
        """Return a reference in the form used for comparison; raises ValueError if it has none."""


class ReferenceGrader(CheckedGrader[E]):
    """Base of the graders that compare an answer with the item's reference.

    ``inline_limit`` is the size up to which an answer and its reference are compared on the event loop.
    """

    inline_limit: ClassVar[int] = INLINE_LIMIT

    def __call__(self, item: Item, answer: str) -> Grade:
        """Grade an answer: soft is the best match among the accepted answers, hard is 0 or 1.

        Raises:
            DataError: This grader cannot use the item's reference.
        """
        matches = [self._match(expected, answer) for expected in self._list_accepted(item)]
        soft, reason = max(matches, key=lambda match: match[0])
        feedback = None if soft == 1 else self._feedback(item, answer, reason) or None
        score = Score(hard=float(soft >= self._pass_threshold), soft=soft)
        return Grade(score=score, answer=answer, feedback=feedback)

    @property
    def _pass_threshold(self) -> float:
        """The minimum soft score of a solved item."""
        return 1.0

    def _feedback(self, item: Item, answer: str, reason: str) -> str:
        """Return the feedback for the failure analyst; empty if answer and reference suffice."""
        expected = " or ".join(quote_json(reference) for reference in _references(item))
        return f"expected {expected}, got {quote_json(answer)}" + (f": {reason}" if reason else "")

    @abstractmethod
    def _match(self, expected: E, answer: str) -> tuple[float, str]:
        """Return the degree of a match, in 0..1, and the problem of the answer."""


class ExactGrader(ReferenceGrader[str]):
    """The same text, character by character, except for white space at both ends.

    References are text or whole numbers.
    """

    name = "exact"
    meaning = (
        "An answer is right if it equals the reference, character by character, apart from spaces around it."
    )

    def list_right_answers(self, item: Item) -> tuple[str, ...]:
        """Return the references without white space at both ends."""
        return tuple(self._list_accepted(item))

    def _read(self, reference: JsonValue) -> str:
        return _text(reference).strip()

    def _match(self, expected: str, answer: str) -> tuple[float, str]:
        return float(answer.strip() == expected), ""


class NormalizedGrader(ReferenceGrader[str]):
    """The same text after ``normalize``. Articles count: ``The Who`` is not ``who``.

    References are text or whole numbers that are not empty after ``normalize``.
    """

    name = "normalized"
    meaning = "An answer is right if it equals the reference, apart from case, punctuation and spaces."

    def list_right_answers(self, item: Item) -> tuple[str, ...]:
        """Return the references after ``normalize``."""
        return tuple(self._list_accepted(item))

    def _read(self, reference: JsonValue) -> str:
        text = normalize(_text(reference))
        if not text:
            raise ValueError(f"nothing of the reference {quote_json(reference)} is left without punctuation")
        return text

    def _match(self, expected: str, answer: str) -> tuple[float, str]:
        return float(normalize(answer) == expected), ""


class TokenF1Grader(ReferenceGrader[Counter[str]]):
    """Overlap of words, as SQuAD measures it (Rajpurkar et al., 2016): F1 of the two bags of words.

    Soft is F1; hard is 1 if F1 reaches ``threshold``. References are text or whole numbers with at
    least one word.
    """

    name = "token_f1"
    meaning = (
        "The score of an answer is the F1 of its words and those of the reference, so missing and needless "
        "words both cost."
    )
    threshold: float = Field(default=1.0, gt=0, le=1)

    @classmethod
    def from_config(cls, config: EnvironmentConfig) -> Self:
        """Return the grader with the configured threshold."""
        return cls(threshold=config.threshold)

    @property
    def _pass_threshold(self) -> float:
        return self.threshold

    def list_right_answers(self, item: Item) -> tuple[str, ...]:
        """Return the references after ``normalize``."""
        return tuple(normalize(_text(reference)) for reference in _references(item))

    def _read(self, reference: JsonValue) -> Counter[str]:
        words = Counter(_iter_words(_text(reference)))
        if not words:
            raise ValueError(f"the reference {quote_json(reference)} has no words")
        return words

    def _match(self, expected: Counter[str], answer: str) -> tuple[float, str]:
        words = Counter(_iter_words(answer))
        shared = (words & expected).total()
        f1 = 2 * shared / (words.total() + expected.total())
        return f1, f"token F1 is {f1:.2f} and {self.threshold:.2f} is needed"


class NumericGrader(ReferenceGrader[float]):
    """The same number within ``tolerance`` or within ``relative_tolerance`` times the reference.

    The answer must be a number and nothing else, in the form that ``parse_number`` accepts. Numbers are compared
    as double-precision floats. References are numbers, or text in the same form.
    """

    name = "numeric"
    meaning = "An answer is right if its number equals the reference's, within a tolerance."
    tolerance: float = Field(default=0.0, ge=0)
    relative_tolerance: float = Field(default=1e-6, ge=0)

    @classmethod
    def from_config(cls, config: EnvironmentConfig) -> Self:
        """Return the grader with the configured tolerances."""
        return cls(tolerance=config.tolerance, relative_tolerance=config.relative_tolerance)

    def list_right_answers(self, item: Item) -> tuple[str, ...]:
        """Return the references as decimal numbers."""
        return tuple(repr(value).removesuffix(".0") for value in self._list_accepted(item))

    def _read(self, reference: JsonValue) -> float:
        value: float | None = None
        if isinstance(reference, str):
            value = parse_number(reference)
        elif isinstance(reference, int | float) and not isinstance(reference, bool):
            value = to_finite(reference)
        if value is None:
            raise ValueError(f"the reference {quote_json(reference)} is not a finite number")
        return value

    def _match(self, expected: float, answer: str) -> tuple[float, str]:
        value = parse_number(answer)
        if value is None:
            return 0.0, "the answer must be a single number and nothing else"
        off = abs(value - expected)
        allowed = max(self.tolerance, self.relative_tolerance * abs(expected))
        return float(off <= allowed), f"it is off by {off:g} and {allowed:g} is allowed"


class RegexGrader(ReferenceGrader["Pattern[str]"]):
    """The whole answer, except for white space at both ends, matches a regular expression.

    References are patterns of the ``regex`` package, a superset of Python's own; inline flags such as ``(?i)``
    apply. If a match takes longer than ``MATCH_SECONDS``, the item stays unmeasured, because the pattern is at
    fault and not the answer. So every answer is matched on another thread.
    """

    name = "regex"
    meaning = "An answer is right if the whole of it matches the reference, which is a regular expression."
    inline_limit = 0

    def _read(self, reference: JsonValue) -> Pattern[str]:
        import regex

        pattern = _text(reference)
        try:
            return regex.compile(pattern)
        except (regex.error, OverflowError, RecursionError) as error:
            raise ValueError(f"{quote_json(reference)} is not a regular expression: {error}") from None

    def _match(self, expected: Pattern[str], answer: str) -> tuple[float, str]:
        try:
            match = expected.fullmatch(answer.strip(), timeout=MATCH_SECONDS)
        except TimeoutError:
            raise EnvironmentFailure(
                f"the pattern {quote_json(expected.pattern)} took more than {MATCH_SECONDS} s on an answer of "
                f"{len(answer)} characters: rewrite it without nested repetitions"
            ) from None
        return float(match is not None), "the whole answer must match this pattern"


class JsonFieldsGrader(ReferenceGrader[dict[str, JsonValue]]):
    """The answer is a JSON object with the reference's fields; further fields are ignored.

    Soft is the share of the reference's fields that are present with an equal value; hard is 1 if all are.
    Numbers are equal by value (1 and 1.0), but never to true, false or text; objects and lists are compared
    as a whole. The answer is parsed strictly: nothing around the object, no repeated names, no NaN or
    infinity. An answer of more than ``MAX_JSON_CHARS`` is wrong. References are objects with at least one field.
    """

    name = "json_fields"
    meaning = "An answer is a JSON object; it is right if it has the reference's fields with their values."

    def list_right_answers(self, item: Item) -> tuple[str, ...]:
        """Return the references as JSON with sorted keys."""
        accepted = self._list_accepted(item)
        return tuple(json.dumps(reference, sort_keys=True, ensure_ascii=False) for reference in accepted)

    def _read(self, reference: JsonValue) -> dict[str, JsonValue]:
        if not isinstance(reference, dict) or not reference:
            raise ValueError(f"the reference {quote_json(reference)} is not an object with fields")
        return reference

    def _match(self, expected: dict[str, JsonValue], answer: str) -> tuple[float, str]:
        if len(answer) > MAX_JSON_CHARS:
            return 0.0, f"the answer has more than {MAX_JSON_CHARS} characters"
        try:
            wrong = _list_wrong_fields(expected, parse_strict_json(answer))
        except RecursionError:
            return 0.0, "the answer is nested too deeply to be read as JSON"
        except ValueError as error:
            return 0.0, f"the answer is not a JSON object ({error})"
        return 1 - len(wrong) / len(expected), "; ".join(wrong)


def _list_wrong_fields(expected: dict[str, JsonValue], answer: Any) -> list[str]:
    if not isinstance(answer, dict):
        raise ValueError("it is JSON of another kind")  # noqa: TRY004 - the caller catches it
    return [
        f"{quote_json(name)} is {quote_json(answer[name]) if name in answer else 'missing'}"
        for name, value in expected.items()
        if name not in answer or not json_equal(value, answer[name])
    ]


# --------------------------------------------------------------------------------------------- applying


def identify_grader(grade: Grader) -> JsonValue:
    """Return a grader's own ``identity``, or a function's qualified name; ConfigError if it has neither."""
    identity: JsonValue = getattr(grade, "identity", None)
    return {"grader": name_function(grade)} if identity is None else identity


def name_function(function: Callable[..., object]) -> str:
    """Return the qualified name by which a function is known in identities.

    Raises:
        ConfigError: It has none, such as a ``functools.partial``.
    """
    name = getattr(function, "__qualname__", None)
    if name is None:
        raise ConfigError(
            f"{function!r:.100} has no name that identifies its scores: pass a function or a method, or give a "
            "grader an `identity`"
        )
    return f"{function.__module__}.{name}"


def list_right_answers(grade: Grader, item: Item) -> tuple[str, ...]:
    """Return an item's right answers under a grader, equal ones as equal texts.

    For your own function they are the references that are text or numbers. Patterns and tests are no answers.
    """
    if isinstance(grade, CheckedGrader):
        return grade.list_right_answers(item)
    plain = [reference for reference in _references(item) if not isinstance(reference, bool)]
    return tuple(str(reference) for reference in plain if isinstance(reference, str | int | float))


async def apply_grader(grade: Grader, item: Item, answer: str) -> Grade:
    """Apply a grader, plain or async, and return its result as a ``Grade``.

    A ``ReferenceGrader`` grades long answers on another thread. Your own function is called on the event loop.

    Raises:
        EnvironmentFailure: It did not return a ``GraderOutput``; names the item.
    """
    outcome: Awaitable[GraderOutput] | GraderOutput
    if isinstance(grade, ReferenceGrader):
        outcome = await run_in_thread(
            partial(grade, item, answer), answer, item.reference, inline_limit=grade.inline_limit
        )
    else:
        outcome = grade(item, answer)
    if inspect.isawaitable(outcome):
        outcome = await outcome
    if isinstance(outcome, Grade):
        return outcome
    if isinstance(outcome, Score):
        return Grade(score=outcome, answer=answer)
    if isinstance(outcome, bool | int | float) and 0 <= outcome <= 1:
        return Grade(score=Score.of(outcome), answer=answer)
    raise EnvironmentFailure(
        f"the grader returned {outcome!r:.100} for item {item.id!r}: "
        "return a Grade, a Score, True or False, or a number in 0..1"
    )


def _references(item: Item) -> list[JsonValue]:
    return item.reference if isinstance(item.reference, list) else [item.reference]


def _text(reference: JsonValue) -> str:
    if isinstance(reference, str | int) and not isinstance(reference, bool):
        return str(reference)
    raise ValueError(
        f"the reference {quote_json(reference)} is neither text nor a whole number; write it as text"
    )
