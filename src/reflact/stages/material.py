"""How documents, trajectories and proposals are shown to an optimizer. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import JsonValue

from reflact.cards import RejectedEdit
from reflact.prompts import fence
from reflact.records import StepBufferEntry
from reflact.skill import editable_text
from reflact.stages.trajectories import BYTES_PER_TOKEN, Passage, count_bytes, share_bytes, truncate
from reflact.types import Edit, Item, Rollout, Skill, canonical_json

_SHOWN_EDIT_BYTES = 1500


def show_skill(skill: Skill) -> str:
    """Return the document's editable text, fenced; nothing where there is none: small models quote it."""
    text = editable_text(skill.text).strip("\n")
    return fence("document", text) if text.strip() else ""


def show_cases(rollouts: Sequence[Rollout], items: Sequence[Item], *, failed: bool, tokens: int) -> str:
    """Return numbered trajectories; failed ones with feedback and reference.

    Args:
        rollouts: A minibatch: all failures, or all successes.
        items: Their items.
        failed: Which of the two they are.
        tokens: What they may take together, in estimated tokens (see ``trajectories``); the tags around
            them come on top. Short cases leave what they do not need to the long ones.
    """
    cases = [_case_passages(rollout, item, failed) for rollout, item in zip(rollouts, items, strict=True)]
    rooms = share_bytes([count_bytes(_show_passages(case)) for case in cases], tokens * BYTES_PER_TOKEN)
    return "\n\n".join(
        fence(f"case_{n}", _show_passages(case, room))
        for n, (case, room) in enumerate(zip(cases, rooms, strict=True), 1)
    )


def show_case(rollout: Rollout, item: Item, *, failed: bool, tokens: int) -> str:
    """Return one trajectory in at most about so many estimated tokens, without tags around it."""
    return _show_passages(_case_passages(rollout, item, failed), tokens * BYTES_PER_TOKEN)


def show_edits(edits: Sequence[Edit]) -> str:
    """Return numbered proposals, each fenced, and after them a line on the cases behind each.

    The line stands apart because small models copy what stands beside a text along with it.
    """
    fenced = "\n\n".join(fence(f"proposal_{n}", _show_edit(e)) for n, e in enumerate(edits, 1))
    support = ", ".join(f"proposal {n} from {_show_support(e)}" for n, e in enumerate(edits, 1))
    return f"{fenced}\n\nCases behind them: {support}."


def show_buffer(buffer: Sequence[StepBufferEntry]) -> str:
    """Return what earlier steps of the epoch tried, as a note; empty where there were none."""
    if not buffer:
        return ""
    lines = [_show_buffer_entry(entry) for entry in buffer]
    return "Earlier attempts in this round:\n" + fence("attempts", "\n".join(lines))


def show_memory(cards: Sequence[RejectedEdit]) -> str:
    """Return edits that were tried and rejected, as a note; empty where there are none."""
    if not cards:
        return ""
    lines = [_show_rejected_edit(card) for card in cards]
    return "Edits tried before that did not help:\n" + fence("rejected", "\n".join(lines))


def show_meta(meta: str) -> str:
    """Return the optimizer's memory from earlier epochs, as a note; empty where there is none."""
    if not meta.strip():
        return ""
    return "What earlier epochs taught about edits here:\n" + fence("advice", meta.strip())


def to_text(value: JsonValue) -> str:
    """Return a value as people would write it: text as it is, anything else as canonical JSON."""
    return value if isinstance(value, str) else canonical_json(value)


def _case_passages(rollout: Rollout, item: Item, failed: bool) -> tuple[Passage, ...]:
    answer = "wrong answer: " if failed else "answer: "
    if [turn.role for turn in rollout.turns] == ["user", "assistant"]:
        task, given = rollout.turns
        parts = [Passage(label="task: ", text=task.content), Passage(label=answer, text=given.content)]
    else:
        parts = [Passage(turns=rollout.turns), Passage(label=answer, text=rollout.answer)]
    if failed and rollout.feedback:
        parts.append(Passage(label="remark: ", text=rollout.feedback))
    if failed and item.reference is not None:
        parts.append(Passage(label="right answer: ", text=to_text(item.reference)))
    return tuple(parts)


def _show_passages(case: Sequence[Passage], room: int | None = None) -> str:
    sizes = [count_bytes(part.full_text) for part in case]
    rooms = sizes if room is None else share_bytes(sizes, room - (len(case) - 1))
    return "\n".join(part.fit(r) for part, r in zip(case, rooms, strict=True))


def _show_support(edit: Edit) -> str:
    source = "" if edit.source_type is None else f"{edit.source_type} "
    return f"{edit.support_count} {source}{'case' if edit.support_count == 1 else 'cases'}"


def _show_edit(edit: Edit) -> str:
    if edit.op in {"append", "suggest", "rewrite"}:
        return edit.content
    lines = [f"op: {edit.op}", f"target: {edit.target}"]
    if edit.content:
        lines.append(f"content: {edit.content}")
    return "\n".join(lines)


def _show_tried_edit(edit: Edit) -> str:
    return f"{edit.op} {truncate(edit.content or edit.target, _SHOWN_EDIT_BYTES)}"


def _show_rejected_edit(card: RejectedEdit) -> str:
    words = [f"{card.op}: {truncate(card.target or card.content, _SHOWN_EDIT_BYTES)}"]
    if card.target and card.content:
        words.append(f"content: {truncate(card.content, _SHOWN_EDIT_BYTES)}")
    if card.score_before is not None and card.score_after is not None:
        words.append(f"validation score {card.score_before:.3f} before, {card.score_after:.3f} after")
    return "\n  ".join(words)


def _show_buffer_entry(entry: StepBufferEntry) -> str:
    words = [f"step {entry.step}: {entry.n_failures} of {entry.n_total} cases failed; outcome {entry.action}"]
    if entry.score_before is not None and entry.score_after is not None:
        words.append(f"validation score {entry.score_before:.3f} before, {entry.score_after:.3f} after")
    words += [f"pattern ({p.count}): {p.type}: {p.description}" for p in entry.patterns]
    words += [f"did not help: {_show_tried_edit(e)}" for e in entry.rejected_edits]
    return "\n  ".join(words)
