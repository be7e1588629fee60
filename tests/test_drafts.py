"""Drafts of models in a few lines."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from reflact.report.drafts import cut, draft_lines, shown
from rich.cells import cell_len

SCALARS = st.none() | st.booleans() | st.integers() | st.text()
DRAFTS = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner), max_leaves=12
)


def lines(draft: object, *, width: int = 40, room: int = 6, encoding: str = "utf-8") -> tuple[str, ...]:
    """Return a draft's lines."""
    return draft_lines(draft, width=width, room=room, encoding=encoding)  # type: ignore[arg-type]


@given(DRAFTS, st.integers(1, 60), st.integers(0, 9), st.sampled_from(["utf-8", "ascii", "latin-1"]))
def test_whatever_is_written_fits(draft: object, width: int, room: int, encoding: str) -> None:
    """No draft takes more lines or cells than there are, and none steers the terminal."""
    found = lines(draft, width=width, room=room, encoding=encoding)
    assert len(found) <= room
    for line in found:
        assert cell_len(line) <= width
        assert line.isprintable() or not any(ord(c) < 32 or ord(c) == 127 for c in line)
        line.encode(encoding)


def test_edits_come_one_by_one() -> None:
    """Each edit has a line with the sign of what it does; the last one may still grow."""
    edits = [
        {"op": "append", "content": "one"},
        {"op": "replace", "target": "old", "content": "new"},
        {"op": "delete", "target": "gone"},
        {"content": "still gro"},
    ]
    assert lines({"edits": edits[:1]}) == ("+ one",)
    assert lines({"edits": edits}) == ("+ one", "~ old => new", "- gone", "+ still gro")


def test_fields_are_named() -> None:
    """What is no edit says which field it is in; numbers beside words are left out."""
    draft = {"patterns": [{"type": "sums", "description": "off by one", "count": 2}], "reasoning": "so"}
    assert lines(draft) == ("patterns: sums, off by one", "reasoning: so")


def test_a_growing_document_shows_its_end() -> None:
    """The newest lines of a long text are seen, with a mark that something stands before them."""
    document = "\n".join(f"- rule {number}" for number in range(100))
    found = lines({"strengths": "short", "document": document}, room=4)
    assert found == ("strengths: short", "...- rule 97", "- rule 98", "- rule 99")


def test_long_lines_break_at_words() -> None:
    """The part that grows is read in whole words, where these fit."""
    found = lines({"guidance": "some words that are too many for a line of text"}, width=20)
    assert found == ("guidance: some words", "that are too many", "for a line of text")


def test_a_part_that_is_complete_has_one_line() -> None:
    """What is complete is cut, so that all parts have a place."""
    found = lines({"edits": [{"op": "append", "content": "word " * 50}, {"op": "append", "content": "b"}]})
    assert found[0].endswith("word...")
    assert found[1] == "+ b"


def test_models_cannot_steer_the_terminal() -> None:
    """Escape sequences, marks of direction and markup are shown as what they are."""
    evil = "\x1b[2J\x1b]0;title\x07[bold]x[/bold]\u202e"
    for draft in ({"edits": [{"op": "append", "content": evil}]}, {"document": evil}, evil):
        (found,) = lines(draft, width=79)
        assert found.endswith(r"\x1b[2J\x1b]0;title\x07[bold]x[/bold]\u202e")


@pytest.mark.parametrize(
    ("text", "encoding", "seen"),
    [
        ("Größe → 世", "utf-8", "Größe → 世"),
        ("Größe → 世", "latin-1", r"Größe \u2192 \u4e16"),
        ("Größe", "ascii", r"Gr\xf6\xdfe"),
        ("\U0001f468\u200d\U0001f469", "utf-8", "\U0001f468\U0001f469"),
        ("a\tb", "utf-8", "a    b"),
    ],
)
def test_what_a_terminal_cannot_show_is_written_out(text: str, encoding: str, seen: str) -> None:
    """Letters that its encoding lacks become escapes; joined signs, whose width is uncertain, come apart."""
    assert shown(text, encoding) == seen


def test_wide_letters_are_counted_as_such() -> None:
    """A letter of two cells never straddles the edge."""
    assert cut("世界世界", 6, "...") == "世..."
    assert cut("世界", 4, "...") == "世界"
