"""Stored traces: which can test a batch, and which pairs and anchors came from them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from pydantic import JsonValue

from memory_pairs import make_pair
from reflact import MemoryStore
from reflact.calibration.promotion import take_snapshot
from reflact.calibration.trace import Trace
from reflact.errors import DataError
from reflact.memory.cards import AnchorExclusions
from reflact.memory.models import (
    Action,
    ContrastPair,
    Label,
    LabelSource,
    Origin,
    Provenance,
    ScoreEvent,
    Transition,
)
from reflact.memory.store import ImportResult


@pytest.fixture
async def memory(tmp_path: Path) -> AsyncIterator[MemoryStore]:
    async with MemoryStore(tmp_path / "memory.db") as opened:
        yield opened


def of_step(pair: ContrastPair, trace: str, step: int | None) -> ContrastPair:
    """Return an equal pair that was made of another step."""
    return pair.model_copy(update={"provenance": Provenance(trace_id=trace, step=step)})


def perturbed(pair: ContrastPair) -> ContrastPair:
    """Return a pair of the same step whose transition is another one."""
    moved = Transition(
        before=pair.transition.before, action=pair.transition.action, after="Nothing came of it."
    )
    return pair.model_copy(update={"transition": moved, "construction": "no_effect"})


async def test_a_trace_of_an_anchor_teaches_nothing_in_any_form(memory: MemoryStore) -> None:
    """A perturbed pair of an anchor's step is turned away, and one of another step of its trace."""
    anchor = make_pair(1)
    await memory.add_anchors([anchor])
    pair = perturbed(anchor)
    assert pair.hashes.subject != anchor.hashes.subject
    submitted = await memory.submit(pair)
    assert (submitted.is_new, submitted.status, submitted.reason) == (False, "rejected", "anchor_trace")
    assert await memory.pairs() == ()
    assert (await memory.submit(of_step(pair, "trace", 2))).reason == "anchor_trace"
    assert (await memory.submit(of_step(pair, "other", 2))).is_new
    again = await memory.submit(pair)
    assert (again.is_new, again.reason) == (False, "anchor_trace")
    (stored,) = await memory.pairs()
    assert stored.origins == (Origin(trace_id="other", step=2),)


def test_what_shows_the_state_that_an_anchor_scores_teaches_nothing() -> None:
    """A step of whatever trace, on either side, under the anchor's purpose; its state before is no reason."""

    def step(before: JsonValue, after: JsonValue) -> Transition:
        return Transition(before=before, action=Action(name="look"), after=after)

    states: list[JsonValue] = [None, True, 1, 1.5, "", "1", "\ud800", [], {"a": ["\u00e9"]}]
    for state in states:
        anchor = make_pair(1).model_copy(update={"transition": step("empty", state)})
        exclusions, origin = AnchorExclusions.from_anchors([anchor]), Origin(trace_id="another", step=9)
        for showing in (step(state, "x"), step("x", state), step(state, state)):
            assert exclusions.excludes(anchor.purpose, showing, origin), state
            assert not exclusions.excludes("Burn the report.", showing, origin), state
            assert exclusions.excludes("Burn the report.", showing, Origin(trace_id="trace", step=2)), state
        assert not exclusions.excludes(anchor.purpose, step("empty", "x"), origin), state
        assert not exclusions.excludes(anchor.purpose, step("x", [state]), origin), state


async def test_a_step_that_taught_is_no_anchor(memory: MemoryStore) -> None:
    """An anchor of a step that any stored pair was made of is refused, with the step and the pair."""
    pair = perturbed(make_pair(1))
    await memory.submit(pair)
    await memory.submit(of_step(pair, "second", 7))
    with pytest.raises(DataError, match=f"made of trace trace, and so was stored pair {pair.id}"):
        await memory.add_anchors([make_pair(1)])
    with pytest.raises(DataError, match="made of trace second"):
        await memory.add_anchors([of_step(make_pair(5), "second", 7)])
    with pytest.raises(DataError, match=f"has the transition of stored pair {pair.id}"):
        await memory.add_anchors([of_step(pair, "third", 0)])
    assert await memory.anchors() == ()


async def test_an_anchor_that_two_steps_give_keeps_both(memory: MemoryStore) -> None:
    """Kept again from another trace it is no new anchor, and that step teaches nothing either."""
    anchor = make_pair(1)
    assert await memory.add_anchors([anchor]) == 1
    assert await memory.add_anchors([of_step(anchor, "second", 7)]) == 0
    assert (await memory.submit(of_step(make_pair(2), "second", 7))).reason == "anchor_trace"
    lines = [line async for line in memory.export_lines()]
    assert (await memory.forget("second")).n_anchors == 1
    assert (await memory.import_lines(lines)).n_anchors == 1
    assert (await memory.submit(of_step(make_pair(2), "second", 7))).reason == "anchor_trace"


async def test_all_traces_of_a_pair_were_learned_from(memory: MemoryStore) -> None:
    """A pair made of two traces is one unit, both traces taught it, and neither tests it."""
    pair, other = make_pair(1, trace="first"), make_pair(2, trace="first")
    for one in (pair, of_step(pair, "second", 4), of_step(pair, "second", 4), other):
        await memory.submit(one)
    stored = {one.pair.id: one.origins for one in await memory.pairs()}
    assert stored[pair.id] == (Origin(trace_id="first", step=1), Origin(trace_id="second", step=4))
    standing = await take_snapshot(memory)
    assert standing.learned.trace_ids == {"first", "second"}
    assert {one.id for one in standing.list_testable_pairs([])} == {pair.id, other.id}
    assert standing.list_testable_pairs([Trace("p", id="second")]) == (other,)
    assert standing.list_testable_pairs([Trace("p", id="first")]) == ()


async def test_forgetting_takes_pairs_that_other_traces_gave_too(memory: MemoryStore) -> None:
    """Whichever of its traces is forgotten, the pair goes; the other trace may give it anew."""
    pair, kept = make_pair(1, trace="first"), make_pair(2, trace="first")
    for one in (pair, of_step(pair, "second", 4), kept):
        await memory.submit(one)
    assert (await memory.forget("second")).pair_ids == (pair.id,)
    assert [one.pair.id for one in await memory.pairs()] == [kept.id]
    assert (await take_snapshot(memory)).learned.trace_ids == {"first"}
    assert (await memory.submit(pair)).is_new
    assert (await memory.pairs([pair.id]))[0].origins == (Origin(trace_id="first", step=1),)


async def test_origins_come_back_from_an_export(memory: MemoryStore, tmp_path: Path) -> None:
    """All of them, for a pair that is there already as well; a step that is an anchor's there stays out."""
    pair = make_pair(1, trace="first")
    for one in (pair, of_step(pair, "second", 4)):
        await memory.submit(one)
    lines = [line async for line in memory.export_lines()]
    async with MemoryStore(tmp_path / "new.db") as other:
        await other.import_lines(lines)
        assert (await other.pairs())[0].origins == (await memory.pairs())[0].origins
    async with MemoryStore(tmp_path / "known.db") as other:
        await other.submit(of_step(pair, "third", 0))
        assert await other.import_lines(lines) == ImportResult()
        assert {one.trace_id for one in (await other.pairs())[0].origins} == {"first", "second", "third"}
    async with MemoryStore(tmp_path / "anchored.db") as other:
        await other.add_anchors([of_step(make_pair(9), "second", 4)])
        assert (await other.import_lines(lines)).n_pairs == 0


def label_by(source: LabelSource = "program") -> Label:
    return Label(progress_before=0, progress_after=1, source=source)


def recorded_trace(
    name: str, *states: int, source: LabelSource | None = "program", purpose: str = "Count."
) -> Trace:
    """Return a trace that went through states."""
    trace = Trace(purpose, id=name)
    for state in states:
        step = Transition(before=state, action=Action(name="add"), after=state + 1)
        trace.record(step, label=None if source is None else label_by(source))
    return trace


async def content_hashes(memory: MemoryStore) -> dict[str, str]:
    return {one.id: one.content_hash for one in await memory.testable_traces(before=None, limit=100)}


async def test_pages_go_from_the_newest_to_the_oldest(memory: MemoryStore) -> None:
    """Each trace comes once, whatever the pages; those without label_by from outside do not come at all."""
    names = [f"t{number * 7 % 10}" for number in range(10)]
    for number, name in enumerate(names):
        await recorded_trace(name, number).save_to(memory)
    await recorded_trace("agreed", 50, source="agreement").save_to(memory)
    await recorded_trace("unknown", 60, source=None).save_to(memory)
    found, before = [], None
    while page := await memory.testable_traces(before=before, limit=3):
        assert len(page) <= 3
        found += [one.id for one in page]
        before = page[-1].number
    assert found == names[::-1]


async def test_a_label_lets_a_trace_test_and_takes_it_out(memory: MemoryStore) -> None:
    """What is known of a trace follows its labels."""
    await recorded_trace("t", 1, 2, source=None).save_to(memory)
    assert await content_hashes(memory) == {}
    await memory.label("t", 1, label_by("human"))
    assert set(await content_hashes(memory)) == {"t"}
    await memory.label("t", 1, label_by("human"))
    await memory.label("t", 1, label_by("agreement"))
    assert await content_hashes(memory) == {}
    await recorded_trace("t", 1, 2).save_to(memory)
    assert set(await content_hashes(memory)) == {"t"}


async def test_what_a_trace_holds_is_kept_as_it_grows(memory: MemoryStore) -> None:
    """In whatever order its steps come, a stored trace holds what the trace itself does."""
    whole, other = recorded_trace("t", 1, 2, 3), recorded_trace("other", 1, 2, 3)
    for number in (0, 2, 1):
        await memory.open_trace("t", "Count.")
        await memory.append("t", whole.events[number])
    await other.save_to(memory)
    found = await content_hashes(memory)
    assert found["t"] == found["other"] == whole.recording.content_hashes[-1]
    await memory.append("other", ScoreEvent(step=3, transition=recorded_trace("x", 9).events[0].transition))
    assert (await content_hashes(memory))["other"] == recorded_trace(
        "y", 1, 2, 3, 9
    ).recording.content_hashes[-1]
