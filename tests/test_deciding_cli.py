"""What a person says at a terminal: a unit is released or rejected, a step is labelled."""

from __future__ import annotations

import json
from pathlib import Path

import anyio
import pytest
from typer.testing import CliRunner, Result

from memory_pairs import make_pair
from reflact import MemoryStore, Trace
from reflact.cli.app import app
from reflact.memory import Action, Gold, Transition

HELD, FREE = make_pair(1, note="write to j@doe.com"), make_pair(2)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["memory", *map(str, arguments)])


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Return a memory with a held pair, one that waits, and a trace of which two of three steps have gold."""
    path = tmp_path / "memory.db"

    async def fill() -> None:
        async with MemoryStore(path) as memory:
            for pair in (HELD, FREE):
                await memory.submit(pair)
            trace = Trace("Sort the mail.", id="monday")
            for source in (None, "agreement", "program"):
                step = Transition(before="a", action=Action(name="sort"), after="b")
                gold = source and Gold.model_validate({"phi_before": 0, "phi_after": 1, "source": source})
                trace.record(step, gold=gold or None)
            await trace.keep(memory)

    anyio.run(fill)
    return path


def standing(store: Path, unit: str) -> tuple[str, list[str | None]]:
    """Return a unit's state and the reasons in its history."""
    shown = [json.loads(line) for line in run("show", store, unit, "--json").stdout.splitlines()]
    return shown[0]["status"], [one["reason"] for one in shown if "after" in one]


def golds(store: Path) -> list[object]:
    """Return the gold of each step of the trace."""
    return [one["gold"] for one in json.loads(run("trace", store, "monday", "--json").stdout)["events"]]


def test_a_held_unit_is_released_with_a_reason(store: Path) -> None:
    """The list names it as held, and after its release it is not any more; why stands in its history."""
    assert "quarantined (personal_data)" in run("list", store).stdout
    done = run("release", store, HELD.id[:12], "--reason", "our own address")
    assert (done.exit_code, done.stdout) == (0, f"released {HELD.id}: it may be tested\n")
    assert "personal_data" not in run("list", store).stdout
    assert standing(store, HELD.id) == ("quarantined", [None, "personal_data", "our own address"])


def test_a_unit_is_rejected_with_a_reason(store: Path) -> None:
    """Held or waiting, it never counts; a card's id names its pair."""
    done = run("reject", store, FREE.id, "--reason", "not what we want")
    assert (done.exit_code, done.stdout) == (0, f"rejected {FREE.id}\n")
    assert standing(store, FREE.id) == ("rejected", [None, None, "not what we want"])
    card = json.loads(run("show", store, HELD.id, "--json").stdout.splitlines()[0])["id"]
    assert run("reject", store, card, "--reason", "an address").exit_code == 0
    assert standing(store, HELD.id)[0] == "rejected"


def test_a_step_is_labelled(store: Path) -> None:
    """Gold comes from a person, with its reason; of the state before it may be left out."""
    done = run("label", store, "monday", 0, "--before", "0.5", "--after", 4, "--reason", "two of five")
    assert (done.exit_code, done.stdout) == (
        0,
        "labelled step 0 of trace monday; 2 of its 3 steps have gold\n",
    )
    first = Gold(phi_before=0.5, phi_after=4, source="human", reasoning="two of five")
    assert golds(store)[0] == first.model_dump(mode="json")
    assert run("label", store, "mond", 1, "--after", 5).exit_code == 0
    assert golds(store)[1] == Gold(phi_after=5, source="human").model_dump(mode="json")
    assert "gold: 0.5 to 4, from human" in run("trace", store, "monday").stdout


def test_a_label_is_replaced_where_that_is_said(store: Path) -> None:
    """A slip of the finger can be mended, and what a program said corrected."""
    done = run("label", store, "monday", 2, "--before", 1, "--after", 3, "--replace")
    assert done.exit_code == 0, done.output
    assert golds(store)[2] == Gold(phi_before=1, phi_after=3, source="human").model_dump(mode="json")


def test_a_unit_is_archived_with_a_reason(store: Path) -> None:
    """Held or waiting, it is out of use; what a promoted one is, is not shown to a critic any more either."""
    done = run("archive", store, FREE.id, "--reason", "of an older agent")
    assert (done.exit_code, done.stdout) == (
        0,
        f"archived {FREE.id}: no critic is shown it any more\n",
    )
    assert standing(store, FREE.id) == ("archived", [None, None, "of an older agent"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("release", "STORE", FREE.id, "--reason", "r"), "not held; there is nothing to release"),
        (("release", "STORE", "ffff0000", "--reason", "r"), "begins with 'ffff0000'; list them with"),
        (("release", "STORE", HELD.id, "--reason", " "), "--reason is empty"),
        (("release", "STORE", HELD.id), "--reason"),
        (("reject", "STORE", "ffff0000", "--reason", "r"), "begins with 'ffff0000'; list them with"),
        (("archive", "STORE", FREE.id, "--reason", " "), "--reason is empty"),
        (("reject", "nowhere.db", FREE.id, "--reason", "r"), "no memory at nowhere.db"),
        (("label", "STORE", "monday", "2", "--after", "3"), "gold from a program already, phi after 1"),
        (("label", "STORE", "monday", "3", "--after", "3"), "has no step 3"),
        (("label", "STORE", "tuesday", "0", "--after", "3"), "begins with 'tuesday'"),
        (("label", "STORE", "monday", "0", "--after", "11"), "less than or equal to 10"),
        (("label", "STORE", "monday", "0", "--after", "nan"), "equal to 10"),
        (("label", "STORE", "monday", "0"), "--after"),
    ],
)
def test_what_cannot_be_done_changes_nothing(store: Path, arguments: tuple[str, ...], said: str) -> None:
    """Unknown ids, missing reasons, steps with gold and values out of range end with code 2."""
    before = run("export", store).stdout
    done = run(*(str(store) if one == "STORE" else one for one in arguments))
    assert done.exit_code == 2
    assert said in done.stderr
    assert run("export", store).stdout == before


def test_what_was_rejected_cannot_be_rejected_again(store: Path) -> None:
    """It says where the unit stands and what it can still become."""
    run("reject", store, FREE.id, "--reason", "r")
    again = run("reject", store, FREE.id, "--reason", "r")
    assert again.exit_code == 2
    assert "that is rejected cannot become rejected; it can become archived" in again.stderr
