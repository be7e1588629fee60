"""``reflact memory`` at a terminal and for programs: list, search, show, label, forget, export, import."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import anyio
import pytest
from typer.testing import CliRunner, Result

from memory_pairs import keep_reply, make_pair, promote
from reflact import MemoryStore, Trace
from reflact.cli.app import app
from reflact.cli.memory import format_table
from reflact.memory.models import Action, ContrastPair, Evaluation, Label, LabelSource, Transition
from reflact.store.runs import open_store
from served import assert_refused, reflact

PAIR = make_pair(1, note="a zebra", trace="monday-1").model_copy(
    update={"reason": "It says \x1b]0;done\x07."}
)
EVALUATION = Evaluation(progress_before=0, progress_after=7, reasoning="It says\x1b[2J so.", confidence=0.5)
TRACES = ("monday-1", "monday-2", "monday-22")


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["memory", *map(str, arguments)], terminal_width=200)


def read_lines(*arguments: object) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run(*arguments, "--json").stdout.splitlines()]


def make_label(source: LabelSource, after: float = 2) -> Label:
    return Label(progress_before=0, progress_after=after, source=source)


def record(folder: Path, name: str) -> Path:
    path = folder / f"{name}.jsonl"
    trace = Trace("Sort the mail.", id=name, path=path)
    labels = (make_label("human"), make_label("program"), None, None)
    for number, label in enumerate(labels):
        step = Transition(
            before={"sorted": number, "desk": "d" * 3000},
            action=Action(name="sort", arguments={"letters": 1}),
            after={"sorted": number + 1, "desk": "e" * 3000, "\udc00": 1},
        )
        trace.record(step, None if number else EVALUATION, label=label)
    trace.finish()
    return path


def fill(path: Path, promoted: Iterable[ContrastPair] = (), waiting: Iterable[ContrastPair] = ()) -> Path:
    async def submit() -> None:
        async with MemoryStore(path) as memory:
            if promoted:
                await promote(memory, list(promoted))
            for pair in waiting:
                await memory.submit(pair)

    anyio.run(submit)
    return path


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli")
    for name in TRACES:
        record(folder / "traces", name)
    path = folder / "memory.db"
    assert run("import", path, folder / "traces").exit_code == 0
    return fill(path, [PAIR], [make_pair(2, trace="monday-1"), make_pair(3, trace="elsewhere")])


@pytest.fixture
def store(filled: Path, tmp_path: Path) -> Path:
    path = tmp_path / "memory.db"
    path.write_bytes(filled.read_bytes())
    return path


def test_a_list_shows_pairs_or_traces(filled: Path, tmp_path: Path) -> None:
    assert run("list", filled).stdout.count("credit_for_intention") == 3
    (stored,) = read_lines("list", filled, "--status", "promoted")
    assert (stored["pair"]["purpose"], stored["status"]) == (PAIR.purpose, "promoted")
    assert [one["pair"]["purpose"] for one in read_lines("list", filled, "zebra")] == [PAIR.purpose]
    assert run("list", filled, '" OR NEAR(').exit_code == 0
    first, second, third = read_lines("list", filled, "--kind", "trace")
    counts = {"n_events": 4, "n_scored": 1, "n_labelled": 2, "n_pairs": 2}
    assert first == {"id": "monday-1", "purpose": "Sort the mail.", **counts}
    assert (second["id"], second["n_pairs"], third["id"]) == ("monday-2", 0, "monday-22")
    assert "has no matching traces" in run("list", fill(tmp_path / "empty.db"), "--kind", "trace").stderr
    assert "--limit" in run("list", filled, "--limit", 1).stderr
    assert run("list", filled).stderr == ""


def test_what_a_model_wrote_cannot_steer_the_terminal(filled: Path, tmp_path: Path) -> None:
    """Controls are written out, and a line break in a name or a cell forges no line."""
    shown = run("list", filled, "--id", PAIR.id[:16]).stdout
    for text in ("promoted, since", "2 -> 9", "zebra", r"\x1b]0;done\x07"):
        assert text in shown
    assert "\x1b" not in shown + run("list", filled).stdout
    name, path = "real\nforged-trace  9  9  9  9  none", tmp_path / "m.db"

    async def open_trace() -> None:
        async with MemoryStore(path) as memory:
            await memory.open_trace(name, "Do\nit.\u2028Now.")
            await memory.submit(make_pair(1, trace=name))

    anyio.run(open_trace)
    lines = run("list", path, "--kind", "trace").stdout.splitlines()
    assert len(lines) == 2
    for one in (name, make_pair(1).id):
        lines += run("list", path, "--id", one).stdout.splitlines()
    assert not any(line.lstrip().startswith(("forged", "it.")) for line in lines)
    assert_refused(run("label", path, name, 9, "--after", 1), r"trace real\nforged-trace")
    rows = [("name", "n", "says"), ("one\nforged", "3", "a\ttab"), ("検", "12", "\x1b[2J\ud800")]
    assert list(format_table(rows)) == [
        "name         n   says",
        r"one\nforged  3   a\ttab",
        r"検           12  \x1b[2J\ud800",
    ]


def test_commands_that_read_change_nothing(filled: Path) -> None:
    """They leave the memory and its folder as they were, to the byte."""
    folder = filled.parent
    before = {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}
    for command, *arguments in (["list"], ["list", "report"], ["export"], ["list", "--id", "monday-1"]):
        done = reflact("memory", command, filled, *arguments)
        assert (done.exit_code, bool(done.stdout)) == (0, True), command
        assert before == {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}


def read_labels(store: Path) -> list[object]:
    (trace,) = read_lines("list", store, "--id", "monday-1")
    return [one["label"] for one in trace["events"]]


def test_a_step_is_labelled(store: Path) -> None:
    done = run("label", store, "monday-1", 3, "--before", "0.5", "--after", 4, "--reason", "two of five")
    assert done.stdout == "labelled step 3 of trace monday-1\n"
    assert run("label", store, "monday-1", 2, "--after", 5).exit_code == 0
    assert run("label", store, "monday-1", 1, "--before", 0, "--after", 3, "--replace").exit_code == 0
    third = Label(progress_before=0.5, progress_after=4, source="human", reasoning="two of five")
    expected = [make_label("human", 3), Label(progress_after=5, source="human"), third]
    assert read_labels(store)[1:] == [one.model_dump(mode="json") for one in expected]


def test_a_wrong_label_changes_nothing(store: Path) -> None:
    before = run("export", store).stdout
    for arguments, problem in (
        (("monday-1", "1", "--after", "3"), "already has a label from a program with progress after 2"),
        (("monday-1", "4", "--after", "3"), "has no step 4"),
        (("tuesday", "0", "--after", "3"), "has no trace 'tuesday'"),
        (("monday-1", "0", "--after", "11"), "less than or equal to 10"),
        (("monday-1", "0"), "--after"),
    ):
        done = run("label", store, *arguments)
        assert (done.exit_code, problem in done.stderr) == (2, True), arguments
    assert run("export", store).stdout == before


def test_forgetting_says_what_went(store: Path) -> None:
    """The pairs of the trace go and are counted; replies that may quote it go on demand."""

    async def ask() -> None:
        async with open_store(store) as calls:
            await keep_reply(calls, "critic/score", "It quotes.")

    anyio.run(ask)
    assert "forgot trace elsewhere: 0 events, 1 pairs" in run("forget", store, "elsewhere").stdout
    said = run("forget", store, "monday-1").stdout
    assert "forgot trace monday-1: 4 events, 2 pairs" in said
    assert "1 cached replies to questions of calibrations may quote it" in said
    assert read_lines("list", store) == []
    for name in ("monday-1", "monday"):
        assert_refused(run("forget", store, name), f"came from a trace '{name}'")
    assert "removed 1 cached replies" in run("forget", store, "monday-1", "--calls").stdout
    assert len(read_lines("list", store, "--kind", "trace")) == 2


def test_an_export_comes_back(filled: Path, tmp_path: Path) -> None:
    file, other = tmp_path / "out.jsonl", tmp_path / "other.db"
    done = run("export", filled, file)
    assert done.stdout == f"wrote {len(file.read_text(encoding='ascii').splitlines())} lines to {file}\n"
    assert run("export", filled).stdout == file.read_text(encoding="ascii")
    assert "new: 3 pairs, 3 traces with 12 steps, 0 anchors" in run("import", other, file).stdout
    assert read_lines("import", other, file)[0]["n_pairs"] == 0
    assert len(read_lines("list", other, "--status", "quarantined")) == 3


def test_files_and_folders_of_traces_are_imported(tmp_path: Path) -> None:
    path, file = tmp_path / "memory.db", record(tmp_path / "traces", "monday")
    extra = record(tmp_path, "tuesday")
    for source in (tmp_path / "traces", extra):
        assert "new: 0 pairs, 1 traces with 4 steps, 0 anchors" in run("import", path, source).stdout
    extra.write_bytes(extra.read_bytes()[:-3])
    said = run("import", path, extra).stdout
    assert "trace tuesday: left out 10 incomplete bytes of its file" in said
    assert "0 traces with 0 steps" in said
    file.write_text(file.read_text(encoding="ascii").replace("Sort the", "Burn the"), encoding="ascii")
    assert_refused(run("import", path, file), "trace monday has the purpose 'Burn the")


def test_each_error_is_one_sentence(store: Path, tmp_path: Path) -> None:
    foreign = tmp_path / "foreign"
    foreign.write_text("hello " * 1000, encoding="ascii")
    for arguments, problem in (
        (("list", "nowhere.db"), "no memory at nowhere.db"),
        (("list", store, "zebra", "--kind", "trace"), "cannot be combined"),
        (("list", foreign), "not a SQLite database"),
        (("list", store, "--id", "zzzz"), "has no pair or trace 'zzzz'"),
        (("list", store, "--id", "mon"), "at least 4 characters"),
        (("list", store, "--id", "mond"), "monday-1, monday-2, monday-22"),
        (("import", store, "nowhere.jsonl"), "cannot read nowhere.jsonl"),
        (("import", store, foreign), "holds no trace"),
        (("export", store, "nowhere/out"), "nowhere/out: No such file"),
    ):
        assert_refused(run(*arguments), problem)
    for arguments in (("--status", "lost"), ("--kind", "lost")):
        assert run("list", store, *arguments).exit_code == 2
