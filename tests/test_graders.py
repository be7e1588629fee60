"""Graders: what counts as a right answer, what is said of a wrong one, and what cannot be graded."""

from __future__ import annotations

import asyncio
import json
import math
import re
import threading
import time
from contextlib import suppress
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import JsonValue

from doubles import check_beside_loop
from reflact.environments.comparison import normalize, parse_number, tokenize
from reflact.environments.function_identity import identify_function
from reflact.environments.graders import (
    MAX_JSON_CHARS,
    ExactGrader,
    Grader,
    GraderOutput,
    JsonFieldsGrader,
    NormalizedGrader,
    NumericGrader,
    ReferenceGrader,
    RegexGrader,
    TokenF1Grader,
    apply_grader,
    identify_grader,
)
from reflact.errors import DataError, EnvironmentFailure, InterfaceError
from reflact.types import Grade, Item, Score

AnyGrader = ReferenceGrader[Any]

ALL: tuple[AnyGrader, ...] = (
    ExactGrader(),
    NormalizedGrader(),
    TokenF1Grader(),
    NumericGrader(),
    RegexGrader(),
    JsonFieldsGrader(),
)


def _item(reference: JsonValue) -> Item:
    return Item(id="q1", input="?", reference=reference)


def _hard(grade: AnyGrader, reference: JsonValue, answer: str) -> float:
    return grade(_item(reference), answer).score.hard


def _feedback(grade: AnyGrader, reference: JsonValue, answer: str) -> str:
    feedback = grade(_item(reference), answer).feedback
    assert feedback is not None
    return feedback


# ------------------------------------------------------------------------------------------- all of them


@pytest.mark.parametrize("grade", ALL, ids=lambda grade: grade.name)
@given(answer=st.text())
def test_any_answer_gets_a_score(grade: AnyGrader, answer: str) -> None:
    """Every text is judged, and words are said of it exactly where it falls short."""
    reference: JsonValue = {"a": 1} if isinstance(grade, JsonFieldsGrader) else "7"
    graded = grade(_item(reference), answer)
    assert graded.answer == answer
    assert (graded.feedback is None) == (graded.score.soft == 1)
    if graded.feedback is not None:
        graded.feedback.encode("utf-8")


@pytest.mark.parametrize(
    "grade",
    [ExactGrader(), NormalizedGrader(), TokenF1Grader(), NumericGrader(), RegexGrader()],
    ids=lambda g: g.name,
)
def test_any_of_several_accepted_answers_will_do(grade: AnyGrader) -> None:
    """A reference that is a list holds accepted answers; the feedback names them all."""
    assert _hard(grade, ["7", "8"], "8") == 1
    assert _hard(grade, ["7", "8"], "9") == 0
    assert 'expected "7" or "8", got "9"' in _feedback(grade, ["7", "8"], "9")


UNFIT: tuple[tuple[AnyGrader, JsonValue], ...] = (
    *((grade, reference) for grade in ALL for reference in (None, [], ["7", None], 1e999)),
    (NormalizedGrader(), "  "),
    (TokenF1Grader(), " "),
    (NumericGrader(), "seven"),
    (NumericGrader(), 10**400),
    (RegexGrader(), "(open"),
    (JsonFieldsGrader(), {}),
    (JsonFieldsGrader(), "{}"),
    (NumericGrader(), True),
    (JsonFieldsGrader(), True),
    (NormalizedGrader(), "\u200b"),
    (ExactGrader(), {"a": 1}),
)


def test_a_useless_reference_is_refused_by_name() -> None:
    """A reference that a grader cannot use is an error that names the item and the grader."""
    for grade, reference in UNFIT:
        item = Item.model_construct(id="q1", input="?", reference=reference)
        with pytest.raises(DataError, match=rf"item 'q1' cannot be graded by {grade.name}"):
            grade.check(item)


LOOSE, WIDE = NumericGrader(tolerance=0.5, relative_tolerance=0), NumericGrader(relative_tolerance=0.1)
RIGHT: tuple[tuple[AnyGrader, JsonValue, str], ...] = (
    (ExactGrader(), "Paris", " Paris\n"),
    (ExactGrader(), 7, "7"),
    (NormalizedGrader(), "New York", '"new  york."'),
    (NormalizedGrader(), "-", "-"),
    (NormalizedGrader(), "B", "(b)."),
    (NormalizedGrader(), "l\u2019heure d\u02bcété", "L'heure d\u2018été"),
    (NormalizedGrader(), "co\u2010op\u2011ed", "co-op-ed"),
    (NormalizedGrader(), "co\u00adop \u2764\ufe0f", "coop \u2764"),
    (NormalizedGrader(), "Paris", "\ufeff \u200b'Paris\u200e'.\u2060"),
    (NormalizedGrader(), True, "True"),
    (NormalizedGrader(), [0.5, "n/a"], "0.5"),
    (ExactGrader(), "\u200fParis\u200b", "\ufeff Paris \u2060"),
    (ExactGrader(), False, "false"),
    (ExactGrader(), 1.5, "1.5"),
    (TokenF1Grader(), "it\u2019s a well\u2010made", "\ufeffit's \u200bwell-made\u200b"),
    (TokenF1Grader(), True, "true"),
    (NumericGrader(), "\ufeff7", "7\u200b"),
    (RegexGrader(), 1.5, "1.5"),
    (NumericGrader(), 1_000_000, "1,000,000.9"),
    (NumericGrader(), 9_007_199_254_740_993, "9,007,199,254,740,993"),
    (NumericGrader(), 200250077.0, "200250077"),
    (NumericGrader(), "1000000.0", "1000000"),
    (NumericGrader(relative_tolerance=1e-6), 1_000_000, "1000001"),
    (NumericGrader(tolerance=1), 1_000_000, "1000001"),
    (NumericGrader(), 6.02e23, "6.0200001e23"),
    (NumericGrader(relative_tolerance=0), 0.1, "0.1"),
    (NumericGrader(), "50%", "0.5"),
    (LOOSE, 10, "10.5"),
    (WIDE, 100, "110"),
    (WIDE, -100, "-110"),
    (RegexGrader(), r"\d{4}", " 1984\n"),
    (RegexGrader(), r"(?i)yes|no", "YES"),
    (RegexGrader(), r"a|ab", "ab"),
    (JsonFieldsGrader(), [{"a": 1, "b": 1}, {"a": 2}], '{"a": 2}'),
)
WRONG: tuple[tuple[AnyGrader, JsonValue, str], ...] = (
    (ExactGrader(), "Paris", "paris"),
    (ExactGrader(), "Paris", "Paris."),
    (ExactGrader(), "a b", "a  b"),
    (ExactGrader(), True, "True"),
    (ExactGrader(), "\U0001f468\u200d\U0001f469", "\U0001f468\U0001f469"),
    (NormalizedGrader(), "\U0001f468\u200d\U0001f469", "\U0001f468\U0001f469"),
    (NormalizedGrader(), "5\u20137", "5-7"),
    (RegexGrader(), 1.5, "1x5"),
    (NormalizedGrader(), "The Who", "who"),
    (NormalizedGrader(), "10²", "102"),
    (NormalizedGrader(), "H₂O", "H2O"),
    (NormalizedGrader(), "1½", "11⁄2"),
    (NormalizedGrader(), "ℕ", "N"),
    (NormalizedGrader(), "①", "1"),
    (NormalizedGrader(), ") ] >", "} >"),
    (NormalizedGrader(), "x ]", "x"),
    (NormalizedGrader(), "[0,1)", "(0,1]"),
    (NormalizedGrader(), "[0,1]", "(0,1)"),
    (NormalizedGrader(), "5!", "5"),
    (NormalizedGrader(), "(n-1)!", "(n-1)"),
    (NormalizedGrader(), "f'", "f"),
    (NormalizedGrader(), "-", "+"),
    (NormalizedGrader(), "- 5", "5"),
    (NormalizedGrader(), "A -", "A"),
    (NormalizedGrader(), "__init__", "init"),
    (NormalizedGrader(), "5‰", "5"),
    (TokenF1Grader(), "10²", "102"),
    (TokenF1Grader(), ") ] >", "} >"),
    (TokenF1Grader(), "-", "+"),
    (NumericGrader(), 1_000_000, "1000001"),
    (NumericGrader(), "1000000", "1000001.0"),
    (NumericGrader(), "4111111111111111111", "4111111111111111112"),
    (NumericGrader(), 0.1, "0.10001"),
    (LOOSE, 10, "10.51"),
    (WIDE, 0, "0.05"),
    (RegexGrader(), r"\d{4}", "in 1984"),
    (RegexGrader(), r"\d{4}", "1984."),
    (JsonFieldsGrader(), {"a": 1}, '{"a": true}'),
    (JsonFieldsGrader(), {"a": 0}, '{"a": false}'),
    (JsonFieldsGrader(), {"a": True}, '{"a": 1}'),
    (JsonFieldsGrader(), {"a": 1}, '{"a": "1"}'),
    (JsonFieldsGrader(), {"a": None}, '{"a": 0}'),
    (JsonFieldsGrader(), {"a": []}, '{"a": {}}'),
    (JsonFieldsGrader(), {"a": [1]}, '{"a": [1, 2]}'),
    (JsonFieldsGrader(), {"a": {}}, '{"a": []}'),
)


def test_what_each_grader_forgives() -> None:
    """Right are white space, forms, tolerances and orders as documented; all else is wrong."""
    assert [case for case in RIGHT if _hard(*case) != 1] == []
    assert [case for case in WRONG if _hard(*case) != 0] == []


def test_normalized_text() -> None:
    """Case, width, spacing and punctuation at the ends go; signs, points and articles stay."""
    expected = {
        "  **Paris**.  ": "paris",
        "`x`": "x",
        "“New\n  York”!": "new york",
        "STRASSE": "strasse",
        "straße": "strasse",
        "\ufb01ne": "fine",
        "４２": "42",
        "e\u0301": "\u00e9",
        "the answer": "the answer",
        "-5": "-5",
        "- five": "- five",
        ".5": ".5",
        "5.": "5",
        "5%": "5%",
        "5!": "5!",
        "Stop!": "stop",
        "C#": "c#",
        "A-": "a-",
        "it's": "it's",
        "'yes'": "yes",
        "[A]": "a",
        "(a) and (b)": "(a) and (b)",
        "...": "...",
        " ?! ": "?!",
    }
    assert {text: normalize(text) for text in expected} == expected


@given(st.text())
def test_normalizing_twice_changes_nothing(text: str) -> None:
    """A normalised text is its own normal form."""
    assert normalize(normalize(text)) == normalize(text)


def test_tokens_leave_articles_out() -> None:
    """Words are normalised each; articles, dashes and punctuation count only where there is nothing else."""
    assert tokenize("The cat, a dog & an Ox-cart 3.5") == ("cat", "dog", "&", "ox-cart", "3.5")
    assert tokenize("A") == ("a",)
    assert tokenize("Red (or blue), green — 'x'!") == ("red", "or", "blue", "green", "x")
    assert tokenize(") ] >") == (">", ")", "]")
    assert tokenize(") ]") == (")", "]")


def test_token_f1_is_the_overlap_of_two_bags() -> None:
    """Two of three words given, both right, is an F1 of 0.8; repetition is counted."""
    grade = TokenF1Grader(threshold=0.8)
    assert grade(_item("red green blue"), "the green red").score == Score(hard=1, soft=0.8)
    assert TokenF1Grader()(_item("red green blue"), "green red").score == Score(hard=0, soft=0.8)
    assert TokenF1Grader()(_item("red"), "red red red").score == Score(hard=0, soft=0.5)
    assert TokenF1Grader()(_item(["blue", "red"]), "red").score == Score(hard=1, soft=1)
    assert "F1 is 0.80 and 1.00 is needed" in _feedback(TokenF1Grader(), "red green blue", "green red")


@given(st.text(alphabet="ab c", min_size=1), st.text(alphabet="ab c", min_size=1))
def test_token_f1_is_symmetric(one: str, other: str) -> None:
    """Reference and answer can change places."""
    if tokenize(one) and tokenize(other):
        assert TokenF1Grader()(_item(one), other).score == TokenF1Grader()(_item(other), one).score


def test_texts_that_are_numbers() -> None:
    """Signs, thousands commas, exponents and per cent signs are read."""
    expected = {
        "42": 42.0,
        " -42\n": -42.0,
        "+4.5": 4.5,
        "\u22127": -7.0,
        ".5": 0.5,
        "5.": 5.0,
        "1,234,567.8": 1234567.8,
        "1e3": 1000.0,
        "2.5E-1": 0.25,
        "12.5%": 0.125,
        "50 %": 0.5,
        "007": 7.0,
    }
    assert {text: parse_number(text) for text in expected} == expected


def test_texts_that_are_no_numbers() -> None:
    """Anything around a number, other notations, NaN, infinity and overflow are refused."""
    texts = [
        "", "-", ".", "seven", "42 km", "$42", "about 42", "42 or 43", "**42**", "1,5", "12,34", "1.234,5",
        ",123", "1,2345", "1/2", "0x10", "1_000", "1 000", "nan", "NaN", "inf", "-Infinity", "1e999", "1e",
        "--1", "4%%", "٤٢",
    ]  # fmt: skip
    assert [text for text in texts if parse_number(text) is not None] == []


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_every_float_is_read_as_itself(value: float) -> None:
    """Python's own notation and the one with thousands commas are both read exactly."""
    assert parse_number(repr(value)) == value
    assert parse_number(f"{value:,f}") == float(f"{value:f}")


def test_a_catastrophic_pattern_leaves_the_item_unmeasured() -> None:
    """A pattern that never comes to an end is broken off; the answer is not called wrong."""
    with pytest.raises(EnvironmentFailure, match="nested repetitions"):
        RegexGrader()(_item(r"([a-z]+)*\d"), "ab" * 20_000)


ATTACKS = {
    "dots": ".",
    "dots in words": "... ",
    "dashes": "-",
    "spaces": " ",
    "dots and spaces": ". ",
    "marks on a letter": "\u0315\u0300",
    "Korean letters": "\u1100",
    "ligatures": "\ufdfa",
    "articles": "the ",
    "digits": "1",
    "groups of digits": "111,",
    "brackets": "[",
    "quotes": '"',
    "numbers": "1,",
}
"""Texts that are repeated; each is hard on a rule of a grader."""


def measure_seconds(grade: AnyGrader, reference: JsonValue, answer: str) -> float:
    """Return the processor time of grading an answer, the best of three."""
    times = []
    for _ in range(3):
        start = time.thread_time()
        grade(_item(reference), answer)
        times.append(time.thread_time() - start)
    return min(times)


@pytest.mark.parametrize("grade", ALL, ids=lambda grade: grade.name)
@pytest.mark.parametrize("attack", ATTACKS)
def test_time_is_linear_in_the_size_of_an_answer(grade: AnyGrader, attack: str) -> None:
    """Eight times the text takes at most about eight times as long, and not 64 times."""
    reference: JsonValue = {"a": 1} if isinstance(grade, JsonFieldsGrader) else "7"
    small, large = (
        measure_seconds(grade, reference, (ATTACKS[attack] * size)[:size]) for size in (5_000, 40_000)
    )
    assert large < 24 * small + 0.02


def test_json_fields_are_counted() -> None:
    """Soft is the share of the reference's fields that are right; further fields do no harm."""
    reference: JsonValue = {"name": "Ada", "born": 1815, "tags": ["x", {"y": None}]}
    right = '{"born": 1815.0, "tags": ["x", {"y": null}], "name": "Ada", "more": true}'
    assert JsonFieldsGrader()(_item(reference), right).score == Score.of(1)
    partly = '{"name": "ada", "born": 1815, "tags": ["x", {}]}'
    score = JsonFieldsGrader()(_item(reference), partly).score
    assert score.hard == 0
    assert score.soft == pytest.approx(1 / 3)
    feedback = _feedback(JsonFieldsGrader(), reference, '{"name": "ada", "born": 1815}')
    assert feedback.endswith('"name" is "ada"; "tags" is missing')
    assert JsonFieldsGrader()(_item([{"a": 1, "b": 1}, {"a": 2}]), '{"a": 1}').score.soft == 0.5


def test_nothing_is_mended_in_an_answer() -> None:
    """Fences, prose, trailing commas, repeated names, NaN, huge numbers and endless nesting score nothing."""
    answers = [
        "", "null", "[]", '[{"a": 1}]', '"a"', '```json\n{"a": 1}\n```', 'Here: {"a": 1}', '{"a": 1,}',
        "{'a': 1}", '{"a": 1} {"a": 1}', '{"a": 1', '{"a": 1, "b": NaN}', '{"a": 1, "b": -Infinity}',
        '{"a": 1, "b": 1e999}',
        '{"a": 2, "a": 1}', '{"a": 1, "b": ' + "9" * 5000 + "}", '{"a":' * 100_000,
    ]  # fmt: skip
    scores = {answer[:20]: JsonFieldsGrader()(_item({"a": 1}), answer).score for answer in answers}
    assert {answer: score for answer, score in scores.items() if score != Score.of(0)} == {}


def test_feedback_says_what_is_missing_and_can_be_stored() -> None:
    """Values are quoted in part, with lone surrogates escaped; each grader says what is wrong."""
    long = _feedback(ExactGrader(), "7", "x" * 5000)
    assert len(long) < 500
    assert "(5000 characters)" in long
    odd = _feedback(JsonFieldsGrader(), {"a": "é"}, r'{"a": "\ud800"}')
    assert "é" in odd
    assert odd.encode("utf-8")
    assert "off by 2 and 0.5 is allowed" in _feedback(NumericGrader(tolerance=0.5), 10, "12")
    assert "must be a single number" in _feedback(NumericGrader(), 10, "0" * 10_000 + "1")
    huge = json.dumps({"a": 1, "b": "x" * MAX_JSON_CHARS})
    assert f"more than {MAX_JSON_CHARS} characters" in _feedback(JsonFieldsGrader(), {"a": 1}, huge)


def test_identities_tell_graders_apart() -> None:
    """Kind, version and settings make up an identity; an own function has its name and a digest of its code."""
    own = _returning(True)
    graders: tuple[Grader, ...] = (*ALL, NumericGrader(tolerance=1), TokenF1Grader(threshold=0.5), own)
    identities = [identify_grader(grade) for grade in graders]
    assert all(identities.count(identity) == 1 for identity in identities)
    assert identities[-1] == {"grader": identify_function(own)}


# --------------------------------------------------------------------------------------- own functions


def _returning(outcome: GraderOutput) -> Grader:
    return lambda item, answer: outcome


GRADED = Grade(score=Score.of(0), answer="part", feedback="because")


class OtherNumber:
    """A number that is neither an int nor a float, as those of numpy are."""

    def __init__(self, value: float) -> None:
        self._value = value

    def __float__(self) -> float:
        return float(self._value)


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [
        (True, Grade(score=Score.of(1), answer="a")),
        (False, Grade(score=Score.of(0), answer="a")),
        (1, Grade(score=Score.of(1), answer="a")),
        (0.25, Grade(score=Score.of(0.25), answer="a")),
        (Score(hard=0, soft=0.5), Grade(score=Score(hard=0, soft=0.5), answer="a")),
        (GRADED, GRADED),
    ],
)
async def test_own_functions_return_what_suits_them(outcome: GraderOutput, expected: Grade) -> None:
    """Truth values, fractions, scores and grades all become a grade, from plain and async functions."""

    async def grade(item: Item, answer: str) -> GraderOutput:
        return outcome

    assert await apply_grader(_returning(outcome), _item(None), "a") == expected
    assert await apply_grader(grade, _item(None), "a") == expected


@pytest.mark.parametrize(
    ("outcome", "score"),
    [
        (Decimal("0.5"), 0.5),
        (Fraction(1, 4), 0.25),
        (OtherNumber(0.75), 0.75),
        (OtherNumber(True), 1),
        (1 + 1e-12, 1),
    ],
)
async def test_numbers_of_other_libraries_are_scores(outcome: Any, score: float) -> None:
    """What `float` takes is a number, such as `bool_` and `float32` of numpy; rounding beyond 1 does no harm."""
    assert (await apply_grader(_returning(outcome), _item(None), "a")).score == Score.of(score)


def _stop(item: Item, answer: str) -> GraderOutput:
    raise StopIteration


async def _stop_async(item: Item, answer: str) -> GraderOutput:
    raise StopIteration


def _run_nested(item: Item, answer: str) -> GraderOutput:
    waiting = asyncio.sleep(0)
    try:
        asyncio.run(waiting)
    finally:
        waiting.close()
    return 1.0


@pytest.mark.parametrize(
    ("grade", "advice"),
    [(_stop, ""), (_stop_async, ""), (_run_nested, "async def")],
    ids=["plain", "async", "nested loop"],
)
async def test_a_grading_function_that_fails_is_named_with_its_line(grade: Any, advice: str) -> None:
    """An exception that Python turns into another one at an await still says whose it is, and where."""
    name = re.escape(f"grading function failed on item {_item(None).id} ({__file__}:")
    with pytest.raises(EnvironmentFailure, match=rf"{name}\d+\): .*{advice}") as caught:
        await apply_grader(grade, _item(None), "a")
    assert isinstance(caught.value.__cause__, RuntimeError | StopIteration)


async def test_a_result_that_is_no_score_ends_the_run() -> None:
    """A value of another type or out of range is a fault of the function, and not of one item, unless it is NaN."""
    outcomes: tuple[Any, ...] = (
        1.5,
        100,
        -0.1,
        math.inf,
        None,
        "1",
        [1],
        1j,
        Decimal("sNaN"),
        Fraction(10**400),
    )
    for outcome in outcomes:
        with pytest.raises(InterfaceError, match="item 'q1'"):
            await apply_grader(_returning(outcome), _item(None), "a")
    with pytest.raises(EnvironmentFailure, match="NaN"):
        await apply_grader(_returning(math.nan), _item(None), "a")


class ThreadGrader(ReferenceGrader[str]):
    """Says on which thread it graded."""

    name = "thread"

    def _read(self, reference: JsonValue) -> str:
        return ""

    def _match(self, expected: str, answer: str) -> tuple[float, str]:
        return 0, f"thread {threading.get_ident()}"


async def test_long_answers_are_graded_beside_the_event_loop() -> None:
    """A long answer or reference goes to another thread, a short one does not."""

    async def is_beside(item: Item, answer: str) -> bool:
        feedback = str((await apply_grader(ThreadGrader(), item, answer)).feedback)
        return f"thread {threading.get_ident()}" not in feedback

    assert not await is_beside(_item("a"), "b")
    assert await is_beside(_item("a"), "b" * 3000)
    assert await is_beside(_item(["a"] * 3000), "b")


async def test_patterns_are_matched_beside_the_event_loop() -> None:
    """A pattern can take its whole time on a short answer, so other work is done meanwhile."""
    with suppress(EnvironmentFailure):
        await check_beside_loop(lambda: apply_grader(RegexGrader(), _item(r"([a-z]+)*\d"), "ab" * 900))
