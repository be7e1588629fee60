"""Options and fixtures that every test may use."""

from __future__ import annotations

import functools
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import typer.testing
from hypothesis import HealthCheck, settings

from virtual_time import VirtualLoop

MEMORY = Path("/dev/shm")
"""A file system in memory: databases and exports there are flushed without a disk."""

SNAPSHOTS = Path(__file__).parent / "snapshots"

SLOW_FILE = re.compile(r"^pytestmark = \[?\s*pytest\.mark\.slow\b", re.MULTILINE)
SLACK = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]

settings.register_profile(
    "dev", max_examples=25, deadline=None, derandomize=True, suppress_health_check=SLACK
)
settings.register_profile("thorough", max_examples=200, deadline=None, suppress_health_check=SLACK)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let the thorough tests, and the numbers of random kills and hostile replies, be chosen."""
    parser.addoption("--thorough", action="store_true", help="run slow tests too, and more cases of others")
    parser.addoption(
        "--rest", action="store_true", help="leave out what runs in the same way without --thorough"
    )
    parser.addoption("--kills", type=int, default=6, help="random kills of a run (tests/test_kills.py)")
    parser.addoption("--snapshots", action="store_true", help="write the screens in tests/snapshots anew")
    words = "one in so many hostile replies is played to whole runs (tests/test_hostile_runs.py)"
    parser.addoption("--hostile", type=int, default=3, help=words)


def pytest_configure(config: pytest.Config) -> None:
    """Choose how many examples property tests try and the root of temporary folders; register markers."""
    if os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > 2 * 1024**3:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))
    config.addinivalue_line(
        "markers", "virtual_time: asynchronous tests whose sleeps take no time (no threads)"
    )
    typer.testing._get_command = functools.cache(typer.testing._get_command)  # 40 ms each time
    settings.load_profile("thorough" if config.getoption("--thorough") else "dev")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import files of slow tests alone, unless they are asked for."""
    if config.getoption("--thorough") or collection_path.suffix != ".py":
        return None
    return SLOW_FILE.search(collection_path.read_text(encoding="utf-8")) is not None or None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave slow tests out, unless they are asked for; then begin with their files, so that no worker ends alone."""
    if config.getoption("--rest"):
        same = {item for item in items if not _is_thorough(item)}
        config.hook.pytest_deselected(items=[*same])
        items[:] = [item for item in items if item not in same]
    if config.getoption("--thorough"):
        n_tests = Counter(item.path for item in items)
        n_slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
        items.sort(key=lambda item: (-n_slow[item.path] / n_tests[item.path], str(item.path)))
        return
    slow = [item for item in items if item.get_closest_marker("slow")]
    config.hook.pytest_deselected(items=slow)
    items[:] = [item for item in items if item not in set(slow)]


def _is_thorough(item: pytest.Item) -> bool:
    """Whether a test runs only with --thorough, or tries more cases then."""
    fixtures = set(getattr(item, "fixturenames", ()))
    has_cases = hasattr(getattr(item, "obj", None), "hypothesis") or not fixtures.isdisjoint(
        {"thorough", "kills"}
    )
    return has_cases or item.get_closest_marker("slow") is not None


@pytest.fixture
def anyio_backend(request: pytest.FixtureRequest) -> str | tuple[str, dict[str, Any]]:
    """The event loop that asynchronous tests run on; tests marked ``virtual_time`` sleep without waiting."""
    if request.node.get_closest_marker("virtual_time"):
        return "asyncio", {"loop_factory": VirtualLoop}
    return "asyncio"


@pytest.fixture
def snapshot(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Return a function that compares a text with the one stored under a name, or stores it with --snapshots."""

    def check(name: str, text: str) -> None:
        path = SNAPSHOTS / f"{name}.txt"
        if request.config.getoption("--snapshots"):
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
        assert text == path.read_text(encoding="utf-8"), f"if {path.name} is out of date: make snapshots"

    return check


@pytest.fixture
def kills(request: pytest.FixtureRequest) -> int:
    """How many times processes are killed at random moments."""
    number: int = request.config.getoption("--kills")
    return number


@pytest.fixture
def thorough(request: pytest.FixtureRequest) -> bool:
    """Whether all cases are asked for, or a selection of them."""
    return bool(request.config.getoption("--thorough"))


@pytest.fixture
def reachable_folder() -> Iterator[Path]:
    """Return a folder that every user can reach; pytest closes its own to others whenever a session starts."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        for one in (folder, *folder.parents):
            if not one.stat().st_mode & 0o001:
                one.chmod(0o755)
        yield folder
