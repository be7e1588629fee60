"""The documents: their links lead somewhere, their pages are current, their examples run."""

from __future__ import annotations

import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")])
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
RUNNABLE = re.compile(r"^```python runnable\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INCLUDED = re.compile(r"<!-- include: (\S+)#(\w+) -->\n```python\n(.*?)```\n<!-- end -->", re.DOTALL)
NAMED_TEST = re.compile(r"`(tests/\w+\.py)(?:::(\w+))?`")
FENCED_PYTHON = re.compile(r"^```python.*?^```$", re.MULTILINE | re.DOTALL)
SERVICES = {"service.py"}
"""Examples that end when they are told to; they have tests of their own."""
EXAMPLES = sorted(path for path in (ROOT / "examples").glob("*.py") if path.name not in SERVICES)

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def run(program: Path | str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a program or a script with this interpreter in a folder."""
    arguments = ["-c", program] if isinstance(program, str) else [str(program)]
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )


def anchor(heading: str) -> str:
    """Return the anchor that a heading is linked by."""
    return re.sub(r"[^a-z0-9_ -]", "", heading.lower()).replace(" ", "-")


@each_page
def test_links_lead_somewhere(page: Path) -> None:
    """Every link to a file or a heading of this project finds it."""
    for link in LINK.findall(page.read_text(encoding="utf-8")):
        if link.startswith("https://"):
            continue
        name, _, fragment = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.is_file(), f"{page.name} links to {link}"
        if fragment:
            headings = re.findall(r"^#+ (.+)$", target.read_text(encoding="utf-8"), re.MULTILINE)
            assert fragment in {anchor(heading) for heading in headings}, f"{page.name} links to {link}"


@each_page
def test_a_page_stands_in_the_index(page: Path) -> None:
    """Whoever opens docs/index.md can find every page."""
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    assert page.parent == ROOT or page.name == "index.md" or f"({page.name})" in index


def test_generated_pages_are_current() -> None:
    """The pages of keys, commands, errors and dependencies say what the code says."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "generate_docs.py"), "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("picture", sorted((ROOT / "docs").rglob("*.svg")), ids=lambda path: path.name)
def test_pictures_are_drawn_for_light_and_dark(picture: Path) -> None:
    """A picture is well-formed, is described in words, and follows the reader's colours."""
    root = ET.parse(picture).getroot()
    svg = "{http://www.w3.org/2000/svg}"
    assert root.findtext(f"{svg}title")
    assert root.findtext(f"{svg}desc")
    assert "prefers-color-scheme: dark" in (root.findtext(f"{svg}style") or "")


def blocks() -> list[tuple[str, str]]:
    """Return all runnable blocks, each with its page."""
    return [
        (page.relative_to(ROOT).as_posix(), code)
        for page in PAGES
        for code in RUNNABLE.findall(page.read_text(encoding="utf-8"))
    ]


def test_the_readme_has_a_short_example_that_runs() -> None:
    """README shows the library at work in at most 15 lines of code."""
    lengths = [len([*filter(str.strip, code.splitlines())]) for page, code in blocks() if page == "README.md"]
    assert lengths
    assert max(lengths) <= 15


@pytest.mark.slow
@pytest.mark.parametrize(("page", "code"), blocks(), ids=lambda value: value if "\n" not in value else "")
def test_runnable_blocks_run(page: str, code: str, tmp_path: Path) -> None:
    """A block marked as runnable ends without an error in an empty folder."""
    done = run(code, tmp_path)
    assert done.returncode == 0, f"{page}: {done.stderr}"
    assert done.stdout.strip(), f"{page}: the example shows nothing"


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_examples_run(example: Path, tmp_path: Path) -> None:
    """Each example ends without an error in an empty folder and shows something."""
    done = run(example, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_the_readme_shows_a_short_environment_that_runs() -> None:
    """The environment in README is the class of an example that the tests run, word for word."""
    ((name, kind, code),) = INCLUDED.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    assert ROOT / name in EXAMPLES
    source = (ROOT / name).read_text(encoding="utf-8")
    assert f"\n{code}\n\n" in source, "run `make docs`"
    assert code.startswith(f"class {kind}")
    assert len([*filter(str.strip, code.splitlines())]) <= 22


@each_page
def test_tests_that_are_named_exist(page: Path) -> None:
    """A page that says which test shows something names one that exists."""
    for name, test in NAMED_TEST.findall(page.read_text(encoding="utf-8")):
        text = (ROOT / name).read_text(encoding="utf-8")
        assert not test or f"def {test}(" in text, f"{page.name} names {name}::{test}"


def test_the_documents_name_no_command_that_is_missing() -> None:
    """Every `make` target and every `reflact` command that the documents name exists."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    commands = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    for page in PAGES:
        text = FENCED_PYTHON.sub("", page.read_text(encoding="utf-8"))
        code = "\n".join(
            re.findall(r"`([^`\n]+)`", text) + re.findall(r"^(?: {4}|```sh\n)(.+)$", text, re.MULTILINE)
        )
        for target in re.findall(r"\bmake ([a-z][a-z-]*)", code):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"{page.name} names make {target}"
        for command in re.findall(r"\breflact ([a-z]+)\b", code):
            assert f"## reflact {command}" in commands, f"{page.name} names reflact {command}"
