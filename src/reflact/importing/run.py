"""A run folder of the older trainer as a run of this one: the same steps, documents and scores."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import JsonValue

from reflact.folding import first_state
from reflact.importing import reported
from reflact.importing.documents import BEST, Documents, below, snapshot
from reflact.importing.epochs import epoch_record, slow_result
from reflact.importing.history import read_history
from reflact.importing.reading import Fields, Folder, Remarks
from reflact.importing.steps import Gate, step_record
from reflact.ports import Committed
from reflact.records import EpochRecord, Promotion, RunState, StepRecord, Version
from reflact.results import RunSummary
from reflact.summing import counted
from reflact.types import Frozen, Measurement, Skill, Split, Verdict, digest


class Commit(Frozen):
    """What is committed, with the state after it; the first commit has no record."""

    record: Committed | None
    state: RunState


class ImportedRun(Frozen):
    """A run folder, read: what goes into a store and beside it, and what is to be said of it."""

    run_id: str
    identity: Mapping[str, JsonValue]
    commits: tuple[Commit, ...]
    skills: tuple[Skill, ...]
    versions: tuple[Version, ...]
    summary: RunSummary
    remarks: tuple[str, ...]

    def text(self, version: Version) -> Skill:
        """Return the document of a version."""
        return next(skill for skill in self.skills if skill.hash == version.skill_hash)


def read_run(root: Path, config: JsonValue = None) -> ImportedRun:
    """Read the folder of a run; nothing in it is changed.

    Args:
        root: The folder.
        config: The run's configuration in this library's terms, for its summary.

    Raises:
        UsageError: The folder lacks what makes a run, or holds a path that leaves it; names the file.
    """
    remarks = Remarks()
    folder = Folder(root, remarks)
    documents = Documents(folder)
    ended, settings = folder.object("summary.json"), folder.object("config.json")
    left = _left(folder, "" if settings is None else settings.text("out_root"))
    history = read_history(folder)
    compared, baseline = _compared(folder, settings, ended)
    initial = documents.need(snapshot(0))
    commits = [Commit(record=None, state=first_state(initial, baseline))]
    for source, closes in zip(history, _closing(history), strict=True):
        state = commits[-1].state
        closed = closes and slow_result(folder, source.count("epoch") or 1) is not None
        record = step_record(source, state, documents, compared=compared, closed=closed)
        commits.append(_commit(state, record))
        end = None
        if closes:
            end = epoch_record(record.epoch, commits[-1].state, documents, compared=compared)
        if end is not None:
            commits.append(_commit(commits[-1].state, end))
    _check_current(documents, left, commits[-1].state)
    score = None if ended is None else ended.number("best_selection_hard")
    best = _best(documents, left, commits[-1].state, score)
    if best.skill_hash == commits[-1].state.current.skill_hash != commits[-1].state.best.skill_hash:
        commits.append(_commit(commits[-1].state, _promotion(commits[-1].state, best)))
    identity: dict[str, JsonValue] = {
        "imported_from": "SkillOpt",
        "version": "" if ended is None else ended.text("version"),
        "folder": folder.root.name,
        "content": digest([commit.model_dump(mode="json") for commit in commits]),
    }
    summary = _summary(folder, ended, history, commits, best).model_copy(
        update={"run_id": f"i{digest(identity)[:12]}", "config": config}
    )
    return ImportedRun(
        run_id=summary.run_id,
        identity=identity,
        commits=tuple(commits),
        skills=documents.all,
        versions=_versions(commits, best),
        summary=summary,
        remarks=remarks.lines,
    )


class _Left(Frozen):
    """What the older tool noted of where it stood: names of documents in the folder, and a score."""

    current: str | None = None
    best: str = BEST
    score: float | None = None


def _left(folder: Folder, out_root: str) -> _Left:
    noted = folder.object("runtime_state.json")
    if noted is None:
        return _Left()
    current, best = noted.text("current_skill_path"), noted.text("best_skill_path")
    return _Left(
        current=below(current, out_root) if current else None,
        best=below(best, out_root) if best else BEST,
        score=noted.number("current_score"),
    )


def _compared(folder: Folder, settings: Fields | None, ended: Fields | None) -> tuple[Gate, float | None]:
    """Return what the gate compared, and what the initial document had."""
    rows = folder.rows("selection_eval_baseline/results.jsonl")
    gate = Gate(n=len(rows))
    if settings is not None:
        metric = settings.text("gate_metric") or gate.metric
        if metric not in {"hard", "soft", "mixed"}:
            folder.remarks.add("config.json: gate_metric is none of hard, soft, mixed; read as hard.")
            metric = gate.metric
        weight = settings.share("gate_mixed_weight")
        gate = Gate.model_validate(
            {"metric": metric, "mixed_weight": gate.mixed_weight if weight is None else weight, "n": gate.n}
        )
    hard = None if ended is None else ended.share("baseline_selection_hard")
    hard = _mean(rows, "hard") if hard is None else hard
    soft = _mean(rows, "soft")
    return gate, gate.score(Measurement(skill_hash="", split=Split.val, n=gate.n, hard=hard, soft=soft))


def _mean(rows: Sequence[Fields], name: str) -> float | None:
    values = [value for row in rows if (value := row.share(name)) is not None]
    return math.fsum(values) / len(values) if values else None


def _closing(history: Sequence[Fields]) -> list[bool]:
    epochs = [source.count("epoch") for source in history]
    return [epoch not in epochs[place + 1 :] for place, epoch in enumerate(epochs)]


def _commit(state: RunState, record: Committed) -> Commit:
    made = [version.skill_hash for version in _made(record)]
    update: dict[str, object] = {
        "commits": state.commits + 1,
        "current": record.current,
        "best": record.best,
        "latest_version": max(state.latest_version, record.current.number),
        "seen_hashes": (*state.seen_hashes, *(h for h in made if h not in state.seen_hashes)),
    }
    if isinstance(record, StepRecord):
        update |= {"step": record.step, "epoch": record.epoch}
    if isinstance(record, EpochRecord):
        update |= {"closed_epoch": record.epoch, "last_hash": record.last_hash}
        if record.meta is not None:
            update["meta"] = record.meta
        if record.slow is not None and record.slow.action in {"forced", "accepted"}:
            update["guidance"] = record.slow.guidance or ""
    return Commit(record=record, state=state.model_copy(update=update))


def _made(record: Committed | None) -> tuple[Version, ...]:
    return () if record is None or isinstance(record, Promotion) else record.made


def _best(documents: Documents, left: _Left, state: RunState, score: float | None) -> Version:
    remarks = documents.folder.remarks
    skill = documents.read(BEST) or documents.read(left.best)
    if skill is None:
        remarks.add(f"{BEST} is missing; the best document is the one that the steps made.")
        return state.best
    if skill.hash == state.best.skill_hash:
        return state.best
    if skill.hash == state.current.skill_hash:
        return state.current.model_copy(update={"score": score, "inherited": False})
    remarks.add(f"{BEST} is neither the best nor the last document of the steps; it is a version of its own.")
    return Version(
        number=state.latest_version + 1, skill_hash=skill.hash, origin=BEST, score=score, inherited=True
    )


def _promotion(state: RunState, best: Version) -> Promotion:
    verdict = Verdict(
        action="accept_new_best",
        reason="Imported: the last skill was promoted at the end.",
        candidate_score=best.score,
        current_score=state.best.score,
    )
    return Promotion(step=state.step, verdict=verdict, current=best, best=best)


def _check_current(documents: Documents, left: _Left, state: RunState) -> None:
    remarks = documents.folder.remarks
    current = None if left.current is None else documents.read(left.current)
    if current is not None and current.hash != state.current.skill_hash:
        remarks.add(
            "runtime_state.json names another current document than the steps left; theirs was taken."
        )
    ours = state.current.score
    if left.score is not None and ours is not None and abs(left.score - ours) > reported.SAME:
        remarks.add("runtime_state.json holds another current score than the steps left; theirs was taken.")


def _versions(commits: Sequence[Commit], best: Version) -> tuple[Version, ...]:
    made = [version for commit in commits for version in _made(commit.record)]
    numbered = {version.number: version for version in (commits[0].state.current, *made, best)}
    return tuple(numbered[number] for number in sorted(numbered))


def _summary(
    folder: Folder,
    ended: Fields | None,
    history: Sequence[Fields],
    commits: Sequence[Commit],
    best: Version,
) -> RunSummary:
    first, last = commits[0].state, commits[-1].state
    hashes = {
        "baseline": first.current.skill_hash,
        "best": best.skill_hash,
        "final": last.current.skill_hash,
    }
    scores = () if ended is None else reported.scores(folder, ended, hashes)
    seconds = None if ended is None else ended.number("total_wall_time_s")
    if seconds is None:
        seconds = math.fsum(source.number("wall_time_s") or 0.0 for source in history)
    plain = RunSummary(
        run_id="",
        status="completed" if ended is not None else "cancelled",
        reason=None if ended is not None else "imported: there is no summary.json, so the run had not ended",
        scores=scores,
        spend=reported.spend(ended, history),
        stages=reported.times(history),
        test_openings=int(any(score.split is Split.test for score in scores)),
        seconds=max(0.0, seconds),
    )
    steps = [c.record for c in commits if isinstance(c.record, StepRecord)]
    epochs = [c.record for c in commits if isinstance(c.record, EpochRecord)]
    told = counted(plain, steps, epochs, last).model_copy(update={"best": best})
    ours = {"steps": told.steps, "accepts": told.accepts, "rejects": told.rejects, "skips": told.skips}
    for name, number in ours.items():
        theirs = None if ended is None else ended.count(f"total_{name}")
        if theirs is not None and theirs != number:
            folder.remarks.add(f"summary.json counts {theirs} {name}, the history holds {number}.")
    return told
