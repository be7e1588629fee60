"""docs/architecture.md: the functions on its paths exist, and a run enters them in this order."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import re
import sys
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import httpx

import reflact
from doubles import completion
from reflact import Trainer
from reflact.events import StepStarted
from reflact.testing import ToyEnvironment
from toy_runs import build_trainer

PAGE = Path(__file__).parent.parent / "docs" / "architecture.md"
SOURCE = Path(reflact.__file__).parent
NAME = re.compile(r"`((?:\w+\.)+\w+)`")
MODEL = {"base_url": "http://localhost:1/v1", "api_key_env": None, "model": "m"}


@cache
def read_paths() -> tuple[tuple[str, ...], ...]:
    sections = re.split(r"^### ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    lists = (re.findall(r"^\d+\. .+(?:\n {3}.+)*", section, re.MULTILINE) for section in sections)
    return tuple(tuple(name for item in items for name in NAME.findall(item)) for items in lists)


def find_function(name: str) -> Callable[..., Any]:
    """Return the function with a dotted name below ``reflact``, decorators removed."""
    parts = name.split(".")
    for n in range(len(parts) - 1, 0, -1):
        try:
            found: Any = importlib.import_module(".".join(["reflact", *parts[:n]]))
        except ModuleNotFoundError:
            continue
        for part in parts[n:]:
            found = getattr(found, part)
        return inspect.unwrap(found)
    raise AttributeError(name)


class Recorder:
    """Records which functions of reflact are entered, in order."""

    def __init__(self) -> None:
        self.calls: list[CodeType] = []
        self._is_on = False

    def __call__(self, frame: FrameType, event: str, arg: object) -> None:
        if self._is_on and event == "call" and frame.f_code.co_filename.startswith(str(SOURCE)):
            self.calls.append(frame.f_code)

    def start(self) -> None:
        self._is_on = True
        threading.setprofile(self)
        sys.setprofile(self)

    def stop(self) -> None:
        self._is_on = False
        sys.setprofile(None)
        threading.setprofile(None)

    def check_order(self, names: tuple[str, ...]) -> None:
        calls = iter(self.calls)
        assert [name for name in names if find_function(name).__code__ not in calls] == []


class Endpoint(httpx.AsyncBaseTransport):
    """Answers every request with 4; the first one stops the recorder."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self._recorder.stop()
        return completion("4")


def test_the_functions_of_all_paths_exist() -> None:
    paths = read_paths()
    assert len(paths) == 3
    assert all(paths)
    for path in paths:
        for name in path:
            assert callable(find_function(name)), name


def test_a_training_takes_the_first_path(tmp_path: Path) -> None:
    for side, numbers in {"train": (1, 2), "val": (3,), "test": (4,)}.items():
        items = [{"id": f"{side}{n}", "input": f"{n}", "reference": "4"} for n in numbers]
        (tmp_path / side).mkdir()
        (tmp_path / side / "items.json").write_text(json.dumps(items), encoding="utf-8")
    recorder = Recorder()
    config = {
        "out_dir": tmp_path / "run",
        "data": {"path": tmp_path},
        "environment": {"grader": "exact"},
        "models": {"target": MODEL, "optimizer": MODEL},
        "search": {"sources": ["edits"]},
        "train": {"num_epochs": 1},
        "gate": {"policy": "strict"},
    }
    trainer = Trainer(config, transport=Endpoint(recorder))
    recorder.start()
    try:
        asyncio.run(trainer.train())
    finally:
        recorder.stop()
    recorder.check_order(read_paths()[0])


async def test_a_training_takes_the_second_path(tmp_path: Path) -> None:
    trainer = build_trainer(
        {
            "out_dir": tmp_path,
            "search": {"sources": ["edits"]},
            "train": {"num_epochs": 1},
            "reflect": {"overlap": False},
        },
        environment=ToyEnvironment(train=4, val=4, test=4, rules=1),
    )
    recorder = Recorder()
    async with trainer.stream() as stream:
        async for event in stream:
            if isinstance(event, StepStarted):
                recorder.start()
    recorder.stop()
    recorder.check_order(read_paths()[1])
