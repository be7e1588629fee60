"""JSON values: how much they hold, whether two are alike, and that pieces are what is written at once."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import JsonValue

from reflact.jsonutil import CHUNK_SIZE, is_same_json, is_short, iter_json_chunks, measure_size
from reflact.types import canonical_json

texts = st.text(max_size=20) | st.sampled_from(["", "a\ud800", "\u65e5"])
small = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts
json_values = st.recursive(
    small,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=20,
)


def size(value: JsonValue) -> int:
    """Return how many values and characters a JSON value holds."""
    if isinstance(value, str):
        return 1 + len(value)
    if isinstance(value, list):
        return 1 + sum(map(size, value))
    if isinstance(value, dict):
        return 1 + sum(len(name) + size(item) for name, item in value.items())
    return 1


def grown(value: JsonValue, wide: bool) -> JsonValue:
    """Return a long value that holds another several times, side by side or far within."""
    if wide:
        return {
            "a": [value] * 9,
            "b": ["x" * 70] * CHUNK_SIZE,
            "c": {f"{n}": value for n in range(CHUNK_SIZE // 3)},
        }
    return {
        "deep": [{"text": "y" * (CHUNK_SIZE + 1), "here": [value, {"longer": ["z" * CHUNK_SIZE, value]}]}]
    }


def shown(value: JsonValue) -> str:
    """Return a value as JSON in another form."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False)


@given(json_values, st.integers(0, 200))
def test_short_is_what_holds_few_values_and_characters(value: JsonValue, most: int) -> None:
    """A value is short where its values and characters together are no more than the bound."""
    assert is_short([value], most) is (size(value) <= most)
    assert is_short([value, value], most) is (2 * size(value) <= most)
    assert measure_size(value, 10**6) == size(value)


@given(json_values, st.sampled_from([None, True, False]))
def test_pieces_make_the_text_that_is_written_at_once(value: JsonValue, wide: bool | None) -> None:
    """Joined, the pieces of any value are its canonical JSON, and in another form its text in that form."""
    value = value if wide is None else grown(value, wide)
    pieces = list(iter_json_chunks(value))
    assert "".join(pieces) == canonical_json(value)
    assert "".join(iter_json_chunks(value, write=shown, signs=(", ", ": "))) == shown(value)
    assert max(map(len, pieces)) <= 6 * (2 * CHUNK_SIZE + 100)


@given(json_values, json_values)
def test_alike_is_what_has_one_canonical_text(one: JsonValue, other: JsonValue) -> None:
    """Two values are alike exactly where their canonical JSON is the same."""
    assert is_same_json(one, other) is (canonical_json(one) == canonical_json(other))
    assert is_same_json(one, json.loads(canonical_json(one)))


@pytest.mark.parametrize(
    ("one", "other"), [(1, 1.0), (1, True), (0.0, -0.0), ([1], [1.0]), ({"a": 0}, {"a": False})]
)
def test_values_of_other_kinds_are_not_alike(one: JsonValue, other: JsonValue) -> None:
    """What Python takes for equal is not alike where JSON writes it otherwise, in long values too."""
    assert not is_same_json(one, other)
    long = ["x"] * CHUNK_SIZE
    assert not is_same_json([*long, one], [*long, other])
    assert is_same_json([*long, one], [*long, one])
