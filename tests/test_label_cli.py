"""What a person says at a terminal of a step: how far it came."""

from __future__ import annotations

import json
from pathlib import Path

import anyio
import pytest
from typer.testing import CliRunner, Result

from reflact import MemoryStore, Trace
from reflact.cli.app import app
from reflact.memory.models import Action, Label, Transition


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["memory", *map(str, arguments)])


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Return a memory with a trace of which two of three steps have gold."""
    path = tmp_path / "memory.db"

    async def fill() -> None:
        async with MemoryStore(path) as memory:
            trace = Trace("Sort the mail.", id="monday")
            for source in (None, "agreement", "program"):
                step = Transition(before="a", action=Action(name="sort"), after="b")
                gold = source and Label.model_validate(
                    {"progress_before": 0, "progress_after": 1, "source": source}
                )
                trace.record(step, label=gold or None)
            await trace.save_to(memory)

    anyio.run(fill)
    return path


def golds(store: Path) -> list[object]:
    """Return the gold of each step of the trace."""
    return [one["gold"] for one in json.loads(run("show", store, "monday", "--json").stdout)["events"]]


def test_a_step_is_labelled(store: Path) -> None:
    """Gold comes from a person, with its reason; of the state before it may be left out."""
    done = run("label", store, "monday", 0, "--before", "0.5", "--after", 4, "--reason", "two of five")
    assert (done.exit_code, done.stdout) == (
        0,
        "labelled step 0 of trace monday; 2 of its 3 steps have gold\n",
    )
    first = Label(progress_before=0.5, progress_after=4, source="human", reasoning="two of five")
    assert golds(store)[0] == first.model_dump(mode="json")
    assert run("label", store, "mond", 1, "--after", 5).exit_code == 0
    assert golds(store)[1] == Label(progress_after=5, source="human").model_dump(mode="json")
    assert "gold: 0.5 to 4, from human" in run("show", store, "monday").stdout


def test_a_label_is_replaced_where_that_is_said(store: Path) -> None:
    """A slip of the finger can be mended, and what a program said corrected."""
    done = run("label", store, "monday", 2, "--before", 1, "--after", 3, "--replace")
    assert done.exit_code == 0, done.output
    assert golds(store)[2] == Label(progress_before=1, progress_after=3, source="human").model_dump(
        mode="json"
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("label", "STORE", "monday", "2", "--after", "3"), "gold from a program already, phi after 1"),
        (("label", "STORE", "monday", "3", "--after", "3"), "has no step 3"),
        (("label", "STORE", "tuesday", "0", "--after", "3"), "begins with 'tuesday'"),
        (("label", "STORE", "monday", "0", "--after", "11"), "less than or equal to 10"),
        (("label", "STORE", "monday", "0", "--after", "nan"), "equal to 10"),
        (("label", "STORE", "monday", "0"), "--after"),
    ],
)
def test_what_cannot_be_done_changes_nothing(store: Path, arguments: tuple[str, ...], said: str) -> None:
    """Unknown ids, steps with gold and values out of range end with code 2."""
    before = run("export", store).stdout
    done = run(*(str(store) if one == "STORE" else one for one in arguments))
    assert done.exit_code == 2
    assert said in done.stderr
    assert run("export", store).stdout == before
