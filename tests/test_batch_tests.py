"""Tests of batches: how they are counted by their traces, and what they change of their pairs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Sequence
from pathlib import Path

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memory_pairs import HELD_OUT, evidence_for, make_pair, promote, recorded
from profiles import cases
from reflact import MemoryStore, Trace
from reflact.concurrency import fan_out
from reflact.errors import DataError
from reflact.memory.cards import TOTAL_ALPHA, TraceIdentity, compute_alpha, count_tests
from reflact.memory.models import Action, BatchTest, ContrastPair, Label, StoredPair, Transition


@pytest.fixture
async def memory(tmp_path: Path) -> AsyncIterator[MemoryStore]:
    async with MemoryStore(tmp_path / "memory.db") as opened:
        yield opened


async def open_next(memory: MemoryStore, traces: Collection[TraceIdentity]) -> BatchTest:
    pair = make_pair(len(await memory.pairs()), trace="learned")
    await memory.submit(pair)
    return await memory.open_test([pair.id], traces=traces)


async def run_test(
    memory: MemoryStore, pair: ContrastPair, *, passed: bool, recheck: bool = False
) -> StoredPair:
    test = await memory.open_test([pair.id], traces=HELD_OUT, kind="demote" if recheck else "promote")
    await memory.close_test(test.number, evidence_for(test, promoted=passed))
    return await read(memory, pair)


async def read(memory: MemoryStore, pair: ContrastPair) -> StoredPair:
    (stored,) = await memory.pairs([pair.id])
    return stored


async def test_earlier_tests_are_counted_by_traces_across_stores(tmp_path: Path) -> None:
    path = tmp_path / "memory.db"
    async with MemoryStore(path) as one, MemoryStore(path) as two:
        pairs = [make_pair(n) for n in range(10)]
        await fan_out(one.submit, pairs)

        async def test(n: int) -> int:
            names = ["shared", f"own {n}"] if n < 8 else ["another"]
            opened = await (one, two)[n % 2].open_test(
                [pairs[n].id], traces=[recorded(name) for name in names]
            )
            return opened.n_earlier_tests

        before = await fan_out(test, range(10))
        assert sorted(before[:8]) == list(range(8))
        assert sorted(before[8:]) == [0, 1]
        assert [test.number for test in await two.tests()] == list(range(1, 11))


@cases(60, 10)
@given(st.lists(st.sets(st.sampled_from("abcdef"), min_size=1), min_size=1, max_size=8))
async def test_on_no_trace_is_more_than_the_level_spent(
    tmp_path_factory: pytest.TempPathFactory, sets: Sequence[set[str]]
) -> None:
    async with MemoryStore(tmp_path_factory.mktemp("sets") / "m.db") as memory:
        tests = [await open_next(memory, list(map(recorded, traces))) for traces in sets]
    for n, traces in enumerate(sets):
        assert tests[n].n_earlier_tests == sum(not traces.isdisjoint(s) for s in sets[:n])
    for trace in "abcdef":
        shared = [test for test, traces in zip(tests, sets, strict=True) if trace in traces]
        assert sum(compute_alpha(test.n_earlier_tests) for test in shared) <= TOTAL_ALPHA


def played(name: str, *states: int) -> Trace:
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


async def test_a_forgotten_trace_still_counts_and_cannot_be_read(tmp_path: Path) -> None:
    path, name = tmp_path / "memory.db", "Ottilie Quandt 1961"
    async with MemoryStore(path) as memory:
        await memory.open_trace(name, "p")
        await open_next(memory, [recorded(name)])
        await memory.forget(name)
        assert (await open_next(memory, [recorded(name)])).n_earlier_tests == 1
    assert b"Ottilie" not in await anyio.Path(path).read_bytes()


async def test_a_batch_is_not_tested_on_what_it_was_made_of(memory: MemoryStore) -> None:
    pair = make_pair(1, trace="first")
    await memory.submit(pair)
    await memory.submit(pair.model_copy(update={"provenance": make_pair(1, trace="second").provenance}))
    for trace in ("first", "second"):
        with pytest.raises(DataError, match=f"was made of trace {trace}"):
            await memory.open_test([pair.id], traces=[*HELD_OUT, recorded(trace)])
    with pytest.raises(DataError, match="name the traces"):
        await memory.open_test([pair.id], traces=[])
    with pytest.raises(DataError, match="at least one pair"):
        await memory.open_test([], traces=HELD_OUT)
    assert await memory.tests() == ()


UNFIT: list[tuple[dict[str, object], str]] = [
    ({"p_value": 0.5}, "a p-value of 0.5 at alpha"),
    ({"alpha": 0.025}, "its alpha is 0.025"),
    ({"n_traces": 19, "p_value": 0.001}, "19 traces, and a test needs at least 20"),
    ({"n_traces": 61}, "compares 61 traces, and 60 were held out"),
    ({"effect": 0.0}, "an effect of 0"),
    ({"p_value": 0.0}, "60 traces cannot have a p-value of 0"),
    ({"accuracy_change": -0.03}, "a change of accuracy of -0.03"),
    ({"n_earlier_tests": 5}, "earlier tests on its traces"),
]
"""What the evidence of a passed first test cannot say, and the reason in the message."""


async def test_evidence_that_contradicts_itself_changes_nothing(memory: MemoryStore) -> None:
    pair = make_pair(1)
    await memory.submit(pair)
    test = await memory.open_test([pair.id], traces=HELD_OUT)
    for wrong, problem in UNFIT:
        with pytest.raises(DataError, match=problem):
            await memory.close_test(test.number, evidence_for(test).model_copy(update=wrong))
    assert (await read(memory, pair)).status == "quarantined"
    await memory.close_test(test.number, evidence_for(test))
    assert (await read(memory, pair)).status == "promoted"
    again = await memory.open_test([pair.id], traces=HELD_OUT, kind="demote")
    for wrong, _ in UNFIT[:2]:
        harm = evidence_for(again, promoted=False).model_copy(update=wrong)
        with pytest.raises(DataError, match="does not fit test 2"):
            await memory.close_test(again.number, harm)
    assert (await read(memory, pair)).status == "promoted"
    for number, problem in ((test.number, "is over"), (7, "was never opened")):
        with pytest.raises(DataError, match=problem):
            await memory.close_test(number, evidence_for(test))


async def test_a_promotion_takes_a_test_that_was_passed_and_may_be_taken_back(memory: MemoryStore) -> None:
    bad, good = make_pair(1), make_pair(2)
    await fan_out(memory.submit, [bad, good])
    assert (await run_test(memory, bad, passed=False)).status == "quarantined"
    await promote(memory, [bad, good])
    assert [one.status for one in await memory.pairs()] == ["promoted"] * 2
    expected = [evidence_for(test, promoted=test.number == 2) for test in await memory.tests()]
    assert [test.evidence for test in await memory.tests()] == expected
    assert (await read(memory, bad)).utility == pytest.approx(0.575)
    after = await run_test(memory, bad, passed=False, recheck=True)
    assert (after.status, after.needs_review) == ("quarantined", True)
    assert after.utility == pytest.approx(0.475)
    assert (await run_test(memory, good, passed=True, recheck=True)).status == "promoted"
    with pytest.raises(DataError, match="only promoted pairs"):
        await run_test(memory, bad, passed=True, recheck=True)


async def test_a_pair_that_needs_review_is_tested_once_it_is_released(memory: MemoryStore) -> None:
    pair = make_pair(1, note="j@doe.com")
    await memory.submit(pair)
    with pytest.raises(DataError, match=r"needs review \(personal_data\); release it first"):
        await run_test(memory, pair, passed=True)
    await memory.move([pair.id], "quarantined")
    assert (await run_test(memory, pair, passed=True)).status == "promoted"


async def test_a_pair_that_changed_during_a_test_is_not_promoted_by_it(memory: MemoryStore) -> None:
    pair, other = make_pair(1), make_pair(2)
    await fan_out(memory.submit, [pair, other])
    test = await memory.open_test([pair.id, other.id], traces=HELD_OUT)
    await run_test(memory, pair, passed=True)
    await run_test(memory, pair, passed=False, recheck=True)
    await memory.move([pair.id], "quarantined")
    await memory.close_test(test.number, evidence_for(test))
    assert (await read(memory, pair)).status == "quarantined"
    assert (await read(memory, other)).status == "promoted"
