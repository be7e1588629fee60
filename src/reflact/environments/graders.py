"""Graders: they compare an answer with an item's reference.

A reference is one accepted answer or a list of accepted answers; with a list the best match counts.
Each grader's docstring states the references that it accepts; ``check`` refuses all others.

An environment also accepts any function ``(item, answer)``, plain or async, that returns a
``Grade``, a ``Score``, a number in 0..1 or a truth value.
"""

from __future__ import annotations

import inspect
import json
import math
import traceback
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from difflib import SequenceMatcher
from functools import partial
from typing import ClassVar, Generic, Self, TypeAlias, TypeVar

import regex
from pydantic import Field, JsonValue
from regex import Pattern

from reflact.adapters import read_text
from reflact.concurrency import INLINE_LIMIT, run_in_thread
from reflact.config.training import EnvironmentConfig
from reflact.environments.comparison import (
    BLANK,
    normalize,
    parse_number,
    quote_json,
    to_finite,
    tokenize,
)
from reflact.environments.function_identity import INSTALLED, identify_function
from reflact.errors import DataError, EnvironmentFailure, InterfaceError
from reflact.types import FrozenModel, Grade, Item, Score

# The results that a grader may return; a number is a share of success in 0..1.
GraderOutput: TypeAlias = Grade | Score | float | bool

Grader: TypeAlias = Callable[[Item, str], Awaitable[GraderOutput] | GraderOutput]
"""Grades an answer to an item."""

E = TypeVar("E")

# Longer texts are compared by words, since the time for characters grows with their square.
MAX_COMPARED_CHARS = 1_000
MAX_COMPARED_WORDS = 5_000

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
        """Return the grader with those settings of a configuration that it has."""
        return cls(**{name: getattr(config, name) for name in cls.model_fields})

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
        written = map(self._write, self._list_accepted(item))
        return tuple(text for text in written if text is not None)

    def _list_accepted(self, item: Item) -> list[E]:
        subject = f"item {item.id!r} cannot be graded by {self.name}"
        advice = "write its right answer, remove it, or set data.skip_unanswered: true"
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

    def _write(self, accepted: E) -> str | None:
        """Return what was read as an answer; None if it is none, such as a pattern."""
        return accepted if isinstance(accepted, str) else None


class ReferenceGrader(CheckedGrader[E]):
    """Base of the graders that compare an answer with the item's reference."""

    # Up to this size, an answer and its reference are compared on the event loop.
    inline_limit: ClassVar[int] = INLINE_LIMIT

    def __call__(self, item: Item, answer: str) -> Grade:
        """Grade an answer: soft is the best match among the accepted answers, hard is 0 or 1."""
        matches = [self._match(expected, answer) for expected in self._list_accepted(item)]
        soft, reason = max(matches, key=lambda match: match[0])
        feedback = None
        if soft < 1:
            expected = " or ".join(map(quote_json, _list_references(item)))
            feedback = f"expected {expected}, got {quote_json(answer)}"
            if reason:
                feedback += f": {reason}"
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

    def _read(self, reference: JsonValue) -> str:
        return _read_as_text(reference).strip(BLANK)

    def _match(self, expected: str, answer: str) -> tuple[float, str]:
        return float(answer.strip(BLANK) == expected), ""


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

    def _read(self, reference: JsonValue) -> str:
        return _read_normalized(reference)

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

    def _write(self, accepted: float) -> str:
        return repr(accepted)

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


class RegexGrader(ReferenceGrader[Pattern[str]]):
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


class ContainsGrader(ReferenceGrader[str]):
    """The answer contains the reference; both are folded as in ``normalize``.

    References are text, numbers, true or false that are not empty after ``normalize``.
    """

    name = "contains"
    meaning = "An answer is right if it contains the reference, apart from case and spaces."

    def _read(self, reference: JsonValue) -> str:
        return _read_normalized(reference)

    def _match(self, expected: str, answer: str) -> tuple[float, str]:
        return float(expected in normalize(answer)), "the answer must contain it"


class SimilarityGrader(ReferenceGrader[str]):
    """How alike two texts are after ``normalize``: ``ratio`` of Python's ``difflib``.

    Texts are compared by characters; if one has more than ``MAX_COMPARED_CHARS``, by words. Soft is
    the ratio; hard is 1 if it reaches ``threshold``. References are text, numbers, true or false of
    at most ``MAX_COMPARED_WORDS`` words; a longer answer is wrong.
    """

    name = "similarity"
    meaning = "The score of an answer is how alike it and the reference are, as texts."
    threshold: float = Field(default=1.0, gt=0, le=1)

    @property
    def _pass_threshold(self) -> float:
        return self.threshold

    def _read(self, reference: JsonValue) -> str:
        text = _read_normalized(reference)
        if len(text.split()) > MAX_COMPARED_WORDS:
            raise ValueError(f"the reference has more than {MAX_COMPARED_WORDS} words")
        return text

    def _match(self, expected: str, answer: str) -> tuple[float, str]:
        one: Sequence[str] = expected
        other: Sequence[str] = normalize(answer)
        if max(len(one), len(other)) > MAX_COMPARED_CHARS:
            one = expected.split()
            other = normalize(answer).split()
            if len(other) > MAX_COMPARED_WORDS:
                return 0.0, f"the answer has more than {MAX_COMPARED_WORDS} words"
        ratio = SequenceMatcher(None, one, other, autojunk=False).ratio()
        return ratio, f"the ratio is {ratio:.2f} and {self.threshold:.2f} is needed"


def list_right_answers(grade: Grader, item: Item) -> tuple[str, ...]:
    """Return an item's right answers under a grader, equal ones as equal texts.

    For your own function they are the references that are text or numbers.
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
    event loop. It may also return a number of another library, such as numpy.

    Raises:
        EnvironmentFailure: It returned NaN, or raised RuntimeError or StopIteration.
        InterfaceError: It returned anything else.
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


def _read_normalized(reference: JsonValue) -> str:
    text = normalize(_read_as_text(reference))
    if not text:
        raise ValueError(f"the reference {quote_json(reference)} is empty")
    return text


def identify_grader(grade: Grader) -> JsonValue:
    """Return a grader's own ``identity``, or the name and the code of a function."""
    identity: JsonValue = getattr(grade, "identity", None)
    return {"grader": identify_function(grade)} if identity is None else identity
