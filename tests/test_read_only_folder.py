"""A memory in a folder that cannot be written to is read there: a backup, a share, another user's."""

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
import pytest

from memory_pairs import make_pair
from permissions import open_to_all
from reflact import MemoryStore
from reflact.errors import StoreError
from reflact.store.database import copy_database

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="folders have no write permission there")

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
            outcomes.append((done.exit_code, done.stdout, done.stderr))
        return outcomes

    expected = ask(writable)
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(int(user))
        os.setuid(int(user))
    print(json.dumps([expected, ask(*names)]))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Return a folder that everybody can read; whatever becomes of its permissions, it can be removed."""
    open_to_all(tmp_path)
    (tmp_path / "temporary").mkdir()
    (tmp_path / "temporary").chmod(0o777)
    found = tmp_path / "memory"
    found.mkdir()
    yield found
    found.chmod(0o755)


async def fill(path: Path) -> None:
    """Make a memory with a trace, a unit and an anchor."""
    async with MemoryStore(path) as memory:
        await memory.open_trace("early", "Write.")
        await memory.submit(make_pair(1))
        await memory.add_anchors([make_pair(2, trace="set apart")])


def closed(path: Path) -> None:
    """Make a memory and close it."""
    anyio.run(fill, path)


def killed(path: Path) -> None:
    """Make a memory, left by a process that was killed: with a log, and without the log's index."""
    closed(path)
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("INSERT INTO traces (id, purpose) VALUES ('late', '\"Write.\"')")
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


def held(folder: Path) -> dict[str, bytes]:
    """Return the files of a folder with what is in them."""
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.slow
@pytest.mark.parametrize("make", [closed, killed])
@pytest.mark.parametrize("mode", [0o444, 0o644])
def test_commands_that_read_need_no_permission_to_write(
    folder: Path, make: Callable[[Path], None], mode: int
) -> None:
    """They say what they say elsewhere, what stands in a log too, and leave nothing behind in any folder."""
    path = folder / "memory.db"
    make(path)
    before = held(folder)
    expected, found = asked(path, mode)
    assert [[code, out] for code, out, _ in found] == [[0, out] for _, out, _ in expected]
    assert "early" in found[1][1]
    assert ("late" in found[1][1]) is (make is killed)
    assert held(folder) == before
    assert list(folder.with_name("temporary").iterdir()) == []


def test_what_is_being_written_is_read_too(folder: Path) -> None:
    """Where the writer's log and its index are there, they are read in their place."""
    path = folder / "memory.db"
    closed(path)
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("INSERT INTO traces (id, purpose) VALUES ('late', '\"Write.\"')")
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
