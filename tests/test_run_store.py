"""The SQLite store: what it keeps, what it refuses, and what it says when the file is no good."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import AsyncIterator
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path

import pytest

from reflact.data import DataSet
from reflact.errors import RunConflict, StoreError
from reflact.messages import CallReservation, StoredResponse
from reflact.records import RunState, SkillVersion, StepRecord, Usage
from reflact.store.lock import own_run
from reflact.store.runs import SQLiteRunStore, open_store
from reflact.types import (
    AggregateResult,
    Candidate,
    Item,
    Measurement,
    Rollout,
    Score,
    SelectResult,
    Skill,
    Split,
    Verdict,
)

FIRST = Skill(text="# Skill\n")
SECOND = Skill(text="# Skill\n\nUse {braces}, $dollars and \x00.\n")
IDENTITY = {"seed": 42, "train.batch_size": 40}


def initial() -> RunState:
    version = SkillVersion(number=0, skill_hash=FIRST.hash, origin="initial", score=0.25)
    return RunState(commits=1, current=version, best=version)


def made_by(step: int, skill: Skill = SECOND, score: float | None = 0.5) -> SkillVersion:
    return SkillVersion(number=step, skill_hash=skill.hash, origin=f"step {step}", score=score)


def after(step: int, skill: Skill, score: float | None = 0.5) -> RunState:
    version = made_by(step, skill, score)
    return RunState(step=step, commits=step + 1, current=version, best=version, latest_version=step)


def record(step: int, reason: str = "greater") -> StepRecord:
    return StepRecord(
        step=step,
        epoch=1,
        skill_before=FIRST.hash,
        item_ids=("a", "b"),
        rollout=Measurement(skill_hash=FIRST.hash, split=Split.train, n=2, hard=0.5, soft=0.1 + 0.2),
        n_failures=1,
        reports=(),
        merged=AggregateResult(),
        chosen=SelectResult(),
        edits=Candidate(skill=SECOND).results,
        candidate_hash=SECOND.hash,
        verdict=Verdict(action="accept_new_best", reason=reason),
        created_versions=(made_by(step),),
        current=made_by(step),
        best=made_by(step),
    )


def reserved_call(key: str) -> CallReservation:
    return CallReservation(
        key=key, run_id="r", call_id="s", role="target", purpose="rollout", endpoint="http://x", model="m"
    )


def reply(key: str) -> StoredResponse:
    usage = Usage(calls=1, input_tokens=10, cached_tokens=3, output_tokens=2)
    return StoredResponse(key=key, text="{}", usage=usage)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.db"


@pytest.fixture
async def store(path: Path) -> AsyncIterator[SQLiteRunStore]:
    async with open_store(path) as opened:
        await opened.open_run("r", IDENTITY, {"seed": 42})
        yield opened


async def test_a_call_counts_at_its_worst_case_until_it_is_settled(store: SQLiteRunStore) -> None:
    """In flight, cut off, and answered without counts: what nobody knows is booked at the most it can be."""
    worst = Usage(calls=1, input_tokens=100, output_tokens=50, usd=0.25)
    calls = [reserved_call(key).model_copy(update={"worst_case": worst}) for key in ("a", "b", "c", "d")]
    for call in calls:
        await store.reserve(call)
    counted = Usage(calls=1, input_tokens=10, output_tokens=5, usd=0.03)
    for call, usage in zip(calls, (counted, Usage(calls=1, uncounted=1)), strict=False):
        await store.store_response(StoredResponse(key=call.key, text="", usage=usage), call)
    await store.release(calls[2])
    (spend,) = await store.spend("r")
    assert spend.usage == Usage(calls=2, input_tokens=10, output_tokens=5, usd=0.03, uncounted=1)
    assert spend.unsettled == 1
    assert spend.worst_case == Usage(calls=1, input_tokens=200, output_tokens=100, usd=0.5)
    await store.open_run("r", IDENTITY, {})
    assert await store.spend("r") == (spend,)


async def test_a_commit_takes_as_much_room_at_the_end_as_at_the_beginning(path: Path) -> None:
    state = initial()
    async with open_store(path) as store:
        await store.open_run("r", IDENTITY, {})
        await store.commit("r", None, state, [FIRST])
        for step in range(1, 201):
            document = Skill(text=f"# Skill {step}\n")
            version = made_by(step, document)
            made = {"candidate_hash": document.hash, "created_versions": (version,)}
            made |= {"current": version, "best": version}
            done = record(step).model_copy(update=made)
            state = state.after([done])
            await store.commit("r", done, state, [document])
        assert await store.open_run("r", IDENTITY, {}) == state
        with closing(sqlite3.connect(path)) as database:
            sql = "SELECT length(record) FROM commits WHERE number > 1 ORDER BY number"
            sizes = [size for (size,) in database.execute(sql)]
    assert len(state.kept) == 200
    assert max(sizes[-10:]) < 1.1 * max(sizes[:10])


async def test_an_owner_that_was_replaced_writes_nothing(tmp_path: Path) -> None:
    """Without its lock files a run can be owned twice; the first owner is then refused at its next write."""
    path = tmp_path / "runs.db"
    with ExitStack() as stack:
        first = stack.enter_context(own_run(tmp_path / "a", path, "r"))
        identity = tmp_path / "runs.db-r.lock"
        async with open_store(path, ownership=first) as old:
            await old.open_run("r", IDENTITY, None)
            await old.commit("r", None, initial(), [FIRST])
            identity.rename(tmp_path / "aside")
            second = stack.enter_context(own_run(tmp_path / "b", path, "r"))
            async with open_store(path, ownership=second) as new:
                assert await new.open_run("r", IDENTITY, None) == initial()
                identity.rename(tmp_path / "second")
                (tmp_path / "aside").rename(identity)
                for write in (
                    lambda: old.commit("r", record(1), after(1, SECOND), [SECOND]),
                    lambda: old.reserve(reserved_call("k")),
                    lambda: old.decision_log("r").put(1, "x", 1),
                    lambda: old.finish("r", "completed", None, "{}"),
                ):
                    with pytest.raises(StoreError, match=f"run r was continued by process {os.getpid()} on "):
                        await write()
                assert await new.records("r") == ()
                assert await new.spend("r") == ()


async def test_a_changed_identity_is_refused_by_name(store: SQLiteRunStore) -> None:
    with pytest.raises(RunConflict) as refusal:
        await store.open_run("r", {"seed": 43, "target.kind": "chat", "train.batch_size": 40}, {})
    message = str(refusal.value)
    assert "seed was 42 and is now 43" in message
    assert 'target.kind was absent and is now "chat"' in message
    assert "batch_size" not in message
    assert "out_dir" in message


async def test_a_commit_is_all_or_nothing(store: SQLiteRunStore) -> None:
    extra = Skill(text="extra")
    with pytest.raises(StoreError, match="not stored"):
        await store.commit("r", record(1), after(1, SECOND), [extra])
    assert await store.records("r") == ()
    with pytest.raises(StoreError, match="has no skill"):
        await store.skill(extra.hash)


DAMAGE = {
    "commit": "match its checksum",
    "decision": "decision 1/merge of run r does not match its checksum",
    "response": "response k does not match its checksum",
    "rollout": "rollout k does not match its checksum",
    "skill": "does not match its checksum",
    "data": "does not match its checksum",
}


@pytest.mark.parametrize("kind", DAMAGE)
async def test_a_changed_byte_is_noticed(store: SQLiteRunStore, path: Path, kind: str) -> None:
    data = DataSet(train=(Item(id="1", input="no"),), val=(), test=())
    await store.commit("r", record(1), after(1, SECOND), [SECOND])
    await store.decision_log("r").put(1, "merge", "the outcome")
    await store.store_response(reply("k"), reserved_call("k"))
    await store.store_rollout(Rollout(key="k", item_id="i", skill_hash=FIRST.hash, score=Score.of(1)))
    await store.store_items(data)
    reads = {
        "commit": partial(store.records, "r"),
        "decision": partial(store.decision_log("r").get, 1, "merge"),
        "response": partial(store.find_response, "k"),
        "rollout": partial(store.find_rollouts, ["k"]),
        "skill": partial(store.skill, SECOND.hash),
        "data": partial(store.items, data.fingerprint),
    }
    await reads[kind]()
    column, rows = ("record", "commits") if kind == "commit" else ("value", f"outcomes WHERE kind = '{kind}'")
    with closing(sqlite3.connect(path)) as other, other:
        ((text,),) = other.execute(f"SELECT {column} FROM {rows}").fetchall()
        changed = text.replace("1", "2", 1) if "1" in text else text.replace("o", "a", 1)
        assert changed != text
        changes = rows.replace("commits", "commits SET record = ?").replace(
            "outcomes", "outcomes SET value = ?"
        )
        other.execute(f"UPDATE {changes}", (changed,))
    with pytest.raises(StoreError, match=DAMAGE[kind]) as damaged:
        await reads[kind]()
    assert "put back a copy of it, or choose another out_dir" in str(damaged.value)
