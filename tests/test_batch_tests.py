"""Tests of batches: how they are counted by their traces, and what they change of their pairs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Iterable, Sequence
from pathlib import Path

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memory_pairs import HELD_OUT, evidence_for, make_pair, recorded
from profiles import cases
from reflact import MemoryStore, Trace
from reflact.calibration.promotion import take_snapshot
from reflact.calibration.splits import HoldoutRule, list_tested_marks
from reflact.errors import DataError
from reflact.memory.cards import TOTAL_ALPHA, TraceIdentity, compute_alpha, count_tests
from reflact.memory.models import Action, BatchTest, Evaluation, Label, Transition


@pytest.fixture
async def memory(tmp_path: Path) -> AsyncIterator[MemoryStore]:
    async with MemoryStore(tmp_path / "memory.db") as opened:
        yield opened


async def open_next(
    memory: MemoryStore, traces: Iterable[TraceIdentity], *, name: str = "given"
) -> BatchTest:
    """Open a test of a new pair on traces."""
    pair = make_pair(len(await memory.pairs()), trace="learned")
    await memory.submit(pair)
    return await memory.open_test([pair.id], holdout_id=name, traces=frozenset(traces))


async def before(memory: MemoryStore, traces: Collection[str], *, name: str = "given") -> int:
    """Open a test of a new pair on traces and return how many it counts before it."""
    return (await open_next(memory, map(recorded, traces), name=name)).n_earlier_tests


async def test_another_way_to_cut_traces_begins_no_new_error_probability(memory: MemoryStore) -> None:
    """The same traces in a slice of four, in one of three, or given by a folder: each test counts."""
    ids = [f"trace {number}" for number in range(120)]
    for already, slices in enumerate((4, 3, 5)):
        cut = HoldoutRule(slices, "trace")
        here = [one for one in ids if cut.is_held_out(one, "p")]
        assert await before(memory, here, name=cut.held_out_name) == already
    shared = [one for one in ids if all(HoldoutRule(n, "trace").is_held_out(one, "p") for n in (4, 3, 5))]
    assert await before(memory, shared) == 3
    assert count_tests(await memory.tests(), map(recorded, ids)) == 4


async def test_sets_of_one_name_that_share_no_trace_pay_nothing_for_each_other(memory: MemoryStore) -> None:
    """Two given sets are two sets; one that meets both counts the tests of both."""
    assert await before(memory, ["a", "b"]) == 0
    assert await before(memory, ["c", "d"]) == 0
    assert await before(memory, ["b", "c"]) == 2
    assert await before(memory, ["e"]) == 0


@cases(60, 10)
@given(st.lists(st.sets(st.sampled_from("abcdef"), min_size=1), min_size=1, max_size=8))
async def test_on_no_trace_is_more_than_the_level_spent(
    tmp_path_factory: pytest.TempPathFactory, sets: Sequence[set[str]]
) -> None:
    """Whatever sets are held out, the levels of all tests that a trace took part in sum to at most 2.5%."""
    async with MemoryStore(tmp_path_factory.mktemp("sets") / "m.db") as memory:
        counted = [await before(memory, traces) for traces in sets]
        tests = await memory.tests()
    for trace in "abcdef":
        levels = [compute_alpha(n) for n, traces in zip(counted, sets, strict=True) if trace in traces]
        assert sum(levels) <= TOTAL_ALPHA
    for n, traces in enumerate(sets):
        known = count_tests(tests[:n], map(recorded, traces))
        assert counted[n] == known == sum(not traces.isdisjoint(s) for s in sets[:n])


async def test_a_batch_is_not_tested_on_what_it_was_made_of(memory: MemoryStore) -> None:
    """One origin among the held-out traces is enough, in whatever order traces and pairs came."""
    pair = make_pair(1, trace="first")
    await memory.submit(pair)
    await memory.submit(pair.model_copy(update={"provenance": make_pair(1, trace="second").provenance}))
    for trace in ("first", "second"):
        with pytest.raises(DataError, match=f"was made of trace {trace}"):
            await memory.open_test([pair.id], holdout_id="h", traces=[*HELD_OUT, recorded(trace)])
    with pytest.raises(DataError, match="name the traces"):
        await memory.open_test([pair.id], holdout_id="h", traces=[])
    assert await memory.tests() == ()


async def test_evidence_compares_no_more_traces_than_were_held_out(memory: MemoryStore) -> None:
    """Sixty traces are none of a test that was opened on thirty."""
    pair = make_pair(1)
    await memory.submit(pair)
    test = await memory.open_test([pair.id], holdout_id="h", traces=HELD_OUT[:30])
    with pytest.raises(DataError, match="compares 60 traces, and 30 were held out"):
        await memory.close_test(test.number, evidence_for(test))


async def test_a_forgotten_trace_still_counts_and_cannot_be_read(tmp_path: Path) -> None:
    """What stays of it in a test is a hash, by which it is known when it comes back."""
    path, name = tmp_path / "memory.db", "Ottilie Quandt 1961"
    async with MemoryStore(path) as memory:
        await memory.open_trace(name, "p")
        assert await before(memory, [name]) == 0
        await memory.forget(name)
        assert [test.content_fingerprints for test in await memory.tests()] == [(recorded(name).fingerprint,)]
        assert await before(memory, [name]) == 1
    assert b"Ottilie" not in await anyio.Path(path).read_bytes()


def played(name: str, *states: int) -> Trace:
    """Return a trace that went through states."""
    trace = Trace("Count.", id=name)
    for state in states:
        trace.record(
            Transition(before=state, action=Action(name="add"), after=state + 1),
            label=Label(progress_before=0, progress_after=1, source="program"),
        )
    return trace


SAME_TRACE = [
    (("first", 1, 2), ("first", 1, 2), True),
    (("first", 1, 2), ("another name", 1, 2), True),
    (("first", 1, 2), ("grown under another name", 1, 2, 3, 4), True),
    (("first", 1, 2), ("first", 10, 20), True),
    (("first", 1, 2, 3), ("first", 1), True),
    (("first", 1, 2), ("begins alike", 1, 7), False),
    (("first", 1, 2, 3), ("shorter under another name", 1, 2), False),
    (("first", 1), ("second", 2), False),
]
"""Names and states of a tested trace and of a later one, and whether the earlier test counts for it."""


async def test_a_trace_is_known_by_its_name_and_by_how_it_began(memory: MemoryStore) -> None:
    """Copies, renamed, grown, cut off or rendered otherwise, begin no new error probability."""
    for tested, later, counts in SAME_TRACE:
        test = await open_next(memory, [played(*tested).recording])
        assert count_tests([test], [played(*later).recording]) == counts, later
        assert played(*tested).recording.fingerprints.isdisjoint(list_tested_marks([test])) is False


def test_scores_and_gold_make_no_other_recording() -> None:
    """What was said of the steps is not part of what a trace holds; its purpose is."""
    said = Trace("Count.", id="said")
    said.record(
        Transition(before=1, action=Action(name="add"), after=2),
        Evaluation(progress_before=0, progress_after=9, reasoning="r"),
    )
    assert said.recording.content_hashes == played("gold", 1).recording.content_hashes
    assert said.recording.fingerprint != played("longer", 1, 2).recording.fingerprint
    assert said.recording.content_hashes != Trace("Wait.", id="said").recording.content_hashes


async def waiting(store: MemoryStore) -> list[str]:
    """Return the pairs that may be tested now."""
    return [one.pair.id for one in (await take_snapshot(store)).waiting_pairs]


async def close_with(store: MemoryStore, pair_id: str, *, promoted: bool, recheck: bool = False) -> None:
    """Test a batch of one pair."""
    test = await store.open_test(
        [pair_id], holdout_id="given", traces=HELD_OUT, kind="demote" if recheck else "promote"
    )
    await store.close_test(test.number, evidence_for(test, promoted=promoted))


async def test_a_pair_waits_for_a_test_until_one_refused_it(memory: MemoryStore) -> None:
    """A release after measured harm makes it wait anew; each test measures its utility.

    A point of error that a batch takes away is worth a twentieth.
    """
    refused = (await memory.submit(make_pair(1))).pair_id
    await close_with(memory, refused, promoted=False)
    assert await waiting(memory) == []
    pair = (await memory.submit(make_pair())).pair_id
    (stored,) = await memory.pairs([pair])
    assert (await waiting(memory), stored.utility) == ([pair], 0.5)
    await close_with(memory, pair, promoted=True)
    (stored,) = await memory.pairs(status="promoted")
    assert stored.utility == pytest.approx(0.575)
    await close_with(memory, pair, promoted=False, recheck=True)
    (stored,) = await memory.pairs([pair])
    assert stored.utility == pytest.approx(0.475)
    assert await waiting(memory) == []
    await memory.release(pair, reason="I looked")
    assert await waiting(memory) == [pair]
