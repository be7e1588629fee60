"""The memory in a file: pairs, statuses, search, bounds, anchors, forgetting, traces, odd values."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import JsonValue

from memory_pairs import HELD_OUT, evidence_for, keep_reply, make_pair, promote, set_utility
from profiles import cases
from reflact import MemoryStore, Trace
from reflact.calibration.promotion import take_snapshot
from reflact.concurrency import fan_out
from reflact.errors import DataError, StoreError
from reflact.memory.models import Action, ContrastPair, Evaluation, Origin, Provenance, ScoreEvent, Transition
from reflact.store.runs import open_store


class Days:
    """A clock that goes on by a day each time that it is looked at."""

    def __init__(self) -> None:
        self.now = datetime(2026, 1, 1, tzinfo=UTC)

    def __call__(self) -> datetime:
        self.now += timedelta(days=1)
        return self.now


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "memory.db"


@pytest.fixture
async def memory(path: Path) -> AsyncIterator[MemoryStore]:
    async with MemoryStore(path, clock=Days()) as opened:
        yield opened


async def status(memory: MemoryStore, pair: ContrastPair) -> str:
    (stored,) = await memory.pairs([pair.id])
    return stored.status


def of_step(pair: ContrastPair, trace: str, step: int | None) -> ContrastPair:
    return pair.model_copy(update={"provenance": Provenance(trace_id=trace, step=step)})


async def test_a_pair_comes_back_as_it_was(memory: MemoryStore) -> None:
    pair = make_pair(1, note="null \x00, lone \ud800, 検索, \U0001f600")
    submitted = await fan_out(lambda _: memory.submit(pair), range(5))
    assert sorted(one.is_new for one in submitted) == [False] * 4 + [True]
    assert {(one.status, one.reason) for one in submitted} == {("quarantined", None)}
    (stored,) = await memory.pairs()
    assert (stored.pair, stored.status, stored.utility) == (pair, "quarantined", 0.5)


async def test_illegal_changes_raise_and_change_nothing(memory: MemoryStore) -> None:
    one, two = make_pair(1), make_pair(2)
    await fan_out(memory.submit, [one, two])
    await memory.move([two.id], "archived", reason="old")
    with pytest.raises(DataError, match=rf"pair {two.id}: .* archived cannot become rejected"):
        await memory.move([one.id, two.id], "rejected", reason="no")
    with pytest.raises(DataError, match="only a test promotes"):
        await memory.move([one.id], "promoted")  # type: ignore[arg-type]  # what a caller may try
    with pytest.raises(DataError, match="has no pair nowhere"):
        await memory.move(["nowhere"], "rejected", reason="no")
    assert await status(memory, one) == "quarantined"


@cases(60, 10)
@given(text=st.text(), start=st.integers(0, 20), length=st.integers(3, 6))
async def test_a_pair_is_found_by_its_words_and_by_parts_of_them(
    tmp_path_factory: pytest.TempPathFactory, text: str, start: int, length: int
) -> None:
    """Any stretch of a text finds it, in scripts with and without spaces; Latin letters in any case."""
    kanji = "".join(chr(0x4E00 + ord(c) % 5000) for c in text[:30]) + "検索機能を追加する"
    start = min(start, len(kanji) - length)
    async with MemoryStore(tmp_path_factory.mktemp("words") / "m.db") as memory:
        await memory.submit(make_pair(1, note=f"{text} {kanji}"))
        await memory.submit(make_pair(2, note="nothing of it"))
        for words in (kanji[start : start + length], f"{kanji[-4:]} REPORT", "intent"):
            found = await memory.find(words)
            assert len(found) == (2 if words == "intent" else 1)
        for odd in (text, '"', "a AND NOT b*", "NEAR(a b, 2)", "^col : (x", "\x00", "\ud800", "*"):
            await memory.find(odd)


async def test_beyond_the_bound_the_weakest_are_archived(path: Path) -> None:
    async with MemoryStore(path, max_active_pairs=4, clock=Days()) as memory:
        pairs = [make_pair(n) for n in range(7)]
        await promote(memory, pairs[:1])
        for pair in pairs[1:4]:
            await memory.submit(pair)
        failed = await memory.open_test([pairs[2].id], traces=HELD_OUT)
        await memory.close_test(failed.number, evidence_for(failed, promoted=False))
        await set_utility(memory, pairs[2].id, 0.9)
        archived: list[str] = []
        for pair in pairs[4:]:
            await memory.submit(pair)
            (last,) = {one.pair.id for one in await memory.pairs(status="archived")} - set(archived)
            archived.append(last)
            await set_utility(memory, pairs[0].id, 0.2)
        assert archived == [pairs[n].id for n in (2, 0, 1)]
        assert {one.reason for one in await memory.pairs(archived)} == {"bound"}


async def test_anchors_are_never_learned_from(memory: MemoryStore) -> None:
    anchor, pair = make_pair(1, trace="anchor"), make_pair(2)
    assert await memory.add_anchors([anchor]) == 1
    assert await memory.add_anchors([anchor]) == 0
    submitted = await memory.submit(of_step(anchor, "other", 1).model_copy(update={"mistake": "inflated"}))
    assert (submitted.is_new, submitted.status, submitted.reason) == (False, "rejected", "anchor")
    assert (await memory.submit(of_step(pair, "anchor", 2))).reason == "anchor_trace"
    await memory.submit(pair)
    assert (await memory.submit(of_step(pair, "anchor", 2))).reason == "anchor_trace"
    with pytest.raises(DataError, match="never learns from"):
        await memory.add_anchors([make_pair(3, trace="more"), of_step(pair, "more", 3)])
    with pytest.raises(DataError, match=f"made of trace trace, and so was stored pair {pair.id}"):
        await memory.add_anchors([make_pair(4)])
    assert await memory.anchors() == (anchor,)
    (stored,) = await memory.pairs()
    assert (stored.pair, stored.origins) == (pair, (Origin(trace_id="trace", step=2),))


async def test_forgetting_a_trace_leaves_nothing_of_it(path: Path) -> None:
    secret, kept = "Xylophon-Kwijibo", make_pair(1, trace="kept")
    async with MemoryStore(path) as memory:
        forgotten = [make_pair(n, trace="gone", note=secret) for n in (2, 3)]
        await promote(memory, [forgotten[0], kept])
        await memory.submit(of_step(forgotten[1], "another", 4))
        await memory.submit(forgotten[1])
        await memory.open_trace("gone", secret)
        await memory.append("gone", event(0, secret))
        removed = await memory.forget("gone")
        assert (removed.trace_removed, removed.n_events, removed.n_anchors) == (True, 1, 0)
        assert {pair.id for pair in forgotten} == set(removed.pair_ids)
        assert await memory.find(secret) == ()
        assert await memory.trace("gone") is None
        assert [len(test.pair_ids) for test in await memory.tests()] == [2]
        assert [(one.pair, one.status) for one in await memory.pairs()] == [(kept, "promoted")]
        await memory.add_anchors([make_pair(4, trace="gone", note=secret)])
        again = await memory.forget("gone")
        assert (again.trace_removed, again.pair_ids, again.n_anchors) == (False, (), 1)
        assert await memory.anchors() == ()
    left = await anyio.Path(path).read_bytes()
    for word in (b"Xylophon", b"xylophon", b"kwijibo"):
        assert word not in left


async def test_replies_to_calibrations_questions_are_forgotten_on_demand(path: Path) -> None:
    """They may quote a trace in a file that runs share: all of them go, and those of the runs stay."""
    asked = ("critic/score", "contrast/mistake", "judge/compare", "meta_judge/evaluation")
    secret = "Xylophon-Kwijibo"
    async with MemoryStore(path) as memory, open_store(path) as calls:
        keys = [await keep_reply(calls, question, f"{secret} {question}") for question in asked]
        kept = await keep_reply(calls, "target/rollout", "An answer of a run.")
        await memory.open_trace("t", "p")
        first = await memory.forget("t")
        assert (first.trace_removed, first.n_responses, first.n_responses_left) == (True, 0, len(asked))
        assert await calls.find_response(keys[0]) is not None
        second = await memory.forget("t", calls=True)
        assert (second.trace_removed, second.n_responses, second.n_responses_left) == (False, len(asked), 0)
        assert [await calls.find_response(key) for key in keys] == [None] * len(asked)
        assert await calls.find_response(kept) is not None
    assert secret.encode() not in await anyio.Path(path).read_bytes()


def read_word(path: Path, word: bytes) -> set[str]:
    files = [file for file in path.parent.iterdir() if file.name.startswith(path.name)]
    return {file.name for file in files if word in file.read_bytes().lower()}


async def test_a_reader_keeps_the_log_and_forgetting_again_empties_it(path: Path) -> None:
    async with MemoryStore(path, lock_timeout=0.05) as memory:
        await memory.open_trace("t", "p")
        for number in range(20):
            await memory.append("t", event(number, "zebrafink " + "pad " * 400))
            await memory.submit(make_pair(number, note="zebrafink", trace="t"))
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN")
            other.execute("SELECT count(*) FROM traces").fetchone()
            for _ in range(2):
                assert (await memory.forget("t")).remains_in_wal
                assert read_word(path, b"zebrafink") == {"memory.db-wal"}
        assert not (await memory.forget("t")).remains_in_wal
        assert read_word(path, b"zebrafink") == set()


def event(step: int, note: str = "") -> ScoreEvent:
    transition = Transition(before="", action=Action(name="act"), after={"note": note, "odd": "\udfff"})
    evaluation = Evaluation(progress_before=0, progress_after=step % 10, reasoning="r")
    return ScoreEvent(step=step, transition=transition, evaluation=evaluation)


async def test_a_trace_comes_back_as_it_was_appended(memory: MemoryStore) -> None:
    for _ in range(2):
        await memory.open_trace("t", "Do it.")
    assert await memory.append("t", event(1))
    assert await memory.append("t", event(0))
    assert not await memory.append("t", event(1))
    with pytest.raises(DataError, match=r"'Do something else.'.* 'Do it.'"):
        await memory.open_trace("t", "Do something else.")
    with pytest.raises(DataError, match="another event as step 0"):
        await memory.append("t", event(0, "changed"))
    with pytest.raises(DataError, match="not stored"):
        await memory.append("unknown", event(0))
    stored = await memory.trace("t")
    assert (stored.purpose, stored.events) == ("Do it.", (event(0), event(1)))
    assert await memory.trace_ids() == ("t",)


async def test_all_traces_of_a_pair_were_learned_from(memory: MemoryStore) -> None:
    pair, other = make_pair(1, trace="first"), make_pair(2, trace="first")
    for one in (pair, of_step(pair, "second", 4), of_step(pair, "second", 4), other):
        await memory.submit(one)
    stored = {one.pair.id: one.origins for one in await memory.pairs()}
    assert stored[pair.id] == (Origin(trace_id="first", step=1), Origin(trace_id="second", step=4))
    snapshot = await take_snapshot(memory)
    assert snapshot.learned.trace_ids == {"first", "second"}
    assert {one.id for one in snapshot.list_testable_pairs([])} == {pair.id, other.id}
    assert snapshot.list_testable_pairs([Trace("p", id="second")]) == (other,)
    assert snapshot.list_testable_pairs([Trace("p", id="first")]) == ()


TEXTS = st.text(st.characters() | st.sampled_from("\ud800\udfff\0\n\x85\u2028"), max_size=8)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)
LONG: JsonValue = {"digits": 10**5000}


def odd_event(value: JsonValue) -> ScoreEvent:
    step = Transition(before=value, action=Action(name="a", arguments=value), after="b")
    return ScoreEvent(step=0, transition=step)


def odd_pair(value: JsonValue) -> ContrastPair:
    return make_pair(1).model_copy(
        update={"transition": odd_event(value).transition, "reason": "half \ud800"}
    )


def write_exactly(value: JsonValue) -> str:
    return json.dumps(value, sort_keys=True)


@cases(60, 10)
@given(VALUES)
async def test_what_is_stored_comes_back_exactly(
    tmp_path_factory: pytest.TempPathFactory, value: JsonValue
) -> None:
    folder = tmp_path_factory.mktemp("odd")
    event, pair, anchor = odd_event(value), odd_pair(value), of_step(odd_pair([value]), "other", 0)
    async with MemoryStore(folder / "a.db") as memory:
        await memory.open_trace("t", "purpose \ud800")
        assert await memory.append("t", event)
        assert not await memory.append("t", event)
        await memory.submit(pair)
        await memory.add_anchors([anchor])
        lines = [line async for line in memory.export_lines()]
    async with MemoryStore(folder / "b.db") as other:
        await other.import_lines(lines)
        trace = await other.trace("t")
        assert trace.purpose == "purpose \ud800"
        assert write_exactly(trace.events[0].transition.before) == write_exactly(value)
        (stored,) = await other.pairs()
        assert (stored.pair, stored.pair.id) == (pair, pair.id)
        assert write_exactly(stored.pair.transition.before) == write_exactly(value)
        assert [one.id for one in await other.anchors()] == [anchor.id]


async def test_what_no_file_can_hold_is_refused(memory: MemoryStore) -> None:
    """Numbers of too many digits, half of a surrogate pair in a name, a step beyond 64 bits: one sentence."""
    await memory.open_trace("t", "p")
    half = "t\ud800"
    refused = (
        (memory.append("t", odd_event(LONG)), r"step 0 of trace t cannot be stored: .*digits"),
        (memory.submit(odd_pair(LONG)), r"a pair made of step 1 of trace trace cannot be stored: .*digits"),
        (memory.add_anchors([odd_pair(LONG)]), "write the number as a text"),
        (memory.open_trace(half, "p"), "holds half of a surrogate pair"),
        (memory.trace(half), "holds half of a surrogate pair"),
        (memory.forget(half), "holds half of a surrogate pair"),
        (memory.submit(of_step(make_pair(1), half, 0)), "holds half of a surrogate pair"),
        (memory.append("t", odd_event("s").model_copy(update={"step": 10**30})), "more than 64 bits"),
    )
    for work, problem in refused:
        with pytest.raises(DataError, match=problem):
            await work
    assert (await memory.pairs(), await memory.anchors()) == ((), ())


async def test_what_was_opened_to_be_read_is_not_written(path: Path, tmp_path: Path) -> None:
    async with MemoryStore(path) as writer:
        await writer.open_trace("monday", "p")
    async with MemoryStore(path, read_only=True) as reader, MemoryStore(path) as writer:
        for work in (reader.submit(make_pair(2)), reader.forget("monday")):
            with pytest.raises(StoreError, match="opened read-only"):
                await work
        await writer.open_trace("tuesday", "p")
        assert await reader.trace_ids() == ("monday", "tuesday")
    sqlite3.connect(tmp_path / "other.db").close()
    for name, problem in (("none.db", "cannot be opened"), ("other.db", "reflact has stored nothing in it")):
        with pytest.raises(StoreError, match=problem):
            async with MemoryStore(tmp_path / name, read_only=True):
                pass
    assert {file.name async for file in anyio.Path(tmp_path).iterdir()} == {"memory.db", "other.db"}
