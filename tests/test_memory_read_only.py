"""Reading a memory changes nothing: not a byte of its file, nothing beside it, in any folder."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from memory_pairs import make_pair
from reflact import MemoryStore, Trace
from reflact.errors import StoreError
from reflact.memory.models import Action, Label, Transition
from reflact.store.database import copy_database
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


NOBODY = 65534

ASKING = """
    import json, os, sys
    from typer.testing import CliRunner
    from reflact.cli.app import app

    writable, user, *names = sys.argv[1:]

    def ask(path):
        outcomes = []
        for command in (["list"], ["list", "--kind", "trace"], ["list", "--kind", "anchor"], ["export"]):
            done = CliRunner().invoke(app, ["memory", *command, path])
            outcomes.append((done.exit_code, done.stdout, done.stderr or repr(done.exc_info) if done.exit_code else ""))
        return outcomes

    expected = ask(writable)
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(int(user))
        os.setuid(int(user))
    print(json.dumps([expected, ask(*names)]))
"""


@pytest.fixture
def readable_folder(reachable_folder: Path) -> Iterator[Path]:
    """Return a folder that everybody can read; whatever becomes of its permissions, it can be removed."""
    if sys.platform == "win32":
        pytest.skip("folders have no write permission there")
    (reachable_folder / "temporary").mkdir()
    (reachable_folder / "temporary").chmod(0o777)
    found = reachable_folder / "memory"
    found.mkdir()
    yield found
    found.chmod(0o755)


async def fill_readable(path: Path) -> None:
    """Make a memory with a trace, a unit and an anchor."""
    async with MemoryStore(path) as memory:
        await memory.open_trace("early", "Write.")
        await memory.submit(make_pair(1))
        await memory.add_anchors([make_pair(2, trace="set apart")])


def closed(path: Path) -> None:
    """Make a memory and close it."""
    anyio.run(fill_readable, path)


def killed(path: Path) -> None:
    """Make a memory, left by a process that was killed: with a log, and without the log's index."""
    closed(path)
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("INSERT INTO traces (id, purpose, content_hash) VALUES ('late', '\"Write.\"', '')")
        left = {file: file.read_bytes() for file in path.parent.iterdir() if file.suffix != ".db-shm"}
    for file, content in left.items():
        file.write_bytes(content)
    assert {file.name for file in path.parent.iterdir()} == {"memory.db", "memory.db-wal"}


def asked(path: Path, mode: int) -> tuple[list[Any], list[Any]]:
    """Return what commands that read say of a copy in another folder, and of what nobody may write to."""
    copy = path.parent.with_name("copy")
    shutil.copytree(path.parent, copy)
    for file in path.parent.iterdir():
        file.chmod(mode)
    path.parent.chmod(0o555)
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(ASKING), str(copy / path.name), str(NOBODY), str(path)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "TMPDIR": str(path.parent.with_name("temporary")), "PYTHONWARNINGS": "error"},
    )
    expected, found = json.loads(done.stdout)
    return expected, found


@pytest.mark.slow
@pytest.mark.parametrize("make", [closed, killed])
@pytest.mark.parametrize("mode", [0o444, 0o644])
def test_commands_that_read_need_no_permission_to_write(
    readable_folder: Path, make: Callable[[Path], None], mode: int
) -> None:
    """They say what they say elsewhere, what stands in a log too, and leave nothing behind in any folder."""
    path = readable_folder / "memory.db"
    make(path)
    before = read_files(readable_folder)
    expected, found = asked(path, mode)
    assert [[code, out, error] for code, out, error in found] == [[0, out, ""] for _, out, _ in expected]
    assert "early" in found[1][1]
    assert ("late" in found[1][1]) is (make is killed)
    assert read_files(readable_folder) == before
    assert list(readable_folder.with_name("temporary").iterdir()) == []


@pytest.mark.slow
def test_what_is_being_written_is_read_too(readable_folder: Path) -> None:
    """Where the writer's log and its index are there, they are read in their place."""
    path = readable_folder / "memory.db"
    closed(path)
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("INSERT INTO traces (id, purpose, content_hash) VALUES ('late', '\"Write.\"', '')")
        _, found = asked(path, 0o644)
    assert [code for code, *_ in found] == [0, 0, 0, 0]
    assert "late" in found[1][1]


def test_a_copy_of_two_moments_is_refused(tmp_path: Path) -> None:
    """What another process wrote while it was copied (here its log, which comes to be) is not read."""
    path = tmp_path / "memory.db"
    closed(path)
    with pytest.raises(StoreError, match=r"memory\.db: .* wrote to the file while it was copied; try again"):
        copy_database(path, tmp_path / "memory.db-wal")


def test_a_copy_that_cannot_be_made_says_why(tmp_path: Path) -> None:
    """It names the memory, the folder of the copy and what the system said."""
    path = tmp_path / "memory.db"
    closed(path)
    with pytest.raises(StoreError, match=r"memory\.db: .*missing.*: No such file or directory"):
        copy_database(path, tmp_path / "missing" / "copy.db")
