"""The skill document: protected regions, edits and reasons of rejections, guidance and notes."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from profiles import cases
from reflact.errors import SkillError
from reflact.skills import document as skills
from reflact.types import Candidate, Edit, EditKind, Operation, Skill
from skill_documents import FRONT, MARKERS, NOTES, SLOW, documents, plain, protected, well_formed, wild

operations: st.SearchStrategy[Operation] = st.sampled_from(("append", "insert_after", "replace", "delete"))
kinds: st.SearchStrategy[EditKind] = operations | st.sampled_from(("rewrite", "suggest"))


@st.composite
def edits_of(draw: st.DrawFn, text: str) -> Edit:
    """An edit whose anchor is mostly a piece of the text."""
    start = draw(st.integers(0, len(text)))
    target = draw(st.just(text[start : start + draw(st.integers(0, 12))]) | wild)
    return Edit(op=draw(kinds), target=target, content=draw(wild))


@st.composite
def edited(draw: st.DrawFn, source: st.SearchStrategy[str]) -> tuple[str, list[Edit]]:
    """A text and edits of it."""
    text = draw(source)
    return text, draw(st.lists(edits_of(text), max_size=4))


def _edit(text: str, op: EditKind, target: str = "", content: str = "") -> Candidate:
    return skills.apply_edits(Skill(text=text), [Edit(op=op, target=target, content=content)])


def _edited(text: str, op: EditKind, target: str = "", content: str = "") -> str:
    candidate = _edit(text, op, target, content)
    assert candidate.results[0].reason is None
    return candidate.skill.text


def _refusal(text: str, op: EditKind, target: str = "", content: str = "") -> str:
    candidate = _edit(text, op, target, content)
    assert candidate.skill.text == text
    assert candidate.results[0].status == "rejected"
    return candidate.results[0].reason or ""


@cases(2500)
@given(edited(wild | documents()))
def test_any_edits_on_any_text_give_one_result_each_and_keep_protected_regions(
    case: tuple[str, list[Edit]],
) -> None:
    text, edits = case
    candidate = skills.apply_edits(Skill(text=text), edits)
    assert [result.edit for result in candidate.results] == edits
    assert all((result.status == "rejected") == bool(result.reason) for result in candidate.results)
    assert protected(candidate.skill.text) == protected(text)
    assert well_formed(candidate.skill.text) == well_formed(text)


@cases(1000)
@given(documents(), plain)
def test_a_rewrite_leaves_the_new_text_and_the_regions(text: str, content: str) -> None:
    candidate = _edit(text, "rewrite", content=content)
    after = candidate.skill.text
    assert protected(after) == protected(text)
    if candidate.results[0].status == "rejected":
        assert after == text
        return
    left = re.sub(r"\r*\n", "\n", skills.editable_text(after)).strip("\r\n")
    assert left == re.sub(r"\r*\n", "\n", content).strip("\r\n")
    assert _refusal(after, "rewrite", content=content) == "the edit changes nothing"


@pytest.mark.parametrize(
    ("text", "after"),
    [
        ("", "New.\n"),
        ("Old.", "Old.\n\nNew.\n"),
        ("Old.\n\n\n", "Old.\n\n\nNew.\n"),
        ("Old.\r\n", "Old.\r\n\r\nNew.\r\n"),
        (FRONT, f"{FRONT}\n\nNew.\n"),
        (f"Old.\n{SLOW}\n\n{NOTES}\n", f"Old.\n\nNew.\n\n{SLOW}\n\n{NOTES}\n"),
        (f"{SLOW}\nOld.\n{NOTES}", f"{SLOW}\nOld.\n\nNew.\n\n{NOTES}"),
    ],
)
def test_append_adds_a_paragraph_before_the_tail(text: str, after: str) -> None:
    assert _edited(text, "append", content="\nNew.\n\n") == after


def test_replace_and_delete_change_exactly_the_anchor() -> None:
    assert _edited("Always retry, twice.", "replace", "retry", "  wait\n") == "Always   wait\n, twice."
    assert _edited("Never retry.\n- a\n- b\n", "delete", "- a\n") == "Never retry.\n- b\n"
    assert _edited("只用规则一。", "replace", "规则一", "规则二") == "只用规则二。"


def test_edits_are_read_with_the_documents_line_breaks() -> None:
    assert _edited("one\r\ntwo\r\n", "replace", "one\ntwo", "1\n2") == "1\r\n2\r\n"
    assert _edited("one\ntwo\n", "replace", "one\r\ntwo", "1\r\n2") == "1\n2\n"
    assert _edited("one\r\ntwo\n", "replace", "two\n", "2\n") == "one\r\n2\n"
    assert "does not occur" in _refusal("one\r\ntwo\n", "delete", "one\ntwo")
    assert "middle of a word" in _refusal("Never retry.", "delete", "Nev")


@pytest.mark.parametrize(
    ("text", "after"),
    [
        ("Old.", "New.\n\n- a\n"),
        ("Old.\r\nOlder.\r\n", "New.\r\n\r\n- a\r\n"),
        (f"{FRONT}\nOld.\n", f"{FRONT}\n\nNew.\n\n- a\n"),
        (f"Old.\n{SLOW}", f"New.\n\n- a\n\n{SLOW}"),
        (f"Old.\n{SLOW}{NOTES}\n\n", f"New.\n\n- a\n\n{SLOW}\n\n{NOTES}\n\n"),
        (f"{FRONT}\n{NOTES}\nOld.\n{SLOW}\nOlder.", f"{FRONT}\n\nNew.\n\n- a\n\n{NOTES}\n\n{SLOW}\n"),
    ],
)
def test_a_rewrite_stands_between_front_matter_and_tail(text: str, after: str) -> None:
    assert _edited(text, "rewrite", "not looked at", "\nNew.\n\n- a\n\n") == after


@pytest.mark.parametrize(
    ("text", "op", "target", "content", "reason"),
    [
        ("aaa!", "delete", "aa", "", "more than once"),
        ("one two", "append", "", f"new {MARKERS[0]}", "marker of a protected region"),
        ("one two", "delete", f"one {MARKERS[-1]}", "", "marker of a protected region"),
        (f"one\n{SLOW}", "insert_after", "one\n<", "new", "lies in a protected region"),
        ("one two", "delete", " \t\n", "", "the target is empty"),
        ("one two", "replace", "two", "two", "changes nothing"),
        ("one two", "replace", "two", " \n", "the content is empty"),
        ("one two", "suggest", "", "Say more on units.", "a suggestion is for a rewrite"),
        ("one two", "rewrite", "", f"\n{FRONT}\nNew.", "opens front matter"),
        (f"{FRONT}\none\n{SLOW}", "rewrite", "", "\none\n", "changes nothing"),
        ("---\nname: x", "rewrite", "", "New.", "open, close or change"),
        (f"Never.\n{FRONT}", "delete", "Never.\n", "", "open, close or change"),
        (f"one\n{FRONT}", "replace", "one", "---", "open, close or change"),
        ("<!-- APPENDIX_ START -->", "replace", "<!-- APPENDIX_ ", "<!-- APPENDIX_", "open, close or change"),
    ],
)
def test_a_refusal_names_its_reason(text: str, op: EditKind, target: str, content: str, reason: str) -> None:
    assert reason in _refusal(text, op, target, content)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("---\nname: x\n", "line 1 opens front matter"),
        ("a\n<!-- APPENDIX_START -->\nb", "line 2: .* is never closed"),
        ("a\n\n<!-- APPENDIX_END -->", "line 3: .* not opened"),
        ("<!-- APPENDIX_END --><!-- APPENDIX_START -->", "line 1: .* not opened"),
        (f"<!-- APPENDIX_START -->\n{SLOW}\n<!-- APPENDIX_END -->", "line 2: .* inside another one"),
        ("<!-- APPENDIX_START -->\n<!-- SLOW_UPDATE_END -->", "line 2: .* still open"),
        (f"{SLOW}\n{SLOW}", "line 4: .* a second time"),
    ],
)
def test_a_malformed_document_is_refused_and_its_restprotected(text: str, words: str) -> None:
    with pytest.raises(SkillError, match=words):
        skills.check_document(text)
    assert skills.find_regions(text)[-1].end == len(text)


SPLIT_MARKER = "<!--\nAPPENDIX_END -->"


def _fits(text: str) -> bool:
    try:
        skills.check_region_text(text)
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
    (region,) = (region for region in skills.find_regions(text) if region.name == name)
    return text[: region.start], text[region.end :]


def _others(text: str, name: str) -> list[str]:
    return [text[region.start : region.end] for region in skills.find_regions(text) if region.name != name]


@cases(1000)
@given(writable, words)
def test_guidance_is_read_as_it_was_written(text: str, new: str) -> None:
    after = skills.replace_guidance(Skill(text=text), new)
    assert skills.read_guidance(after.text) == new.replace("\r\n", "\n").replace("\r", "\n").strip()
    assert skills.replace_guidance(after, new) == after


@cases(1000)
@given(writable, some_notes)
def test_notes_are_read_as_they_were_written(text: str, new: list[str]) -> None:
    after = skills.replace_notes(Skill(text=text), new)
    assert skills.read_notes(after.text) == tuple(_flat(note) for note in new if note.strip())
    assert skills.replace_notes(after, new) == after


@cases(1000)
@given(writable, words, some_notes, st.sampled_from(("slow_update", "appendix")))
def test_writing_keeps_every_byte_outside_its_region(
    text: str, new: str, new_notes: list[str], name: str
) -> None:
    write: Callable[[], Skill] = (
        (lambda: skills.replace_guidance(Skill(text=text), new))
        if name == "slow_update"
        else (lambda: skills.replace_notes(Skill(text=text), new_notes))
    )
    after = write().text
    assert well_formed(after)
    assert _others(after, name) == _others(text, name)
    if name not in {region.name for region in skills.find_regions(after)}:
        assert after == text
    elif name in {region.name for region in skills.find_regions(text)}:
        assert _around(after, name) == _around(text, name)
    else:
        before, behind = _around(after, name)
        place = len(text) - len(behind.lstrip("\r\n"))
        assert before.startswith(text[:place])
        assert text[place:] == behind.lstrip("\r\n")
        assert before[place:].strip("\r\n") == ""


@given(writable, st.tuples(plain, st.sampled_from((*MARKERS, SPLIT_MARKER)), plain).map("".join))
def test_text_that_holds_a_marker_is_refused(text: str, bearing: str) -> None:
    with pytest.raises(ValueError, match="protected region"):
        skills.check_region_text(bearing)
    with pytest.raises(ValueError, match="protected region"):
        skills.replace_guidance(Skill(text=text), bearing)
    with pytest.raises(ValueError, match="protected region"):
        skills.replace_notes(Skill(text=text), ["sound", bearing])


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
    assert skills.read_notes(f"Old.\n<!--APPENDIX_START-->{inside}<!--APPENDIX_END-->\n") == read
