"""Runs that end between any two writes: what is on disk then leads to the end of the unbroken run.

A run writes, one after another, the calls that it is about to make, what they gave, rollouts, outcomes that
it is about to use, commits and events. At chosen writes its folder is copied as a killed process would
leave it, with what is on disk and nothing else, and a new trainer goes on from the copy.
"""

from __future__ import annotations

import re
import sqlite3
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from shutil import copyfile, copytree
from typing import Any, NamedTuple

import anyio
import pytest
from anyio.lowlevel import checkpoint
from pydantic import JsonValue

import pure_server
from pure_world import Ended, PureNetwork, TooLong, differences, left_by, rows, settings, write_world
from reflact import Trainer, events
from reflact.config import loading
from reflact.messages import CallReservation, StoredResponse
from reflact.records import CandidateReview, CommitRecord, RunState, StepRecord
from reflact.store.database import Database
from reflact.store.outcomes import SQLiteDecisionLog
from reflact.store.runs import RECORD_TYPES, SQLiteRunStore
from reflact.store.schema import SCHEMA
from reflact.trainer import describe_verdict
from reflact.training.loop import store_summary, train_to_end
from reflact.training.open_run import connect_run, start
from reflact.training.plan import Overrides, prepare_run
from reflact.types import Rollout, Skill

Wrote = Callable[[str], None]
Moment = Callable[[Sequence[str]], str | None]
"""Finds a write among all of a run."""

MODES: Mapping[str, Mapping[str, Any]] = {
    "patch": {},
    "rewrite": {"update": {"mode": "rewrite"}, "select": {"lr_control": "autonomous"}},
    "full_rewrite": {"update": {"mode": "full_rewrite"}, "appendix": {"enabled": False}},
    "ranked": {"target": {"deterministic": False}},
    "search": {"search": {"sources": ["rewrite", "examples", "edits"]}},
}
POINTS = {"patch": 22, "rewrite": 24, "full_rewrite": 20, "ranked": 22, "search": 22}
STAGES = ("analyst_failure", "analyst_success", "lapse_failure", "consolidate", "commit promotion")
SEEDS = (7, 4, 5, 6, 8, 9, 11)
"""Where a run is looked for in which everything happens: the first of them should do."""


def crowded(body: dict[str, Any], call_id: str) -> str:
    if re.match(r"optimizer/merge/step=4/part=\w+%2F\d+%2F0/", call_id):
        raise TooLong
    return pure_server.answer(body, call_id)


class Watched(SQLiteRunStore):
    """A store that tells of each write, by a name of its own, once it is on disk."""

    def __init__(self, database: Database, wrote: Wrote) -> None:
        super().__init__(database)
        self._wrote = wrote

    def decision_log(self, run_id: str) -> SQLiteDecisionLog:
        return WatchedDecisionLog(self._database, run_id, self._wrote)

    async def reserve(self, reservation: CallReservation) -> None:
        await super().reserve(reservation)
        self._wrote(f"reservation {reservation.call_id}")

    async def store_response(self, reply: StoredResponse, reservation: CallReservation) -> None:
        await super().store_response(reply, reservation)
        self._wrote(f"reply {reservation.call_id}")

    async def store_rollout(self, rollout: Rollout) -> None:
        await super().store_rollout(rollout)
        self._wrote(f"rollout {rollout.trial} {rollout.key}")

    async def commit(
        self, run_id: str, record: CommitRecord | None, state: RunState, skills: Sequence[Skill]
    ) -> None:
        await super().commit(run_id, record, state, skills)
        kind = next((n for n, kind in RECORD_TYPES.items() if isinstance(record, kind)), "first")
        self._wrote(f"commit {kind} {state.step}")

    async def append_event(self, event: events.Event) -> bool:
        is_new = await super().append_event(event)
        if is_new:
            self._wrote(f"event {event.kind} {event.id}")
        return is_new


class WatchedDecisionLog(SQLiteDecisionLog):
    def __init__(self, database: Database, run_id: str, wrote: Wrote) -> None:
        super().__init__(database, run_id)
        self._wrote = wrote

    async def put(self, step: int, label: str, value: JsonValue) -> None:
        await super().put(step, label, value)
        self._wrote(f"note {step} {label}")


async def watched(config: Mapping[str, Any], wrote: Wrote) -> list[str]:
    """Train to the end over a watched store, and return the samples that were asked for."""
    network = PureNetwork(crowded)
    plan = prepare_run(loading.load_config(config), Overrides(transport=network))
    async with Database(plan.config.out_dir / "run.db", SCHEMA) as database:
        store = Watched(database, wrote)
        async with connect_run(plan, store, approve=Approver()) as run:
            run.describe = describe_verdict
            await start(run)
            await train_to_end(run)
            await store_summary(run, "completed", None)
    return network.samples


class Approver:
    """Approves what comes in steps 3 to 5, and nothing else; notes what it was asked about.

    Args:
        turned: The step and part about which it has changed its mind.
    """

    def __init__(self, *turned: tuple[int, str]) -> None:
        self._turned = turned
        self.asked: list[tuple[int, str]] = []

    async def __call__(self, review: CandidateReview) -> bool | str:
        self.asked.append((review.step, review.part))
        await checkpoint()
        agrees = (review.step in {3, 4, 5}) is not ((review.step, review.part) in self._turned)
        return True if agrees else "let it be"


class Whole(NamedTuple):
    """An unbroken run: its configuration, what it left, what it asked for and wrote, in order."""

    config: dict[str, Any]
    ended: Ended
    samples: list[str]
    writes: list[str]


def unbroken(world: Path, out_dir: Path, **sections: Any) -> Whole:
    config = settings(world, out_dir, **sections)
    writes: list[str] = []
    samples = anyio.run(watched, config, writes.append)
    return Whole(config, left_by(out_dir), samples, writes)


def killed_at(whole: Whole, writes: Collection[str], folder: Path) -> dict[str, Path]:
    """Train once more and return, for each of the writes, the folder as it was right after it.

    A rollout that an early decision cuts off in one run and not in the other leaves no folder.
    """
    out_dir = folder / "run"
    copies = {write: folder / f"{n}" for n, write in enumerate(writes)}

    def copy(write: str) -> None:
        if write in copies and not copies[write].exists():
            _copy(out_dir, copies[write])

    anyio.run(watched, {**whole.config, "out_dir": str(out_dir)}, copy)
    return copies


def _copy(out_dir: Path, folder: Path) -> None:
    folder.mkdir()
    with (
        closing(sqlite3.connect(out_dir / "run.db")) as now,
        closing(sqlite3.connect(folder / "run.db")) as then,
    ):
        now.backup(then)
    if (out_dir / "skills").exists():
        copytree(out_dir / "skills", folder / "skills")
    if (out_dir / "best_skill.md").exists():
        copyfile(out_dir / "best_skill.md", folder / "best_skill.md")


def assert_goes_on(
    whole: Whole,
    folder: Path,
    *,
    network: PureNetwork | None = None,
    approver: Approver | None = None,
) -> None:
    """Check that a new trainer goes on in a folder to the end of the unbroken run, paying nothing twice."""
    network = network or PureNetwork(crowded)
    paid = settled(folder)
    config = {**whole.config, "out_dir": str(folder)}
    summary = anyio.run(Trainer(config, transport=network, approve=approver or Approver()).train)
    assert (summary.status, summary.reason) == ("completed", None)
    assert differences(left_by(folder), whole.ended) == []
    assert not paid & set(network.samples)
    assert max(Counter(network.samples).values(), default=1) == 1
    assert settled(folder) == settled(Path(whole.config["out_dir"]))
    assert set(network.samples) <= set(whole.samples)


def settled(folder: Path) -> set[str]:
    return {call_id for (call_id,) in rows(folder, "SELECT call_id FROM calls WHERE state = 'settled'")}


def first(pattern: str) -> Moment:
    return lambda writes: next((write for write in writes if re.match(pattern, write)), None)


def last(pattern: str) -> Moment:
    return lambda writes: first(pattern)(writes[::-1])


def judge_guidance(writes: Sequence[str]) -> str | None:
    """The gate had asked for a second trial of the guidance and got some of it."""
    reply = last(GUIDANCE)(writes)
    return None if reply is None else first(r"rollout 1 |commit")(writes[writes.index(reply) :])


GUIDANCE = r"reply optimizer/slow_update/step=4/"
MOMENTS: Mapping[str, Moment] = {
    "a merge failed for good, and so did the ones above it": last(r"note 4 no_reply/optimizer/merge/"),
    "the gate got some of a third trial": first(r"rollout 2 "),
    "the slow update had its reply, and the gate had not begun": last(GUIDANCE),
    "the gate got some of a second trial of the guidance": judge_guidance,
    "a candidate was vetoed": first(r"note [12] approval/"),
    "a candidate was approved": first(r"note [345] approval/"),
    "the second epoch was committed": first(r"commit epoch 4$"),
    "the last skill was compared with the best": first(r"commit promotion 6$"),
    "the test split was opened": first(r"note 0 test_opening/1$"),
}


def kind_of(write: str) -> str:
    """Return what a write is about: a call's purpose, a commit's kind, an outcome's, or just its sort."""
    match write.split(" "):
        case ["reservation" | "reply", call_id]:
            return call_id.split("/")[1]
        case ["commit", kind, *_]:
            return f"commit {kind}"
        case ["note", _, *label]:
            return f"note {label[0].split('/')[0]}"
        case [sort, *_]:
            return sort
    raise AssertionError(write)


def chosen(writes: Sequence[str], most: int) -> list[str]:
    """Return so many writes: of every kind, in every part between two commits, and evenly over the rest."""
    part_of, part = {}, 0
    for write in writes:
        part_of[write] = part
        part += write.startswith("commit ")
    kinds = Counter(map(kind_of, writes))
    picked: list[str] = []
    for kind in sorted(kinds, key=lambda k: (kinds[k], k)):
        known = {part_of[write] for write in picked}
        mine = [write for write in writes if kind_of(write) == kind]
        fresh = [write for write in mine if part_of[write] not in known] or mine
        picked.append(fresh[len(fresh) // 2])
    for number in sorted({*part_of.values()} - {part_of[write] for write in picked}):
        mine = [write for write in writes if part_of[write] == number]
        picked.append(mine[len(mine) // 2])
    assert len(picked) <= most, f"{len(picked)} points are needed"
    return picked + evenly([write for write in writes if write not in picked], most - len(picked))


def evenly(writes: Sequence[str], count: int) -> list[str]:
    return [writes[(2 * n + 1) * len(writes) // (2 * count)] for n in range(count)]


class Killed(NamedTuple):
    """An unbroken run, the chosen writes, and the folders of runs that were killed after some writes."""

    whole: Whole
    points: list[str]
    folders: dict[str, Path]

    def copy(self, write: str, folder: Path) -> Path:
        return copytree(self.folders[write], folder / "killed")

    def at(self, moment: str, folder: Path) -> Path:
        return self.copy(self.write(moment), folder)

    def write(self, moment: str) -> str:
        return MOMENTS[moment](self.whole.writes)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_world(tmp_path_factory.mktemp("world"))


def is_eventful(whole: Whole, mode: str) -> bool:
    """Return whether candidates were accepted and rejected, and in patch mode all named moments came.

    With the stages, the last skill was also compared with the best one. The model of these tests writes no
    whole document that is accepted.
    """
    if mode == "full_rewrite":
        return True
    actions = {record.verdict.action for record in steps_of(whole)}
    named = mode != "patch" or all(moment(whole.writes) in whole.writes for moment in MOMENTS.values())
    refused = {"set_aside", "return"} if mode == "ranked" else {"reject"}
    named &= mode == "search" or any(w.startswith("commit promotion") for w in whole.writes)
    return named and not actions.isdisjoint(refused) and not actions.isdisjoint({"accept", "accept_new_best"})


def steps_of(whole: Whole) -> list[StepRecord]:
    return [StepRecord.model_validate_json(c[3]) for c in whole.ended.commits if c[1] == "step"]


Modes = Callable[[str], Killed]


@pytest.fixture(scope="module")
def in_mode(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Modes:
    made: dict[str, Killed] = {}

    def killed(mode: str) -> Killed:
        if mode not in made:
            runs = (unbroken(world, tmp_path_factory.mktemp(mode), seed=n, **MODES[mode]) for n in SEEDS)
            whole = next(run for run in runs if is_eventful(run, mode))
            points = chosen(whole.writes, POINTS[mode])
            named = [moment(whole.writes) for moment in MOMENTS.values()] if mode == "patch" else []
            writes = {*points, *(write for write in named if write is not None)}
            made[mode] = Killed(whole, points, killed_at(whole, writes, tmp_path_factory.mktemp("killed")))
        return made[mode]

    return killed


@pytest.mark.slow
@pytest.mark.parametrize(
    "mode", [pytest.param(mode, marks=[pytest.mark.slow] if mode != "patch" else []) for mode in MODES]
)
def test_points_lie_everywhere(in_mode: Modes, mode: str) -> None:
    killed = in_mode(mode)
    kinds = set(map(kind_of, killed.whole.writes))
    assert kinds >= {"rollout", "event", "commit first", "commit step"}
    assert kinds >= {"note mode", "note test_opening", "note approval"}
    if mode == "search":
        assert kinds >= {"write_document", "analyst_failure"}
        assert set(map(kind_of, killed.points)) == kinds
        return
    assert kinds >= {"slow_update", "meta_skill", "commit epoch"}
    if mode == "full_rewrite":
        assert "write_document" in kinds
    else:
        assert kinds >= {*STAGES, "merge", "ranking", "note no_reply"}
    assert ("step_size" in kinds, "rewrite" in kinds) == ((mode == "rewrite"),) * 2
    assert set(map(kind_of, killed.points)) == kinds
    assert sum(POINTS.values()) >= 50


@pytest.mark.parametrize(
    ("mode", "number"),
    [
        pytest.param(mode, n, marks=[pytest.mark.slow] if mode != "patch" or n % 7 != 3 else [])
        for mode in MODES
        for n in range(POINTS[mode])
    ],
)
def test_a_killed_run_ends_as_the_unbroken_one(
    in_mode: Modes, mode: str, number: int, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    killed = in_mode(mode)
    record_property("killed", f"after {killed.points[number]}")
    assert_goes_on(killed.whole, killed.copy(killed.points[number], tmp_path))


def test_a_refused_merge_stays_refused(in_mode: Modes, tmp_path: Path) -> None:
    """Killed between a merge that failed for good and its fallback: a model that mends its ways is late."""
    killed = in_mode("patch")
    mended = PureNetwork(partial(pure_server.answer, spoiled=None))
    folder = killed.at("a merge failed for good, and so did the ones above it", tmp_path)
    assert_goes_on(killed.whole, folder, network=mended)
    assert any(record.merged.fallbacks for record in steps_of(killed.whole))


EPOCH_TOLD = "SELECT 1 FROM outcomes WHERE value LIKE '%\"epoch_committed\"%' AND value LIKE '%\"epoch\":2%'"
FINAL_TOLD = "SELECT 1 FROM outcomes WHERE value LIKE '%\"final_score_measured\"%'"
EPOCH_ENDED = "SELECT 1 FROM commits WHERE kind = 'epoch' AND step = 4"


@pytest.mark.parametrize(
    ("moment", "later"),
    [
        pytest.param("the gate got some of a third trial", None, marks=pytest.mark.slow),
        ("the slow update had its reply, and the gate had not begun", EPOCH_ENDED),
        ("the gate got some of a second trial of the guidance", EPOCH_ENDED),
        ("the second epoch was committed", EPOCH_TOLD),
        ("the last skill was compared with the best", FINAL_TOLD),
        ("the test split was opened", FINAL_TOLD),
    ],
)
def test_a_run_killed_at_a_named_moment_goes_on(
    in_mode: Modes, moment: str, later: str | None, tmp_path: Path
) -> None:
    """What comes ``later`` is not there yet; an epoch's event comes once, and one opening is counted."""
    killed = in_mode("patch")
    folder = killed.at(moment, tmp_path)
    assert later is None or not rows(folder, later)
    assert_goes_on(killed.whole, folder)
    assert len(rows(folder, EPOCH_TOLD)) == 1
    assert killed.whole.ended.summary.test_openings == 1


@pytest.mark.parametrize("moment", ["a candidate was vetoed", "a candidate was approved"])
def test_an_approver_is_asked_once(in_mode: Modes, moment: str, tmp_path: Path) -> None:
    """Killed between a veto or an approval and the commit: one who has changed his mind is not asked."""
    killed = in_mode("patch")
    write = killed.write(moment)
    step, part = int(write.split(" ")[1]), write.removeprefix("note ").split("/")[1]
    approver = Approver((step, part))
    assert_goes_on(killed.whole, killed.copy(write, tmp_path), approver=approver)
    assert (step, part) not in approver.asked
