"""Graders: what counts as a right answer, what is said of a wrong one, and what cannot be graded."""

from __future__ import annotations

import asyncio
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
from reflact.environments import JsonFieldsGrader, JsonSchemaGrader, JsonSubsetGrader
from reflact.environments.graders import (
    ContainsGrader,
    ExactGrader,
    Grader,
    GraderOutput,
    NormalizedGrader,
    NumericGrader,
    ReferenceGrader,
    RegexGrader,
    SimilarityGrader,
    TokenF1Grader,
    apply_grader,
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


@pytest.mark.parametrize("grade", ALL[:-1], ids=lambda grade: grade.name)
def test_any_of_several_accepted_answers_will_do(grade: AnyGrader) -> None:
    assert _hard(grade, ["7", "8"], "8") == 1
    assert 'expected "7" or "8", got "9"' in _feedback(grade, ["7", "8"], "9")


UNFIT: tuple[tuple[AnyGrader, JsonValue], ...] = (
    *((grade, reference) for grade in ALL for reference in (None, [], ["7", None], 1e999)),
    *((NormalizedGrader(), reference) for reference in ("  ", "\u200b")),
    (TokenF1Grader(), " "),
    *((NumericGrader(), reference) for reference in ("seven", 10**400, True)),
    (RegexGrader(), "(open"),
    *((JsonFieldsGrader(), reference) for reference in ({}, "{}", True)),
    (ExactGrader(), {"a": 1}),
)


def test_a_useless_reference_is_refused_by_name() -> None:
    for grade, reference in UNFIT:
        item = Item.model_construct(id="q1", input="?", reference=reference)
        with pytest.raises(DataError, match=rf"item 'q1' cannot be graded by {grade.name}"):
            grade.check(item)


EXACT, NORMALIZED, F1, NUMERIC, REGEX, FIELDS = ALL
LOOSE, WIDE = NumericGrader(tolerance=0.5, relative_tolerance=0), NumericGrader(relative_tolerance=0.1)
FAMILY = "\U0001f468\u200d\U0001f469"
FIRST = "\ufeff \u200b"
"""Invisible characters, as at the beginning of a file."""

CASES: tuple[tuple[AnyGrader, JsonValue, list[str], list[str]], ...] = (
    (EXACT, "Paris", [" Paris\n", f"{FIRST}Paris \u2060"], ["paris", "Paris."]),
    (EXACT, "a b", ["a b"], ["a  b"]),
    (EXACT, 7, ["7"], ["7.0"]),
    (EXACT, 1.5, ["1.5"], []),
    (EXACT, FAMILY, [FAMILY], ["\U0001f468\U0001f469"]),
    (NORMALIZED, "New York", ['"new  york."'], ["newyork"]),
    (NORMALIZED, "Paris", [f"{FIRST}'Paris\u200e'.\u2060"], []),
    (NORMALIZED, "B", ["(b)."], []),
    (NORMALIZED, "l\u2019heure d\u02bcété", ["L'heure d\u2018été"], []),
    (NORMALIZED, "co\u2010op\u2011ed", ["co-op-ed"], []),
    (NORMALIZED, "co\u00adop \u2764\ufe0f", ["coop \u2764"], []),
    (NORMALIZED, True, ["True"], []),
    (NORMALIZED, [0.5, "n/a"], ["0.5"], []),
    (NORMALIZED, FAMILY, [], ["\U0001f468\U0001f469"]),
    (NORMALIZED, "-", ["-"], ["+"]),
    (NORMALIZED, "5\u20137", [], ["5-7"]),
    (NORMALIZED, "The Who", [], ["who"]),
    (NORMALIZED, "10²", [], ["102"]),
    (NORMALIZED, "H₂O", [], ["H2O"]),
    (NORMALIZED, "ℕ", [], ["N"]),
    (NORMALIZED, ") ] >", [], ["} >"]),
    (NORMALIZED, "x ]", [], ["x"]),
    (NORMALIZED, "[0,1)", [], ["(0,1]", "[0,1]", "(0,1)"]),
    (NORMALIZED, "5!", [], ["5"]),
    (NORMALIZED, "(n-1)!", [], ["(n-1)"]),
    (NORMALIZED, "f'", [], ["f"]),
    (NORMALIZED, "- 5", [], ["5"]),
    (NORMALIZED, "__init__", [], ["init"]),
    (F1, "it\u2019s a well\u2010made", ["\ufeffit's \u200bwell-made\u200b"], []),
    (F1, True, ["true"], []),
    (F1, ") ] >", [], ["} >"]),
    (NUMERIC, "\ufeff7", ["7\u200b"], []),
    (NUMERIC, 1_000_000, ["1,000,000.9"], ["1000001"]),
    (NUMERIC, 9_007_199_254_740_993, ["9,007,199,254,740,993"], ["9007199254740992"]),
    (NUMERIC, 200250077.0, ["200250077"], []),
    (NUMERIC, "1000000", ["1000000.0"], ["1000001.0"]),
    (NUMERIC, "4111111111111111111", [], ["4111111111111111112"]),
    (NUMERIC, 6.02e23, ["6.0200001e23"], []),
    (NUMERIC, 0.1, ["0.1"], ["0.10001"]),
    (NUMERIC, "50%", ["0.5"], []),
    (NumericGrader(relative_tolerance=1e-6), 1_000_000, ["1000001"], []),
    (NumericGrader(tolerance=1), 1_000_000, ["1000001"], []),
    (LOOSE, 10, ["10.5"], ["10.51"]),
    (WIDE, 100, ["110"], []),
    (WIDE, 0, [], ["0.05"]),
    (REGEX, r"\d{4}", [" 1984\n"], ["in 1984", "1984."]),
    (REGEX, r"(?i)yes|no", ["YES"], []),
    (REGEX, 1.5, ["1.5"], ["1x5"]),
    (FIELDS, [{"a": 1, "b": 1}, {"a": 2}], ['{"a": 2}'], []),
    (FIELDS, {"a": 1}, ['{"a": 1.0}'], ['{"a": true}', '{"a": "1"}']),
    (FIELDS, {"a": False}, [], ['{"a": 0}', '{"a": null}']),
    (FIELDS, {"a": []}, [], ['{"a": {}}', '{"a": [1]}']),
    (FIELDS, {"a": [1]}, [], ['{"a": [1, 2]}']),
)
"""A grader, a reference, and right and wrong answers to it."""


def test_what_each_grader_forgives() -> None:
    """Right are white space, forms, tolerances and orders as documented; all else is wrong."""
    for grade, reference, right, wrong in CASES:
        scores = [_hard(grade, reference, answer) for answer in (*right, *wrong)]
        assert scores == [1] * len(right) + [0] * len(wrong), (grade.name, reference)


def test_token_f1_is_the_overlap_of_two_bags() -> None:
    """Two of three words given, both right, is an F1 of 0.8; repetition is counted."""
    grade = TokenF1Grader(threshold=0.8)
    assert grade(_item("red green blue"), "the green red").score == Score(hard=1, soft=0.8)
    assert TokenF1Grader()(_item("red green blue"), "green red").score == Score(hard=0, soft=0.8)
    assert TokenF1Grader()(_item("red"), "red red red").score == Score(hard=0, soft=0.5)
    assert TokenF1Grader()(_item(["blue", "red"]), "red").score == Score(hard=1, soft=1)
    assert "F1 is 0.80 and 1.00 is needed" in _feedback(TokenF1Grader(), "red green blue", "green red")


def test_a_catastrophic_pattern_leaves_the_item_unmeasured() -> None:
    """A pattern that never comes to an end is broken off; the answer is not called wrong."""
    with pytest.raises(EnvironmentFailure, match="nested repetitions"):
        RegexGrader()(_item(r"([a-z]+)*\d"), "ab" * 20_000)


ATTACKS = [*'.- 1["\u1100\ufdfa', "... ", ". ", "\u0315\u0300", "the ", "111,", "1,"]
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
    small, large = (measure_seconds(grade, reference, (attack * size)[:size]) for size in (5_000, 40_000))
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


def _returning(outcome: GraderOutput) -> Grader:
    return lambda item, answer: outcome


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [
        (True, Score.of(1)),
        (False, Score.of(0)),
        (0.25, Score.of(0.25)),
        (Score(hard=0, soft=0.5), Score(hard=0, soft=0.5)),
        (Decimal("0.5"), Score.of(0.5)),
        (Fraction(1, 4), Score.of(0.25)),
        (1 + 1e-12, Score.of(1)),
    ],
)
async def test_own_functions_return_what_suits_them(outcome: Any, expected: Score) -> None:
    """Truth values, numbers of any library and scores become a grade; a grade stays what it is."""

    async def grade(item: Item, answer: str) -> GraderOutput:
        result: GraderOutput = outcome
        return result

    graded = Grade(score=expected, answer="a")
    assert await apply_grader(_returning(outcome), _item(None), "a") == graded
    assert await apply_grader(grade, _item(None), "a") == graded
    own = Grade(score=Score.of(0), answer="part", feedback="because")
    assert await apply_grader(_returning(own), _item(None), "a") == own


def _stop(item: Item, answer: str) -> GraderOutput:
    raise StopIteration


def _run_nested(item: Item, answer: str) -> GraderOutput:
    waiting = asyncio.sleep(0)
    try:
        asyncio.run(waiting)
    finally:
        waiting.close()
    return 1.0


@pytest.mark.parametrize(
    ("grade", "advice"), [(_stop, ""), (_run_nested, "async def")], ids=["plain", "nested loop"]
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


@pytest.mark.parametrize(
    ("grade", "reference", "right", "wrong"),
    [
        (ContainsGrader(), "42 euro", "It costs\n 42  Euro.", "42"),
        (ContainsGrader(), ["red", "blue"], "so blue", "green"),
        (SimilarityGrader(threshold=0.8), "colour", "Color!", "blue"),
        (SimilarityGrader(threshold=0.8), "a b " * 500, "a b " * 450, "c " * 900),
        (
            JsonSubsetGrader(),
            {"a": {"b": [1, {"c": "x"}]}},
            '{"a": {"b": [1, {"c": "x", "d": 0}]}}',
            '{"a": {"b": [1]}}',
        ),
        (JsonSubsetGrader(), {"a": {}}, '{"a": {}}', '{"a": {"b": 1}}'),
        (JsonSchemaGrader(), {"type": "object", "required": ["n"]}, '{"n": 1}', "{}"),
        (
            JsonSchemaGrader(),
            {"properties": {"n": {"type": "integer", "minimum": 3}}},
            '{"n": 3}',
            '{"n": 2}',
        ),
        (JsonSchemaGrader(), {"properties": {}, "additionalProperties": False}, "{}", '{"n": 2}'),
        (JsonSchemaGrader(), {"items": {"enum": ["a", None]}, "minItems": 1}, '["a", null]', '["b"]'),
        (
            JsonSchemaGrader(),
            {"anyOf": [{"type": "null"}, {"type": "string", "pattern": "^a"}]},
            '"ab"',
            '"b"',
        ),
        (JsonSchemaGrader(), {"type": ["number", "boolean"]}, "1.5", '"1.5"'),
    ],
)
def test_graders_of_parts_and_likeness(
    grade: ReferenceGrader[Any], reference: JsonValue, right: str, wrong: str
) -> None:
    grade.check(_item(reference))
    assert grade(_item(reference), right).score.hard == 1
    failed = grade(_item(reference), wrong)
    assert failed.score.hard == 0
    assert failed.feedback


def test_a_part_of_a_subset_counts() -> None:
    reference: JsonValue = {"a": {"b": 1, "c": [1, 2]}, "d": True}
    grade = JsonSubsetGrader()(_item(reference), '{"a": {"b": 1, "c": [1, 3]}, "d": 1}')
    assert grade.score.soft == 0.5
    assert str(grade.feedback).endswith(': "a.c[1]" is 3; "d" is 1')


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/x"},
        {"properties": {"a": {"oneOf": []}}},
        {"type": "text"},
        {"minLength": "1"},
        {"pattern": "("},
    ],
)
def test_a_schema_that_is_not_read_is_refused(schema: JsonValue) -> None:
    """An answer that breaks a rule would be right if the rule were passed over."""
    with pytest.raises(DataError, match="JSON schema"):
        JsonSchemaGrader().check(_item(schema))


def test_a_slow_pattern_is_no_fault_of_the_answer() -> None:
    with pytest.raises(EnvironmentFailure, match="rewrite it"):
        JsonSchemaGrader()(_item({"pattern": r"^([a-z]+)*\d$"}), f'"{"ab" * 20_000}"')
