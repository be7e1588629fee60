"""Memories that tested on the same traces are brought together: error probability is spent once."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import anyio
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from memory_pairs import HELD_OUT, evidence_for, make_pair, recorded
from reflact import MemoryStore, Trace
from reflact.cli.app import app
from reflact.memory import Action, Gold, Transition
from reflact.memory_cards import LEVEL, Recording, level
from reflact.memory_ports import BatchTest
from reflact.store.booking import test_id as name_of
from reflact.store.exchange import MORE_TESTS, Imported

pytestmark = pytest.mark.anyio

GOLD = Gold(phi_before=0, phi_after=1, source="human")
BARELY = 0.01
"""A p-value that passes as the first test of a trace, and not as the second."""


async def judge(
    memory: MemoryStore,
    number: int,
    *,
    p_value: float = BARELY,
    traces: Sequence[Recording] = HELD_OUT,
    use: Literal["promote", "demote"] = "promote",
    promoted: bool = True,
) -> str:
    """Test a pair on traces, with what is found to promote it or take it back; returns its id."""
    pair = make_pair(number)
    await memory.submit(pair)
    test = await memory.open_test([pair.id], held_out="given", traces=traces, use=use)
    found = evidence_for(test, promoted=promoted).model_copy(update={"p_value": p_value})
    await memory.close_test(test.number, found)
    return pair.id


async def lines_of(memory: MemoryStore) -> list[str]:
    return [line async for line in memory.export_lines()]


async def exported(path: Path, number: int, *, p_value: float = BARELY) -> list[str]:
    """Return the export of a memory that promoted one pair in its first test."""
    async with MemoryStore(path) as memory:
        await judge(memory, number, p_value=p_value)
        return await lines_of(memory)


async def test_a_first_test_elsewhere_is_a_second_one_here(tmp_path: Path) -> None:
    """It counts the test that is here and has the level after it, at which its batch does not pass."""
    lines = await exported(tmp_path / "there.db", 2)
    async with MemoryStore(tmp_path / "here.db") as memory:
        own = await judge(memory, 1)
        done = await memory.import_lines(lines)
        assert done == Imported(tests=1, recounted=1, units=1, held=1, unproven=1)
        first, second = await memory.tests()
        assert (first.before, second.before) == (0, 1)
        assert second.evidence is not None
        assert (second.evidence.batches_before, second.evidence.alpha) == (1, level(1))
        assert (second.evidence.promoted, second.evidence.p_value) == (False, BARELY)
        (mine,) = await memory.pairs([own])
        (other,) = await memory.pairs([make_pair(2).id])
        assert (mine.status, other.status, other.reason, other.held) == (
            "promoted",
            "quarantined",
            MORE_TESTS,
            True,
        )
        history = [change.after for change in await memory.history(other.pair.id)]
        assert history == ["candidate", "quarantined", "promoted", "quarantined"]


async def test_what_passes_at_the_level_that_is_left_stays_promoted(tmp_path: Path) -> None:
    """A clear result stands after other tests as well, at a level of its own."""
    lines = await exported(tmp_path / "there.db", 2, p_value=1e-6)
    async with MemoryStore(tmp_path / "here.db") as memory:
        await judge(memory, 1)
        assert await memory.import_lines(lines) == Imported(tests=1, recounted=1, units=1)
        assert [pair.status for pair in await memory.pairs()] == ["promoted", "promoted"]
        evidence = (await memory.tests())[1].evidence
        assert evidence is not None
        assert (evidence.promoted, evidence.alpha) == (True, level(1))


async def test_other_traces_spend_nothing(tmp_path: Path) -> None:
    """A test on traces of its own is counted as it was."""
    lines = await exported(tmp_path / "there.db", 2)
    async with MemoryStore(tmp_path / "here.db") as memory:
        await judge(memory, 1, traces=[recorded(f"other {number}") for number in range(60)])
        assert await memory.import_lines(lines) == Imported(tests=1, units=1)
        assert [test.before for test in await memory.tests()] == [0, 0]


async def test_merged_memories_come_back_as_they_are(tmp_path: Path) -> None:
    """The export of a merged memory is one; what each test was where it was made stands in it."""
    first, second = await exported(tmp_path / "a.db", 1), await exported(tmp_path / "b.db", 2)
    async with MemoryStore(tmp_path / "merged.db") as merged:
        await merged.import_lines(first)
        await merged.import_lines(second)
        assert await merged.import_lines(first) == await merged.import_lines(second) == Imported()
        tests, pairs, lines = await merged.tests(), await merged.pairs(), await lines_of(merged)
        assert await merged.import_lines(lines) == Imported()
    made = [json.loads(line) for line in lines if json.loads(line)["type"] == "test"]
    assert [one["test"]["before"] for one in made] == [0, 0]
    async with MemoryStore(tmp_path / "again.db") as again:
        await again.import_lines(lines)
        assert await again.tests() == tests
        assert await again.pairs() == pairs
        assert await lines_of(again) == lines


async def test_a_test_that_names_no_traces_counts_all_that_were_made_elsewhere(tmp_path: Path) -> None:
    """Nobody knows on what it was made, so it comes after every test here; alone it keeps its count."""
    values = [json.loads(line) for line in await exported(tmp_path / "there.db", 2)]
    (line,) = [value for value in values if value["type"] == "test"]
    named, _ = line["id"], line["test"].pop("traces")
    older = name_of(BatchTest.model_validate(line["test"]))
    lines = [json.dumps(value).replace(named, older) for value in values]
    async with MemoryStore(tmp_path / "alone.db") as alone:
        assert await alone.import_lines(lines) == Imported(tests=1, units=1)
    async with MemoryStore(tmp_path / "here.db") as memory:
        await judge(memory, 1, traces=[recorded(f"other {number}") for number in range(60)])
        assert (await memory.import_lines(lines)).unproven == 1


async def test_a_trace_that_has_grown_since_is_the_same_trace(tmp_path: Path) -> None:
    """Where its steps are stored, a test of its beginning counts before one of the whole."""
    trace, tests = Trace("Sort the mail.", id="monday"), list[Recording]()
    for number in range(2):
        trace.record(Transition(before=number, action=Action(name="sort"), after=number + 1), gold=GOLD)
        tests.append(trace.recording)
    others = [recorded(f"other {number}") for number in range(59)]
    more = [recorded(f"more {number}") for number in range(59)]
    async with MemoryStore(tmp_path / "there.db") as there:
        await trace.keep(there)
        await judge(there, 2, traces=[tests[1], *others])
        lines = await lines_of(there)
    async with MemoryStore(tmp_path / "here.db") as memory:
        await judge(memory, 1, traces=[tests[0], *more])
        assert (await memory.import_lines(lines)).unproven == 1
        assert [test.before for test in await memory.tests()] == [0, 1]


async def test_harm_that_is_no_longer_shown_leaves_its_batch_held(tmp_path: Path) -> None:
    """What was taken back elsewhere is not promoted here because the test that took it back counts less."""
    async with MemoryStore(tmp_path / "there.db") as there:
        pair = await judge(there, 2, p_value=1e-9)
        await judge(there, 2, p_value=0.001, use="demote", promoted=False)
        lines = await lines_of(there)
    async with MemoryStore(tmp_path / "here.db") as memory:
        for number in range(5, 9):
            await judge(memory, number, p_value=1e-9)
        assert (await memory.import_lines(lines)).recounted == 2
        assert [one.held for one in await memory.pairs([pair])] == [True]
        last = (await memory.tests())[-1].evidence
        assert last is not None
        assert (last.promoted, last.outcome) == (True, "no_harm_shown")
        await memory.import_lines(await lines_of(memory))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=15, deadline=None)
@given(st.lists(st.lists(st.sampled_from("abcd"), min_size=1, max_size=3), min_size=1, max_size=3))
async def test_no_trace_spends_more_than_its_level_however_memories_meet(
    tmp_path_factory: pytest.TempPathFactory, memories: Sequence[Sequence[str]]
) -> None:
    """Whatever each memory tested on, the levels of a trace's tests sum to at most 2.5% once they are one."""
    folder = tmp_path_factory.mktemp("merged")
    number = 0
    async with MemoryStore(folder / "merged.db") as merged:
        for place, groups in enumerate(memories):
            async with MemoryStore(folder / f"{place}.db") as memory:
                for group in groups:
                    number += 1
                    traces = [recorded(f"{group} {one}") for one in range(60)]
                    await judge(memory, number, traces=traces, p_value=1e-9)
                await merged.import_lines(await lines_of(memory))
        tests = await merged.tests()
    for group in "abcd":
        counted = [test.before for test in tests if recorded(f"{group} 0").mark in (test.traces or ())]
        assert counted == list(range(len(counted)))
        assert sum(map(level, counted)) <= LEVEL


def test_the_command_says_what_no_longer_passes(tmp_path: Path) -> None:
    """It tells how many tests were counted anew, and how many units are held for it."""
    file = tmp_path / "there.jsonl"

    async def prepare() -> None:
        lines = await exported(tmp_path / "there.db", 2)
        file.write_text("\n".join(lines), encoding="ascii")
        async with MemoryStore(tmp_path / "here.db") as memory:
            await judge(memory, 1)

    anyio.run(prepare)
    said = CliRunner().invoke(app, ["memory", "import", str(tmp_path / "here.db"), str(file)]).stdout
    assert "1 of the units are held or rejected" in said
    assert "1 tests have more tests before them" in said
    assert "1 promoted units do not pass at the level that is left, and are held" in said
