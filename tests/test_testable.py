"""Which stored traces can test, found without their steps: what each holds, what of it is known."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from memory_pairs import make_pair
from reflact import MemoryStore
from reflact.calibration.trace import Trace
from reflact.memory.models import Action, Label, LabelSource, ScoreEvent, Transition

pytestmark = pytest.mark.anyio


@pytest.fixture
async def memory(tmp_path: Path) -> AsyncIterator[MemoryStore]:
    async with MemoryStore(tmp_path / "memory.db") as opened:
        yield opened


def gold(source: LabelSource = "program") -> Label:
    return Label(progress_before=0, progress_after=1, source=source)


def played(name: str, *states: int, source: LabelSource | None = "program", purpose: str = "Count.") -> Trace:
    """Return a trace that went through states."""
    trace = Trace(purpose, id=name)
    for state in states:
        step = Transition(before=state, action=Action(name="add"), after=state + 1)
        trace.record(step, label=None if source is None else gold(source))
    return trace


async def contents(memory: MemoryStore) -> dict[str, str]:
    return {one.id: one.content_hash for one in await memory.testable_traces(before=None, limit=100)}


async def test_pages_go_from_the_newest_to_the_oldest(memory: MemoryStore) -> None:
    """Each trace comes once, whatever the pages; those without gold from outside do not come at all."""
    names = [f"t{number * 7 % 10}" for number in range(10)]
    for number, name in enumerate(names):
        await played(name, number).save_to(memory)
    await played("agreed", 50, source="agreement").save_to(memory)
    await played("unknown", 60, source=None).save_to(memory)
    found, before = [], None
    while page := await memory.testable_traces(before=before, limit=3):
        assert len(page) <= 3
        found += [one.id for one in page]
        before = page[-1].number
    assert found == names[::-1]


async def test_a_label_lets_a_trace_test_and_takes_it_out(memory: MemoryStore) -> None:
    """What is known of a trace follows its labels."""
    await played("t", 1, 2, source=None).save_to(memory)
    assert await contents(memory) == {}
    await memory.label("t", 1, gold("human"))
    assert set(await contents(memory)) == {"t"}
    await memory.label("t", 1, gold("human"))
    await memory.label("t", 1, gold("agreement"))
    assert await contents(memory) == {}
    await played("t", 1, 2).save_to(memory)
    assert set(await contents(memory)) == {"t"}


async def test_what_a_trace_holds_is_kept_as_it_grows(memory: MemoryStore) -> None:
    """In whatever order its steps come, a stored trace holds what the trace itself does."""
    whole, other = played("t", 1, 2, 3), played("other", 1, 2, 3)
    for number in (0, 2, 1):
        await memory.open_trace("t", "Count.")
        await memory.append("t", whole.events[number])
    await other.save_to(memory)
    found = await contents(memory)
    assert found["t"] == found["other"] == whole.recording.content_hashes[-1]
    await memory.append("other", ScoreEvent(step=3, transition=played("x", 9).events[0].transition))
    assert (await contents(memory))["other"] == played("y", 1, 2, 3, 9).recording.content_hashes[-1]


async def test_a_copy_of_what_taught_is_taught_as_well(memory: MemoryStore) -> None:
    """A trace tests nothing where a pair was made of it, or of another one that holds the same."""
    for trace in (played("first", 1), played("copy", 1), played("other", 2)):
        await trace.save_to(memory)
    await memory.submit(make_pair(1, trace="first"))
    assert {one.id: one.has_pairs for one in await memory.testable_traces(before=None, limit=9)} == {
        "first": True,
        "copy": True,
        "other": False,
    }


async def test_purposes_are_counted_up_to_a_bound(memory: MemoryStore) -> None:
    """However many traces share them."""
    for number in range(12):
        await played(f"t{number}", number, purpose=f"Purpose {number % 3}.").save_to(memory)
    assert await memory.purposes(limit=9) == {f"Purpose {number}." for number in range(3)}
    assert len(await memory.purposes(limit=2)) == 2
