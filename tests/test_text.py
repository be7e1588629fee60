"""Text for people: nothing in it steers a terminal, and figures and cuts are short."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reflact.text import (
    escape_controls,
    escape_line,
    format_count,
    format_duration,
    format_usd,
    shorten,
    shorten_reason,
)

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


@pytest.mark.parametrize(
    ("reason", "shown"),
    [
        ('refused: {"error": {"message": "too long", "code": 400}}', "refused: too long"),
        ('refused: {"error": "too long"}; try again', "refused: too long; try again"),
        ('refused: {"code": 400}', 'refused: {"code": 400}'),
        ('cut: {"error": {"mess', 'cut: {"error": {"mess'),
    ],
)
def test_a_reason_has_the_message_of_a_refusal(reason: str, shown: str) -> None:
    """The JSON around the message of an endpoint is left out."""
    assert shorten_reason(reason) == shown
    assert len(shorten_reason(reason * 50)) <= 160


@pytest.mark.parametrize(
    ("form", "number", "shown"),
    [
        *((format_duration, *pair) for pair in ((0.4, "0.4 s"), (42, "42 s"), (240, "4 min"))),
        *((format_duration, *pair) for pair in ((9000, "2.5 h"), (3 * 86400, "3.0 days"))),
        *((format_count, *pair) for pair in ((0, "0"), (9999, "9,999"), (45_210, "45.2k"))),
        *((format_count, *pair) for pair in ((999_700, "1M"), (1_234_000, "1.23M"))),
        *((format_usd, *pair) for pair in ((0, "$0.00"), (1234.5, "$1,234.50"), (0.0012, "$0.0012"))),
        (format_usd, 0.00002, "$0.000020"),
    ],
)
def test_figures_are_short(form: Callable[[float], str], number: float, shown: str) -> None:
    """A duration has one unit, a large count three digits and a unit, and money only the digits that tell."""
    assert form(number) == shown
