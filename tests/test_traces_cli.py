"""Traces in a memory, at a terminal: imported from files, listed, shown, named by an id, forgotten."""

from __future__ import annotations

import json
from pathlib import Path

import anyio
import pytest
from typer.testing import CliRunner, Result

from memory_pairs import make_pair
from reflact import Trace
from reflact.cli.app import app
from reflact.memory.models import Action, Evaluation, Label, Transition
from reflact.memory.store import MemoryStore

SAID = Evaluation(progress_before=0, progress_after=7, reasoning="It says\x1b[2J so.", confidence=0.5)
GOLD = Label(progress_before=0, progress_after=2, source="human")
AGREED = Label(progress_before=0, progress_after=2, source="agreement")


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["memory", *map(str, arguments)], terminal_width=200)


def record(folder: Path, name: str) -> Path:
    """Record a trace of three steps: scored and with gold, with gold alone, with what samples agreed on."""
    path = folder / f"{name}.jsonl"
    trace = Trace("Sort the mail.", id=name, path=path)
    for number, (said, gold) in enumerate(((SAID, GOLD), (None, GOLD), (None, AGREED))):
        step = Transition(
            before={"sorted": number, "desk": "d" * 3000},
            action=Action(name="sort", arguments={"letters": 1}),
            after={"sorted": number + 1, "desk": "e" * 3000},
        )
        trace.record(step, said, label=gold)
    trace.finish()
    return path


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Return a memory with three traces, one of which pairs were made of."""
    path = tmp_path / "memory.db"
    for name in ("monday-1", "monday-2", "monday-22"):
        record(tmp_path / "traces", name)
    assert run("import", path, tmp_path / "traces").exit_code == 0

    async def learn() -> None:
        async with MemoryStore(path) as memory:
            await memory.submit(make_pair(1, trace="monday-1"))
            await memory.submit(make_pair(2, trace="elsewhere"))

    anyio.run(learn)
    return path


def test_files_and_folders_of_traces_are_handed_in(tmp_path: Path) -> None:
    """Everything is counted; what is there already is not new, and what a trace has grown by is."""
    path, file = tmp_path / "memory.db", record(tmp_path / "traces", "monday")
    extra = record(tmp_path, "tuesday")
    for source in (tmp_path / "traces", extra):
        said = run("import", path, source).stdout
        assert said == "new: 0 units, 1 traces with 3 steps, 0 anchors; 0 of the units need review or were rejected\n"
    extra.write_bytes(extra.read_bytes()[:-3])
    said = run("import", path, extra).stdout
    assert "trace tuesday: 10 bytes of its file are not whole" in said
    assert "0 traces with 0 steps" in said
    file.write_text(file.read_text(encoding="ascii").replace("Sort the", "Burn the"), encoding="ascii")
    refused = run("import", path, file)
    assert refused.exit_code == 2
    assert "stored with another purpose" in refused.stderr


def test_a_memory_without_traces_says_where_they_are(tmp_path: Path) -> None:
    """A calibration of a folder keeps none, so an empty table alone would look like a loss."""

    async def begin() -> None:
        async with MemoryStore(tmp_path / "memory.db"):
            pass

    anyio.run(begin)
    listed = run("list", tmp_path / "memory.db", "--kind", "trace")
    assert listed.exit_code == 0
    assert (
        "keeps no trace: a calibration with `traces: FOLDER` reads its files in their folder" in listed.stderr
    )


def test_traces_are_listed_with_what_they_hold(store: Path) -> None:
    """Steps, those that were scored, those with gold that counts, and the pairs made of them."""
    found = [json.loads(line) for line in run("list", store, "--kind", "trace", "--json").stdout.splitlines()]
    assert [one["id"] for one in found] == ["monday-1", "monday-2", "monday-22"]
    assert found[0] == {
        "id": "monday-1",
        "purpose": "Sort the mail.",
        "n_events": 3,
        "n_scored": 1,
        "n_labelled": 2,
        "n_pairs": 1,
    }
    assert found[1]["n_pairs"] == 0
    table = run("list", store, "--kind", "trace").stdout
    assert [word in table for word in ("monday-22", "Sort the mail.", "scored")] == [True] * 3


def test_a_trace_is_shown_step_by_step(store: Path) -> None:
    """What was done, what changed, what the critic said and what is right; long changes are cut, marked."""
    shown = run("show", store, "monday-1").stdout
    assert "steps: 3, 1 scored, 2 labelled" in shown
    assert "pairs: 1" in shown
    assert 'step 0: sort { "letters": 1 }' in shown
    assert "critic: 0 to 7, confidence 0.5" in shown
    assert "label: 0 to 2, from human" in shown
    assert "label: 0 to 2, from agreement" in shown
    assert "characters cut" in shown
    assert "\x1b" not in shown
    whole = json.loads(run("show", store, "monday-1", "--json").stdout)
    assert whole["events"][2]["transition"]["after"] == {"sorted": 3, "desk": "e" * 3000}


def test_an_id_with_a_line_break_forges_no_line(tmp_path: Path) -> None:
    """Whatever traces are called and for, each is one line of a list, and named in one line elsewhere."""
    name, path = "real\nforged-trace  9  9  9  9  none", tmp_path / "m.db"

    async def open_it() -> None:
        async with MemoryStore(path) as memory:
            await memory.open_trace(name, "Do\nit.\u2028Now.")
            await memory.submit(make_pair(1, trace=name))

    anyio.run(open_it)
    shown = [
        run("list", path, "--kind", "trace"),
        run("show", path, name),
        run("show", path, make_pair(1).id),
    ]
    lines = [line for one in shown for line in one.stdout.splitlines()]
    assert len(shown[0].stdout.splitlines()) == 2
    assert [line for line in lines if line.lstrip().startswith(("forged", "it."))] == []
    refused = run("label", path, name, 9, "--after", 1).stderr
    assert refused.startswith(r"error: trace real\nforged-trace")
    assert refused.count("\n") == 1
    assert r"trace real\nforged-trace" in run("forget", path, name).stdout


def test_the_beginning_of_an_id_is_enough_where_it_is_the_only_one(store: Path) -> None:
    """A whole id stands for itself, whatever begins with it; what begins several is refused, with them."""
    assert run("show", store, "monday-2").stdout.startswith("trace monday-2\n")
    assert run("show", store, "monday-22").stdout.startswith("trace monday-22\n")
    refused = run("show", store, "mond")
    assert refused.exit_code == 2
    assert "monday-1, monday-2, monday-22" in refused.stderr


def test_only_a_whole_id_is_forgotten(store: Path) -> None:
    """A trace whose id begins with that of one that is gone stays, and is named."""
    gone = run("forget", store, "elsewhere").stdout
    assert "forgot trace elsewhere: 0 events, 1 units with 2 cards" in gone
    assert "forgot trace monday-2:" in run("forget", store, "monday-2").stdout
    for name, others in (("monday-2", "monday-22"), ("monday", "monday-1, monday-22")):
        refused = run("forget", store, name)
        assert refused.exit_code == 2
        assert f"is called '{name}'" in refused.stderr
        assert refused.stderr.endswith(f"these begin so: {others}\n")
    assert "removed 0 cached replies" in run("forget", store, "monday-2", "--calls").stdout
    assert run("list", store, "--kind", "trace", "--json").stdout.count('"n_events":3') == 2


def test_the_beginning_of_a_pairs_id_is_only_taken_for_one(tmp_path: Path) -> None:
    """Two pairs whose ids begin alike are named, so that one can be chosen; no wildcard is one."""
    pairs = sorted((make_pair(n) for n in range(2)), key=lambda pair: pair.id)

    async def fill() -> None:
        async with MemoryStore(tmp_path / "memory.db") as memory:
            for pair in pairs:
                await memory.submit(pair)

    anyio.run(fill)
    for pair in pairs:
        assert run("show", tmp_path / "memory.db", pair.id[:4]).exit_code == 0
    for name in ("%%%%", "____", "****"):
        assert f"begins with '{name}'" in run("show", tmp_path / "memory.db", name).stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("list", "nowhere.db", "--kind", "trace"), "no memory at nowhere.db"),
        (("show", "STORE", "mon"), "no unit or trace in"),
        (("show", "STORE", "mon"), "at least 4 characters"),
        (("show", "STORE", "tuesday"), "list them with `reflact memory list"),
        (("show", "STORE", "elsewhere"), "but not the trace itself"),
        (("forget", "STORE", "mon"), "takes a whole id"),
        (("import", "STORE", "nowhere"), "cannot read nowhere"),
        (("list", "STORE", "--kind", "trace", "--kind", "anchor"), "list traces and anchors alone"),
    ],
)
def test_what_is_wrong_is_one_sentence(store: Path, arguments: tuple[str, ...], said: str) -> None:
    """Unknown files and ids end with code 2 and a sentence that says what to do."""
    result = run(*(str(store) if argument == "STORE" else argument for argument in arguments))
    assert result.exit_code == 2
    assert said in result.stderr
    assert result.stderr.count("\n") == 1
