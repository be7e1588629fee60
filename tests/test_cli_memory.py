"""``reflact memory`` at a terminal and for programs: list, search, show, label, forget, export, import."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import anyio
import pytest
from typer.testing import CliRunner, Result

from memory_pairs import HELD_OUT, evidence_for, keep_reply, make_pair
from reflact import MemoryStore, Trace
from reflact.cli.app import app
from reflact.cli.memory_output import format_table
from reflact.memory.models import Action, ContrastPair, Evaluation, Label, LabelSource, Provenance, Transition
from reflact.store.runs import open_store
from served import assert_refused

PAIR = make_pair(1, note="a zebra", trace="monday-1").model_copy(
    update={"reason": "It says \x1b]0;done\x07."}
)
ANCHORS = (
    make_pair(51, trace="sunday"),
    make_pair(52, trace="a\x1b[2J").model_copy(update={"purpose": "Write\nthe report. " + "x" * 80}),
    make_pair(53).model_copy(update={"provenance": Provenance()}),
)
EVALUATION = Evaluation(progress_before=0, progress_after=7, reasoning="It says\x1b[2J so.", confidence=0.5)
TRACES = ("monday-1", "monday-2", "monday-22")


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["memory", *map(str, arguments)], terminal_width=200)


def read_lines(*arguments: object) -> list[dict[str, Any]]:
    """Return what a command prints as lines of JSON."""
    return [json.loads(line) for line in run(*arguments, "--json").stdout.splitlines()]


def make_label(source: LabelSource, after: float = 2) -> Label:
    return Label(progress_before=0, progress_after=after, source=source)


def record(folder: Path, name: str) -> Path:
    """Record a trace of four steps: scored and labelled, labelled by a program, by agreement, and not."""
    path = folder / f"{name}.jsonl"
    trace = Trace("Sort the mail.", id=name, path=path)
    labels = (make_label("human"), make_label("program"), make_label("agreement"), None)
    for number, label in enumerate(labels):
        step = Transition(
            before={"sorted": number, "desk": "d" * 3000},
            action=Action(name="sort", arguments={"letters": 1}),
            after={"sorted": number + 1, "desk": "e" * 3000},
        )
        trace.record(step, None if number else EVALUATION, label=label)
    trace.finish()
    return path


def fill(path: Path, pairs: Iterable[ContrastPair] = (), anchors: Iterable[ContrastPair] = ()) -> Path:
    """Store pairs and anchors in a memory."""

    async def submit() -> None:
        async with MemoryStore(path) as memory:
            for pair in pairs:
                await memory.submit(pair)
            await memory.add_anchors(list(anchors))

    anyio.run(submit)
    return path


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a memory of three traces, a promoted pair, two others and three anchors; tests only read it."""
    path, traces = tmp_path_factory.mktemp("cli") / "memory.db", tmp_path_factory.mktemp("traces")
    for name in TRACES:
        record(traces, name)
    assert run("import", path, traces).exit_code == 0
    fill(path, [PAIR, make_pair(2, trace="monday-1"), make_pair(3, trace="elsewhere")], ANCHORS)

    async def promote() -> None:
        async with MemoryStore(path) as memory:
            test = await memory.open_test([PAIR.id], holdout_id="h", traces=HELD_OUT)
            await memory.close_test(test.number, evidence_for(test))

    anyio.run(promote)
    return path


@pytest.fixture
def store(filled: Path, tmp_path: Path) -> Path:
    """Return a copy of the memory, to be changed."""
    path = tmp_path / "memory.db"
    path.write_bytes(filled.read_bytes())
    return path


def test_a_list_shows_all_statuses(filled: Path) -> None:
    """Each pair is a line; words and options narrow it; JSON holds each pair whole."""
    assert run("list", filled).stdout.count("credit_for_intention") == 3
    (stored,) = read_lines("list", filled, "--status", "promoted")
    assert (stored["pair"]["purpose"], stored["status"]) == (PAIR.purpose, "promoted")
    assert [one["pair"]["purpose"] for one in read_lines("list", filled, "zebra")] == [PAIR.purpose]
    assert len(read_lines("list", filled, "--limit", "1")) == 1
    assert run("list", filled, '" OR NEAR(').exit_code == 0


def test_a_list_says_that_it_is_empty_or_cut(filled: Path, tmp_path: Path) -> None:
    """Both are said on standard error, and not in the table."""
    empty = fill(tmp_path / "empty.db")
    for options in ((), ("--kind", "trace"), ("--kind", "anchor")):
        assert " has no " in run("list", empty, *options).stderr
    assert "--limit" in run("list", filled, "--limit", 1).stderr
    assert run("list", filled).stderr == ""


def test_a_table_is_what_its_cells_are() -> None:
    """A line break in a cell is written out, so that no row can pretend to be two; numbers stand right."""
    rows = [("one\nforged  7", "3", "a\ttab"), ("検", "12", "\x1b[2J\ud800")]
    assert list(format_table(("name", "n", "says"), rows, right_aligned={1})) == [
        "name             n  says",
        r"one\nforged  7   3  a\ttab",
        r"検              12  \x1b[2J\ud800",
    ]


def test_traces_are_listed_with_their_counts(filled: Path) -> None:
    """Steps, those that were scored, those with labels that count, and the pairs made of them."""
    first, second, third = read_lines("list", filled, "--kind", "trace")
    counts = {"n_events": 4, "n_scored": 1, "n_labelled": 2, "n_pairs": 2}
    assert first == {"id": "monday-1", "purpose": "Sort the mail.", **counts}
    assert (second["id"], second["n_pairs"], third["id"]) == ("monday-2", 0, "monday-22")
    assert "monday-22" in run("list", filled, "--kind", "trace").stdout


def test_each_anchor_is_a_line_of_aligned_columns(filled: Path) -> None:
    """Its id's beginning, its origin, the right score and the purpose, with nothing unseen; JSON has all."""
    head, *lines = run("list", filled, "--kind", "anchor").stdout.splitlines()
    assert head == "anchor        trace     step  progress after  purpose"
    first, second, third = (pair.id[:12] for pair in ANCHORS)
    assert set(lines) == {
        f"{first}  sunday      51               3  Write the report.",
        rf"{second}  a\x1b[2J    52               3  Write the report. {'x' * 41}…",
        f"{third}                               3  Write the report.",
    }
    found = [ContrastPair.model_validate(line) for line in read_lines("list", filled, "--kind", "anchor")]
    assert found == sorted(ANCHORS, key=lambda pair: pair.id)


def test_a_pair_is_shown_and_cannot_steer_the_terminal(filled: Path) -> None:
    """The beginning of an id is enough; controls in what a model wrote are written out."""
    shown = run("show", filled, PAIR.id[:16]).stdout
    for text in ("promoted, since", "2 -> 9", "zebra", r"\x1b]0;done\x07"):
        assert text in shown
    assert "\x1b" not in shown + run("list", filled).stdout
    (stored,) = read_lines("show", filled, PAIR.id)
    assert (stored["pair"]["reason"], stored["status"]) == (PAIR.reason, "promoted")


def test_a_trace_is_shown_step_by_step(filled: Path) -> None:
    """The action, the change, the critic's evaluation and the label; long changes are cut, marked."""
    shown = run("show", filled, "monday-1").stdout
    for text in (
        "steps: 4, 1 scored, 2 labelled",
        'step 0: sort { "letters": 1 }',
        "critic: 0 to 7, confidence 0.5",
        "label: 0 to 2, from human",
        "label: 0 to 2, from agreement",
        "characters cut",
    ):
        assert text in shown
    assert "\x1b" not in shown
    (whole,) = read_lines("show", filled, "monday-1")
    assert whole["events"][2]["transition"]["after"] == {"sorted": 3, "desk": "e" * 3000}


def test_an_id_with_a_line_break_forges_no_line(tmp_path: Path) -> None:
    """Whatever traces are called and for, each is one line of a list, and named in one line elsewhere."""
    name, path = "real\nforged-trace  9  9  9  9  none", tmp_path / "m.db"

    async def open_it() -> None:
        async with MemoryStore(path) as memory:
            await memory.open_trace(name, "Do\nit.\u2028Now.")
            await memory.submit(make_pair(1, trace=name))

    anyio.run(open_it)
    listed = run("list", path, "--kind", "trace").stdout.splitlines()
    shown = [run("show", path, one).stdout.splitlines() for one in (name, make_pair(1).id)]
    assert len(listed) == 2
    lines = [line for part in (listed, *shown) for line in part]
    assert not any(line.lstrip().startswith(("forged", "it.")) for line in lines)
    refused = run("label", path, name, 9, "--after", 1)
    assert_refused(refused, r"trace real\nforged-trace")
    assert r"trace real\nforged-trace" in run("forget", path, name).stdout


def test_the_beginning_of_an_id_is_enough_if_it_is_the_only_one(filled: Path, tmp_path: Path) -> None:
    """A whole id stands for itself, whatever begins with it; no wildcard is the beginning of one."""
    for name in ("monday-2", "monday-22"):
        assert run("show", filled, name).stdout.startswith(f"trace {name}\n")
    path = fill(tmp_path / "pairs.db", [make_pair(n) for n in range(2)])
    for number in range(2):
        assert run("show", path, make_pair(number).id[:4]).exit_code == 0
    for name in ("%%%%", "____", "****"):
        assert_refused(run("show", path, name), f"has no pair or trace '{name}'")


def read_labels(store: Path) -> list[object]:
    """Return the label of each step of a trace."""
    (trace,) = read_lines("show", store, "monday-1")
    return [one["label"] for one in trace["events"]]


def test_a_step_is_labelled(store: Path) -> None:
    """A person's label has a reason, and may leave out the state before; others are replaced on demand."""
    done = run("label", store, "monday-1", 3, "--before", "0.5", "--after", 4, "--reason", "two of five")
    assert done.stdout == "labelled step 3 of trace monday-1; 3 of its 4 steps are labelled\n"
    first = Label(progress_before=0.5, progress_after=4, source="human", reasoning="two of five")
    assert read_labels(store)[3] == first.model_dump(mode="json")
    assert read_lines("label", store, "monday-1", 2, "--after", 5)[0]["n_labelled"] == 4
    assert read_labels(store)[2] == Label(progress_after=5, source="human").model_dump(mode="json")
    assert run("label", store, "monday-1", 1, "--before", 0, "--after", 3, "--replace").exit_code == 0
    assert read_labels(store)[1] == make_label("human", 3).model_dump(mode="json")


def test_a_wrong_label_changes_nothing(store: Path) -> None:
    """Unknown ids, labelled steps and values out of range end with code 2."""
    before = run("export", store).stdout
    for arguments, problem in (
        (("monday-1", "1", "--after", "3"), "already has a label from a program with progress after 2"),
        (("monday-1", "4", "--after", "3"), "has no step 4"),
        (("tuesday", "0", "--after", "3"), "has no trace 'tuesday'"),
        (("monday-1", "0", "--after", "11"), "less than or equal to 10"),
        (("monday-1", "0", "--after", "nan"), "equal to 10"),
        (("monday-1", "0"), "--after"),
    ):
        done = run("label", store, *arguments)
        assert (done.exit_code, problem in done.stderr) == (2, True), arguments
    assert run("export", store).stdout == before


def test_forgetting_says_what_went(store: Path) -> None:
    """The pairs of the trace go and are counted; only a whole id is forgotten, and others are named."""
    assert "forgot trace elsewhere: 0 events, 1 pairs" in run("forget", store, "elsewhere").stdout
    assert "forgot trace monday-1: 4 events, 2 pairs" in run("forget", store, "monday-1").stdout
    assert read_lines("list", store) == []
    for options in ((), ("--json",)):
        assert_refused(run("forget", store, "monday-1", *options), "came from a trace 'monday-1'")
    refused = run("forget", store, "monday")
    assert_refused(refused, "has no trace 'monday'")
    assert refused.stderr.endswith("begin with it: monday-2, monday-22\n")
    assert read_lines("forget", store, "monday-1", "--calls")[0]["pair_ids"] == []
    assert len(read_lines("list", store, "--kind", "trace")) == 2


def test_replies_are_removed_on_demand(store: Path) -> None:
    """Without the option it is said that replies stay and may quote the trace; with it they are removed."""

    async def ask() -> None:
        async with open_store(store) as calls:
            await keep_reply(calls, "critic/score", "It quotes.")

    anyio.run(ask)
    assert (
        "1 cached replies to questions of calibrations may quote it"
        in run("forget", store, "monday-1").stdout
    )
    assert "removed 1 cached replies" in run("forget", store, "monday-1", "--calls").stdout
    assert "removed 0 cached replies" in run("forget", store, "monday-1", "--calls").stdout


def test_an_export_comes_back(filled: Path, tmp_path: Path) -> None:
    """What is exported to a file or to standard output is imported into a new memory."""
    file, other = tmp_path / "out.jsonl", tmp_path / "other.db"
    done = run("export", filled, file)
    assert done.stdout == f"wrote {len(file.read_text(encoding='ascii').splitlines())} lines to {file}\n"
    assert run("export", filled).stdout == file.read_text(encoding="ascii")
    assert "new: 3 pairs, 3 traces with 12 steps, 3 anchors" in run("import", other, file).stdout
    assert read_lines("import", other, file)[0]["n_pairs"] == 0
    assert len(read_lines("list", other, "--status", "quarantined")) == 3


def test_files_and_folders_of_traces_are_imported(tmp_path: Path) -> None:
    """Everything is counted; what is there already is not new, and what a trace has grown by is."""
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
    """Missing and foreign files, unknown ids and statuses: one sentence on standard error, exit code 2."""
    foreign = tmp_path / "foreign"
    foreign.write_text("hello " * 1000, encoding="ascii")
    for arguments, problem in (
        (("list", "nowhere.db"), "no memory at nowhere.db"),
        (("list", "x" * 300), "x" * 300),
        (("list", store, "--status", "lost"), "'lost'"),
        (("list", store, "--kind", "lost"), "--kind lost is unknown"),
        (("list", store, "zebra", "--kind", "trace"), "cannot be combined"),
        (("list", foreign), "not a SQLite database"),
        (("show", store, "zzzz"), "has no pair or trace 'zzzz'"),
        (("show", store, ""), "at least 4 characters"),
        (("show", store, "mon"), "at least 4 characters"),
        (("show", store, "mond"), "monday-1, monday-2, monday-22"),
        (("show", store, "elsewhere"), "but not the trace itself"),
        (("forget", store, "mon"), "needs a complete id"),
        (("import", store, "nowhere.jsonl"), "cannot read nowhere.jsonl"),
        (("import", store, store), "cannot read"),
        (("import", store, foreign), "holds no trace"),
        (("export", store, "nowhere/out"), "cannot write nowhere/out"),
    ):
        assert_refused(run(*arguments), problem)
