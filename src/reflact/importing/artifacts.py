"""The files of one step of the older trainer, as the values that a step's record holds."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import get_args

from pydantic import JsonValue

from reflact.importing.reading import Fields, Folder
from reflact.types import (
    Chosen,
    Edit,
    EditResult,
    FailurePattern,
    Fallback,
    Merged,
    Operation,
    Patch,
    Report,
    Source,
    StepSize,
    canonical,
)

OPERATIONS: tuple[Operation, ...] = get_args(Operation)
SOURCES: dict[str, Source] = {
    "failure": "failure",
    "fail": "failure",
    "success": "success",
    "succ": "success",
}
WORDS = ("content", "suggestion", "new_skill", "skill", "text", "description")

_BATCH = re.compile(r"batch_(\d{1,6})")
_MINIBATCH = re.compile(r"minibatch_(fail|succ)_(\d{1,6})\.json")


def step_folder(step: int) -> str:
    """Return where a step's files stand."""
    return f"steps/step_{step:04d}"


def batches(folder: Folder, step: int) -> tuple[str, ...]:
    """Return the folders of a step's accumulated batches; the step's own folder where there was but one."""
    place = step_folder(step)
    found = sorted(folder.names(place, _BATCH), key=lambda name: int(name.removeprefix("batch_")))
    return tuple(f"{place}/{name}" for name in found) or (place,)


def reports(folder: Folder, step: int) -> tuple[Report, ...]:
    """Return what the step's analysts said: by batch, failures first, by number."""
    return tuple(
        report
        for batch, place in enumerate(batches(folder, step))
        for name in folder.names(f"{place}/patches", _MINIBATCH)
        if (report := _report(folder.object(f"{place}/patches/{name}"), name, batch)) is not None
    )


def merged(folder: Folder, step: int) -> Merged:
    """Return the step's merged pool of edits."""
    pool = folder.object(f"{step_folder(step)}/merged_patch.json")
    return Merged() if pool is None else Merged(patch=patch_of(pool))


def chosen(folder: Folder, step: int, record: Fields, pool: Patch) -> Chosen:
    """Return what was selected from the step's pool, and the step size that the optimizer decided on."""
    ranked = folder.object(f"{step_folder(step)}/ranked_edits.json")
    choice = record.fields("lr_decision") or folder.object(f"{step_folder(step)}/lr_decision.json")
    size = record.count("n_edits_merged")
    return Chosen(
        patch=Patch() if ranked is None else patch_of(ranked),
        pool_size=len(pool.edits) if size is None else size,
        budget=record.count("edit_budget"),
        ranked=ranked is not None and "ranking_details" in ranked,
        decision=None if choice is None else _step_size(choice),
        fallbacks=() if choice is None else _fallbacks(choice),
    )


def results(folder: Folder, step: int, edits: Sequence[Edit]) -> tuple[EditResult, ...]:
    """Return what became of the selected edits; of those with a shortened report the full text is used."""
    name = f"{step_folder(step)}/edit_apply_report.json"
    value = folder.value(name)
    entries = Fields({"edit": value}, name, folder.remarks).objects("edit")
    matching = len(entries) == len(edits)
    found = []
    for number, entry in enumerate(entries):
        shown = _edit(entry, content="content_preview")
        full = edits[number] if matching else shown
        if full is None:
            continue
        status = entry.text("status")
        applied = status.startswith("applied")
        reason = None if status == "applied" else entry.text("error") or status or "no reason is recorded"
        found.append(EditResult(edit=full, status="applied" if applied else "rejected", reason=reason))
    return tuple(found)


def appendix(folder: Folder, step: int) -> tuple[str, ...] | None:
    """Return the appendix's notes after a step; None where the step left them alone."""
    noted = folder.object(f"{step_folder(step)}/appendix_notes.json")
    if noted is None:
        return None
    after = noted.raw("appendix_after")
    lines = after.splitlines() if isinstance(after, str) else noted.values("appendix_after")
    return tuple(words for line in lines if (words := _words(line).strip().removeprefix("- ")))


def patch_of(source: Fields) -> Patch:
    """Return a payload's edits, whichever of the three update modes wrote it."""
    edits = [edit for entry in source.objects("edits") if (edit := _edit(entry)) is not None]
    for name, op in (("revise_suggestions", "suggest"), ("skill_candidates", "rewrite")):
        for value in source.values(name):
            fields = Fields(
                value if isinstance(value, dict) else {}, f"{source.where}: {name}", source.remarks
            )
            edits.append(
                Edit.model_validate(
                    {
                        "op": op,
                        "content": _words(value),
                        "source_type": SOURCES.get(fields.text("source_type")),
                        "support_count": max(1, fields.count("support_count") or 1),
                        "merge_level": fields.count("merge_level") or 0,
                    }
                )
            )
    return Patch(reasoning=source.text("reasoning"), edits=tuple(edits))


def _report(source: Fields | None, name: str, batch: int) -> Report | None:
    named = _MINIBATCH.fullmatch(name)
    if source is None or named is None:
        return None
    payload = source.fields("patch")
    patterns = (
        FailurePattern(
            type=entry.text("failure_type"),
            count=max(1, entry.count("count") or 1),
            description=entry.text("description"),
        )
        for entry in source.objects("failure_summary")
    )
    return Report(
        source_type=SOURCES[named[1]],
        index=int(named[2]),
        item_ids=(),
        patch=Patch() if payload is None else patch_of(payload),
        patterns=tuple(patterns),
        batch=batch,
        reminders=tuple(_words(note) for note in source.values("appendix_notes")),
    )


def _edit(source: Fields, content: str = "content") -> Edit | None:
    op = next((known for known in OPERATIONS if known == source.text("op")), None)
    if op is None:
        source.remarks.add(f"{source.where} has no operation that is known; left out.")
        return None
    return Edit(
        op=op,
        target=source.text("target"),
        content=source.text(content),
        source_type=SOURCES.get(source.text("source_type")),
        support_count=max(1, source.count("support_count") or 1),
        merge_level=source.count("merge_level") or 0,
    )


def _step_size(source: Fields) -> StepSize | None:
    count = source.count("learning_rate")
    if count is None:
        return None
    confidence = source.share("confidence")
    return StepSize(
        count=count,
        reasoning=source.text("reasoning"),
        confidence=0.0 if confidence is None else confidence,
        risks=_words(source.raw("risk_notes")),
    )


def _fallbacks(source: Fields) -> tuple[Fallback, ...]:
    if not source.flag("fallback"):
        return ()
    reason = source.text("error") or "no reason is recorded"
    instead = f"a step size of {source.count('learning_rate')}"
    return (Fallback(label="step size", reason=reason, instead=instead),)


def _words(value: JsonValue) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        named = next((words for name in WORDS if isinstance(words := value.get(name), str)), None)
        if named is not None:
            return named
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        return "\n".join(str(line) for line in value)
    return canonical(value)
