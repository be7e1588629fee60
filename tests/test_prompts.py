"""Prompt files: found, checked, rendered in one pass, unchanged once released, and recorded."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from prompt_examples import CASSETTE, examples, outcome
from reflact.config.training import PromptsConfig
from reflact.errors import PromptError
from reflact.llm.cassettes import open_cassette, read_cassette
from reflact.prompts import (
    VARIABLE,
    Prompt,
    find_data_folder,
    find_prompt_file,
    load_prompts,
    read_prompt,
)
from served import assert_refused, reflact

FOLDER = find_data_folder("prompts")
PROMPT_NAMES = {path.name for path in FOLDER.iterdir() if path.is_dir()}
FILES = sorted(FOLDER.glob("*/v*.md"))
CHECKSUMS = FOLDER / "CHECKSUMS"

PLAIN = """---
name: ranking
version: 7
role: optimizer
reply: ReasonedRankReply
variables: [document]
changelog: Another one.
---
Rank.
<!-- user -->
{{document}}
"""


def written(folder: Path, text: str = PLAIN, place: str = "ranking/v7.md") -> Path:
    path = folder / place
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def filled(prompt: Prompt, value: str) -> str:
    rendered = prompt.render(dict.fromkeys(prompt.header.variables, value))
    return "\n".join(message.content for message in rendered.messages)


def checksums() -> str:
    """Return what prompts/CHECKSUMS holds: a line for each file, its hash and its place."""
    return "".join(f"{read_prompt(p).checksum}  {p.relative_to(FOLDER).as_posix()}\n" for p in FILES)


@pytest.mark.parametrize("path", FILES, ids=lambda p: f"{p.parent.name}-{p.stem}")
def test_every_version_renders(path: Path) -> None:
    prompt = read_prompt(path)
    assert prompt.header.name in PROMPT_NAMES
    text = filled(prompt, "VALUE")
    assert not VARIABLE.search(text)
    assert text.count("VALUE") >= len(prompt.header.variables)


def test_every_prompt_has_a_version() -> None:
    book = load_prompts()
    assert set(book.prompts) == set(PROMPT_NAMES) == {p.parent.name for p in FILES}
    for name, prompt in book.prompts.items():
        headers = [read_prompt(path).header for path in FILES if path.parent.name == name]
        assert prompt.header.version == max(header.version for header in headers)


def test_released_versions_never_change() -> None:
    """Files and CHECKSUMS agree: a released prompt is not edited, a new version adds a line.

    Written by ``cd prompts && LC_ALL=C sha256sum */v*.md > CHECKSUMS`` when versions are released.
    """
    assert CHECKSUMS.read_text(encoding="utf-8") == checksums()


@pytest.mark.parametrize(
    ("versions", "folder", "words"),
    [
        ({"ranking": 99}, None, "prompt ranking: v99"),
        ({"rankng": 1}, None, "no prompt is called rankng"),
        ({}, Path("none"), "none is not a folder"),
    ],
)
def test_unknown_pins_are_one_sentence(versions: dict[str, int], folder: Path | None, words: str) -> None:
    with pytest.raises(PromptError, match=words) as refusal:
        load_prompts(PromptsConfig(versions=versions, folder=folder))
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ("---\n", "", "front matter"),
        ("version: 7", "version: seven", "front matter is wrong"),
        ("variables: [document]", "variables: []", "variables in text and front matter differ: document"),
        ("{{document}}", "the document", "variables in text and front matter differ: document"),
        ("version: 7", "version: 8", "is that of ranking v8"),
    ],
)
def test_a_malformed_file_is_one_sentence(tmp_path: Path, before: str, after: str, words: str) -> None:
    path = written(tmp_path, PLAIN.replace(before, after))
    with pytest.raises(PromptError, match=words) as refusal:
        read_prompt(path)
    assert str(path) in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("reply", ["RankReply", "MergeReply"])
def test_a_front_matter_names_a_reply_that_its_prompt_can_have(tmp_path: Path, reply: str) -> None:
    """An unknown one and that of another prompt are refused with the right one."""
    path = written(tmp_path, re.sub("reply: .*", f"reply: {reply}", PLAIN))
    with pytest.raises(PromptError, match="a prompt ranking has ReasonedRankReply") as refusal:
        load_prompts(PromptsConfig(folder=tmp_path))
    assert str(path) in str(refusal.value)


def test_a_prompt_is_listed_printed_and_copied_to_be_changed(tmp_path: Path) -> None:
    """A changed copy is what a run uses; an existing file stays, and a near name is suggested."""
    listed = reflact("prompts").stdout
    assert [name for name in FOLDER.iterdir() if name.is_dir() and name.name not in listed] == []
    newest = find_prompt_file("ranking")
    text = newest.read_text(encoding="utf-8")
    assert reflact("prompts", "ranking").stdout == text
    copied = reflact("prompts", "ranking", "--copy", tmp_path)
    assert copied.exit_code == 0, copied.output
    path = tmp_path / "ranking" / newest.name
    assert path.read_text(encoding="utf-8") == text
    path.write_text(text.replace("\n---\n", "\n---\nBe brief.\n", 1), encoding="utf-8")
    assert load_prompts(PromptsConfig(folder=tmp_path)).prompts["ranking"].system.startswith("Be brief.")
    assert_refused(reflact("prompts", "ranking", "--copy", tmp_path), "exists already")
    assert_refused(reflact("prompts", "rankin"), "did you mean ranking?")
    assert_refused(reflact("prompts", "--copy", tmp_path), "--copy needs the NAME")


VERSIONS = sorted(
    f"{path.parent.name}/{path.stem}"
    for path in find_data_folder("prompts").glob("*/v*.md")
    if path.parent.name != "placebo"
)


@pytest.mark.parametrize("version", VERSIONS)
async def test_a_recorded_answer_passes_its_checks(version: str) -> None:
    example = (await examples())[version]
    async with open_cassette(CASSETTE, mode="replay") as transport:
        reply = await outcome(example, transport)
    assert isinstance(reply, example.reply_type)


async def test_every_version_is_recorded() -> None:
    recorded = {
        f"{i.call_id.split('/')[1]}/{i.call_id.split('part=')[1].split('/')[0]}"
        for i in read_cassette(CASSETTE)
    }
    assert recorded == set(await examples()) == set(VERSIONS)
