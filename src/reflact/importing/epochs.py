"""The end of an epoch of the older trainer: slow update and meta skill, as the record that a run commits."""

from __future__ import annotations

from typing import Literal

from reflact.folding import heir
from reflact.importing.documents import Documents, snapshot
from reflact.importing.reading import Fields, Folder
from reflact.importing.steps import Gate, verdict_of
from reflact.records import Category, Comparison, EpochRecord, RunState, SlowUpdate, Version
from reflact.types import Action, Fallback, Score

Done = Literal["reserved", "forced", "accepted", "kept", "refused"]
DONE: dict[str, Done] = {
    "inject_placeholder": "reserved",
    "force_accept": "forced",
    "accept": "accepted",
    "accept_new_best": "accepted",
    "reject": "kept",
    "no_content": "refused",
}
GATED: dict[str, Action] = {
    "force_accept": "force_accept",
    "accept": "accept",
    "accept_new_best": "accept_new_best",
    "reject": "reject",
}
CATEGORIES: dict[str, Category] = {
    "improved": "improved",
    "regressed": "regressed",
    "persistent_fail": "persistent_failure",
    "stable_success": "stable_success",
}
REMEMBERED = ("write_meta_skill", "skip_first_epoch", "no_content")


def slow_folder(epoch: int) -> str:
    """Return where an epoch's slow update stands."""
    return f"slow_update/epoch_{epoch:02d}"


def meta_folder(epoch: int) -> str:
    """Return where an epoch's meta skill stands."""
    return f"meta_skill/epoch_{epoch:02d}"


def slow_result(folder: Folder, epoch: int) -> Fields | None:
    """Return what an epoch's slow update came to; None where there was none, or it did not finish."""
    result = folder.object(f"{slow_folder(epoch)}/slow_result.json")
    if result is None and folder.has(slow_folder(epoch)):
        folder.remarks.add(f"{slow_folder(epoch)} holds no result that can be read; left out.")
    return result


def epoch_record(epoch: int, state: RunState, documents: Documents, *, compared: Gate) -> EpochRecord | None:
    """Return the record of an epoch's end; None where it had neither slow update nor meta skill."""
    folder = documents.folder
    slow = slow_result(folder, epoch)
    meta = folder.object(f"{meta_folder(epoch)}/meta_skill_result.json")
    if meta is None and folder.has(meta_folder(epoch)):
        folder.remarks.add(f"{meta_folder(epoch)} holds no result that can be read; left out.")
    if slow is None and meta is None:
        return None
    done = None if slow is None else _slow(epoch, slow, state, documents, compared)
    current, best = state.current, state.best
    made: tuple[Version, ...] = ()
    if slow is not None and done is not None:
        version = _version(epoch, state, done, documents)
        if version is not None:
            current, made = version, (version,)
            best = version if slow.text("action") == "accept_new_best" else best
    memory, fallbacks = (None, ()) if meta is None else _meta(meta)
    return EpochRecord(
        epoch=epoch,
        step=state.step,
        last_hash=state.current.skill_hash,
        compared=_compared(folder, epoch),
        slow=done,
        meta=memory,
        fallbacks=fallbacks,
        made=made,
        current=current,
        best=best,
    )


def _slow(
    epoch: int, source: Fields, state: RunState, documents: Documents, compared: Gate
) -> SlowUpdate | None:
    action = source.text("action")
    if action not in DONE:
        source.remarks.add(f"{source.where}: its action is none of {', '.join(DONE)}; left out.")
        return None
    candidate = documents.read(f"{slow_folder(epoch)}/candidate_skill.md")
    recorded = source.text("candidate_hash") or None
    candidate_hash = recorded if candidate is None else candidate.hash
    rows = documents.folder.rows(f"{slow_folder(epoch)}/selection_eval/results.jsonl")
    measured = compared.measured(candidate_hash or state.current.skill_hash, source, rows)
    gated = action in GATED and measured is not None
    return SlowUpdate(
        action=DONE[action],
        reasoning=source.text("reasoning"),
        guidance=source.text("slow_update_content") or None,
        candidate_hash=candidate_hash,
        verdict=verdict_of(GATED[action], state, measured, None, compared) if gated else None,
    )


def _version(epoch: int, state: RunState, done: SlowUpdate, documents: Documents) -> Version | None:
    left = documents.read(snapshot(state.step))
    if left is None and done.action in {"forced", "accepted"}:
        left = documents.read(f"{slow_folder(epoch)}/candidate_skill.md")
    if left is None or left.hash == state.current.skill_hash:
        return None
    number, origin = state.latest_version + 1, f"epoch {epoch}"
    if done.action == "accepted" and done.verdict is not None:
        score = done.verdict.candidate_score
        return Version(number=number, skill_hash=left.hash, origin=origin, score=score)
    return heir(state.current, number=number, skill=left, origin=origin)


def _meta(source: Fields) -> tuple[str | None, tuple[Fallback, ...]]:
    action, content = source.text("action"), source.text("meta_skill_content")
    if action not in REMEMBERED:
        source.remarks.add(f"{source.where}: its action is none of {', '.join(REMEMBERED)}.")
    if action == "skip_first_epoch" or content:
        return content or None, ()
    reason = source.text("reasoning") or "no reason is recorded"
    return None, (Fallback(label="meta skill", reason=reason, instead="the memory stays as it was"),)


def _compared(folder: Folder, epoch: int) -> tuple[Comparison, ...]:
    for place in (slow_folder(epoch), meta_folder(epoch)):
        for name in (f"{place}/comparison_pairs_all.json", f"{place}/comparison_pairs.json"):
            value = folder.value(name)
            if value is not None:
                pairs = Fields({"pair": value}, name, folder.remarks).objects("pair")
                return tuple(pair for source in pairs if (pair := _comparison(source)) is not None)
    return ()


def _comparison(source: Fields) -> Comparison | None:
    before, after = _score(source.fields("prev")), _score(source.fields("curr"))
    category = CATEGORIES.get(source.text("category"))
    if before is None or after is None or category is None:
        source.remarks.add(f"{source.where} lacks a category or a score that is known; left out.")
        return None
    return Comparison(item_id=source.text("id"), category=category, before=before, after=after)


def _score(source: Fields | None) -> Score | None:
    hard = None if source is None else source.share("hard")
    soft = None if source is None else source.share("soft")
    if hard is None:
        return None
    return Score(hard=hard, soft=hard if soft is None else soft)
