"""``reflact memory`` at a terminal and for programs."""

from __future__ import annotations

import json
from pathlib import Path

import anyio
import pytest
from typer.testing import CliRunner, Result

from memory_pairs import HELD_OUT, evidence_for, keep_reply, make_pair
from reflact.cli.app import app
from reflact.cli.memory_output import format_table
from reflact.memory.cards import create_card
from reflact.memory.store import MemoryStore
from reflact.store.runs import open_store

PAIR = make_pair(1, note="a zebra", trace="t").model_copy(update={"reason": "It says \x1b]0;done\x07."})


async def fill(path: Path) -> None:
    async with MemoryStore(path) as memory:
        for pair in (PAIR, make_pair(2, trace="t")):
            await memory.submit(pair)
        test = await memory.open_test([PAIR.id], holdout_id="h", traces=HELD_OUT)
        await memory.close_test(test.number, evidence_for(test))


@pytest.fixture
def store(tmp_path: Path) -> Path:
    path = tmp_path / "memory.db"
    anyio.run(fill, path)
    return path


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["memory", *map(str, arguments)], terminal_width=200)


def test_a_list_shows_all_states_and_scopes(store: Path) -> None:
    """Each card is a line; options narrow it; JSON holds each card whole."""
    assert run("list", store).stdout.count("critic_calibration") == 2
    promoted = run("list", store, "--status", "promoted", "--kind", "failure_pattern", "--json")
    (card,) = [json.loads(line) for line in promoted.stdout.splitlines()]
    assert (card["pair_id"], card["status"], card["kind"]) == (PAIR.id, "promoted", "failure_pattern")
    assert len(run("list", store, "--limit", "1", "--json").stdout.splitlines()) == 1


def test_a_list_has_a_line_for_each_card_and_columns_that_are_aligned(tmp_path: Path) -> None:
    """Names stand above, nothing is cut but the long last column, and wide letters take their room."""
    texts = ("Short.", "検索 finds\nwhat follows.", "x" * 200)

    async def fill_it() -> None:
        async with MemoryStore(tmp_path / "m.db") as memory:
            await memory.submit(PAIR)
            for text in texts:
                await memory.submit_card(create_card("tool_policy", text))

    anyio.run(fill_it)
    head, *lines = run("list", tmp_path / "m.db").stdout.splitlines()
    assert head.split() == ["card", "kind", "status", "utility", "text"]
    assert len(lines) == 5
    at = head.index("text")
    assert {line[at:] for line in lines} >= {"Short.", "検索 finds what follows.", f"{'x' * 59}…"}
    assert {line[at - 2 : at] for line in lines} == {"  "}
    assert sum("critic_calibration  quarantined" in line for line in lines) == 1


def test_a_table_is_what_its_cells_are() -> None:
    """A line break in a cell is written out, so that no row can pretend to be two; numbers stand right."""
    rows = [("one\nforged  7", "3", "a\ttab"), ("検", "12", "\x1b[2J\ud800")]
    assert list(format_table(("name", "n", "says"), rows, right_aligned={1})) == [
        "name             n  says",
        r"one\nforged  7   3  a\ttab",
        r"検              12  \x1b[2J\ud800",
    ]


def test_a_search_finds_by_words(store: Path) -> None:
    """The cards with the word come, and any text is a fit question."""
    found = run("search", store, "zebra", "--json").stdout.splitlines()
    assert {json.loads(line)["pair_id"] for line in found} == {PAIR.id}
    assert run("search", store, '" OR NEAR(').exit_code == 0


def test_a_list_says_that_it_is_empty_or_cut(store: Path) -> None:
    """Both are said beside the table and not in it."""
    assert "has no matching cards" in run("search", store, "walrus").stderr
    assert "only the first 1 cards; --limit shows more" in run("list", store, "--limit", 1).stderr
    assert run("list", store).stderr == ""


def test_a_pair_is_shown_with_its_history_and_cannot_steer_the_terminal(store: Path) -> None:
    """The beginning of an id is enough; controls in what a model wrote are written out."""
    shown = run("show", store, PAIR.id[:16]).stdout
    assert "promoted, test 1" in shown
    assert "2 -> 9" in shown
    assert "\x1b" not in shown + run("list", store).stdout
    assert r"\x1b]0;done\x07" in shown
    assert "zebra" in shown
    lines = run("show", store, PAIR.id, "--json").stdout.splitlines()
    assert [json.loads(line).get("after") for line in lines] == [
        None,
        None,
        "candidate",
        "quarantined",
        "promoted",
    ]


def test_forgetting_says_what_went(store: Path) -> None:
    """The units of the trace go and are counted."""
    assert "2 units with 4 cards" in run("forget", store, "t").stdout
    assert run("list", store, "--json").stdout == ""
    for more in ((), ("--json",)):
        again = run("forget", store, "t", *more)
        assert (again.exit_code, again.stdout) == (2, "")
        assert "came from a trace 't'; list traces with" in again.stderr
    assert json.loads(run("forget", store, "t", "--calls", "--json").stdout)["unit_ids"] == []


def test_replies_go_where_they_are_asked_to(store: Path) -> None:
    """Without the option it is said that replies stay and may quote the trace; with it they are removed."""

    async def ask() -> None:
        async with open_store(store) as calls:
            await keep_reply(calls, "critic/score", "It quotes.")

    anyio.run(ask)
    assert (
        "1 cached replies to questions of calibrations may quote it"
        in run("forget", store, "t").stdout
    )
    assert "removed 1 cached replies" in run("forget", store, "t", "--calls").stdout
    assert "removed 0 cached replies" in run("forget", store, "t", "--calls").stdout


def test_an_export_comes_back(store: Path, tmp_path: Path) -> None:
    """What is exported to a file or to standard output is imported into a new memory."""
    file, other = tmp_path / "out.jsonl", tmp_path / "other.db"
    done = run("export", store, file)
    assert done.exit_code == 0
    assert done.stdout == f"wrote {len(file.read_text(encoding='ascii').splitlines())} lines to {file}\n"
    assert run("export", store).stdout == file.read_text(encoding="ascii")
    assert "new: 2 units, 0 traces" in run("import", other, file).stdout
    assert json.loads(run("import", other, file, "--json").stdout)["n_units"] == 0
    assert run("list", other, "--status", "quarantined", "--json").stdout.count("\n") == 4


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("list", "nowhere.db"), "no memory at nowhere.db"),
        (("show", "STORE", "zzzz"), "begins with 'zzzz'"),
        (("show", "STORE", ""), "at least 4 characters"),
        (("list", "STORE", "--status", "lost"), "'lost'"),
        (("list", "STORE", "--kind", "lost"), "'lost'"),
        (("import", "STORE", "nowhere.jsonl"), "cannot read nowhere.jsonl"),
        (("import", "STORE", "STORE"), "cannot read"),
        (("export", "STORE", "nowhere/out"), "cannot write nowhere/out"),
        (("list", "FOREIGN"), "not a SQLite database"),
        (("import", "STORE", "FOREIGN"), "line 1 is not part"),
    ],
)
def test_what_is_wrong_is_one_sentence(
    store: Path, tmp_path: Path, arguments: tuple[str, ...], said: str
) -> None:
    """Missing and foreign files, unknown ids and states: one sentence on standard error, exit code 2."""
    (tmp_path / "foreign").write_text("hello " * 1000, encoding="ascii")
    places = {"STORE": str(store), "FOREIGN": str(tmp_path / "foreign")}
    result = run(*(places.get(argument, argument) for argument in arguments))
    assert result.exit_code == 2
    assert said in result.stderr
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
