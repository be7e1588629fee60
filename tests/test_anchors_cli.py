"""``reflact memory list --kind anchor``: what a critic is measured on, listed."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest
from typer.testing import CliRunner, Result

from memory_pairs import make_pair
from reflact.cli.app import app
from reflact.memory.models import ContrastPair, Provenance
from reflact.memory.store import MemoryStore

ANCHORS = (
    make_pair(1, trace="monday"),
    make_pair(12, trace="a\x1b[2J").model_copy(update={"purpose": "Write\nthe report. " + "x" * 80}),
    make_pair(3).model_copy(update={"provenance": Provenance()}),
)


async def fill(path: Path, anchors: tuple[ContrastPair, ...]) -> None:
    async with MemoryStore(path) as memory:
        await memory.submit(make_pair(20))
        await memory.add_anchors(anchors)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    path = tmp_path / "memory.db"
    anyio.run(fill, path, ANCHORS)
    return path


def anchors(store: Path, *options: str) -> Result:
    return CliRunner().invoke(app, ["memory", "list", str(store), "--kind", "anchor", *options])


def test_each_anchor_is_a_line_of_aligned_columns(store: Path) -> None:
    """Its id's beginning, where it comes from, the right score and the purpose, with nothing unseen."""
    head, *lines = anchors(store).stdout.splitlines()
    assert head == "anchor        trace     step  progress after  purpose"
    first, second, third = (pair.id[:12] for pair in ANCHORS)
    assert set(lines) == {
        f"{first}  monday       1          3  Write the report.",
        rf"{second}  a\x1b[2J    12          3  Write the report. {'x' * 41}…",
        f"{third}                          3  Write the report.",
    }


def test_as_json_each_is_whole(store: Path) -> None:
    """Pairs are printed as a file of anchors holds them, and so can be given to another memory."""
    lines = anchors(store, "--json").stdout.splitlines()
    found = [ContrastPair.model_validate_json(line) for line in lines]
    assert found == sorted(ANCHORS, key=lambda pair: pair.id)


def test_listing_changes_nothing(store: Path) -> None:
    """The file and its folder stay as they are."""
    before = {file: file.read_bytes() for file in store.parent.iterdir()}
    assert anchors(store).exit_code == 0
    assert {file: file.read_bytes() for file in store.parent.iterdir()} == before


def test_a_memory_without_any_says_so(tmp_path: Path) -> None:
    """Pairs to learn from are no anchors; it is said beside the table where they come from."""
    anyio.run(fill, tmp_path / "memory.db", ())
    found = anchors(tmp_path / "memory.db")
    assert found.stdout.splitlines() == ["anchor  trace  step  progress after  purpose"]
    assert "has no anchors: the key `anchors` of a calibration names a file of anchors" in found.stderr
