"""Bad days of a run's store: full, read-only, locked and damaged; what is said, kept, and how it goes on."""

from __future__ import annotations

import os
import re
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import pytest

from pure_world import Ended, differences, left_by
from reflact import Trainer
from served import HANGS, MAIN, Endpoint, reflact, world

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform == "win32", reason="limits and mounts of Unix"),
]

Rows = Mapping[str, frozenset[Any]]

KEPT = ("outcomes", "commits")
PAGE = 4096

IN_FLIGHT = 16
"""Calls that may be in flight: eight for each role."""


class World(NamedTuple):
    """A configuration whose endpoint answers, and what its run of two steps leaves if nothing happens."""

    config: Path
    endpoint: Endpoint
    whole: Ended

    @property
    def out_dir(self) -> Path:
        return self.config.parent / "run"

    @property
    def database(self) -> Path:
        return self.out_dir / "run.db"

    def half_done(self) -> Rows:
        """Stop the run in order after its first step, and return what is kept of it."""

        async def main() -> None:
            trainer = Trainer(self.config)
            async with trainer.stream() as happenings:
                async for event in happenings:
                    if event.kind == "step_committed":
                        trainer.stop("half done")

        anyio.run(main)
        return kept(self.out_dir)

    def goes_on(self, before: Rows) -> None:
        """Check that the same command ends as if nothing had happened, and has lost and repeated nothing."""
        done = reflact("train", self.config)
        assert done.exit_code == 0, done.output
        assert differences(left_by(self.out_dir), self.whole) == []
        assert_kept(self.out_dir, before)
        assert len(self.endpoint.samples) == len(set(self.endpoint.samples))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder, endpoint = tmp_path_factory.mktemp("faults"), Endpoint()
    with world(folder, endpoint, train=6) as config:
        assert reflact("train", config).exit_code == 0
        yield World(config, endpoint, left_by(folder / "run"))


@pytest.fixture
def place(served: World) -> World:
    shutil.rmtree(served.out_dir)
    served.endpoint.samples.clear()
    return served


def kept(out_dir: Path) -> Rows:
    with closing(sqlite3.connect(out_dir / "run.db")) as database:
        return {name: frozenset(database.execute(f"SELECT * FROM {name}")) for name in KEPT}


def assert_kept(out_dir: Path, before: Rows) -> None:
    now = kept(out_dir)
    assert [name for name in KEPT if not now[name] >= before[name]] == []


def assert_one_error(stderr: str, *words: str) -> None:
    assert stderr.startswith("error: "), stderr
    assert stderr.count("\n") == 1, stderr
    for word in words:
        assert re.search(word, stderr), stderr


def overwritten(path: Path) -> None:
    """Put other bytes into a page that holds an answer, which starting does not come by."""
    content = path.read_bytes()
    place = content.rfind(b"chat.completion") // PAGE * PAGE
    path.write_bytes(content[:place] + b"\xff" * PAGE + content[place + PAGE :])


def test_a_damaged_database(place: World) -> None:
    before = place.half_done()
    sound, asked = place.database.read_bytes(), len(place.endpoint.samples)
    overwritten(place.database)
    spoiled = place.database.read_bytes()
    for _ in range(2):
        done = reflact("train", place.config)
        assert done.exit_code == 2, done.output
        words = "the file is damaged; put back a copy"
        assert_one_error(done.stderr, re.escape(str(place.database)), words)
    assert place.database.read_bytes() == spoiled
    assert len(place.endpoint.samples) == asked
    place.database.write_bytes(sound)
    place.goes_on(before)


@cache
def mounts() -> bool:
    command = [*NAMESPACE, "mount", "-t", "tmpfs", "none", "/mnt"]
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


NAMESPACE = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--map-root-user"])]

can_mount = pytest.mark.skipif("not mounts()", reason="needs unshare and the right to mount")


def in_a_namespace(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a shell script, in which ``reflact`` is the command, where its mounts touch nobody else."""
    command = f'reflact() {{ "$PYTHON" -c "$MAIN" "$@"; }}\n{script}'
    return subprocess.run(
        [*NAMESPACE, "sh", "-c", command, "sh", *(str(argument) for argument in arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=2 * HANGS,
        env={**os.environ, "PYTHON": sys.executable, "MAIN": MAIN},
    )


FULL = """
    mkdir -p "$2" && mount -t tmpfs -o size=32m none "$2" || exit 9
    mkdir -p "$2/full" && head -c $((32 * 1024 * 1024 - $3 * 1024 - 8192)) /dev/zero > "$2/ballast" || exit 9
    reflact train "$1"
    first=$?
    cp -r "$2" "$4/full" && rm "$4/full/ballast" "$2/ballast" || exit 9
    reflact train "$1" >/dev/null
    second=$?
    cp -r "$2" "$4/again" || exit 9
    echo "codes $first $second"
"""


@can_mount
@pytest.mark.parametrize(("kilobytes", "code"), [(40, 2), (700, 1)], ids=["at the start", "under way"])
def test_a_full_disk(place: World, tmp_path: Path, kilobytes: int, code: int) -> None:
    done = in_a_namespace(FULL, place.config, place.out_dir, kilobytes, tmp_path)
    assert done.stdout.splitlines()[-1] == f"codes {code} 0", done.stdout + done.stderr
    assert_one_error(done.stderr, "run", "full|room|No space left", "start again|choose another")
    before = kept(tmp_path / "full") if code == 1 else {name: frozenset() for name in KEPT}
    assert_kept(tmp_path / "again", before)
    assert differences(left_by(tmp_path / "again"), place.whole) == []
    assert len(place.endpoint.samples) - len(set(place.endpoint.samples)) <= IN_FLIGHT
    place.out_dir.mkdir(exist_ok=True)


READ_ONLY = """
    mount --bind "$2" "$2" && mount -o remount,ro,bind "$2" || exit 9
    reflact train "$1"
    echo "code $?"
"""


@can_mount
@pytest.mark.parametrize("part", ["folder", "database"])
def test_what_is_read_only(place: World, part: str) -> None:
    before = place.half_done()
    asked = len(place.endpoint.samples)
    where = place.out_dir if part == "folder" else place.database
    done = in_a_namespace(READ_ONLY, place.config, where)
    assert done.stdout.splitlines()[-1] == "code 2", done.stdout + done.stderr
    assert_one_error(done.stderr, re.escape(str(place.out_dir)), "writable")
    assert len(place.endpoint.samples) == asked
    place.goes_on(before)
