"""JSON that is still being written: seen as it grows, however it is cut, and nothing is raised."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reflact.llm.partial import DEEPEST, Partial

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS
VALUES = st.recursive(SCALARS, lambda v: st.lists(v, max_size=3) | st.dictionaries(TEXTS, v, max_size=3))
OBJECTS = st.dictionaries(TEXTS, VALUES, max_size=4)
SPACING = st.sampled_from([{}, {"indent": 1}, {"separators": (",", ":")}])


def seen(text: str, size: int) -> tuple[Partial, list[Any]]:
    """Feed a text in pieces of a size, and return what was seen after each."""
    partial, values = Partial(), []
    for at in range(0, len(text), size):
        partial.feed(text[at : at + size])
        values.append(partial.value)
    return partial, values


def grows(before: Any, after: Any) -> bool:
    """Whether the earlier value is a beginning of the later one."""
    match before, after:
        case None, _:
            return True
        case dict(), dict():
            return all(name in after and grows(value, after[name]) for name, value in before.items())
        case list(), list():
            return bool(after[: len(before)] == before)
        case str(), str():
            return bool(after.startswith(before))
    return bool(before == after)


@given(OBJECTS, SPACING, st.booleans(), st.integers(1, 9))
def test_in_the_end_all_is_seen(value: Any, spacing: Any, ascii_only: bool, size: int) -> None:
    """However a text is spaced, escaped and cut, its last value is what a parser reads in it."""
    text = json.dumps(value, ensure_ascii=ascii_only, **spacing)
    partial, values = seen(text, size)
    assert (values[-1], partial.broken, partial.read) == (json.loads(text), False, len(text))


@given(OBJECTS, st.booleans(), st.integers(1, 9))
def test_what_was_seen_is_never_taken_back(value: Any, ascii_only: bool, size: int) -> None:
    """Each value is a beginning of the next one, and none changes once it was given out."""
    text = json.dumps(value, ensure_ascii=ascii_only)
    partial, shown = Partial(), []
    for at in range(0, len(text), size):
        partial.feed(text[at : at + size])
        shown.append((partial.value, json.dumps(partial.value)))
    assert all(grows(before, after) for (before, _), (after, _) in pairwise(shown))
    assert all(json.dumps(given_out) == then for given_out, then in shown)


@given(OBJECTS, st.data())
def test_nothing_is_raised_whatever_is_written(value: Any, data: Any) -> None:
    """A text that was damaged in one place grows up to there at least, and at worst stops."""
    text = json.dumps(value)
    at = data.draw(st.integers(0, len(text) - 1))
    damage = data.draw(st.sampled_from(['"', "\\", "{", "}", "[", "]", ",", ":", "x", "\n", "\ud800", ""]))
    intact, damaged = seen(text[:at], 3)[0], seen(text[:at] + damage + text[at + 1 :], 3)[0]
    assert grows(intact.value, damaged.value)


@given(st.text(max_size=30))
def test_what_is_no_object_is_never_seen(text: str) -> None:
    """Before the brace that opens an object there is nothing to see."""
    partial, values = seen(f"[{text}", 1)
    assert partial.broken
    assert set(values) == {None}


def test_texts_grow_and_elements_come_whole() -> None:
    """A text is seen letter by letter; an element of a list, a number and a word once they have closed."""
    shown = []
    _, values = seen('{"say": "h\\u00e9", "list": ["ab", {"c": 1}], "n": {"deep": 12, "on": true}}', 1)
    for value in values:
        if value not in shown:
            shown.append(value)
    said: dict[str, Any] = {"say": "hé"}
    listed = said | {"list": ["ab", {"c": 1}]}
    assert (
        shown
        == [
            None,
            {},
            {"say": ""},
            {"say": "h"},
            said,
            said | {"list": []},
            said | {"list": ["ab"]},
            listed,
            listed | {"n": {}},
            listed | {"n": {"deep": 12}},
            listed | {"n": {"deep": 12, "on": True}},
        ][1:]
    )


def test_a_character_of_two_escapes_comes_whole() -> None:
    """Half of a surrogate pair is never seen."""
    _, values = seen('{"a": "\\ud83d\\ude00!"}', 1)
    assert {value["a"] for value in values if value} == {"", "\U0001f600", "\U0001f600!"}


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ('{"a": "x", "a": 1}', {"a": "x"}),
        ('{"a": 1} and more', {"a": 1}),
        ('{"a": NaN, "b": 1}', {}),
        ('{"a": "\\x", "b": 1}', {"a": ""}),
        ('{"a": "\\ud83d and", "b": 1}', {"a": ""}),
        ('{"a": "x\ny"}', {"a": "x"}),
        ('{"a": [1, 2 3, 4]}', {"a": [1, 2]}),
        ('{"a": [1, [2 3], 4]}', {"a": [1]}),
        ('{"a": [1,]}', {"a": [1]}),
        ('{"a": 1,}', {"a": 1}),
        ('{"a" 1}', {}),
        ('```json\n{"a": 1}', None),
    ],
)
@pytest.mark.parametrize("size", [1, 100])
def test_what_is_wrong_stops_the_growth(text: str, kept: Any, size: int) -> None:
    """What was seen before stays, and nothing after it is looked at."""
    partial, values = seen(text, size)
    assert partial.broken
    assert not partial.growing
    assert values[-1] == kept


@pytest.mark.parametrize("nest", ['{"a": ', '{"a": ['])
def test_deep_nesting_is_harmless(nest: str) -> None:
    """Objects are followed to some depth; what is nested without end stops the growth."""
    text = nest + '{"a": ' * 100_000
    for size in (1000, len(text)):
        partial, values = seen(text + "1", size)
        assert partial.broken or values[-1] == {"a": []}
    within = '{"a": ' * DEEPEST + "1" + "}" * DEEPEST
    assert seen(within, 5)[1][-1] == json.loads(within)


def test_elements_are_asked_for() -> None:
    """Each element of a list that grows is looked at once, with the names that lead to it."""
    asked: list[tuple[tuple[str, ...], str]] = []

    def fits(path: tuple[str, ...], raw: str) -> bool:
        asked.append((path, raw))
        return raw != "3"

    partial = Partial(fits)
    partial.feed('{"a": {"b": [1, [2, "x"], 3, 4]}}')
    assert partial.broken
    assert partial.value == {"a": {"b": [1, [2, "x"]]}}
    assert asked == [(("a", "b"), "1"), (("a", "b"), '[2, "x"]'), (("a", "b"), "3")]
