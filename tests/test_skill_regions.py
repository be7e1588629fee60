"""The protected tail of a document: reading and writing guidance and notes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from profiles import cases
from reflact.errors import SkillError
from reflact.skills import document as tail
from reflact.skills.document import apply_edits, find_regions
from reflact.types import Edit, Skill
from skill_documents import FRONT, MARKERS, NOTES, SLOW, documents, plain, protected, well_formed, wild

SPLIT_MARKER = "<!--\nAPPENDIX_END -->"


def _fits(text: str) -> bool:
    try:
        tail.check_region_text(text)
    except ValueError:
        return False
    return True


words = (plain | st.text(max_size=20)).filter(_fits)
some_notes = st.lists(words, max_size=4)
writable = documents().filter(lambda text: not text.endswith("\r"))


def _flat(note: str) -> str:
    return " ".join(note.split())


def _around(text: str, name: str) -> tuple[str, str]:
    """What stands before and after a region."""
    (region,) = (region for region in find_regions(text) if region.name == name)
    return text[: region.start], text[region.end :]


def _others(text: str, name: str) -> list[str]:
    return [text[region.start : region.end] for region in find_regions(text) if region.name != name]


@cases(1000)
@given(writable, words)
def test_guidance_is_read_as_it_was_written(text: str, new: str) -> None:
    after = tail.replace_guidance(Skill(text=text), new)
    assert tail.read_guidance(after.text) == new.replace("\r\n", "\n").replace("\r", "\n").strip()
    assert tail.replace_guidance(after, new) == after


@cases(1000)
@given(writable, some_notes)
def test_notes_are_read_as_they_were_written(text: str, new: list[str]) -> None:
    after = tail.replace_notes(Skill(text=text), new)
    assert tail.read_notes(after.text) == tuple(_flat(note) for note in new if note.strip())
    assert tail.replace_notes(after, new) == after


@cases(1000)
@given(writable, words, some_notes, st.sampled_from(("slow_update", "appendix")))
def test_writing_keeps_every_byte_outside_its_region(
    text: str, new: str, new_notes: list[str], name: str
) -> None:
    write: Callable[[], Skill] = (
        (lambda: tail.replace_guidance(Skill(text=text), new))
        if name == "slow_update"
        else (lambda: tail.replace_notes(Skill(text=text), new_notes))
    )
    after = write().text
    assert well_formed(after)
    assert _others(after, name) == _others(text, name)
    if name not in {region.name for region in find_regions(after)}:
        assert after == text
    elif name in {region.name for region in find_regions(text)}:
        assert _around(after, name) == _around(text, name)
    else:
        before, behind = _around(after, name)
        place = len(text) - len(behind.lstrip("\r\n"))
        assert before.startswith(text[:place])
        assert text[place:] == behind.lstrip("\r\n")
        assert before[place:].strip("\r\n") == ""


@cases(1000)
@given(writable, words, some_notes, plain, st.booleans())
def test_an_update_of_either_mode_keeps_the_tail(
    text: str, new: str, new_notes: list[str], content: str, whole: bool
) -> None:
    skill = tail.replace_notes(tail.replace_guidance(Skill(text=text), new), new_notes)
    after = apply_edits(skill, [Edit(op="rewrite" if whole else "append", content=content)]).skill
    assert protected(after.text) == protected(skill.text)
    assert tail.read_guidance(after.text) == tail.read_guidance(skill.text)
    assert tail.read_notes(after.text) == tail.read_notes(skill.text)


@cases(500)
@given(wild)
def test_any_text_can_be_read(text: str) -> None:
    assert tail.read_guidance(text) == tail.read_guidance(text).strip()
    assert all(note == _flat(note) and note for note in tail.read_notes(text))


@cases(500)
@given(some_notes, some_notes)
def test_added_notes_stand_once_and_in_order(old: list[str], new: list[str]) -> None:
    every = tail.merge_notes(old, new)
    keys = [note.casefold() for note in every]
    assert len(set(keys)) == len(keys)
    assert set(keys) == {_flat(note).casefold() for note in (*old, *new) if note.strip()}
    assert every[: len(tail.merge_notes(old, []))] == tail.merge_notes(old, [])
    assert tail.merge_notes(every, new) == every


@given(writable, st.tuples(plain, st.sampled_from((*MARKERS, SPLIT_MARKER)), plain).map("".join))
def test_text_that_holds_a_marker_is_refused(text: str, bearing: str) -> None:
    with pytest.raises(ValueError, match="protected region"):
        tail.check_region_text(bearing)
    with pytest.raises(ValueError, match="protected region"):
        tail.replace_guidance(Skill(text=text), bearing)
    with pytest.raises(ValueError, match="protected region"):
        tail.replace_notes(Skill(text=text), ["sound", bearing])


@given(st.tuples(documents(), st.sampled_from(MARKERS)).map("".join))
def test_a_malformed_document_is_refused(text: str) -> None:
    for write in (
        lambda s: tail.replace_guidance(s, "x"),
        lambda s: tail.replace_notes(s, ["x"]),
    ):
        with pytest.raises(SkillError, match="malformed"):
            write(Skill(text=text))


GUIDED = "<!-- SLOW_UPDATE_START -->\nCheck signs.\n\nThen units.\n<!-- SLOW_UPDATE_END -->"
NOTED = "<!-- APPENDIX_START -->\n## Execution Notes Appendix\n\n- a b\n- c\n<!-- APPENDIX_END -->"


@pytest.mark.parametrize(
    ("text", "after"),
    [
        ("", f"{GUIDED}\n"),
        ("Old.", f"Old.\n\n{GUIDED}\n"),
        ("Old.\n\n\n", f"Old.\n\n\n{GUIDED}\n"),
        (FRONT, f"{FRONT}\n\n{GUIDED}\n"),
        (f"Old.\n{NOTES}", f"Old.\n\n{GUIDED}\n\n{NOTES}"),
        (f"{NOTES}\nOld.\n", f"{NOTES}\nOld.\n\n{GUIDED}\n"),
        (f"a\n{SLOW}\nb", f"a\n{GUIDED}\nb"),
        (f"{NOTES}\n{SLOW}", f"{NOTES}\n{GUIDED}"),
        ("\ufeffOld.\r\n", "\ufeffOld.\r\n\r\n" + GUIDED.replace("\n", "\r\n") + "\r\n"),
    ],
)
def test_guidance_stands_in_its_region_or_before_the_appendix(text: str, after: str) -> None:
    assert tail.replace_guidance(Skill(text=text), "\nCheck signs.\n\nThen units. ").text == after


@pytest.mark.parametrize(
    ("text", "after"),
    [
        ("", f"{NOTED}\n"),
        ("Old.", f"Old.\n\n{NOTED}\n"),
        (f"Old.\n{SLOW}", f"Old.\n{SLOW}\n\n{NOTED}\n"),
        (f"a\n{NOTES}\n{SLOW}\n", f"a\n{NOTED}\n{SLOW}\n"),
        ("Old.\r\n", "Old.\r\n\r\n" + NOTED.replace("\n", "\r\n") + "\r\n"),
    ],
)
def test_notes_are_bullets_under_a_heading(text: str, after: str) -> None:
    assert tail.replace_notes(Skill(text=text), ["a\n  b", " ", "c"]).text == after


def test_empty_guidance_leaves_an_empty_region() -> None:
    empty = "<!-- SLOW_UPDATE_START -->\n<!-- SLOW_UPDATE_END -->"
    assert tail.replace_guidance(Skill(text="Old.\n"), "").text == f"Old.\n\n{empty}\n"
    assert tail.replace_guidance(Skill(text=f"Old.\n{SLOW}\n"), "").text == f"Old.\n{empty}\n"


def test_no_notes_add_no_region_and_empty_one() -> None:
    assert tail.replace_notes(Skill(text="Old.\n"), []).text == "Old.\n"
    emptied = tail.replace_notes(Skill(text=f"Old.\n{NOTES}\n"), [])
    assert emptied.text == "Old.\n<!-- APPENDIX_START -->\n<!-- APPENDIX_END -->\n"
    assert tail.read_notes(emptied.text) == ()


@pytest.mark.parametrize(
    ("inside", "read"),
    [
        ("\n## Execution Notes Appendix\n- a\n- b\n", ("a", "b")),
        ("\r\n## Execution Notes Appendix\r\n\r\n- a\r\n  more\r\n\r\n- b\r\n", ("a more", "b")),
        ("written by hand\n- - a\n-\n-5 degrees\n", ("written by hand", "- a", "-5 degrees")),
        ("", ()),
    ],
)
def test_notes_of_other_hands_are_read(inside: str, read: tuple[str, ...]) -> None:
    assert tail.read_notes(f"Old.\n<!--APPENDIX_START-->{inside}<!--APPENDIX_END-->\n") == read


def test_what_says_the_same_stays_as_it_is_spelt() -> None:
    text = "<!--APPENDIX_START-->- a\n- b<!--APPENDIX_END--><!--SLOW_UPDATE_START-->c<!--SLOW_UPDATE_END-->"
    assert tail.replace_notes(Skill(text=text), ["a", "b"]).text == text
    assert tail.replace_guidance(Skill(text=text), "c\n").text == text


def test_the_same_reminder_is_added_once() -> None:
    notes = tail.merge_notes(["Check units."], ["check  UNITS.", "Straße", " STRASSE\n", "", "Check signs."])
    assert notes == ("Check units.", "Straße", "Check signs.")
