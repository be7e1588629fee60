"""Graders: they compare an answer with an item's reference.

A reference is one accepted answer or a list of accepted answers; with a list the best match counts.
Each grader's docstring states the references that it accepts; ``check`` refuses all others.

An environment also accepts any function ``(item, answer)``, plain or async, that returns a
``Grade``, a ``Score``, a number in 0..1 or a truth value.
"""

from __future__ import annotations

import dis
import inspect
import json
import logging
import math
import os
import re
import sysconfig
import traceback
import unicodedata
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from functools import partial
from pathlib import Path
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NoReturn, Self, TypeAlias, TypeVar

from pydantic import Field, JsonValue

from reflact.adapters import read_text
from reflact.concurrency import INLINE_LIMIT, run_in_thread
from reflact.config.training import EnvironmentConfig
from reflact.errors import DataError, EnvironmentFailure, InterfaceError
from reflact.jsonutil import build_object
from reflact.types import FrozenModel, Grade, Item, Score, digest_json

if TYPE_CHECKING:
    from regex import Pattern

# The results that a grader may return; a number is a share of success in 0..1.
GraderOutput: TypeAlias = Grade | Score | float | bool

Grader: TypeAlias = Callable[[Item, str], Awaitable[GraderOutput] | GraderOutput]
"""Grades an answer to an item."""

E = TypeVar("E")

# Maximum length of an answer in JSON, in characters.
MAX_JSON_CHARS = 500_000

# Time limit of ``RegexGrader`` for one pattern on one answer, in seconds.
MATCH_SECONDS = 0.25

# The relative tolerance between two numbers of which one has decimals, if none is set.
ROUNDING = 1e-6

# Whole numbers below this are exact as floats, so that 7.0 in a table is the whole number 7.
EXACT_FLOATS = 2**53


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
        return {
            "grader": self.name,
            "version": self.version,
            "settings": self.model_dump(mode="json"),
        }

    def check(self, item: Item) -> None:
        """Raise DataError, which names the item, if this grader cannot use its reference."""
        self._list_accepted(item)

    def list_right_answers(self, item: Item) -> tuple[str, ...]:
        """Return the item's right answers, equal ones as equal texts; empty if it names none."""
        return ()

    def _list_accepted(self, item: Item) -> list[E]:
        subject = f"item {item.id!r} cannot be graded by {self.name}"
        advice = "write its right answer, or remove it"
        if item.reference is None or item.reference == "":
            raise DataError(f"{subject}: it has no reference; {advice}")
        try:
            accepted = [self._read(reference) for reference in _list_references(item)]
        except ValueError as error:
            raise DataError(f"{subject}: {error}") from None
        if not accepted:
            raise DataError(f"{subject}: the list of references is empty; {advice}")
        return accepted

    @abstractmethod
    def _read(self, reference: JsonValue) -> E:
        """Return a reference in the form used for comparison; raises ValueError if it has none."""


class ReferenceGrader(CheckedGrader[E]):
    """Base of the graders that compare an answer with the item's reference.

    ``inline_limit`` is the size up to which an answer and its reference are compared on the event
    loop.
    """

    inline_limit: ClassVar[int] = INLINE_LIMIT

    def __call__(self, item: Item, answer: str) -> Grade:
        """Grade an answer: soft is the best match among the accepted answers, hard is 0 or 1.

        Raises:
            DataError: This grader cannot use the item's reference.
        """
        matches = [self._match(expected, answer) for expected in self._list_accepted(item)]
        soft, reason = max(matches, key=lambda match: match[0])
        feedback = None
        if soft < 1:
            expected = " or ".join(map(quote_json, _list_references(item)))
            feedback = f"expected {expected}, got {quote_json(answer)}" + (
                f": {reason}" if reason else ""
            )
        score = Score(hard=float(soft >= self._pass_threshold), soft=soft)
        return Grade(score=score, answer=answer, feedback=feedback)

    @property
    def _pass_threshold(self) -> float:
        """The minimum soft score of a solved item."""
        return 1.0

    @abstractmethod
    def _match(self, expected: E, answer: str) -> tuple[float, str]:
        """Return the degree of a match, in 0..1, and the problem of the answer."""


class ExactGrader(ReferenceGrader[str]):
    """The same text, except for white space and invisible characters at both ends.

    References are text, numbers, true or false; the last three count as their JSON.
    """

    name = "exact"
    meaning = (
        "An answer is right if it equals the reference, character by character, apart from "
        "spaces around it."
    )

    def list_right_answers(self, item: Item) -> tuple[str, ...]:
        """Return the references without white space at both ends."""
        return tuple(self._list_accepted(item))

    def _read(self, reference: JsonValue) -> str:
        return _read_as_text(reference).strip(_BLANK)

    def _match(self, expected: str, answer: str) -> tuple[float, str]:
        return float(answer.strip(_BLANK) == expected), ""


class NormalizedGrader(ReferenceGrader[str]):
    """The same text after ``normalize``. Articles count: ``The Who`` is not ``who``.

    References are text, numbers, true or false that are not empty after ``normalize``.
    """

    name = "normalized"
    meaning = (
        "An answer is right if it equals the reference, apart from case, spaces, quotes around it "
        "and punctuation at its end."
    )
    version = 2

    def list_right_answers(self, item: Item) -> tuple[str, ...]:
        """Return the references after ``normalize``."""
        return tuple(self._list_accepted(item))

    def _read(self, reference: JsonValue) -> str:
        text = normalize(_read_as_text(reference))
        if not text:
            raise ValueError(f"the reference {quote_json(reference)} is empty")
        return text

    def _match(self, expected: str, answer: str) -> tuple[float, str]:
        return float(normalize(answer) == expected), ""


class TokenF1Grader(ReferenceGrader[Counter[str]]):
    """Overlap of words, as SQuAD measures it (Rajpurkar et al., 2016): F1 of the two bags of words.

    Soft is F1; hard is 1 if F1 reaches ``threshold``. References are text, numbers, true or false
    with at least one word.
    """

    name = "token_f1"
    meaning = (
        "The score of an answer is the F1 of its words and those of the reference, so missing and "
        "needless words both cost."
    )
    version = 2
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
        return tuple(normalize(_read_as_text(reference)) for reference in _list_references(item))

    def _read(self, reference: JsonValue) -> Counter[str]:
        words = Counter(tokenize(_read_as_text(reference)))
        if not words:
            raise ValueError(f"the reference {quote_json(reference)} has no words")
        return words

    def _match(self, expected: Counter[str], answer: str) -> tuple[float, str]:
        words = Counter(tokenize(answer))
        shared = (words & expected).total()
        f1 = 2 * shared / (words.total() + expected.total())
        return f1, f"token F1 is {f1:.2f} and {self.threshold:.2f} is needed"


class NumericGrader(ReferenceGrader[float]):
    """The same number within ``tolerance`` or within ``relative_tolerance`` times the reference.

    The answer must be a number and nothing else, in the form that ``parse_number`` accepts. Without
    ``relative_tolerance``, whole numbers are compared exactly, and others within ``ROUNDING``, as
    double-precision floats. References are numbers, or text in the same form.
    """

    name = "numeric"
    meaning = (
        "An answer is right if its number equals the reference's; a small tolerance is for "
        "decimals only."
    )
    tolerance: float = Field(default=0.0, ge=0)
    relative_tolerance: float | None = Field(default=None, ge=0)

    @classmethod
    def from_config(cls, config: EnvironmentConfig) -> Self:
        """Return the grader with the configured tolerances."""
        return cls(tolerance=config.tolerance, relative_tolerance=config.relative_tolerance)

    def list_right_answers(self, item: Item) -> tuple[str, ...]:
        """Return the references as decimal numbers."""
        return tuple(map(repr, self._list_accepted(item)))

    def _read(self, reference: JsonValue) -> float:
        value: float | None = None
        if isinstance(reference, str):
            value = parse_number(reference)
        elif isinstance(reference, int | float) and not isinstance(reference, bool):
            value = None if to_finite(reference) is None else reference
            if isinstance(value, float) and value.is_integer() and abs(value) < EXACT_FLOATS:
                value = int(value)
        if value is None:
            raise ValueError(f"the reference {quote_json(reference)} is not a finite number")
        return value

    def _match(self, expected: float, answer: str) -> tuple[float, str]:
        value = parse_number(answer)
        if value is None:
            return 0.0, "the answer must be a single number and nothing else"
        relative = self.relative_tolerance
        if relative is None:
            relative = 0.0 if isinstance(value, int) and isinstance(expected, int) else ROUNDING
        off = abs(value - expected)
        allowed = max(self.tolerance, relative * abs(expected))
        return float(off <= allowed), f"it is off by {off:g} and {allowed:g} is allowed"


class RegexGrader(ReferenceGrader["Pattern[str]"]):
    """The whole answer, except for white space at both ends, matches a regular expression.

    References are patterns of the ``regex`` package, a superset of Python's own; inline flags such
    as ``(?i)`` apply. If a match takes longer than ``MATCH_SECONDS``, the item stays unmeasured,
    because the pattern is at fault and not the answer. So every answer is matched on another
    thread.
    """

    name = "regex"
    meaning = (
        "An answer is right if the whole of it matches the reference, which is a regular "
        "expression."
    )
    inline_limit = 0

    def _read(self, reference: JsonValue) -> Pattern[str]:
        import regex

        pattern = (
            reference if isinstance(reference, str) else regex.escape(_read_as_text(reference))
        )
        try:
            return regex.compile(pattern)
        except (regex.error, OverflowError, RecursionError) as error:
            raise ValueError(
                f"{quote_json(reference)} is not a regular expression: {error}"
            ) from None

    def _match(self, expected: Pattern[str], answer: str) -> tuple[float, str]:
        try:
            match = expected.fullmatch(answer.strip(), timeout=MATCH_SECONDS)
        except TimeoutError:
            raise EnvironmentFailure(
                f"the pattern {quote_json(expected.pattern)} took more than {MATCH_SECONDS} s on "
                f"an answer of {len(answer)} characters: rewrite it without nested repetitions"
            ) from None
        return float(match is not None), "the whole answer must match this pattern"


class JsonFieldsGrader(ReferenceGrader[dict[str, JsonValue]]):
    """The answer is a JSON object with the reference's fields; further fields are ignored.

    Soft is the share of the reference's fields that are present with an equal value; hard is 1 if
    all are. Numbers are equal by value (1 and 1.0), but never to true, false or text; objects and
    lists are compared as a whole. The answer is parsed strictly: nothing around the object, no
    repeated names, no NaN or infinity. An answer of more than ``MAX_JSON_CHARS`` is wrong.
    References are objects with at least one field.
    """

    name = "json_fields"
    meaning = (
        "An answer is a JSON object; it is right if it has the reference's fields with their "
        "values."
    )

    def list_right_answers(self, item: Item) -> tuple[str, ...]:
        """Return the references as JSON with sorted keys."""
        accepted = self._list_accepted(item)
        return tuple(
            json.dumps(reference, sort_keys=True, ensure_ascii=False) for reference in accepted
        )

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


# ----------------------------------------------------------------------------------------- applying


def list_right_answers(grade: Grader, item: Item) -> tuple[str, ...]:
    """Return an item's right answers under a grader, equal ones as equal texts.

    For your own function they are the references that are text or numbers. Patterns and tests are
    no answers.
    """
    if isinstance(grade, CheckedGrader):
        return grade.list_right_answers(item)
    return tuple(
        str(reference)
        for reference in _list_references(item)
        if isinstance(reference, str | int | float) and not isinstance(reference, bool)
    )


async def apply_grader(grade: Grader, item: Item, answer: str) -> Grade:
    """Apply a grader, plain or async, and return its result as a ``Grade``.

    A ``ReferenceGrader`` grades long answers on another thread. Your own function is called on the
    event loop.

    What it returns may also be a number of another library, such as numpy's, ``Decimal`` or
    ``Fraction``.

    Raises:
        EnvironmentFailure: It returned NaN, or raised RuntimeError or StopIteration: the item could
            not be graded.
        InterfaceError: It returned anything else; names the item.
    """
    outcome: Awaitable[GraderOutput] | GraderOutput
    if isinstance(grade, ReferenceGrader):
        outcome = await run_in_thread(
            partial(grade, item, answer), answer, item.reference, inline_limit=grade.inline_limit
        )
    else:
        try:
            outcome = grade(item, answer)
            if inspect.isawaitable(outcome):
                outcome = await outcome
        except (RuntimeError, StopIteration) as error:
            raise _describe_failure(item, error) from error
    if isinstance(outcome, Grade):
        return outcome
    if isinstance(outcome, Score):
        return Grade(score=outcome, answer=answer)
    value = _read_number(outcome)
    if value is not None and math.isnan(value):
        problem = ValueError("NaN is no score")  # as a cause, it is reported while the run goes on
        raise EnvironmentFailure(f"the grader returned NaN for item {item.id!r}") from problem
    if value is None or not -ROUNDING <= value <= 1 + ROUNDING:
        raise InterfaceError(
            f"the grader returned {outcome!r:.100} for item {item.id!r}; let it return a "
            "Grade, a Score, True or False, or a number from 0 to 1 (divide points of 100 by 100)"
        )
    return Grade(score=Score.of(min(max(value, 0.0), 1.0)), answer=answer)


def _describe_failure(item: Item, error: Exception) -> EnvironmentFailure:
    """Return the error about a grading function that failed, with the line of its own code."""
    source = (
        error.__cause__ if isinstance(error.__cause__, StopIteration) else error
    )  # of a coroutine
    frames = traceback.extract_tb(source.__traceback__)
    frame = next((one for one in reversed(frames) if not one.filename.startswith(INSTALLED)), None)
    where = "" if frame is None else f" ({frame.filename}:{frame.lineno})"
    text = f"{type(source).__name__}: {read_text(source)}".rstrip(": ")
    if "running event loop" in text:
        text += "; write it as `async def`, and await what you want to run"
    return EnvironmentFailure(f"the grading function failed on item {item.id}{where}: {text}")


def _read_number(value: object) -> float | None:
    """Return a number as a float, also one of numpy or ``Decimal``; None if it is none."""
    try:
        return float(value) if hasattr(value, "__float__") else None
    except (ArithmeticError, TypeError, ValueError):
        return None


def _list_references(item: Item) -> list[JsonValue]:
    return item.reference if isinstance(item.reference, list) else [item.reference]


def _read_as_text(reference: JsonValue) -> str:
    if isinstance(reference, str):
        return reference
    if isinstance(reference, int | float):
        return json.dumps(reference, allow_nan=False)
    raise ValueError(
        f"the reference {quote_json(reference)} is no text, number or truth value; write it as text"
    )


# -------------------------------------------------------------------------------------------- texts

# Longer texts are normalized in parts of about this length, in characters.
PART_CHARS = 2_000

# Apostrophes, single quotes and hyphens as in ASCII; soft hyphens and variation selectors go.
_PLAIN = str.maketrans("\u2019\u02bc\u2018\u2010\u2011", "'''--", "\u00ad\ufe0f")

_INVISIBLE = "\u200b\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2060\u2066\u2067\u2068\u2069\ufeff"

# White space, and invisible characters at the end of a text, such as the byte order mark.
_BLANK = "".join(filter(str.isspace, map(chr, range(0x3001)))) + _INVISIBLE

# Unicode's forms of letters and digits that mean something else than the plain ones.
_TELLING_FORMS = frozenset({"<super>", "<sub>", "<fraction>", "<circle>", "<font>"})

_MARKS = ".,;:!?\u2026\u3002\u3001\u061f\u060c\u061b\u0964"
_QUOTES = dict(
    zip("\"'`*\u201c\u00ab\u201e\u201d\u300c", "\"'`*\u201d\u00bb\u201c\u201d\u300d", strict=True)
)
_OPENERS = _INVISIBLE + "([{\u00bf\u00a1_" + "".join(_QUOTES)
_CLOSERS = _INVISIBLE + ")]}_" + _MARKS + "".join(_QUOTES.values())
_NO_WORDS = frozenset({"", "a", "an", "the", "-", "\u2013", "\u2014"})
_WORD = re.compile("[^ ]+")

# ASCII and Chinese characters; none of them joins the character before it.
_SEPARATE = re.compile("[\x00-\x7f\u3400-\u4dbf\u4e00-\u9fff]")


def normalize(text: str) -> str:
    """Return a text as the ``normalized`` grader compares it.

    Unicode NFKC and case folding; runs of white space become one space. Typographic apostrophes and
    hyphens become those of ASCII; soft hyphens and variation selectors go. Superscripts,
    subscripts, fractions, circled and mathematical letters stay what they are (``10²`` is not
    ``102``). White space, invisible characters, and pairs of quotes, asterisks or backticks go from
    both ends, and so does a pair of brackets around one word. ``. , ; : ! ?`` go from the end, but
    not the ``!`` of a factorial. A text of such signs alone stays as it is.
    """
    return _strip_edges(_fold_text(text))


def tokenize(text: str) -> tuple[str, ...]:
    """Return the words of a text, as the ``token_f1`` grader counts them.

    The text is folded as in ``normalize`` and split at white space. Quotes, brackets and
    punctuation at both ends of a word are left out, but not a leading full stop (``.5``). ``a``,
    ``an``, ``the``, dashes and words of nothing else are left out too, unless the text has no other
    words.
    """
    words = []
    skipped = []
    for match in _WORD.finditer(_fold_text(text)):
        word = match[0].lstrip(_OPENERS).rstrip(_CLOSERS)
        if word in _NO_WORDS:
            skipped.append(word or match[0])
        else:
            words.append(word)
    has_text = any(char.isalnum() for word in words for char in word)
    return tuple(words if has_text else words + skipped)


def _fold_text(text: str) -> str:
    """Return a text composed and case-folded, each run of white space as one space."""
    pieces: list[str] = []
    is_gap = False
    for part in _split_text(text):
        plain = _compose(part.translate(_PLAIN)).casefold().translate(_PLAIN)
        folded = _compose(plain)
        words = folded.split()
        if words and pieces and (is_gap or folded[0].isspace()):
            pieces.append(" ")
        pieces.append(" ".join(words))
        is_gap = folded[-1:].isspace() or (is_gap and not words)
    return "".join(pieces).strip(_BLANK)


def _split_text(text: str) -> Iterator[str]:
    """Yield a text in parts: the time for NFKC grows with the square of the marks on one letter.

    A part ends before a character that joins no other, if there is one.
    """
    start = 0
    while len(text) - start > PART_CHARS:
        match = _SEPARATE.search(text, start + PART_CHARS // 2, start + PART_CHARS)
        end = start + PART_CHARS if match is None else match.start()
        yield text[start:end]
        start = end
    yield text[start:]


def _compose(text: str) -> str:
    """Return a text in NFKC, but superscripts and the like, whose form matters, stay."""
    if unicodedata.is_normalized("NFKC", text):
        return text
    return unicodedata.normalize("NFC", "".join(map(_decompose, text)))


def _decompose(char: str) -> str:
    form = unicodedata.decomposition(char).partition(" ")[0]
    return char if form in _TELLING_FORMS else unicodedata.normalize("NFKD", char)


def _strip_edges(text: str) -> str:
    start = 0
    end = len(text)
    while start < end:
        first = text[start]
        last = text[end - 1]
        if first in _BLANK:
            start += 1
        elif last in _BLANK or _is_mark(last, text[max(start, end - 3) : end - 1]):
            end -= 1
        elif end - start > 1 and (
            _QUOTES.get(first) == last
            or (first + last in {"()", "[]"} and text[start + 1 : end - 1].isalnum())
        ):
            start += 1
            end -= 1
        else:
            break
    return text[start:end] or text.strip(_BLANK)


def _is_mark(char: str, before: str) -> bool:
    """Whether a sign at the end of a text is punctuation.

    ``!`` after a number, a bracket or one letter is a factorial.
    """
    is_factorial = char == "!" and re.search(r"[\d)]$|(^|\W)\w$", before) is not None
    return char in _MARKS and not is_factorial


# ------------------------------------------------------------------------------------ numbers, JSON

# Maximum length of a number, in characters.
MAX_NUMBER_CHARS = 10_000

# Maximum length of ``quote_json``, in characters.
SHOWN_CHARS = 300

_NUMBER = re.compile(
    r"(?P<sign>[+-])?(?P<digits>(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+)"
    r"(?P<exponent>e[+-]?[0-9]+)?\s*(?P<percent>%)?",
    re.IGNORECASE,
)


def parse_number(text: str) -> int | float | None:
    """Return a text as a number, a whole one exactly; None if it is anything else.

    White space and invisible characters at both ends are ignored. A number is decimal digits with,
    each optional: a sign (``+``, ``-`` or the minus sign U+2212), commas between groups of three
    digits before the decimal point, a decimal point, an exponent, and a per cent sign, which
    divides by 100 (``12.5%`` is 0.125). It is whole if it has neither of the last two, and only
    zeros after the point. Never a number: ``1,5``, ``1.234,5``, ``$5``, ``5 km``, ``1/2``,
    ``0x10``, NaN, infinity, what overflows, and a text of more than ``MAX_NUMBER_CHARS``.
    """
    bare = text.strip(_BLANK)
    match = None if len(bare) > MAX_NUMBER_CHARS else _NUMBER.fullmatch(bare.replace("\u2212", "-"))
    if match is None:
        return None
    sign = -1 if match["sign"] == "-" else 1
    digits = match["digits"].replace(",", "")
    value = to_finite(float(f"{digits}{match['exponent'] or ''}"))
    whole, _, rest = digits.partition(".")
    if value is None:
        return None
    if match["percent"]:
        return sign * value / 100
    return sign * (value if match["exponent"] or rest.strip("0") else int(whole.lstrip("0") or 0))


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
        text,
        object_pairs_hook=build_object,
        parse_constant=_refuse_number,
        parse_float=_parse_finite,
    )


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


# ----------------------------------------------------------------------------------------- identity

LOGGER = logging.getLogger("reflact")

# Beginnings of file names of code that changes only with a version; its name is enough.
INSTALLED = (
    "<frozen ",
    str(Path(__file__).resolve().parents[1]) + os.sep,
    *(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")),
)

# Methods that change a list, a mapping or a set.
CHANGING_METHODS = frozenset(
    [
        "add",
        "append",
        "clear",
        "discard",
        "extend",
        "insert",
        "pop",
        "remove",
        "setdefault",
        "update",
    ]
)


def identify_grader(grade: Grader) -> JsonValue:
    """Return a grader's own ``identity``, or the name and the code of a function."""
    identity: JsonValue = getattr(grade, "identity", None)
    return {"grader": identify_function(grade)} if identity is None else identity


def identify_function(function: Callable[..., Any]) -> str:
    """Return a function's qualified name, and a digest of what it computes.

    The digest covers the function's byte code, which differs between Python versions, its defaults,
    and the values and functions that it takes from around it. A ``partial``, a method and an object
    with ``__call__`` count with their parts. Not covered are the code of installed packages,
    objects that are no plain data, and what the function changes itself, such as a cache.
    """
    inner: Any = function
    while isinstance(inner, partial):
        inner = inner.func
    name = _name(inner if hasattr(inner, "__qualname__") else type(inner))
    described = _describe(function, {})
    if not isinstance(described, str):
        return f"{name}#{digest_json(described)[:16]}"
    if not name.startswith("reflact."):
        LOGGER.warning(
            "the code of %s is not read, so no run notices if what it computes changes", name
        )
    return name


# The numbers of values that were described, by their ids; kept, so that ids stay their own.
Described = dict[int, tuple[int, Any]]


def _describe(value: Any, described: Described) -> JsonValue:
    """Return a value as JSON, which is equal for equal values in every process.

    A value that was described before counts by its number, so values may contain each other.
    """
    if value is None or isinstance(
        value, bool | int | float | str | bytes | Enum | Decimal | Fraction
    ):
        return repr(value)
    if id(value) in described:
        return ["again", described[id(value)][0]]
    described[id(value)] = (len(described), value)
    if isinstance(value, set | frozenset):
        return [*sorted(repr(_describe(part, {})) for part in value)]
    parts = _list_parts(value)
    if parts is None:
        return _name(
            value
            if hasattr(value, "__qualname__") or isinstance(value, ModuleType)
            else type(value)
        )
    return [type(value).__name__, *(_describe(part, described) for part in parts)]


def _list_parts(value: Any) -> Sequence[Any] | None:  # noqa: PLR0911 - one for each kind of value
    """Return the values that a value consists of; None if its name is all that is known of it."""
    if isinstance(value, list | tuple):
        return value
    if isinstance(value, dict):
        return [part for pair in value.items() for part in pair]
    if isinstance(value, re.Pattern):
        return [value.pattern, value.flags]
    if isinstance(value, CodeType):
        return [value.co_code, value.co_names, value.co_consts]
    if isinstance(value, partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, FunctionType) and _is_own(value):
        return [value.__code__, _list_used_values(value)]
    if isinstance(value, type):
        methods = _list_methods(value)
        return [_name(value), methods] if methods else None
    wrapped = inspect.getattr_static(value, "__wrapped__", None)
    if wrapped is not None:
        return [wrapped]
    methods = (
        {} if isinstance(getattr(value, "__qualname__", None), str) else _list_methods(type(value))
    )
    if not methods:
        return None
    stored, _ = _find_changes([method for name, method in methods.items() if name != "__init__"])
    state = {
        name: part for name, part in getattr(value, "__dict__", {}).items() if name not in stored
    }
    return [type(value), state]


def _name(value: Any) -> str:
    name = getattr(value, "__qualname__", None) or value.__name__
    return f"{getattr(value, '__module__', None) or 'builtins'}.{name}"


def _is_own(function: FunctionType) -> bool:
    return not function.__code__.co_filename.startswith(INSTALLED)


def _list_methods(kind: type) -> dict[str, FunctionType]:
    """Return the methods of a class and its bases that are no part of an installed package."""
    methods = {}
    for base in reversed(kind.__mro__):
        for name, member in vars(base).items():
            method = getattr(member, "__func__", None) or getattr(member, "fget", None) or member
            if isinstance(method, FunctionType) and _is_own(method):
                methods[name] = method
    return methods


def _list_used_values(function: FunctionType) -> dict[str, Any]:
    """Return what a function takes from around it, except for what it changes itself."""
    names = {name for code in _iter_codes(function.__code__) for name in code.co_names}
    values = {name: value for name, value in function.__globals__.items() if name in names}
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    values |= {name: cell.cell_contents for name, cell in cells if cell != CellType()}
    values |= {
        f"default {number}": value for number, value in enumerate(function.__defaults__ or ())
    }
    values |= {f"default {name}": value for name, value in (function.__kwdefaults__ or {}).items()}
    stored, changes_items = _find_changes([function])
    return {
        name: value
        for name, value in sorted(values.items())
        if name not in stored and not (changes_items and isinstance(value, list | dict | set))
    }


def _find_changes(functions: Sequence[FunctionType]) -> tuple[frozenset[str], bool]:
    """Return the names to which functions assign, and whether they change items of something."""
    codes = [code for function in functions for code in _iter_codes(function.__code__)]
    steps = [step for code in codes for step in dis.get_instructions(code)]
    stored = (s.argval for s in steps if s.opname in {"STORE_GLOBAL", "STORE_DEREF", "STORE_ATTR"})
    changes_items = any(
        s.argval in CHANGING_METHODS or s.opname in {"STORE_SUBSCR", "DELETE_SUBSCR"} for s in steps
    )
    return frozenset(stored), changes_items


def _iter_codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for value in code.co_consts:
        if isinstance(value, CodeType):
            yield from _iter_codes(value)
