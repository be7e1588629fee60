"""Skill packages: what `export` writes, which rules it checks, and what stays byte for byte."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reflact import export_skill
from reflact.errors import SkillError
from reflact.skills.document import (
    apply_edits,
    join_files,
    remove_markers,
    replace_guidance,
    replace_notes,
    split_files,
)
from reflact.skills.package import MAIN_FILE, build_package, load_skill, read_front_matter
from reflact.testing import TOY_RULES
from reflact.types import Edit, Skill
from served import assert_refused, reflact
from toy_runs import build_trainer

FRONT = (
    b"---\nname: word-rules # as the folder\r\ndescription: >\n  Rules for words.\n"
    b"license: MIT\nmetadata: {a: 'b'}\n---\n"
)
FILES = {
    MAIN_FILE: FRONT + b"\n# Words\n\nSee references/more.md.\n",
    "references/more.md": b"# More\r\n",
    "scripts/run.sh": b"#!/bin/sh\necho \xff\n",
    "assets/empty": b"",
}
STEERING = "\x1b[2J\x1b]0;title\x07"


def write_folder(folder: Path, files: dict[str, bytes] = FILES) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    (folder / "scripts/run.sh").chmod(0o755)
    return folder


def read_folder(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }


def train(out: Path, skill: Path | None = None, files: tuple[str, ...] = ()) -> Path:
    """Train in the toy world for one epoch and return the run's folder."""
    trainer = build_trainer(
        {
            "out_dir": out,
            "skill": skill,
            "skill_files": files,
            "search": {"sources": ["edits"]},
            "train": {"num_epochs": 1},
            "test": {"enabled": False},
        }
    )
    assert anyio.run(trainer.train).status == "completed"
    return out


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a skill, ``word-rules``, and with a run that began with it."""
    root = tmp_path_factory.mktemp("packages")
    train(root / "run", write_folder(root / "word-rules"))
    return root


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("plain") / "My Run_2")


def test_training_changes_the_body_alone(folder: Path, tmp_path: Path) -> None:
    """Front matter and other files keep their bytes, a program stays one, and nothing is overwritten."""
    skill = anyio.run(export_skill, folder / "run", tmp_path / "first", "baseline")
    assert skill == tmp_path / "first" / "word-rules"
    assert read_folder(skill) == FILES
    assert (skill / "scripts/run.sh").stat().st_mode & 0o111
    assert not (skill / MAIN_FILE).stat().st_mode & 0o111
    done = reflact("export", folder / "run", "--out", tmp_path)
    assert done.exit_code == 0, done.output
    files = read_folder(tmp_path / "word-rules")
    assert {**files, MAIN_FILE: b""} == {**FILES, MAIN_FILE: b""}
    assert files[MAIN_FILE].startswith(FRONT)
    assert files[MAIN_FILE] != FILES[MAIN_FILE]
    assert reflact("show", folder / "run", "--skill", "best").stdout_bytes == files[MAIN_FILE]
    assert_refused(reflact("export", folder / "run", "--out", tmp_path), "nothing is overwritten")
    assert read_folder(tmp_path / "word-rules") == files


def test_an_export_says_what_is_not_shown_of_the_skill(tmp_path: Path) -> None:
    """Nothing better than the initial one, no confirmed gain, no test; another version has no such hint."""
    (tmp_path / "word-rules").mkdir()
    rules = "\n".join(rule.line for rule in TOY_RULES.values())
    (tmp_path / "word-rules" / MAIN_FILE).write_bytes(FRONT + f"\n{rules}\n".encode())
    train(tmp_path / "same", tmp_path / "word-rules")
    train(tmp_path / "untested")
    search = {"sources": ["edits"]}
    unconfirmed = {"out_dir": tmp_path / "unconfirmed", "search": search, "train": {"num_epochs": 1}}
    anyio.run(build_trainer(unconfirmed).train)
    for name, hint in (
        ("same", "hint: the run has no better document; this is its initial skill"),
        ("untested", "hint: this is v1 from step 1, which the validation items selected"),
        ("unconfirmed", "hint: the run's result: "),
    ):
        words = () if name == "same" else ("--name", "rules", "--description", "Rules.")
        best = reflact("export", tmp_path / name, *words, "--out", tmp_path / f"{name} best")
        assert best.stdout.startswith(hint), best.output
        first = reflact(
            "export", tmp_path / name, *words, "--out", tmp_path / f"{name} first", "--version", "baseline"
        )
        assert (first.exit_code, hint in first.stdout) == (0, False)


def test_several_files_are_trained_as_one_document_and_split_again(folder: Path, tmp_path: Path) -> None:
    """Chosen files are joined for the run; the export has them apart, and unchanged ones keep their bytes."""
    more = "references/more.md"
    run = train(tmp_path / "run", folder / "word-rules", (more,))
    text = (run / "skills" / "v0000.md").read_bytes().decode()
    assert f"\n<!-- SKILL_FILE {more} -->" in text
    before = anyio.run(export_skill, run, tmp_path / "before", "baseline")
    after = anyio.run(export_skill, run, tmp_path / "after")
    assert read_folder(before) == FILES
    files = read_folder(after)
    assert {**files, MAIN_FILE: b""} == {**FILES, MAIN_FILE: b""}, "appended rules are in SKILL.md"
    assert files[MAIN_FILE].startswith(FRONT)
    assert any(rule.line in files[MAIN_FILE].decode() for rule in TOY_RULES.values())
    assert b"SKILL_FILE" not in files[MAIN_FILE]
    with pytest.raises(SkillError, match="does not join the files"):
        build_package(Skill(text=text), name="a", description="b", files=("references/other.md",))


@pytest.mark.parametrize(
    "edit",
    [
        Edit(op="delete", target="<!-- SKILL_FILE b.md -->"),
        Edit(op="replace", target="one\n\n<!-- SKILL_FILE b.md -->\ntwo", content="x"),
        Edit(op="append", content="x\n<!-- SKILL_FILE c.md -->\ny"),
        Edit(op="insert_after", target="two", content="<!--SKILL_FILE c.md-->"),
        Edit(op="rewrite", content="everything new"),
    ],
)
def test_no_edit_breaks_the_marks_of_files(edit: Edit) -> None:
    skill = Skill(text=join_files("one\n", [("b.md", "two\n")]))
    candidate = apply_edits(skill, [edit])
    assert candidate.skill == skill
    assert candidate.results[0].reason


@given(st.lists(st.text("a-> \r\n<!"), max_size=4), st.text("a-> \r\n<!"))
def test_joined_files_are_split_as_they_were(contents: list[str], main: str) -> None:
    others = tuple((f"f{number}.md", content) for number, content in enumerate(contents))
    if not main.startswith("---"):
        assert split_files(join_files(main, others)) == (main, others)


@pytest.mark.parametrize(
    "name",
    ["../up.md", "/etc/a.md", "a/../b.md", "SKILL.md", "a.txt", ".a.md", "a b.md", "", "link.md", "none.md"],
)
def test_further_files_stay_in_the_folder(tmp_path: Path, name: str) -> None:
    (tmp_path / MAIN_FILE).write_text("x")
    (tmp_path / "up.md").write_text("x")
    (tmp_path / "link.md").symlink_to(tmp_path / "up.md")
    with pytest.raises(SkillError):
        load_skill(tmp_path, (name,))


def test_a_document_without_front_matter_gets_some(plain: Path, tmp_path: Path) -> None:
    """The name is that of the run's folder; a description has to be given, and the body keeps its bytes."""
    missing = reflact("export", plain, "--out", tmp_path)
    assert_refused(missing, "--description")
    assert list(tmp_path.iterdir()) == []
    words = ("--description", 'Rules: for "words".\n---\nname: other', "--version", "1", "--out", tmp_path)
    assert reflact("export", plain, *words).exit_code == 0
    text = (tmp_path / "my-run-2" / MAIN_FILE).read_text(encoding="utf-8")
    assert text.count("---") == 2, "some readers end front matter at any such mark"
    body = (plain / "skills" / "v0001.md").read_text(encoding="utf-8")
    assert text.endswith(f"---\n\n{body}")
    assert read_front_matter(text) == {
        "name": "my-run-2",
        "description": 'Rules: for "words". --- name: other',
    }


@pytest.mark.parametrize(
    ("options", "part"),
    [
        *(({"name": name}, "breaks the rules") for name in ("../up", "a/b", "A", "a--b", "-a", "a" * 65, "", ".")),
        ({"name": f"a{STEERING}"}, "breaks the rules"),
        ({"description": " \n "}, "no description"),
        ({"description": "a" * 1025}, "1,025 characters"),
        ({"description": "a <b onclick=x> c"}, "tag"),
        ({"description": f"a{STEERING}"}, "control characters"),
        ({"description": "a\u202eb"}, "control characters"),
        ({"description": "\ud800"}, "control characters"),
    ],
)  # fmt: skip
def test_hostile_names_and_descriptions_are_refused(
    plain: Path, tmp_path: Path, options: dict[str, str], part: str
) -> None:
    given = {"description": "Words.", **options}
    arguments = [text for key, value in given.items() for text in (f"--{key}={value}",)]
    done = reflact("export", plain, "--out", tmp_path / "out", *arguments)
    assert_refused(done, part)
    assert "\x1b" not in done.output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "text",
    [
        "plain",
        "---\nname: old\ndescription: Old.\n---\nbody\n",
        "\ufeff---\r\nname: 'old'   # comment\r\ndescription: |\r\n  Old\r\n  text.\r\n\r\nlicense: MIT\r\n---\r\nbody\r\n",
        '---\ndescription: "a\n  b"\nmetadata:\n  name: x\n---',
        "---\n---\n",
    ],
)
def test_a_name_and_a_description_are_replaced_in_place(text: str) -> None:
    """Other values of the front matter and the body stay, in any YAML style; quotes and marks are inert."""
    hostile = 'It\'s "x": --- # {y} & *z \\n \U0001f600 ' + "long " * 100
    package = build_package(Skill(text=text), name="new", description=hostile)
    edited = package.files[0].content.decode()
    before, after = read_front_matter(text), read_front_matter(edited)
    assert after == {**before, "name": "new", "description": " ".join(hostile.split())}
    assert edited.endswith(text.removeprefix("\ufeff").rpartition("---")[2])
    assert "# comment" not in text or (" # comment" in edited and "license: MIT\r\n---\r\nbody" in edited)


UNREADABLE = {
    "colon": "name: a\ndescription: Use for words. Triggers on: words",
    "BOM, CR LF": "\ufeffname: a\r\ndescription: Use for words. Triggers on: words\r\n",
    "number": "name: 2024\ndescription: 1.0",
    "list": "name: a\ndescription:\n- Use for words.\n",
    "null": "name:\ndescription: Use for words.",
    "tab": "name: a\ndescription: |\n\tUse for words.",
    "no mapping": "Use for words.",
    "other key": "name: a\ndescription: b\nglobs: *.py",
}


@pytest.mark.parametrize("front", UNREADABLE.values(), ids=UNREADABLE)
def test_front_matter_that_cannot_be_read_is_found_before_anything_is_paid(
    tmp_path: Path, front: str
) -> None:
    """``init`` and the start of a run refuse it, as a folder and as a file; another document may begin with anything."""
    bom, front = "\ufeff" * front.startswith("\ufeff"), front.removeprefix("\ufeff")
    newline = "\r\n" if "\r\n" in front else "\n"
    text = newline.join((f"{bom}---", front.rstrip(), "---", "", "# Words", ""))
    (tmp_path / MAIN_FILE).write_bytes(text.encode())
    for path in (tmp_path, tmp_path / MAIN_FILE):
        with pytest.raises(SkillError, match="front matter of the skill"):
            load_skill(path)
    (tmp_path / "prompt.md").write_bytes(text.encode())
    assert load_skill(tmp_path / "prompt.md").text == text
    (tmp_path / "data.jsonl").write_text(
        "".join(f'{{"input": "{n}", "reference": "w"}}\n' for n in range(30))
    )
    options = ("--model", "m", "--base-url", "http://127.0.0.1:1/v1", "--skill", tmp_path)
    assert_refused(
        reflact("init", tmp_path / "data.jsonl", "--out", tmp_path / "run.yaml", *options), "front matter"
    )
    assert not (tmp_path / "run.yaml").exists()


@pytest.mark.parametrize("kind", [kind for kind in UNREADABLE if kind != "no mapping"])
def test_a_name_and_a_description_replace_what_cannot_be_read(kind: str) -> None:
    """A run that began with such front matter is exported with both options, which the error names."""
    front = UNREADABLE[kind]
    skill = Skill(text=f"---\n{front.removeprefix(chr(0xFEFF)).rstrip()}\nlicense: MIT\n---\nbody\n")
    with pytest.raises(SkillError, match="--name and --description"):
        build_package(skill, defaults=("a", "b"))
    package = build_package(skill, name="words", description="Rules: for words.")
    text = package.files[0].content.decode()
    values = {"name": "words", "description": "Rules: for words."}
    assert read_front_matter(text) == values
    assert text.endswith("---\n\nbody\n")
    assert any("only the new name and description" in hint for hint in package.hints)


@pytest.mark.parametrize(
    ("before", "is_refused"),
    [
        ("\ufeff\r\n", True),
        ("<!-- made by hand -->\n\n<!-- twice -->\n", True),
        ("# comment\n", True),
        ("\ufeff", False),
        ("Text.\n\n", False),
    ],
)
def test_front_matter_begins_in_the_first_line(tmp_path: Path, before: str, is_refused: bool) -> None:
    for newline in ("\n", "\r\n"):
        text = newline.join((f"{before}---", "description: Use for words.", "name: words", "---", "Body."))
        (tmp_path / MAIN_FILE).write_bytes(text.encode())
        if is_refused:
            with pytest.raises(SkillError, match="in line 1"):
                load_skill(tmp_path)
        else:
            assert load_skill(tmp_path).text == text


def test_an_export_leaves_hidden_files_caches_and_links_behind(tmp_path: Path) -> None:
    """They are named; only what is exported counts towards the limits, which hold when a run begins."""
    skill = write_folder(tmp_path / "word-rules")
    for name in (
        ".git/config",
        ".env",
        "scripts/__pycache__/a.pyc",
        "node_modules/x/y.js",
        "assets/.DS_Store",
    ):
        (skill / name).parent.mkdir(parents=True, exist_ok=True)
        (skill / name).write_text("token")
    for number in range(1001):
        (skill / ".git" / str(number)).touch()
    (skill / "references/passwd").symlink_to("/etc/passwd")
    (skill / "linked").symlink_to(tmp_path)
    marked = replace_notes(replace_guidance(load_skill(skill), "Be slow."), ["Note."])
    (skill / MAIN_FILE).write_bytes(marked.text.encode())
    run = train(tmp_path / "run", skill)
    done = reflact("export", run, "--out", tmp_path / "out")
    assert read_folder(tmp_path / "out/word-rules").keys() == FILES.keys()
    assert b"<!--" not in (tmp_path / "out/word-rules" / MAIN_FILE).read_bytes()
    left_out = ".env, .git, linked, node_modules, assets/.DS_Store, references/passwd, scripts/__pycache__"
    assert done.stdout.splitlines()[-1].partition(": ")[2] == left_out
    for number in range(1001):
        (skill / "assets" / str(number)).touch()
    with pytest.raises(SkillError, match="more than 1,000 files"):
        load_skill(skill)


def test_no_marker_reaches_an_exported_skill() -> None:
    """Guidance, notes and examples are plain Markdown there, and an empty region leaves no trace."""
    body = "---\na: b\n---\n\n# Words\n\nWrite.\n"
    skill = replace_guidance(Skill(text=body), "Be slow.")
    (examples,) = (Edit(op="examples", content="## Examples\n\nOne.\n\nTwo."),)
    full = replace_notes(apply_edits(skill, [examples]).skill, ["Note."])
    plain = f"{body}\n## Examples\n\nOne.\n\nTwo.\n\nBe slow.\n\n## Execution Notes Appendix\n\n- Note.\n"
    assert remove_markers(full.text) == plain
    assert remove_markers(full.text.replace("\n", "\r\n")) == plain.replace("\n", "\r\n")
    assert remove_markers(replace_guidance(Skill(text=body), "").text) == body
    empty = replace_notes(replace_guidance(full, ""), [])
    assert remove_markers(empty.text) == f"{body}\n## Examples\n\nOne.\n\nTwo.\n"
    joined = join_files(full.text, [("b.md", "x\n")])
    assert split_files(remove_markers(joined)) == (plain, (("b.md", "x\n"),))


def test_a_folder_has_to_hold_plain_files(tmp_path: Path, folder: Path) -> None:
    """A link for SKILL.md, a folder that is gone and a folder without SKILL.md are refused with a reason."""
    bad = write_folder(tmp_path / "bad")
    (bad / MAIN_FILE).unlink()
    (bad / MAIN_FILE).symlink_to(folder / "word-rules" / MAIN_FILE)
    with pytest.raises(SkillError, match=r"links and \.\. are not allowed"):
        load_skill(bad)
    with pytest.raises(SkillError, match=r"cannot read the skill .*SKILL.md"):
        load_skill(tmp_path)
    with pytest.raises(SkillError, match="is no regular file"):
        load_skill(Path("/dev/zero"))
    with pytest.raises(SkillError, match="is gone"):
        build_package(Skill(text=""), name="a", description="b", source=tmp_path / "none")
