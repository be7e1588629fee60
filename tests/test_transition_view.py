"""What differs between two states, and texts that are cut to a number of tokens."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import JsonValue

from reflact.calibration.transition_view import (
    NO_CHANGE_TEXT,
    estimate_tokens,
    show_change,
    show_state,
    truncate_to_tokens,
)


@pytest.mark.parametrize(
    ("before", "after", "lines"),
    [
        ({"a": 1}, {"a": 1.5}, ["a: 1 -> 1.5"]),
        ({"a": 1}, {"b": 2}, ["a: 1 -> (not there)", "b: (not there) -> 2"]),
        ({"a": {"b c": [1]}}, {"a": {"b c": [2]}}, ['a["b c"][0]: 1 -> 2']),
        ({"state": {"x": 1}}, {"state": {"x": 2}}, ["state.x: 1 -> 2"]),
        ([1, 2, 3], [0, 1, 2, 3], ["[0]: (not there) -> 0"]),
        ([1, 2, 3], [1, 3], ["[1]: 2 -> (not there)"]),
        ([{"a": 1}, {"a": 2}], [{"a": 1}, {"a": 3}], ["[1].a: 2 -> 3"]),
        ({"a": True}, {"a": 1}, ["a: true -> 1"]),
        ({"a": None}, {}, ["a: null -> (not there)"]),
        ({"a": 1}, "text", ['state: {"a": 1} -> "text"']),
        ({}, [], ["state: {} -> []"]),
        ("a\nb\nc", "a\nx\nc", ["@@", " a", "-b", "+x", " c"]),
        ("", "new", ["@@", "+new"]),
        ("a", "a\n", ['"a" -> "a\\n"']),
        ("a\r\nb", "a\nb", ['"a\\r\\nb" -> "a\\nb"']),
        ({"b": 1, "a": 2}, {"a": 2, "b": 1}, [NO_CHANGE_TEXT]),
        ("same", "same", [NO_CHANGE_TEXT]),
    ],
)
def test_what_differs_is_shown(before: JsonValue, after: JsonValue, lines: list[str]) -> None:
    """Fields stand with both sides, text as a unified diff without line numbers."""
    assert show_change(before, after).splitlines() == lines


def test_a_short_form_leaves_out_what_long_texts_share() -> None:
    """What is equal at both ends is counted, not shown."""
    before, after = ({"log": "x" * 5000 + side + "y" * 5000, "n": 1} for side in ("open", "paid"))
    text = show_change(before, after, shorten=True)
    assert len(text) < 600
    assert re.search(r"equal characters \.\.\.\]x+openy+\[", text)
    assert re.search(r"equal characters \.\.\.\]x+paidy+\[", text)


def test_a_state_is_shown_the_same_whatever_the_order_of_its_fields() -> None:
    """Equal states are equal text; text is shown as it is."""
    text = '{\n "a": "\u5b8c",\n "b": 1\n}'
    assert show_state({"b": 1, "a": "\u5b8c"}) == show_state({"a": "\u5b8c", "b": 1}) == text
    assert show_state("as it is\n") == "as it is\n"
    assert show_state("half \ud83d") == "half \\ud83d"


@given(st.text(alphabet="ab \n\u5b8c\U0001f3891", max_size=400), st.integers(0, 300))
def test_a_cut_fits_and_says_what_is_missing(text: str, room: int) -> None:
    """A text that fits is whole; else both ends and a mark with the number of characters missing fit."""
    short = truncate_to_tokens(text, room)
    if estimate_tokens(text) <= room:
        assert short == text
        return
    mark = re.search(r"\n?\[\.\.\. ([\d,]+) characters cut \.\.\.\]\n?", short)
    head, tail = short[: mark.start()], short[mark.end() :]
    assert text.startswith(head)
    assert text.endswith(tail)
    assert len(head) + len(tail) + int(mark[1].replace(",", "")) >= len(text) - 2
    assert estimate_tokens(short) <= room or (head, tail) == ("", "")
