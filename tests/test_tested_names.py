"""A test counts for the names of its traces too: their states told otherwise are no new traces."""

from __future__ import annotations

from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path

import pytest

from memory_pairs import make_pair
from reflact import MemoryStore, Trace
from reflact.calibration.splits import list_tested_marks
from reflact.memory.models import Action, Transition
from reflact.memory.protocols import count_tests

pytestmark = pytest.mark.anyio

ROUND = range(3)


@pytest.fixture
async def memory(tmp_path: Path) -> AsyncIterator[MemoryStore]:
    async with MemoryStore(tmp_path / "memory.db") as opened:
        yield opened


def told(name: str, *states: str) -> Trace:
    """Return a trace that went through states."""
    trace = Trace("Count.", id=name)
    for before, after in pairwise(states):
        trace.record(Transition(before=before, action=Action(name="add"), after=after))
    return trace


async def before(memory: MemoryStore, *traces: Trace) -> int:
    """Open a test of a new pair on traces and return how many it counts before it."""
    pair = make_pair(len(await memory.pairs()), trace="learned")
    await memory.submit(pair)
    held = [trace.recording for trace in traces]
    return (await memory.open_test([pair.id], holdout_id="given", traces=held)).n_earlier_tests


async def test_the_same_logs_rendered_otherwise_are_the_same_traces(memory: MemoryStore) -> None:
    """An adapter that writes states in another way begins no new error probability."""
    assert await before(memory, *(told(f"log {n}", "0", f"{n}") for n in ROUND)) == 0
    again = [told(f"log {n}", "count: 0", f"count: {n}") for n in ROUND]
    assert await before(memory, *again) == 1
    assert count_tests(await memory.tests(), [told("log 1", "zero").recording]) == 2
    assert await before(memory, told("log 7", "count: 0", "count: 7")) == 0


async def test_a_recording_that_lost_its_end_is_the_same_trace(memory: MemoryStore) -> None:
    """A torn file holds less than what was tested on, under the same name; it had its turn as well."""
    assert await before(memory, *(told(f"log {n}", "0", f"{n}", f"{n}!") for n in ROUND)) == 0
    shorter = told("log 1", "0", "1")
    assert await before(memory, shorter) == 1
    assert not shorter.recording.fingerprints.isdisjoint(list_tested_marks(await memory.tests()))
