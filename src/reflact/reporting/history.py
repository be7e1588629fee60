"""Reads runs from their stores, during or after the run, and compares them."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pydantic import JsonValue

from reflact.config.loading import list_idle_keys
from reflact.config.training import TrainerConfig
from reflact.errors import UsageError
from reflact.events import Event
from reflact.jsonutil import flatten_fields, parse_stored
from reflact.records import (
    CodeFailure,
    EpochRecord,
    Improvement,
    ItemResult,
    RunSummary,
    SkillScore,
    SkillVersion,
    StageCost,
    StepRecord,
    StoredStatus,
    Usage,
)
from reflact.skills.document import diff_texts, remove_markers
from reflact.skills.package import SkillPackage, build_package, suggest_name
from reflact.stages.evaluate import GateMetric
from reflact.stages.final_test import measure_improvement, score_skill
from reflact.text import suggest_path
from reflact.training.items import read_items
from reflact.types import FrozenModel, Rollout, ShortReprModel, Skill, Split, canonical_json

if TYPE_CHECKING:
    from reflact.store.runs import RunRow, SQLiteRunStore

# Settings that say where a run is, and nothing of what it does.
LOCATIONS = {"out_dir", "store", "fork"}

# The name of the lock file of a run beside its store.
LOCK_NAME = re.compile(r"(.+)-r[0-9a-f]{12}\.lock")

# Runs may have other gates, so they are compared by what all of them measure.
HARD = GateMetric(metric="hard")

NOT_MEASURED = "has not measured its initial document yet; start or resume it with reflact train"


class RunHistory(ShortReprModel):
    """The stored history of a run.

    Args:
        run_id: The run.
        status: How its latest start ended, or ``running``; None if it was killed.
        reason: The reason if it did not complete.
        created: The time of its first start.
        summary: The summary of its latest end; None if there is none.
        steps: All committed steps, in order.
        epochs: The committed ends of epochs, in order.
        versions: All skill versions by number, each with its latest score.
        evaluations: The scores of documents that were measured with ``Trainer.evaluate`` or
            ``reflact eval``.
        events: All durable events, in order.
        costs: What each stage of each step took so far, calls and time, over all starts.
        items: The items of one split with the target's answers, if they were asked for.
        items_note: Why there are no items although they were asked for; only in a ``RunReport``.
        failures: The exceptions of your own environment, target, grader, annotator or proposer,
            with tracebacks.
    """

    run_id: str
    status: StoredStatus | None
    reason: str | None
    created: datetime
    summary: RunSummary | None
    steps: tuple[StepRecord, ...]
    epochs: tuple[EpochRecord, ...]
    versions: tuple[SkillVersion, ...]
    events: tuple[Event, ...]
    costs: tuple[StageCost, ...] = ()
    items: tuple[ItemResult, ...] = ()
    items_note: str | None = None
    evaluations: tuple[SkillScore, ...] = ()
    failures: tuple[CodeFailure, ...] = ()

    @property
    def is_open(self) -> bool:
        """Whether the latest start has not ended; the summary is then that of an earlier one."""
        return self.status in {None, "running"}


async def read_run(
    path: Path | str,
    run_id: str | None = None,
    *,
    items: bool = False,
    split: Split | None = None,
    events: bool = True,
) -> RunHistory:
    """Return the stored history of a run; the run may be under way.

    Args:
        path: The run's ``out_dir``, or its database file. If these have several runs, a further
            part of the path names one by its id, or by a prefix that no other run has:
            ``runs/default/r67d5``.
        run_id: The run to read, or a prefix of its id that no other run has; None: the one of the
            path, or else the newest.
        items: Also read what the target answered to each item under the initial and the best
            document.
        split: The split of these items; None: the test split if it was measured, otherwise the
            validation split.
        events: Also read the events, which take more than half of the time.

    Raises:
        UsageError: There is no store, or no such run in it, or nothing is measured on the split.
        StoreError: It cannot be read.
    """
    async with open_run(path, run_id) as (store, row):
        return RunHistory(
            run_id=row.run_id,
            status=row.status,
            reason=row.reason,
            created=row.created,
            summary=await store.summary(row.run_id),
            steps=await store.records(row.run_id),
            epochs=await store.epochs(row.run_id),
            versions=await store.versions(row.run_id),
            events=await store.events(row.run_id) if events else (),
            costs=await store.stage_costs(row.run_id),
            items=await read_items(store, row, split=split) if items else (),
            evaluations=await store.evaluations(row.run_id),
            failures=await store.failures(row.run_id),
        )


class VersionText(FrozenModel):
    """A skill version of a run with its text."""

    version: SkillVersion
    skill: Skill


class StepDetails(FrozenModel):
    """A committed step with what belongs to it.

    ``epoch_end`` is the end of an epoch that followed the step. ``memory`` is the optimizer's
    memory that the prompts of the step showed. ``diff`` is the unified diff from the skill before
    the step to the candidate. ``costs`` are what its stages took.
    """

    record: StepRecord
    epoch_end: EpochRecord | None = None
    memory: str = ""
    diff: str = ""
    costs: tuple[StageCost, ...] = ()


class RunListing(FrozenModel):
    """A run in a list of runs. Scores are mean hard scores over all items; None if they are not
    measured.

    ``val`` and ``test`` are those of the best skill. ``baseline`` is that of the initial skill on
    the test split, or on the validation split if the test split was not measured. ``measured`` is
    the number of documents that were measured outside the training; without any training, ``val``
    and ``test`` are the scores of the latest of them.
    """

    folder: str
    run_id: str
    status: StoredStatus | None
    steps: int
    val: float | None
    test: float | None
    baseline: float | None
    measured: int = 0
    usage: Usage
    created: datetime

    @property
    def state(self) -> str:
        """The status; ``measured`` if there was no training, ``open`` if the run was killed."""
        return self.status or ("measured" if self.measured and not self.steps else "open")


async def list_runs(database: Path) -> tuple[RunListing, ...]:
    """Return the runs of a database, oldest first; StoreError if it cannot be read."""
    from reflact.store.runs import open_store

    async with open_store(database, read_only=True) as store:
        return tuple([await _list_run(store, row, database) for row in await store.runs()])


async def _list_run(store: SQLiteRunStore, row: RunRow, database: Path) -> RunListing:
    summary = await store.summary(row.run_id)
    last = await store.last_commit(row.run_id)
    evaluations = await store.evaluations(row.run_id)
    scores: dict[tuple[str, Split], float | None] = {}
    if last is None:
        scores |= {("best", score.split): score.hard for score in evaluations}
    else:
        scores["best", Split.val] = last.best.score
    if summary is not None:
        scores |= {(s.name, s.split): s.hard for s in summary.scores if s.hard is not None}
    test = scores.get(("best", Split.test))
    folder = str(database.parent)
    if database.name != "run.db":
        folder = str(dict(flatten_fields(row.config)).get("out_dir") or folder)
    return RunListing(
        folder=folder,
        run_id=row.run_id,
        status=row.status,
        steps=row.steps,
        val=scores.get(("best", Split.val)),
        test=test,
        baseline=scores.get(("baseline", Split.val if test is None else Split.test)),
        measured=len(evaluations),
        usage=sum((entry.usage for entry in await store.spend(row.run_id)), Usage()),
        created=row.created,
    )


class RunChoice(FrozenModel):
    """The run that a path means; ``others`` are the others, oldest first, if it named none."""

    run_id: str
    others: tuple[str, ...] = ()


async def find_run(path: Path | str) -> RunChoice:
    """Return which run a path means; errors are those of ``read_run``."""
    async with open_run(path) as (store, row):
        others = [other.run_id for other in await store.runs() if other.run_id != row.run_id]
    if _find_database(Path(path))[1] is not None:
        return RunChoice(run_id=row.run_id)
    return RunChoice(run_id=row.run_id, others=tuple(others))


@asynccontextmanager
async def open_run(
    path: Path | str, run_id: str | None = None
) -> AsyncIterator[tuple[SQLiteRunStore, RunRow]]:
    """Open the store of a run, which may be under way, and find the run; see ``read_run``."""
    from reflact.store.runs import open_store

    database, own = _find_database(Path(path))
    async with open_store(database, read_only=True) as store:
        yield store, choose_run(await store.runs(), run_id or own, database)


async def read_versions(
    path: Path | str, names: Sequence[str], run_id: str | None = None
) -> tuple[VersionText, ...]:
    """Return versions of a run by name: a number such as ``3`` or ``v3``, ``baseline``, ``best`` or
    ``final``.

    Raises:
        UsageError: There is no such run or version.
        StoreError: The store cannot be read.
    """
    async with open_run(path, run_id) as (store, row):
        last = await store.last_commit(row.run_id)
        if last is None:
            raise UsageError(f"run {row.run_id} {NOT_MEASURED}")
        versions = await store.versions(row.run_id)
        known = {str(version.number): version for version in versions}
        known |= {f"v{version.number}": version for version in versions}
        known |= {"baseline": known["0"], "best": last.best, "final": last.current}
        texts = []
        for name in names:
            if name not in known:
                newest = max(version.number for version in versions)
                raise UsageError(
                    f"run {row.run_id} has no version {name}; it has v0 to v{newest}, and the "
                    "names baseline, best, final"
                )
            skill = await store.skill(known[name].skill_hash)
            texts.append(VersionText(version=known[name], skill=skill))
        return tuple(texts)


async def read_package(
    path: Path | str,
    version: str = "best",
    run_id: str | None = None,
    *,
    name: str | None = None,
    description: str | None = None,
) -> SkillPackage:
    """Return a version of a run's skill as a package, with the other files of the folder that the
    run began with; see ``export_skill``.
    """
    async with open_run(path, run_id) as (store, row):
        settings = dict(flatten_fields(row.config))
        summary = await store.summary(row.run_id)
    (found,) = await read_versions(path, [version], row.run_id)
    files = settings.get("skill_files")
    if not isinstance(files, list):
        files = []
    default = suggest_name(Path(str(settings.get("out_dir") or path)).name) or "skill"
    package = build_package(
        Skill(text=remove_markers(found.skill.text)),
        name=name,
        description=description,
        defaults=(default, str(settings.get("environment.description") or "")),
        source=_find_skill_folder(settings.get("skill")),
        files=[str(each) for each in files],
    )
    hints: list[str] = []
    if version == "best":
        hints += _list_doubts(row, summary, found.version)
    if found.version.examples:
        hints.append(f"the document is v{found.version.number}{found.version.examples_note}")
    return package.model_copy(update={"hints": (*hints, *package.hints)})


def _list_doubts(row: RunRow, summary: RunSummary | None, best: SkillVersion) -> Iterator[str]:
    """Yield why the best skill of a run may not be what its reader expects."""
    document = f"v{best.number} from {best.origin}" if best.number else "the initial skill"
    if row.status != "completed":
        yield (
            f"the run is not complete; this is {document}, the best so far, which is not tested; "
            "reflact train resumes the run"
        )
    elif not best.number:
        yield "the run has no better document; this is its initial skill"
    elif summary is None or summary.score("best", Split.test) is None:
        yield f"this is {document}, which the validation items selected; it is not tested on others"


def _find_skill_folder(setting: JsonValue) -> Path | None:
    """Return the folder in the setting ``skill``; it may be gone. None if it names a file."""
    if setting is None:
        return None
    path = Path(str(setting))
    return path if path.is_dir() or not (path.exists() or path.suffix) else None


async def export_skill(
    path: Path | str,
    parent: Path | str,
    version: str = "best",
    run_id: str | None = None,
    *,
    name: str | None = None,
    description: str | None = None,
) -> Path:
    """Write a version of a run's skill as a folder for agents, and return the folder.

    Args:
        path: The run; see ``read_run``.
        parent: The folder for the new one, which has the skill's name.
        version: See ``read_versions``.
        run_id: See ``read_run``.
        name: The skill's name; by default that of the front matter, or else that of the run.
        description: Likewise; by default that of the front matter, or ``environment.description``.

    Raises:
        UsageError: There is no such run or version, or something has that name in ``parent``
            already.
        SkillError: The name or the description is missing or not allowed, or a file of the skill
            cannot be read.
        StoreError: The store cannot be read, or the folder cannot be written.
    """
    from reflact.store.artifacts import write_package

    package = await read_package(path, version, run_id, name=name, description=description)
    return write_package(package, Path(parent))


async def read_step(path: Path | str, step: int, run_id: str | None = None) -> StepDetails:
    """Return a committed step of a run; errors are those of ``read_run``."""
    async with open_run(path, run_id) as (store, row):
        records = {record.step: record for record in await store.records(row.run_id)}
        if step not in records:
            raise UsageError(
                f"run {row.run_id} has no step {step}; {len(records)} steps are committed"
            )
        record = records[step]
        epochs = await store.epochs(row.run_id)
        memories = [end.meta_skill for end in epochs if end.step < step and end.meta_skill]
        diff = ""
        if record.candidate_hash != record.skill_before:
            before = await store.skill(record.skill_before)
            after = await store.skill(record.candidate_hash)
            diff = diff_texts(before.text, after.text)
        return StepDetails(
            record=record,
            epoch_end=next((end for end in epochs if end.step == step), None),
            memory=next(reversed(memories), ""),
            diff=diff,
            costs=tuple(cost for cost in await store.stage_costs(row.run_id) if cost.step == step),
        )


class SettingDifference(FrozenModel):
    """A setting that differs, with its value in each run; None if a run does not have it."""

    key: str
    values: tuple[JsonValue, ...]


class ComparedRun(ShortReprModel):
    """A run in a comparison.

    ``val`` and ``test`` are the scores of its best skill. ``unmeasured`` of a score counts the
    items that it does not cover.
    """

    name: str
    run_id: str
    status: StoredStatus | None
    steps: int
    val: SkillScore | None
    test: SkillScore | None
    usage: Usage
    seconds: float | None
    best: VersionText


class RunComparison(ShortReprModel):
    """Runs side by side.

    ``settings`` are those that differ and have an effect in one of the runs, and the prompts that
    differ. ``gains`` are the improvements of the best skill of each further run over that of the
    first one, paired over the items that both runs measured; ``name`` is the name of the further
    run. ``diffs`` are the unified diffs from the best skill of the first run to that of each
    further run.
    """

    runs: tuple[ComparedRun, ...]
    settings: tuple[SettingDifference, ...]
    gains: tuple[Improvement, ...]
    diffs: tuple[str, ...]


class _ReadRun(NamedTuple):
    run: ComparedRun
    settings: Mapping[str, JsonValue]
    idle: frozenset[str]
    rollouts: Mapping[Split, Sequence[Rollout]]


async def compare_runs(
    paths: Sequence[Path | str], *, run_ids: Sequence[str] | None = None
) -> RunComparison:
    """Compare runs with the first of them; a single path that names no run means all runs of its
    store.

    Args:
        paths: The ``out_dir`` or the database of each run, or a path that names the run too; see
            ``read_run``.
        run_ids: The run of each path; by default the one that it names, or else the newest.

    Raises:
        UsageError: There are less than two runs, or one of them has not measured its initial
            document.
        StoreError: A store cannot be read.
    """
    ids: Sequence[str | None] = run_ids or [None] * len(paths)
    named = list(zip(map(str, paths), paths, ids, strict=True))
    if len(named) == 1:
        choice = await find_run(paths[0])
        named = [(each, paths[0], each) for each in (*choice.others, choice.run_id)]
    if len(named) < 2:
        raise UsageError("a comparison needs at least two runs; name the out_dir of each")
    first, *others = [await _read_for_comparison(*each) for each in named]
    gains = []
    for split in first.rollouts:
        for other in others:
            before = first.rollouts[split]
            after = other.rollouts[split]
            gain = measure_improvement(other.run.name, split, before, after, metric=HARD)
            if gain is not None:
                gains.append(gain)
    text = first.run.best.skill.text
    return RunComparison(
        runs=tuple(each.run for each in (first, *others)),
        settings=tuple(_list_differences([first, *others])),
        gains=tuple(gains),
        diffs=tuple(diff_texts(text, each.run.best.skill.text) for each in others),
    )


async def _read_for_comparison(name: str, path: Path | str, run_id: str | None) -> _ReadRun:
    async with open_run(path, run_id) as (store, row):
        summary = await store.summary(row.run_id)
        last = await store.last_commit(row.run_id)
        if last is None:
            raise UsageError(f"run {row.run_id} {NOT_MEASURED}")
        skill = await store.skill(last.best.skill_hash)
        rollouts: dict[Split, list[Rollout]] = {}
        scores: dict[Split, SkillScore] = {}
        for split in (Split.val, Split.test):
            rollouts[split] = []
            with suppress(UsageError):  # the split is not measured
                items = await read_items(store, row, split=split, version=last.best)
                for item in items:
                    # Items of other data may have the same ids.
                    key = {"item_id": canonical_json([item.item_id, item.input])}
                    rollouts[split] += [r.model_copy(update=key) for r in item.best.rollouts]
                unmeasured = sum(item.best.hard is None for item in items)
                if unmeasured < len(items):
                    score = score_skill("best", skill, split, rollouts[split], (), metric=HARD)
                    scores[split] = score.model_copy(update={"unmeasured": unmeasured})
        config = parse_stored(
            TrainerConfig.model_validate, row.config, f"configuration of run {row.run_id}"
        )
        run = ComparedRun(
            name=name,
            run_id=row.run_id,
            status=row.status,
            steps=row.steps,
            val=scores.get(Split.val),
            test=scores.get(Split.test),
            usage=sum((entry.usage for entry in await store.spend(row.run_id)), Usage()),
            seconds=None if summary is None else summary.seconds,
            best=VersionText(version=last.best, skill=skill),
        )
        fields = dict(flatten_fields(row.config))
        fields |= dict(flatten_fields(dict(await store.identity(row.run_id))))
        # An empty section has no setting.
        settings = {key: value for key, value in fields.items() if value != {}}
        return _ReadRun(run, settings, list_idle_keys(config), rollouts)


def _list_differences(runs: Sequence[_ReadRun]) -> Iterator[SettingDifference]:
    """Yield the settings that differ and have an effect; the path of the same data has none."""
    ignored = LOCATIONS | frozenset.intersection(*(run.idle for run in runs))
    if len({run.settings.get("data") for run in runs}) == 1:
        ignored |= {"data.path"}
    for key in sorted({key for run in runs for key in run.settings} - ignored):
        values = tuple(run.settings.get(key) for run in runs)
        if len({canonical_json(value) for value in values}) > 1:
            yield SettingDifference(key=key, values=values)


def choose_run(rows: Sequence[RunRow], run_id: str | None, path: Path) -> RunRow:
    """Return the run with an id or with its unique prefix, or the newest run; a UsageError lists
    the known ids.
    """
    named = [row for row in rows if run_id in {None, row.run_id}]
    if run_id and not named:
        named = [row for row in rows if row.run_id.startswith(run_id)]
        if len(named) > 1:
            ids = ", ".join(row.run_id for row in named)
            raise UsageError(
                f"{path} holds several runs whose ids begin with {run_id}; name one of {ids}"
            )
    if named:
        return named[-1]
    words = f"{path} holds no run {run_id or ''}".rstrip()
    known = ", ".join(row.run_id for row in rows)
    raise UsageError(words + (f"; it holds {known}" if known else ""))


def list_databases(folder: Path) -> tuple[Path, ...]:
    """Return the databases of the runs in and below a folder; those of shared stores are known by
    their locks.
    """
    own = set(folder.rglob("run.db"))
    locks = (LOCK_NAME.fullmatch(path.name) for path in folder.rglob("*.lock"))
    names = {found[1] for found in locks if found is not None}
    shared = {path for name in names for path in folder.rglob(name) if path.is_file()}
    return tuple(sorted(own | shared))


def _find_database(path: Path) -> tuple[Path, str | None]:
    """Return the database of a run, and the run's id or a prefix of it if the path names one.

    A path may be a database; the folder of a run with its ``run.db``; the folder of a run whose
    store is elsewhere, which its ``summary.json`` names; or a database or such a folder with the id
    of one of its runs behind it.
    """
    if path.is_file():
        return path, None
    if (database := path / "run.db").is_file():
        return database, None
    if (file := path / "summary.json").is_file():
        summary = parse_stored(
            RunSummary.model_validate_json, file.read_text(encoding="utf-8"), str(file)
        )
        store = summary.config.get("store") if isinstance(summary.config, dict) else None
        if store is not None and Path(str(store)).is_file():
            return Path(str(store)), summary.run_id
    for database in (path.parent, path.parent / "run.db"):
        if database.is_file():
            return database, path.name
    inside = ", ".join(sorted(str(database.parent) for database in path.glob("*/run.db")))
    advice = (
        f"the runs in it are {inside}" if inside else "name the out_dir of a run, or its database"
    )
    raise UsageError(f"there is no run at {path}; {advice}{suggest_path(path)}")
