"""The documentation: links lead somewhere, generated pages are current, named tests exist, examples run."""

from __future__ import annotations

import ast
import importlib
import json
import re
from collections.abc import Iterator
from functools import cache
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
import typer
from build_site import list_doors
from generate_docs import list_config_keys
from typer.testing import CliRunner

from filled_schema import fill_schema
from processes import Program
from reflact.cli.app import app
from served import asked_of, completion, send, serving

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")])
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
RUNNABLE = re.compile(r"^```python runnable\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NAMED_TEST = re.compile(r"\b(tests/\w+\.py)(?:::(\w+))?")
FENCED_PYTHON = re.compile(r"^```python.*?^```$", re.MULTILINE | re.DOTALL)
IMPORT = re.compile(
    r"^\s*(?:from (reflact[\w.]*) import (\([^)]*\)|[^\n#]+)|import (reflact[\w.]*))", re.MULTILINE
)
PROMISE = re.compile(r"^\| .* \|$", re.MULTILINE)
FRONT_DOORS = {*list_doors()}
README = ROOT / "README.md"
COMING = ROOT / "docs" / "coming-from.md"
OLDER_KEYS = (ROOT / "tests" / "skillopt_keys.txt").read_text(encoding="utf-8").split()
QUOTED = re.compile(r"`([^`]+)`")
KNOWN = {key for key, *_ in list_config_keys()}
STAND_INS = """
from reflact.targets import ChatTarget
from reflact.testing import ScriptedLLM, append_reply

def answer(prompt, reply_type, call_id):
    words = prompt.messages[-1].content
    return words.replace(" ", "-") if "hyphens" in prompt.messages[0].content else words

def propose(prompt, reply_type, call_id):
    return append_reply(reply_type, "Write hyphens.") if "edits" in reply_type.model_fields else None

target = ChatTarget(ScriptedLLM(answer))
optimizer = ScriptedLLM(propose)
"""
TESTED_ELSEWHERE = {"generated_puzzles.py", "service.py", "text_world.py", "track_with_mlflow.py"}
"""Examples with a test file of their own: one runs until it is stopped, and others need a package."""
EXAMPLES = sorted(path for path in (ROOT / "examples").glob("*.py") if path.name not in TESTED_ELSEWHERE)


def play_colours(handler: BaseHTTPRequestHandler) -> None:
    """Play both models of docs/train-your-agent.md: the rule makes the target right, and the optimizer knows it."""
    body = asked_of(handler)
    first, last = (body["messages"][n]["content"] for n in (0, -1))
    text = last.split()[-1].upper() if "capitals" in first else "no colour"
    if "response_format" in body:
        schema = body["response_format"]["json_schema"]["schema"]
        text = json.dumps(fill_schema(schema, "Answer in capitals."))
    send(handler, completion(text))


def run(program: Path | str, folder: Path) -> str:
    """Run a program or a script in a process of its own in a folder, and return its output; it must exit with 0."""
    if isinstance(program, Path):
        program = f"import runpy; runpy.run_path({str(program)!r}, run_name='__main__')"
    code, output = Program(program, folder=folder).wait()
    assert code == 0, output
    return output


def read(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def list_blocks() -> list[tuple[str, str]]:
    return [
        (page.relative_to(ROOT).as_posix(), code) for page in PAGES for code in RUNNABLE.findall(read(page))
    ]


def to_anchor(heading: str) -> str:
    return re.sub(r"[^a-z0-9_ -]", "", heading.lower()).replace(" ", "-")


@cache
def list_tests(path: Path) -> frozenset[str]:
    nodes = ast.parse(read(path)).body if path.is_file() else []
    return frozenset(node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def test_links_lead_somewhere() -> None:
    """Every link to a file or a heading of this project finds it."""
    broken = []
    for page in PAGES:
        for link in LINK.findall(read(page)):
            if link.startswith("https://"):
                continue
            name, _, fragment = link.partition("#")
            target = (page.parent / name).resolve() if name else page
            headings = re.findall(r"^#+ (.+)$", read(target), re.MULTILINE) if target.suffix == ".md" else []
            if not target.is_file() or (fragment and fragment not in map(to_anchor, headings)):
                broken.append(f"{page.name}: {link}")
    assert broken == []


def test_the_index_lists_every_page() -> None:
    index = read(ROOT / "docs" / "index.md")
    pages = [page.name for page in PAGES if page.parent != ROOT and page.name != "index.md"]
    assert [name for name in pages if f"({name})" not in index] == []


def test_lists_of_pages_begin_after_an_empty_line() -> None:
    """Otherwise the site shows their bullets as one paragraph."""
    joined = []
    for page in PAGES:
        text = re.sub(r"^```.*?^```", "", read(page), flags=re.MULTILINE | re.DOTALL)
        joined += [
            f"{page.name}: {line}" for line in re.findall(r"^\S(?<![-*|>]).*\n([-*] .*)", text, re.MULTILINE)
        ]
    assert joined == []


def test_the_picture_of_the_live_view_shows_its_words_of_today(tmp_path: Path) -> None:
    picture = tmp_path / "live-view.svg"
    program = ROOT / "scripts" / "screenshot.py"
    run(
        f"import runpy, sys; sys.argv = ['x', {str(picture)!r}]; runpy.run_path({str(program)!r}, "
        "run_name='__main__')",
        ROOT,
    )
    assert picture.read_bytes() == (ROOT / "docs" / "live-view.svg").read_bytes()


def test_generated_pages_are_current() -> None:
    run(
        f"import runpy, sys; sys.argv = ['x', '--check']; runpy.run_path({str(SCRIPT)!r}, run_name='__main__')",
        ROOT,
    )


SCRIPT = ROOT / "scripts" / "generate_docs.py"
NEWCOMER = ROOT / "benchmarks" / "newcomer.py"


def test_examples_import_from_public_places_only() -> None:
    code = [(page.name, block) for page in PAGES for block in FENCED_PYTHON.findall(read(page))]
    code += [
        (page.name, text) for page in PAGES for text in re.findall(r"^ {4}from reflact.*$", read(page), re.M)
    ]
    code += [(path.name, read(path)) for path in sorted((ROOT / "examples").glob("*.py"))]
    private = []
    for where, text in code:
        for module, names, plain in IMPORT.findall(text):
            if (module or plain) not in FRONT_DOORS:
                private.append(f"{where}: {module or plain}")
                continue
            door = importlib.import_module(module or plain)
            public = getattr(door, "__all__", None) or [
                name for name in vars(door) if not name.startswith("_")
            ]
            wanted = (word.split(" as ")[0].strip() for word in names.strip("()").split(","))
            private += [f"{where}: {module}.{name}" for name in wanted if name and name not in public]
    assert private == []


def test_the_readme_trains_on_own_lists(tmp_path: Path) -> None:
    """README trains on own lists with an own function in at most 15 lines, which run as they are.

    Only the two names of models are replaced by stand-ins.
    """
    (code,) = re.findall(r"<!-- example: from_items -->\n```python\n(.*?)^```$", read(README), re.M | re.S)
    assert len([*filter(str.strip, code.splitlines())]) <= 15
    for name in ("target", "optimizer"):
        code, n_replaced = re.subn(rf'{name}="[\w-]+"', f"{name}={name}", code)
        assert n_replaced == 1
    output = run(STAND_INS + code, tmp_path)
    assert output.startswith("run r")
    assert "\nPerhaps better, not confirmed: 2 of 2 test items solved instead of 1 " in output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "code"), list_blocks(), ids=lambda value: value if "\n" not in value else ""
)
def test_runnable_blocks_run(page: str, code: str, tmp_path: Path) -> None:
    assert run(code, tmp_path).strip(), f"{page}: the example prints nothing"


@pytest.mark.slow
def test_the_first_session_is_as_the_page_shows_it(tmp_path: Path) -> None:
    """A newcomer trains on 60 questions of a CSV file with at most eight commands, and sees what the page shows."""
    code = f"import runpy, sys; sys.argv = ['x', '--check']; runpy.run_path({str(NEWCOMER)!r}, run_name='__main__')"
    run(code, tmp_path)
    commands = re.findall(r"^\$ reflact (\w+)", read(ROOT / "docs" / "first-session.md"), re.MULTILINE)
    assert commands[:3] == ["init", "check", "train"]
    assert len(commands) <= 8


@pytest.mark.slow
def test_the_program_that_is_trained_works_as_printed(tmp_path: Path) -> None:
    page = read(ROOT / "docs" / "train-your-agent.md")
    ((commands,),) = [re.findall(r"<!-- run -->\n```sh\n(.*?)^```$", page, re.M | re.S)]
    with serving(play_colours) as url:
        for name, text in re.findall(r"<!-- file: (\S+) -->\n```\w+\n(.*?)^```$", page, re.M | re.S):
            (tmp_path / name).parent.mkdir(exist_ok=True)
            here = text.replace("http://localhost:8080", url.removesuffix("/v1"))
            (tmp_path / name).write_text(here, encoding="utf-8")
        for line in commands.splitlines():
            arguments = line.split()[1:]
            output = run(
                f"import sys; sys.argv[1:] = {arguments}\nfrom reflact.cli import main\nmain()", tmp_path
            )
    assert "2 of 2 test items solved instead of 0" in output


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_examples_run(example: Path, tmp_path: Path) -> None:
    """Each example ends without an error in an empty folder, and prints something."""
    output = run(example, tmp_path)
    assert output.strip()
    if example.name == "agent_with_critic.py":
        first, last, learned = output.splitlines()
        assert first == "desk 0: 2 of 10 letters are filed; the critic says 9"
        assert last == "desk 90: 2 of 10 letters are filed; the critic says 2"
        assert learned.startswith("90 traces were taken, ")


def test_named_tests_exist() -> None:
    missing = [
        f"{page.name}: {file}::{name}"
        for page in PAGES
        for file, name in NAMED_TEST.findall(read(page))
        if not (ROOT / file).is_file() or (name and name not in list_tests(ROOT / file))
    ]
    assert missing == []


def test_every_promise_of_reliability_names_its_test() -> None:
    page, _, _ = read(ROOT / "docs" / "reliability.md").partition("## Quirks of endpoints")
    rows = PROMISE.findall(page)
    promised = [row for row in rows if not row.startswith(("| promise |", "| event |"))]
    assert len(promised) > 20
    assert [row for row in promised if not NAMED_TEST.search(row)] == []


def test_the_documents_name_no_command_that_is_missing() -> None:
    makefile, commands = read(ROOT / "Makefile"), read(ROOT / "docs" / "cli.md")
    missing = []
    for page in PAGES:
        text = FENCED_PYTHON.sub("", read(page))
        code = "\n".join(
            re.findall(r"`([^`\n]+)`", text) + re.findall(r"^(?: {4}|```sh\n)(.+)$", text, re.MULTILINE)
        )
        missing += [
            f"{page.name}: make {target}"
            for target in re.findall(r"\bmake ([a-z][a-z-]*)", code)
            if not re.search(rf"^{target}:", makefile, re.MULTILINE)
        ]
        missing += [
            f"{page.name}: reflact {command}"
            for command in re.findall(r"\breflact ([a-z]+)\b", code)
            if f"## reflact {command}" not in commands
        ]
    assert missing == []


def test_there_are_at_most_twenty_commands() -> None:
    commands = re.findall(r"^## (reflact .+)$", read(ROOT / "docs" / "cli.md"), re.MULTILINE)
    assert len(commands) <= 20


def test_help_fits_80_columns() -> None:
    def list_commands(command: typer.core.TyperGroup, path: tuple[str, ...]) -> list[tuple[str, ...]]:
        below = getattr(command, "commands", {})
        return [path, *(found for name, one in below.items() for found in list_commands(one, (*path, name)))]

    wrong = []
    for path in list_commands(typer.main.get_group(app), ()):
        output = CliRunner().invoke(app, [*path, "--help"], env={"COLUMNS": "80"}, terminal_width=80).output
        wrong += [
            f"{' '.join(path)}: {line}"
            for line in output.splitlines()
            if len(line) > 80 or (line.endswith("...") and not line.startswith("Usage:"))
        ]
    assert wrong == []


def test_other_event_loops_are_refused(tmp_path: Path) -> None:
    """Under trio, `train` and `stream` raise an error that says what to do, and leave nothing behind."""
    code = """
import trio
from reflact import Trainer
from reflact.errors import UsageError
from reflact.testing import ScriptedLLM, ToyEnvironment, ToyTarget, toy_optimizer

async def main():
    for start in ("train", "stream"):
        trainer = Trainer({"out_dir": "run"}, environment=ToyEnvironment(), target=ToyTarget(),
                          optimizer=ScriptedLLM(toy_optimizer()))
        try:
            if start == "train":
                await trainer.train()
            else:
                async with trainer.stream() as stream:
                    async for _ in stream:
                        pass
        except UsageError as error:
            print(start, "asyncio" in str(error))

trio.run(main)
"""
    pytest.importorskip("trio")
    assert run(code, tmp_path).split() == ["train", "True", "stream", "True"]
    assert not (tmp_path / "run").exists()


def read_rows(page: Path, heading: str) -> Iterator[tuple[str, str, str]]:
    """Yield the rows of a page's tables that have a heading as their second column."""
    inside = False
    for line in read(page).splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        if len(cells) < 2 or set(cells[0]) <= {"-"}:
            inside = inside and bool(cells)
        elif cells[1] == heading:
            inside = True
        elif inside:
            yield cells[0], cells[1], cells[2]


def test_every_older_key_is_mapped() -> None:
    mapped = [key for older, _, _ in read_rows(COMING, "key here") for key in QUOTED.findall(older)]
    assert sorted(mapped) == sorted(OLDER_KEYS)


def test_mapped_keys_exist() -> None:
    """A row names keys that the configuration has, or says that the key is gone, and why."""
    wrong = [
        (older, here)
        for older, here, note in read_rows(COMING, "key here")
        if not set(QUOTED.findall(here)) <= KNOWN or not (QUOTED.findall(here) or (here == "gone" and note))
    ]
    assert wrong == []
