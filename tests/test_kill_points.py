"""Runs that end between any two writes: what is on disk then leads to the end of the unbroken run.

A run writes, one after another, the calls that it is about to make, what they gave, rollouts, outcomes that
it is about to use, commits and events. At chosen writes its folder is copied as a killed process would
leave it, with what is on disk and nothing else, and a new trainer goes on from the copy.
"""

from __future__ import annotations

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
from pure_world import Ended, PureNetwork, differences, left_by, rows, settings, write_world
from reflact import Trainer, events, loading, wiring
from reflact.calls import Intent, StoredReply
from reflact.ports import Committed
from reflact.records import Review, RunState, StepRecord
from reflact.run import Run
from reflact.store.database import Database
from reflact.store.migrations import MIGRATIONS
from reflact.store.runs import SQLiteJournal, SQLiteStore
from reflact.store.writing import KINDS
from reflact.types import Rollout, Skill

Wrote = Callable[[str], None]

MODES: Mapping[str, Mapping[str, Any]] = {
    "patch": {},
    "rewrite": {"seed": 4, "update": {"mode": "rewrite"}, "select": {"lr_control": "autonomous"}},
    "full_rewrite": {"seed": 5, "update": {"mode": "full_rewrite"}},
}
POINTS = {"patch": 20, "rewrite": 22, "full_rewrite": 18}
EARLY_POINTS = 6


class Watched(SQLiteStore):
    """A store that tells of each write, by a name of its own, once it is on disk."""

    def __init__(self, database: Database, wrote: Wrote) -> None:
        super().__init__(database)
        self._wrote = wrote

    def journal(self, run_id: str) -> SQLiteJournal:
        return WatchedJournal(self._database, run_id, self._wrote)

    async def intend(self, intent: Intent) -> None:
        await super().intend(intent)
        self._wrote(f"intent {intent.sample}")

    async def keep_reply(self, reply: StoredReply, intent: Intent) -> None:
        await super().keep_reply(reply, intent)
        self._wrote(f"reply {intent.sample}")

    async def keep_rollout(self, rollout: Rollout) -> None:
        await super().keep_rollout(rollout)
        self._wrote(f"rollout {rollout.trial} {rollout.key}")

    async def commit(
        self, run_id: str, record: Committed | None, state: RunState, skills: Sequence[Skill]
    ) -> None:
        await super().commit(run_id, record, state, skills)
        kind = "first" if record is None else KINDS[type(record)]
        self._wrote(f"commit {kind} {state.step}")

    async def append(self, event: events.Event) -> bool:
        is_new = await super().append(event)
        if is_new:
            self._wrote(f"event {event.kind} {event.id}")
        return is_new


class WatchedJournal(SQLiteJournal):
    """The journal of a ``Watched`` store."""

    def __init__(self, database: Database, run_id: str, wrote: Wrote) -> None:
        super().__init__(database, run_id)
        self._wrote = wrote

    async def note(self, step: int, label: str, value: JsonValue) -> None:
        await super().note(step, label, value)
        self._wrote(f"note {step} {label}")


async def watched(config: Mapping[str, Any], wrote: Wrote) -> list[str]:
    """Train to the end over a watched store, and return the samples that were asked for."""
    network = PureNetwork()
    plan = wiring.plan(loading.load(config), wiring.Passed(transport=network))
    async with Database(plan.config.out_dir / "run.db", MIGRATIONS) as database:
        store = Watched(database, wrote)
        async with wiring.furnished(plan, wiring.Passed(), store, network) as house:
            run = Run(house, _unheard, Approver())
            await run.open()
            await run.complete()
    return network.samples


async def _unheard(event: events.Event) -> None:
    """Take an event and tell nobody."""


class Approver:
    """Approves everything but the last promotion; notes what it was asked about.

    Args:
        turned: The step and part about which it has changed its mind.
    """

    def __init__(self, *turned: tuple[int, str]) -> None:
        self._turned = turned
        self.asked: list[tuple[int, str]] = []

    async def __call__(self, review: Review) -> bool | str:
        self.asked.append((review.step, review.part))
        await checkpoint()
        agrees = (review.part == "promotion") is ((review.step, review.part) in self._turned)
        return True if agrees else "let it be"


class Whole(NamedTuple):
    """An unbroken run: its configuration, what it left, what it asked for and wrote, in order."""

    config: dict[str, Any]
    ended: Ended
    samples: list[str]
    writes: list[str]


def unbroken(world: Path, out_dir: Path, **sections: Any) -> Whole:
    """Train to the end."""
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
    but: tuple[str, ...] = (),
) -> None:
    """Check that a new trainer goes on in a folder to the end of the unbroken run, paying nothing twice."""
    network = network or PureNetwork()
    paid = {sample for (sample,) in rows(folder, "SELECT sample FROM calls WHERE state = 'settled'")}
    config = {**whole.config, "out_dir": str(folder)}
    summary = anyio.run(Trainer(config, transport=network, approve=approver or Approver()).train)
    assert (summary.status, summary.reason) == ("completed", None)
    assert differences(left_by(folder), whole.ended, but=but) == []
    assert not paid & set(network.samples)
    if not but:
        assert max(Counter(network.samples).values(), default=1) == 1
        assert paid | set(network.samples) == set(whole.samples)


# -------------------------------------------------------------------------------------- named moments


def refused_merges(writes: Sequence[str]) -> str:
    """A merge failed for good, and so did the ones above it; no fallback was used."""
    return [w for w in writes if w.startswith("note 4 refusal/optimizer/merge/")][-1]


def longer_gate(writes: Sequence[str]) -> str:
    """The gate had asked for a third trial of a step's candidate and got some of it."""
    return _third_rollout(writes, "commit first 0", "commit step 1", trial=2)


def guidance_had(writes: Sequence[str]) -> str:
    """The slow update's reply was there; the gate had not begun."""
    return [w for w in writes if w.startswith("reply optimizer/slow_update/step=4/")][-1]


def guidance_judged(writes: Sequence[str]) -> str:
    """The gate had asked for a second trial of the guidance and got some of it."""
    return _third_rollout(writes, guidance_had(writes), "commit epoch 4", trial=1)


def _third_rollout(writes: Sequence[str], after: str, before: str, *, trial: int) -> str:
    between = writes[writes.index(after) : writes.index(before)]
    return [write for write in between if write.startswith(f"rollout {trial} ")][2]


def approved(writes: Sequence[str]) -> str:
    """A step's candidate was approved."""
    return next(w for w in writes if w.startswith("note 1 approval/step/"))


def vetoed(writes: Sequence[str]) -> str:
    """A promotion was vetoed."""
    return next(w for w in writes if w.startswith("note 6 approval/promotion/"))


NAMED: tuple[Callable[[Sequence[str]], str], ...] = (
    refused_merges,
    longer_gate,
    guidance_had,
    guidance_judged,
    approved,
    vetoed,
    lambda _: "commit epoch 4",
    lambda _: "commit promotion 6",
    lambda _: "note 0 opening/1",
)


# -------------------------------------------------------------------------------------- at every stage


def kind_of(write: str) -> str:
    """Return what a write is about: a call's purpose, a commit's kind, an outcome's, or just its sort."""
    match write.split(" "):
        case ["intent" | "reply", sample]:
            return sample.split("/")[1]
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
    """Return so many of the writes, as far apart as they can be."""
    return [writes[(2 * n + 1) * len(writes) // (2 * count)] for n in range(count)]


class Killed(NamedTuple):
    """An unbroken run, the chosen writes, and the folders of runs that were killed after some writes."""

    whole: Whole
    points: list[str]
    folders: dict[str, Path]

    def copy(self, write: str, folder: Path) -> Path:
        """Return a copy of what was left after a write."""
        return copytree(self.folders[write], folder / "killed")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data of all runs."""
    return write_world(tmp_path_factory.mktemp("world"))


Modes = Callable[[str], Killed]
TIMED = ("replies", "rollouts", "spend")
"""What is a matter of timing where evaluations stop early."""


@pytest.fixture(scope="module")
def in_mode(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Modes:
    """Give what was killed in an update mode."""
    made: dict[str, Killed] = {}

    def killed(mode: str) -> Killed:
        if mode not in made:
            whole = unbroken(world, tmp_path_factory.mktemp(mode), **MODES[mode])
            points = chosen(whole.writes, POINTS[mode])
            named = [find(whole.writes) for find in NAMED] if mode == "patch" else []
            folders = killed_at(whole, dict.fromkeys([*points, *named]), tmp_path_factory.mktemp("killed"))
            made[mode] = Killed(whole, points, folders)
        return made[mode]

    return killed


@pytest.mark.parametrize("mode", MODES)
def test_points_lie_everywhere(in_mode: Modes, mode: str) -> None:
    """The run has every stage, and the points at which it is killed lie in all of them."""
    killed = in_mode(mode)
    kinds = set(map(kind_of, killed.whole.writes))
    assert kinds >= {"rollout", "event", "slow_update", "meta_skill", "consolidate", "lapse_failure"}
    assert kinds >= {"commit first", "commit step", "commit epoch", "commit promotion"}
    assert kinds >= {"note mode", "note opening", "note refusal"}
    if mode == "full_rewrite":
        assert kinds >= {"analyst_failure", "analyst_success", "draft_merge"}
    else:
        assert kinds >= {"analyst_failure", "analyst_success", "merge", "merge_final", "ranking"}
    assert ("step_size" in kinds, "rewrite" in kinds) == ((mode == "rewrite"),) * 2
    assert set(map(kind_of, killed.points)) == kinds
    assert sum(POINTS.values()) >= 50
    records = [StepRecord.model_validate_json(c[3]) for c in killed.whole.ended.commits if c[1] == "step"]
    assert {r.verdict.action for r in records} >= {"accept_new_best", "reject"}


@pytest.mark.parametrize(("mode", "number"), [(mode, n) for mode in MODES for n in range(POINTS[mode])])
def test_a_killed_run_ends_as_the_unbroken_one(
    in_mode: Modes, mode: str, number: int, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """Commits, events, journal, skills, exports, settled spend and summary are those of an unbroken run."""
    killed = in_mode(mode)
    record_property("killed", f"after {killed.points[number]}")
    assert_goes_on(killed.whole, killed.copy(killed.points[number], tmp_path))


@pytest.fixture(scope="module")
def early(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Killed:
    """What was killed of a run whose evaluations stop early, within evaluations."""
    whole = unbroken(world, tmp_path_factory.mktemp("early"), gate={"early_stop": True})
    trials = [write for write in whole.writes if write.startswith(("rollout 1 ", "rollout 2 "))]
    folders = killed_at(whole, evenly(trials, 2 * EARLY_POINTS), tmp_path_factory.mktemp("killed_early"))
    return Killed(whole, [write for write, copied in folders.items() if copied.exists()], folders)


@pytest.mark.parametrize("number", range(EARLY_POINTS))
def test_evaluations_that_stop_early_go_on(early: Killed, number: int, tmp_path: Path) -> None:
    """Killed where the gate asks for rollouts: what it decides early, and on what grounds, is the same."""
    assert_goes_on(early.whole, early.copy(early.points[number], tmp_path), but=TIMED)
    stopped = [c for c in early.whole.ended.commits if c[1] == "step" and '"bound":true' in c[3]]
    assert stopped


def test_a_refused_merge_stays_refused(in_mode: Modes, tmp_path: Path) -> None:
    """Killed between a merge that failed for good and its fallback: a model that mends its ways is late."""
    killed = in_mode("patch")
    mended = PureNetwork(partial(pure_server.answer, spoiled=None))
    assert_goes_on(killed.whole, killed.copy(refused_merges(killed.whole.writes), tmp_path), network=mended)
    fallbacks = [
        f.label for c in killed.whole.ended.commits if c[1] == "step" for f in _record(c).merged.fallbacks
    ]
    assert any(label.startswith("merge/") for label in fallbacks)


def test_a_gate_that_had_asked_for_more_goes_on(in_mode: Modes, tmp_path: Path) -> None:
    """Killed inside a further trial of a noisy gate: its rollouts are kept and the verdict is the same."""
    killed = in_mode("patch")
    assert_goes_on(killed.whole, killed.copy(longer_gate(killed.whole.writes), tmp_path))


@pytest.mark.parametrize("moment", [guidance_had, guidance_judged])
def test_a_slow_update_goes_on(
    in_mode: Modes, moment: Callable[[Sequence[str]], str], tmp_path: Path
) -> None:
    """Killed between the slow update's reply and its gate's decision: the same guidance is judged on."""
    killed = in_mode("patch")
    folder = killed.copy(moment(killed.whole.writes), tmp_path)
    assert not rows(folder, "SELECT 1 FROM commits WHERE kind = 'epoch' AND step = 4")
    assert_goes_on(killed.whole, folder)


def test_an_epoch_is_told_after_its_commit(in_mode: Modes, tmp_path: Path) -> None:
    """Killed between an epoch's commit and its event: the event comes in its place, and once."""
    killed = in_mode("patch")
    told = "SELECT 1 FROM events WHERE event LIKE '%\"epoch_closed\"%' AND event LIKE '%\"epoch\":2%'"
    folder = killed.copy("commit epoch 4", tmp_path)
    assert not rows(folder, told)
    assert_goes_on(killed.whole, folder)
    assert len(rows(folder, told)) == 1


@pytest.mark.parametrize("write", ["commit promotion 6", "note 0 opening/1"])
def test_a_promotion_is_made_once(in_mode: Modes, write: str, tmp_path: Path) -> None:
    """Killed between promotion and the final test, or when the split was just opened: one of each."""
    killed = in_mode("patch")
    folder = killed.copy(write, tmp_path)
    assert not rows(folder, "SELECT 1 FROM events WHERE event LIKE '%\"final_score\"%'")
    assert_goes_on(killed.whole, folder)
    assert killed.whole.ended.summary.test_openings == 1


def _record(commit: tuple[Any, ...]) -> StepRecord:
    return StepRecord.model_validate_json(commit[3])


@pytest.mark.parametrize(
    ("moment", "review", "part"), [(approved, (1, "step"), "step"), (vetoed, (6, "promotion"), "promotion")]
)
def test_an_approver_is_asked_once(
    in_mode: Modes, moment: Callable[[Sequence[str]], str], review: tuple[int, str], part: str, tmp_path: Path
) -> None:
    """Killed between an approval or a veto and the commit: one who has changed his mind is not asked."""
    killed = in_mode("patch")
    folder = killed.copy(moment(killed.whole.writes), tmp_path)
    assert not rows(folder, f"SELECT 1 FROM commits WHERE kind = '{part}' AND step = {review[0]}")
    approver = Approver(review)
    assert_goes_on(killed.whole, folder, approver=approver)
    assert review not in approver.asked
