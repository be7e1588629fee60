"""Text for people: nothing in it steers a terminal, and figures and cuts are short."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reflact.text import escape_controls, escape_line, shorten

STEERING = "\x1b[2J\x1b]0;title\x07\r\u202e\u200b\U000e0041"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        *((text, text) for text in ("two\nlines\tand a tab", "Grüße, 世界", "\U0001f468\u200d\U0001f469")),
        (STEERING, r"\x1b[2J\x1b]0;title\x07\r\u202e\u200b\U000e0041"),
    ],
)
def test_only_steering_characters_are_escaped(text: str, shown: str) -> None:
    """Scripts and signs that need joiners keep them; a reviewer sees controls as escapes."""
    assert escape_controls(text) == shown


@given(st.text(st.characters() | st.sampled_from("\n\r\t\v\x85\u2028\ud800\udfff")))
def test_one_line_stays_one(text: str) -> None:
    """A text in a line of many breaks no line, and can be written as UTF-8 whatever is in it."""
    shown = escape_line(text)
    assert len(shown.splitlines()) <= 1
    assert escape_controls(text).encode().decode() == escape_controls(text)
    assert "\t" not in shown


@given(st.text("ab ", max_size=200), st.integers(8, 120))
def test_a_text_loses_its_middle_between_words(text: str, length: int) -> None:
    """The result is never longer than asked for, and begins and ends as the text does."""
    shown = shorten(text, length)
    head, dots, tail = shown.partition("...")
    assert len(shown) <= length
    assert text.startswith(head)
    assert text.endswith(tail)
    assert bool(dots) == (len(text) > length)
