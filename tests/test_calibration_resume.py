"""A calibration that was stopped goes on as if it had not been, also after a batch was promoted."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from calibrate_command import flattering, record, reflact
from flattered_world import PURPOSE, steps
from reflact import Trace
from reflact.calibration.events import (
    CALIBRATION_EVENT_ADAPTER,
    CalibrationEvent,
    CalibrationFinished,
    CalibrationStarted,
    PairBatchTested,
)
from served import HANGS, reflact_process

pytestmark = pytest.mark.slow

PLACES = 2
CONFIG = """
memory: {memory}
traces: learn
heldout: held out
models:
  critic: {{model: small, base_url: "{url}", api_key_env: null, max_retries: 0, mode: json_schema,
           call_id_header: x-sample}}
calibrator:
  concurrency: {places}
  contrast: {{n_judges: 0, candidates_per_event: 2}}
  curriculum: {{max_rounds: 3, patience: 3}}
"""


class Gate:
    """Holds back all answers after so many, and knows which were given."""

    def __init__(self) -> None:
        self.most = 1_000_000
        self.held = threading.Semaphore(0)
        self.go_on = threading.Event()
        self.waiting = 0

    def wait(self, asked: int) -> None:
        """Wait, where it is one of these."""
        if asked > self.most:
            self.waiting += 1
            self.held.release()
            self.go_on.wait(HANGS)

    def full(self) -> None:
        """Wait until every place is taken by a question that is held back."""
        for _ in range(PLACES):
            assert self.held.acquire(timeout=HANGS)


class World:
    """An endpoint, traces, and memories that begin empty."""

    def __init__(self, folder: Path, gate: Gate, url: str, asked: list[bytes]) -> None:
        self.folder, self.gate, self.url, self.asked = folder, gate, url, asked

    def configured(self, name: str) -> Path:
        """Write a configuration with a memory of its own and return its path."""
        path = self.folder / f"{name}.yaml"
        memory = self.folder / f"{name}.db"
        path.write_text(CONFIG.format(memory=memory, url=self.url, places=PLACES), encoding="utf-8")
        return path

    def run(self, path: Path, *options: str) -> list[CalibrationEvent]:
        """Calibrate to the end and return what was told."""
        result = reflact(path, "--show", "json", *options)
        assert result.exit_code == 0, result.output
        return [CALIBRATION_EVENT_ADAPTER.validate_json(line) for line in result.stdout.splitlines()]


def record_bare(folder: Path, number: int) -> None:
    """Write traces whose steps nobody scored: what samples agree on says what is right."""
    folder.mkdir(exist_ok=True)
    for n in range(number):
        trace = Trace(PURPOSE, id=f"bare {n}", path=folder / f"bare {n:03}.jsonl")
        ((step, _),) = steps(trace.id, n, count=1, claims=[n % 2 == 0])
        trace.record(step)
        trace.finish()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """Traces to learn from, some without gold, others that are held out, and an endpoint."""
    record(tmp_path / "learn", 4)
    record_bare(tmp_path / "learn", 4)
    record(tmp_path / "held out", 20)
    with serving_world(tmp_path) as found:
        yield found


@contextmanager
def serving_world(folder: Path) -> Iterator[World]:
    gate = Gate()
    with flattering(gate) as (url, asked):
        yield World(folder, gate, url, asked)
        gate.go_on.set()


def batches(told: list[CalibrationEvent]) -> list[PairBatchTested]:
    """Return the tests among events."""
    return [event for event in told if isinstance(event, PairBatchTested)]


@pytest.mark.parametrize("beyond", [1, 20], ids=["at once", "later"])
def test_killed_after_a_promotion_it_goes_on_exactly(world: World, beyond: int) -> None:
    """The rerun asks nothing that was answered, and its report is that of a calibration never stopped."""
    whole = world.run(world.configured("whole"))
    first, *further = batches(whole)
    assert first.evidence.passed_test
    assert further
    everything = Counter(world.asked)
    world.asked.clear()
    world.gate.most = first.usage.calls + beyond
    path = world.configured("killed")
    with reflact_process("calibrate", path) as process:
        world.gate.full()
        process.kill()
    answered = Counter(world.asked[: world.gate.most])
    world.gate.most = 1_000_000
    world.gate.go_on.set()
    world.asked.clear()
    again = world.run(path)
    asked = Counter(world.asked)
    assert not answered & asked
    assert answered + asked == everything
    assert isinstance(again[0], CalibrationStarted)
    assert again[0].resumed
    assert isinstance(again[-1], CalibrationFinished)
    assert again[-1] == whole[-1]
    assert [test.evidence for test in batches(again)] == [test.evidence for test in batches(whole)]
