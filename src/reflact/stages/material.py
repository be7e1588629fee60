"""How documents, trajectories and proposals are shown to an optimizer. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import JsonValue

from reflact.prompts import fence
from reflact.skill import body
from reflact.types import BufferEntry, Edit, Item, Rollout, Skill, canonical


def show_skill(skill: Skill) -> str:
    """Return the document's editable text, fenced; nothing where there is none: small models quote it."""
    text = body(skill.text).strip("\n")
    return fence("document", text) if text.strip() else ""


def show_cases(rollouts: Sequence[Rollout], items: Sequence[Item], *, chars: int) -> str:
    """Return numbered trajectories, each part cut to ``chars``; failed ones with feedback and reference."""
    return "\n\n".join(
        fence(f"case_{n}", _case(r, i, chars))
        for n, (r, i) in enumerate(zip(rollouts, items, strict=True), 1)
    )


def show_edits(edits: Sequence[Edit]) -> str:
    """Return numbered proposals, each fenced, and after them a line on the cases behind each.

    The line stands apart because small models copy what stands beside a text along with it.
    """
    fenced = "\n\n".join(fence(f"proposal_{n}", _edit(e)) for n, e in enumerate(edits, 1))
    support = ", ".join(f"proposal {n} from {_support(e)}" for n, e in enumerate(edits, 1))
    return f"{fenced}\n\nCases behind them: {support}."


def show_buffer(buffer: Sequence[BufferEntry]) -> str:
    """Return what earlier steps of the epoch tried, as a note; empty where there were none."""
    if not buffer:
        return ""
    lines = [_entry(entry) for entry in buffer]
    return "Earlier attempts in this round:\n" + fence("attempts", "\n".join(lines))


def cut(text: str, chars: int) -> str:
    """Return a text of at most about ``chars`` characters: head and tail, with the gap marked by its size."""
    if len(text) <= chars:
        return text
    head = chars * 2 // 3
    tail = chars - head
    return f"{text[:head]}\n[... {len(text) - chars} characters cut ...]\n{text[-tail:]}"


def as_text(value: JsonValue) -> str:
    """Return a value as people would write it: text as it is, anything else as canonical JSON."""
    return value if isinstance(value, str) else canonical(value)


def _case(rollout: Rollout, item: Item, chars: int) -> str:
    answer = "wrong answer" if rollout.failed else "answer"
    if [turn.role for turn in rollout.turns] == ["user", "assistant"]:
        task, given = rollout.turns
        lines = [f"task: {cut(task.content, chars)}", f"{answer}: {cut(given.content, chars)}"]
    else:
        talk = "\n".join(f"{turn.role}: {turn.content}" for turn in rollout.turns)
        lines = [cut(talk, chars), f"{answer}: {cut(rollout.answer, chars)}"]
    if rollout.failed and rollout.feedback:
        lines.append(f"remark: {cut(rollout.feedback, chars)}")
    if rollout.failed and item.reference is not None:
        lines.append(f"right answer: {cut(as_text(item.reference), chars)}")
    return "\n".join(lines)


def _support(edit: Edit) -> str:
    source = "" if edit.source_type is None else f"{edit.source_type} "
    return f"{edit.support_count} {source}{'case' if edit.support_count == 1 else 'cases'}"


def _edit(edit: Edit) -> str:
    if edit.op == "append":
        return edit.content
    lines = [f"op: {edit.op}", f"target: {edit.target}"]
    if edit.content:
        lines.append(f"content: {edit.content}")
    return "\n".join(lines)


def _entry(entry: BufferEntry) -> str:
    words = [f"step {entry.step}: {entry.n_failures} of {entry.n_total} cases failed; outcome {entry.action}"]
    if entry.score_before is not None and entry.score_after is not None:
        words.append(f"validation score {entry.score_before:.3f} before, {entry.score_after:.3f} after")
    words += [f"pattern ({p.count}): {p.type}: {p.description}" for p in entry.patterns]
    words += [f"did not help: {e.op} {as_text(e.content or e.target)}" for e in entry.rejected_edits]
    return "\n  ".join(words)
