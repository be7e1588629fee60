"""Reads runs from their stores, during or after the run, and compares them."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pydantic import Field, JsonValue

from reflact.config.loading import list_idle_keys
from reflact.errors import UsageError
from reflact.events import Event
from reflact.jsonutil import flatten_fields, parse_stored
from reflact.records import (
    CodeFailure,
    CommitRecord,
    DocumentResult,
    EpochRecord,
    Improvement,
    ItemResult,
    RunState,
    RunSummary,
    SkillComparison,
    SkillEvaluation,
    SkillScore,
    SkillVersion,
    StageCost,
    StepRecord,
    StoredStatus,
    Usage,
)
from reflact.reporting.items import ItemMatrix, MatrixColumn, build_row
from reflact.skills.document import diff_texts, remove_markers
from reflact.skills.package import SkillPackage, build_package, suggest_name
from reflact.stages.evaluate import GateMetric
from reflact.stages.final_test import measure_improvement, score_skill
from reflact.text import suggest_path
from reflact.training.items import (
    ItemAnswers,
    choose_split,
    find_threshold,
    read_answers,
    read_config,
)
from reflact.types import FrozenModel, Rollout, ShortReprModel, Skill, Split, canonical_json

if TYPE_CHECKING:
    from reflact.store.runs import RunRow, SQLiteRunStore

# Settings that say where a run is, and nothing of what it does.
LOCATIONS = {"out_dir", "store", "fork"}

# The name of the lock file of a run beside its store.
LOCK_NAME = re.compile(r"(.+)-r[0-9a-f]{12}\.lock")

# Runs may have other gates, so they are compared by what all of them measure.
HARD = GateMetric(metric="hard")


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
        evaluations: What ``Trainer.evaluate``, ``Trainer.compare`` or ``reflact eval`` measured
            beside the run, in order.
        evaluation: What this is, if it is no training but such a measurement itself;
            ``evaluations`` has its result, if it is complete.
        usage: What it took, over all starts.
        events: All durable events, in order.
        costs: What each stage of each step took so far, calls and time, over all starts.
        items: The items of one split with the target's answers, if they were asked for.
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
    evaluations: tuple[SkillComparison, ...] = ()
    evaluation: SkillEvaluation | None = None
    usage: Usage = Usage()
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
        results: tuple[ItemResult, ...] = ()
        if items:
            matrix = await _read_matrix(store, row, split, ends_only=True)
            results = tuple(matrix.list_results())
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
            items=results,
            evaluations=await store.evaluations(row.run_id),
            evaluation=row.evaluation,
            usage=await _sum_usage(store, row),
            failures=await store.failures(row.run_id),
        )


async def read_matrix(
    path: Path | str,
    run_id: str | None = None,
    *,
    split: Split | None = None,
    ends_only: bool = False,
) -> ItemMatrix:
    """Return the items of a split by the versions of a run, or by the documents of an ``eval``.

    A version that equals an earlier one has no column of its own. The best one is in focus.

    Args:
        path: See ``read_run``.
        run_id: See ``read_run``.
        split: None: the validation split, on which all versions are measured; with ``ends_only``
            as in ``read_run``. An ``eval`` has one split.
        ends_only: Only the initial version and the best one, as ``baseline`` and ``best``.

    Raises:
        UsageError: There is no such run, or nothing is measured on the split.
        StoreError: The store cannot be read.
    """
    async with open_run(path, run_id) as (store, row):
        return await _read_matrix(store, row, split, ends_only=ends_only)


async def _read_matrix(
    store: SQLiteRunStore, row: RunRow, split: Split | None, *, ends_only: bool
) -> ItemMatrix:
    repeats = None
    if row.evaluation is not None:
        split = row.evaluation.split
        repeats = row.evaluation.repeats
        measured, *others = row.evaluation.documents
        columns = [MatrixColumn(**other.model_dump(), in_focus=False) for other in others]
        columns.append(MatrixColumn(**measured.model_dump()))
    else:
        columns = await _list_version_columns(store, row)
    if ends_only and row.evaluation is None:
        split = split or await choose_split(store, row)
        best = next(column for column in columns if column.in_focus)
        columns = [
            columns[0].model_copy(update={"name": "baseline", "in_focus": False}),
            best.model_copy(update={"name": "best"}),
        ]
    split = split or Split.val
    documents = [column.skill_hash for column in columns]
    answers = await read_answers(store, row, split, documents, repeats=repeats)
    return ItemMatrix(
        split=split,
        threshold=find_threshold(read_config(row)),
        columns=tuple(columns),
        rows=tuple(map(build_row, answers)),
    )


async def _list_version_columns(store: SQLiteRunStore, row: RunRow) -> list[MatrixColumn]:
    last = await _read_last_commit(store, row)
    columns: dict[str, MatrixColumn] = {}
    for version in await store.versions(row.run_id):
        is_best = version.skill_hash == last.best.skill_hash
        notes = [version.origin if version.number else "baseline"]
        if is_best:
            notes.append("best")
        if version.skill_hash == last.current.skill_hash:
            notes.append("last")
        column = MatrixColumn(
            name=f"v{version.number}",
            skill_hash=version.skill_hash,
            note=", ".join(notes),
            in_focus=is_best,
        )
        columns.setdefault(version.skill_hash, column)
    return list(columns.values())


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
    the test split, or on the validation split if the test split was not measured. If this is an
    ``evaluation`` and no training, ``val`` or ``test`` is the score of its document, and
    ``baseline`` that of the first one that it is compared with. ``model`` is the target, ``grader``
    what scores its answers.
    """

    folder: str
    run_id: str
    status: StoredStatus | None
    steps: int
    val: float | None
    test: float | None
    baseline: float | None
    evaluation: SkillEvaluation | None = None
    usage: Usage
    created: datetime
    model: str = ""
    grader: str = ""

    @property
    def state(self) -> str:
        """The status; ``open`` if it was killed."""
        return self.status or "open"


async def list_runs(database: Path) -> tuple[RunListing, ...]:
    """Return the runs of a database, oldest first; StoreError if it cannot be read.

    A run that failed before anything was paid or measured is left out.
    """
    from reflact.store.runs import open_store

    async with open_store(database, read_only=True) as store:
        idle = await store.idle_runs()
        rows = await store.runs()
        shown = [row for row in rows if row.status != "failed" or row.run_id not in idle]
        return tuple([await _list_run(store, row, database) for row in shown])


async def _list_run(store: SQLiteRunStore, row: RunRow, database: Path) -> RunListing:
    summary = await store.summary(row.run_id)
    last = await store.last_commit(row.run_id)
    scores: dict[tuple[str, Split], float | None] = {}
    if row.evaluation is not None:
        for compared in await store.evaluations(row.run_id):
            scores |= {("baseline", other.split): other.hard for other in compared.others[:1]}
            scores["best", compared.skill.split] = compared.skill.hard
    elif last is not None:
        scores["best", Split.val] = last.best.score
    if summary is not None:
        scores |= {(s.name, s.split): s.hard for s in summary.scores if s.hard is not None}
    test = scores.get(("best", Split.test))
    identity = await store.identity(row.run_id)
    settings = dict(flatten_fields(row.config))
    folder = str(database.parent)
    if database.name != "run.db":
        folder = str(settings.get("out_dir") or folder)
    return RunListing(
        folder=folder,
        run_id=row.run_id,
        status=row.status,
        steps=row.steps,
        val=scores.get(("best", Split.val)),
        test=test,
        baseline=scores.get(("baseline", Split.val if test is None else Split.test)),
        evaluation=row.evaluation,
        usage=await _sum_usage(store, row),
        created=row.created,
        model=str(settings.get("models.target.model") or _find_name(identity, "target")),
        grader=_find_name(identity, "grader", "environment"),
    )


def _find_name(identity: Mapping[str, JsonValue], key: str, part: str = "") -> str:
    """Return a name in a part of a run's identity: JSON of reflact, or a text of the caller."""
    text = str(identity.get(part or key) or "")
    with suppress(ValueError):
        name: JsonValue = json.loads(text)
        while isinstance(name, dict):
            name = name.get(key)
        return str(name or "").rpartition(".")[2]
    return text


async def _sum_usage(store: SQLiteRunStore, row: RunRow) -> Usage:
    return sum((entry.usage for entry in await store.spend(row.run_id)), Usage())


class RunChoice(FrozenModel):
    """The run that a path means; ``others`` are the other trainings, oldest first, if it named
    none.
    """

    run_id: str
    others: tuple[str, ...] = ()


async def find_run(path: Path | str) -> RunChoice:
    """Return which run a path means; errors are those of ``read_run``."""
    async with open_run(path) as (store, row):
        runs = [other for other in await store.runs() if other.evaluation is None]
    others = [other.run_id for other in runs if other.run_id != row.run_id]
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


async def _read_last_commit(store: SQLiteRunStore, row: RunRow) -> CommitRecord | RunState:
    last = await store.last_commit(row.run_id)
    if last is None and row.evaluation is not None:
        raise UsageError(
            f"{row.run_id} is an {row.evaluation.title}, which has no versions; reflact show "
            "--items lists its answers"
        )
    if last is None:
        raise UsageError(
            f"run {row.run_id} has not measured its initial document yet; start or resume it with "
            "reflact train"
        )
    return last


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
        last = await _read_last_commit(store, row)
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
    further run. ``items`` are those under the best skill of each run: test items, if all runs
    measured them.
    """

    runs: tuple[ComparedRun, ...]
    settings: tuple[SettingDifference, ...]
    gains: tuple[Improvement, ...]
    diffs: tuple[str, ...]
    items: ItemMatrix = Field(exclude=True, repr=False)


class _ReadRun(NamedTuple):
    run: ComparedRun
    settings: Mapping[str, JsonValue]
    idle: frozenset[str]
    answers: Mapping[Split, dict[str, ItemAnswers]]
    threshold: float

    def list_rollouts(self, split: Split) -> list[Rollout]:
        """Return the rollouts of a split by items that are the same in all runs."""
        rollouts = []
        for key, (_, (result,)) in self.answers[split].items():
            rollouts += [r.model_copy(update={"item_id": key}) for r in result.rollouts]
        return rollouts


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
    read = [await _read_for_comparison(*each) for each in named]
    first, *others = read
    gains = []
    for split in (Split.val, Split.test):
        before = first.list_rollouts(split)
        for other in others:
            after = other.list_rollouts(split)
            gain = measure_improvement(other.run.name, split, before, after, metric=HARD)
            if gain is not None:
                gains.append(gain)
    text = first.run.best.skill.text
    has_test = all(each.answers[Split.test] for each in read)
    return RunComparison(
        runs=tuple(each.run for each in read),
        settings=tuple(_list_differences(read)),
        gains=tuple(gains),
        diffs=tuple(diff_texts(text, each.run.best.skill.text) for each in others),
        items=_join_answers(read, Split.test if has_test else Split.val),
    )


def _join_answers(runs: Sequence[_ReadRun], split: Split) -> ItemMatrix:
    """Return the items of a split under the best skill of each run; each item is one row."""
    items = {key: answers.item for run in runs for key, answers in run.answers[split].items()}
    rows = []
    for key, item in items.items():
        found = [run.answers[split].get(key) for run in runs]
        results = [DocumentResult() if each is None else each.results[0] for each in found]
        rows.append(build_row(ItemAnswers(item, tuple(results))))
    columns = [
        MatrixColumn(
            name=each.run.name,
            skill_hash=each.run.best.skill.hash,
            note=f"v{each.run.best.version.number} of {each.run.run_id}",
        )
        for each in runs
    ]
    threshold = max(run.threshold for run in runs)
    return ItemMatrix(split=split, threshold=threshold, columns=tuple(columns), rows=tuple(rows))


async def _read_for_comparison(name: str, path: Path | str, run_id: str | None) -> _ReadRun:
    async with open_run(path, run_id) as (store, row):
        summary = await store.summary(row.run_id)
        last = await _read_last_commit(store, row)
        skill = await store.skill(last.best.skill_hash)
        config = read_config(row)
        fields = dict(flatten_fields(row.config))
        fields |= dict(flatten_fields(dict(await store.identity(row.run_id))))
        run = ComparedRun(
            name=name,
            run_id=row.run_id,
            status=row.status,
            steps=row.steps,
            val=None,
            test=None,
            usage=await _sum_usage(store, row),
            seconds=None if summary is None else summary.seconds,
            best=VersionText(version=last.best, skill=skill),
        )
        read = _ReadRun(
            run=run,
            # An empty section has no setting.
            settings={key: value for key, value in fields.items() if value != {}},
            idle=list_idle_keys(config),
            answers={Split.val: {}, Split.test: {}},
            threshold=find_threshold(config),
        )
        scores: dict[str, SkillScore] = {}
        for split, answers in read.answers.items():
            with suppress(UsageError):  # the split is not measured
                measured = await read_answers(store, row, split, [skill.hash])
                # Items of other data may have the same ids.
                for each in measured:
                    answers[canonical_json([each.item.id, each.item.input])] = each
                rollouts = read.list_rollouts(split)
                score = score_skill("best", skill, split, rollouts, (), metric=HARD)
                n_lost = sum(not each.results[0].rollouts for each in measured)
                scores[split.value] = score.model_copy(update={"unmeasured": n_lost})
        return read._replace(run=run.model_copy(update=scores))


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
    """Return the run with an id or with its unique prefix, or the newest run, or else the newest
    evaluation; a UsageError lists the known ids.
    """
    trainings = [row for row in rows if row.evaluation is None]
    named = [row for row in rows if row.run_id == run_id]
    if run_id is None:
        named = trainings or [*rows]
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
