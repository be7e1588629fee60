"""Reading a memory changes nothing: not a byte of its file, nothing beside it, in any folder."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

from memory_pairs import make_pair
from reflact import MemoryStore, Trace
from reflact.errors import StoreError
from reflact.memory.models import Action, Label, Transition
from served import reflact

READING = (
    ["list"],
    ["list", "report"],
    ["export"],
    ["list", "--kind", "trace"],
    ["show", "monday"],
    ["show", make_pair(1).id],
)
CONFIG = """
memory: {memory}
models: {{critic: {{model: small, base_url: "http://127.0.0.1:9", api_key_env: null}}}}
"""


def read_files(folder: Path) -> dict[str, bytes]:
    """Return the files of a folder with what is in them."""
    return {file.name: file.read_bytes() for file in folder.iterdir()}


async def fill_memory(path: Path) -> None:
    async with MemoryStore(path) as memory:
        await memory.submit(make_pair(1))
        trace = Trace("Write the report.", id="monday")
        step = Transition(before="a", action=Action(name="write"), after="b")
        trace.record(step, label=Label(progress_before=0, progress_after=1, source="human"))
        await trace.save_to(memory)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder that a memory can be put into alone."""
    (tmp_path / "memory").mkdir()
    return tmp_path / "memory"


def test_commands_that_read_change_nothing(folder: Path) -> None:
    """They leave the memory and its folder as they were, to the byte."""
    path = folder / "memory.db"
    anyio.run(fill_memory, path)
    before = read_files(folder)
    for command, *arguments in READING:
        done = reflact("memory", command, path, *arguments)
        assert (done.exit_code, bool(done.stdout)) == (0, True), command
        assert read_files(folder) == before, command


def test_a_dry_run_changes_nothing(folder: Path, tmp_path: Path) -> None:
    """The forecast of a calibration reads the memory and the books of its calls, and writes to neither."""
    path, config = folder / "memory.db", tmp_path / "calibrate.yaml"
    anyio.run(fill_memory, path)
    config.write_text(CONFIG.format(memory=path), encoding="utf-8")
    before = read_files(folder)
    done = reflact("calibrate", config, "--dry-run")
    assert done.exit_code == 0, done.output
    assert "traces to learn from" in done.stdout
    assert read_files(folder) == before


def test_a_log_that_a_process_left_is_read_and_stays(folder: Path) -> None:
    """What was committed before a process ended badly is seen, and not brought into the file by it."""
    path = folder / "memory.db"
    anyio.run(fill_memory, path)
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("INSERT INTO traces (id, purpose, content_hash) VALUES ('tuesday', '\"Write.\"', '')")
        left = {name: content for name, content in read_files(folder).items() if not name.endswith("-shm")}
    for name, content in left.items():
        (folder / name).write_bytes(content)
    assert "tuesday" in reflact("memory", "list", path, "--kind", "trace", "--json").stdout
    assert {name: read_files(folder)[name] for name in left} == left


async def test_what_was_opened_to_be_read_is_not_written(folder: Path) -> None:
    """Methods that write raise, also where they would write to a copy; a file that is missing is not made."""
    await fill_memory(folder / "memory.db")
    async with MemoryStore(folder / "memory.db", read_only=True) as memory:
        assert await memory.trace_ids() == ("monday",)
        with pytest.raises(StoreError, match="opened read-only"):
            await memory.submit(make_pair(2))
        with pytest.raises(StoreError, match="opened read-only"):
            await memory.forget("monday")
    with pytest.raises(StoreError, match="cannot be opened"):
        async with MemoryStore(folder / "none.db", read_only=True):
            pass
    assert not (folder / "none.db").exists()
    sqlite3.connect(folder / "other.db").close()
    with pytest.raises(StoreError, match="reflact has stored nothing in it"):
        async with MemoryStore(folder / "other.db", read_only=True):
            pass


async def test_others_write_while_it_is_read(folder: Path) -> None:
    """A reader sees what another connection commits meanwhile, and keeps nobody from writing."""
    path = folder / "memory.db"
    await fill_memory(path)
    async with MemoryStore(path, read_only=True) as reader, MemoryStore(path) as writer:
        await writer.open_trace("tuesday", "Write.")
        assert await reader.trace_ids() == ("monday", "tuesday")
    assert set(read_files(folder)) == {"memory.db"}
