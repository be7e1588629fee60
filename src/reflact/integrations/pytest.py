"""The pytest plugin: tests whose model calls are recorded once and replayed from then on.

pytest finds the plugin by itself. It has the fixture ``reflact_cassette``, the option
``--reflact-record`` and the mark ``reflact_cassette(NAME)``. Nothing else of reflact is loaded
before a test uses the fixture.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pytest

if TYPE_CHECKING:
    from reflact.config.training import TrainerConfig

__all__ = ["Cassette"]

OPTION = "--reflact-record"
FOLDER = "cassettes"
FIXTURE = "reflact_cassette"


@dataclass(frozen=True)
class Cassette:
    """The recording of a test.

    Attributes:
        path: The file, in the folder ``cassettes`` beside the test's file.
        mode: ``record`` with ``--reflact-record``, otherwise ``replay``.
        out_dir: A new folder for the runs of the test.
    """

    path: Path
    mode: Literal["replay", "record"]
    out_dir: Path

    @property
    def keys(self) -> dict[str, str]:
        """The recording and the folder, as keyword arguments of ``Trainer.from_items``."""
        return {
            "out_dir": str(self.out_dir),
            "replay__cassette": str(self.path.absolute()),
            "replay__mode": self.mode,
        }

    def configure(
        self, source: TrainerConfig | Mapping[str, object] | Path | str, **changes: object
    ) -> TrainerConfig:
        """Return a configuration, a mapping or a file with the recording and a new folder.

        ``changes`` are other values, with two underscores for each dot: ``train__num_epochs=1``.
        """
        from reflact.config.loading import load_config

        values = {"store": None, **self.keys, **changes}
        return load_config(
            source,
            overrides=[
                f"{key.replace('__', '.')}={json.dumps(value, default=str)}"
                for key, value in values.items()
            ],
        )


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option."""
    words = "send requests that the cassettes of tests do not have, and record the responses"
    parser.getgroup("reflact").addoption(OPTION, action="store_true", help=words)


def pytest_configure(config: pytest.Config) -> None:
    """Register the mark."""
    words = f"{FIXTURE}(name): the name of the test's cassette, for tests that share one"
    config.addinivalue_line("markers", words)


@pytest.fixture
def reflact_cassette(request: pytest.FixtureRequest, tmp_path: Path) -> Cassette:
    """Return the recording of the test; without ``--reflact-record`` it has to exist."""
    mark = request.node.get_closest_marker(FIXTURE)
    name = mark.args[0] if mark is not None and mark.args else build_name(request.node.nodeid)
    path = request.path.parent / FOLDER / name
    is_recording = bool(request.config.getoption(OPTION))
    if not is_recording and not path.is_file():
        pytest.fail(f"there is no cassette {path}; record it with pytest {OPTION}", pytrace=False)
    return Cassette(path, "record" if is_recording else "replay", tmp_path / "run")


def build_name(node_id: str) -> str:
    """Return the name of a test's cassette, in characters that every file system has."""
    file, _, test = node_id.partition("::")
    plain = re.sub(r"[^A-Za-z0-9_.-]+", "-", test)[:100]
    digest = "" if plain == test else f"-{hashlib.sha256(test.encode()).hexdigest()[:8]}"
    return f"{Path(file).stem}.{plain}{digest}.jsonl"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Let a test whose request is not recorded fail with the difference to the nearest one."""
    try:
        return (yield)
    except Exception as error:  # only looked at, and raised on
        from reflact.errors import CassetteMiss

        if not isinstance(error, CassetteMiss) or FIXTURE not in getattr(item, "fixturenames", ()):
            raise
        lines = (str(error), *error.difference, f"if the change is intended: pytest {OPTION}")
        pytest.fail("\n".join(lines), pytrace=False)
