"""One step of the older trainer as the record that a run commits."""

from __future__ import annotations

import math
from collections.abc import Sequence

from reflact import gate
from reflact.errors import UsageError
from reflact.folding import heir
from reflact.importing import artifacts
from reflact.importing.documents import Documents, fits, snapshot
from reflact.importing.reading import Fields, Folder
from reflact.records import RunState, StepRecord, Version
from reflact.types import Action, Edit, EditResult, Frozen, Measurement, Skill, Split, Verdict

ACTIONS: dict[str, Action] = {
    "accept_new_best": "accept_new_best",
    "accept": "accept",
    "reject": "reject",
    "force_accept": "force_accept",
    "skip_no_patches": "no_patches",
    "skip_no_rewrite": "no_rewrite",
}
REASONS: dict[Action, str] = {
    "accept_new_best": "was accepted as the new best",
    "accept": "was accepted",
    "reject": "was rejected",
    "force_accept": "was accepted without a gate",
    "no_patches": "was not made: there were no patches",
    "no_rewrite": "was not made: there was no rewrite",
}


class Gate(Frozen):
    """What the older gate compared, and on how many items (0: not recorded)."""

    metric: gate.Metric = "hard"
    mixed_weight: float = 0.5
    n: int = 0

    def measured(self, skill_hash: str, source: Fields, rows: Sequence[Fields]) -> Measurement | None:
        """Return the scores on the validation split that a record holds; None where it holds none.

        ``rows`` are the items' own results, if they were kept.
        """
        hard, soft = source.share("selection_hard"), source.share("selection_soft")
        if hard is None and soft is None:
            return None
        return Measurement(
            skill_hash=skill_hash, split=Split.val, n=len(rows) or self.n, hard=hard, soft=soft
        )

    def score(self, measured: Measurement | None) -> float | None:
        """Return a measurement as one number; None where the scores that it takes are not recorded."""
        if measured is None:
            return None
        if self.metric == "mixed":
            return gate.score(measured, metric=self.metric, mixed_weight=self.mixed_weight)
        return measured.hard if self.metric == "hard" else measured.soft


def step_record(
    source: Fields, state: RunState, documents: Documents, *, compared: Gate, closed: bool
) -> StepRecord:
    """Return the record of a step.

    Args:
        source: What its history says of the step.
        state: The state before the step.
        documents: The run's folder and the documents that were read from it.
        compared: What its gate compared.
        closed: Whether a slow update has written over the document that the step left.

    Raises:
        UsageError: Its action is not known, or a document without which the run makes no sense is missing.
    """
    folder, step = documents.folder, _whole(source, "step")
    action = ACTIONS.get(source.text("action"))
    if action is None:
        raise UsageError(f"{source.where}: its action is none of {', '.join(ACTIONS)}; correct the file")
    candidate = _candidate(source, action, documents, closed=closed)
    before = state.current.skill_hash
    shown = before if action in {"no_patches", "no_rewrite"} else source.text("candidate_hash") or before
    candidate_hash = shown if candidate is None else candidate.hash
    measured = compared.measured(
        candidate_hash, source, folder.rows(f"{artifacts.step_folder(step)}/selection_eval/results.jsonl")
    )
    verdict = verdict_of(action, state, measured, source.number("candidate_gate_score"), compared)
    pool = artifacts.merged(folder, step)
    choice = artifacts.chosen(folder, step, source, pool.patch)
    edits = artifacts.results(folder, step, choice.patch.edits) or _rewritten(folder, step, candidate)
    item_ids, failures = _rollouts(folder, source, step)
    notes = artifacts.appendix(folder, step)
    made = _made(source, state, candidate, verdict, documents, noted=notes is not None, closed=closed)
    current = made[-1] if made else state.current
    best = state.best
    if verdict.accepted and (action == "accept_new_best" or source.count("best_step") == step):
        best = made[0]
    return StepRecord(
        step=step,
        epoch=_whole(source, "epoch"),
        step_in_epoch=source.count("step_in_epoch") or 1,
        skill_before=before,
        item_ids=item_ids,
        rollout=Measurement(
            skill_hash=before,
            split=Split.train,
            n=_rolled_out(source),
            hard=source.share("rollout_hard"),
            soft=source.share("rollout_soft"),
        ),
        n_failures=failures,
        reports=artifacts.reports(folder, step),
        merged=pool,
        chosen=choice,
        edits=edits,
        candidate_hash=candidate_hash,
        verdict=verdict,
        made=made,
        notes=notes,
        current=current,
        best=best,
    )


def _candidate(source: Fields, action: Action, documents: Documents, *, closed: bool) -> Skill | None:
    if action in {"no_patches", "no_rewrite"}:
        return None
    step = _whole(source, "step")
    name, accepted = f"{artifacts.step_folder(step)}/candidate_skill.md", action != "reject"
    candidate = documents.read(name)
    if candidate is None and accepted and not closed:
        candidate = documents.read(snapshot(step))
        source.remarks.add(f"{name} is missing; {snapshot(step)} was taken for it.")
    if candidate is None and accepted:
        raise UsageError(f"there is no {name} in {documents.folder.root}, which step {step} accepted")
    if candidate is None:
        source.remarks.add(f"{name} is missing: what step {step} rejected can be listed but not shown.")
        return None
    recorded = source.text("candidate_hash")
    if recorded and not fits(candidate, recorded):
        source.remarks.add(f"{name} has another hash than history.json says; it was changed afterwards.")
    return candidate


def verdict_of(
    action: Action, state: RunState, measured: Measurement | None, score: float | None, compared: Gate
) -> Verdict:
    """Return what the older gate decided; without a recorded score it follows from the measurement."""
    return Verdict(
        action=action,
        reason=f"Imported: the candidate {REASONS[action]}.",
        candidate=measured,
        candidate_score=compared.score(measured) if score is None else score,
        current_score=state.current.score,
    )


def _made(
    source: Fields,
    state: RunState,
    candidate: Skill | None,
    verdict: Verdict,
    documents: Documents,
    *,
    noted: bool,
    closed: bool,
) -> tuple[Version, ...]:
    step, number = _whole(source, "step"), state.latest_version + 1
    made: tuple[Version, ...] = ()
    current = state.current
    if candidate is not None and verdict.accepted:
        score = source.number("current_score")
        score = verdict.candidate_score if score is None else score
        current = Version(number=number, skill_hash=candidate.hash, origin=f"step {step}", score=score)
        made += (current,)
    left = None if closed else documents.read(snapshot(step))
    if left is None and not closed:
        source.remarks.add(f"{snapshot(step)} is missing; the step's own files say what it held.")
    if left is not None and left.hash != current.skill_hash:
        if not noted:
            source.remarks.add(f"{snapshot(step)} is not what step {step} made; it was taken as it is.")
        origin = f"step {step} notes" if noted else snapshot(step)
        made += (heir(current, number=number + len(made), skill=left, origin=origin),)
    return made


def _rewritten(folder: Folder, step: int, candidate: Skill | None) -> tuple[EditResult, ...]:
    place = artifacts.step_folder(step)
    names = ("rewrite_result.json", "full_rewrite_result.json")
    if candidate is None or not any(folder.has(f"{place}/{name}") for name in names):
        return ()
    return (EditResult(edit=Edit(op="rewrite", content=candidate.text), status="applied"),)


def _rollouts(folder: Folder, source: Fields, step: int) -> tuple[tuple[str, ...], int]:
    rows = [
        row
        for place in artifacts.batches(folder, step)
        for row in folder.rows(f"{place}/rollout/results.jsonl")
    ]
    told = folder.object(f"{artifacts.step_folder(step)}/trajectory_digest.json")
    failures = None if told is None else told.count("n_fail")
    if failures is None and rows:
        failures = sum(row.share("hard") == 0 for row in rows)
    if failures is None:
        hard, n = source.share("rollout_hard"), _rolled_out(source)
        failures = 0 if hard is None else math.floor(n * (1 - hard) + 0.5)
        source.remarks.add(f"{source.where}: its failures were counted from the mean score.")
    return tuple(row.text("id") for row in rows if row.text("id")), failures


def _rolled_out(source: Fields) -> int:
    recorded = source.count("rollout_n")
    if recorded is not None:
        return recorded
    return sum(batch.count("n_envs") or 0 for batch in source.objects("accumulation_batches"))


def _whole(source: Fields, name: str) -> int:
    value = source.count(name)
    if value is None or value < 1:
        raise UsageError(f"{source.where}: {name} is no number from 1 on; correct the file")
    return value
