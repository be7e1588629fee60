"""How documents, trajectories and proposals are shown to an optimizer. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from pydantic import JsonValue

from reflact.prompts import fence
from reflact.records import StepBufferEntry
from reflact.skills.document import editable_text
from reflact.skills.rejected_edits import RejectedEdit
from reflact.types import Edit, FrozenModel, Item, Rollout, Skill, Turn, canonical_json

BYTES_PER_TOKEN = 3
_MIN_TURN_BYTES = 400
_MARK_BYTES = 64

_TROUBLE = re.compile(
    r"error|exception|traceback|\bfail|\binvalid|\billegal|\bunexpected|\bunknown|\bdenied|\brefused"
    r"|\bforbidden|\btimed?[ -]?out|\bnot found|\bno such|\bcannot|\bcould not|\bunable|\bnothing happens"
    r"|\bwrong\b|\bincorrect",
    re.IGNORECASE,
)

_TURNABOUT = re.compile(
    r"\b(?:instead|actually|wait|mistake|wrong|again|retry|differently|different|another way)\b",
    re.IGNORECASE,
)


class Passage(FrozenModel):
    """A labelled piece of a case: a text, or the turns of a conversation."""

    label: str = ""
    text: str = ""
    turns: tuple[Turn, ...] = ()

    @property
    def full_text(self) -> str:
        """The piece without cuts."""
        return self.label + (
            "\n".join(_format_turn(turn) for turn in self.turns) if self.turns else self.text
        )

    def fit(self, room: int) -> str:
        """Return the piece in at most ``room`` bytes; however small the room, what is missing is marked."""
        if count_bytes(self.full_text) <= room:
            return self.full_text
        left = room - count_bytes(self.label)
        return self.label + (fit_conversation(self.turns, left) if self.turns else truncate(self.text, left))


def count_bytes(text: str) -> int:
    """Return a text's length in bytes of UTF-8."""
    return len(text.encode("utf-8"))


def share_bytes(sizes: Sequence[int], room: int) -> tuple[int, ...]:
    """Divide room among texts so that the short ones get all they need and the long ones equal parts.

    What a short text leaves of its equal part goes to the longer ones. The sum is at most ``room``, and
    equals it where the texts do not fit.
    """
    granted = [0] * len(sizes)
    left = max(0, room)
    for served, place in enumerate(sorted(range(len(sizes)), key=lambda i: sizes[i])):
        granted[place] = min(sizes[place], left // (len(sizes) - served))
        left -= granted[place]
    return tuple(granted)


def truncate(text: str, room: int) -> str:
    """Return a text in at most ``room`` bytes: two thirds from its beginning, one from its end.

    Between them stands a mark with the gap's size. Where the room does not even hold the mark, the mark
    stands alone, unless the text is no longer than it.
    """
    if count_bytes(text) <= room:
        return text
    space = room - len(_cut_mark(len(text))) - 2
    if space <= 0:
        return min(text, _cut_mark(len(text)), key=count_bytes)
    encoded = text.encode("utf-8")
    head = encoded[: space * 2 // 3].decode("utf-8", "ignore")
    tail = encoded[len(encoded) - (space - space * 2 // 3) :].decode("utf-8", "ignore")
    return f"{head}\n{_cut_mark(len(text) - len(head) - len(tail))}\n{tail}"


def fit_conversation(turns: Sequence[Turn], room: int) -> str:
    """Return a conversation in at most ``room`` bytes: its key turns, then as many others as fit, last first.

    The key turns are the first one and the first of the user; the last one, the last answer and what it
    answers; those in which the user or a tool speaks of trouble; and those that a change of course
    follows, which an answer shows by words such as "instead". They share the room as ``shares`` says, and
    the earlier in this list come in first where it is short. What is missing of a turn is marked in it;
    turns that are left out are counted where they stood.
    """
    texts = [_format_turn(turn) for turn in turns]
    sizes = [count_bytes(text) for text in texts]
    left = room - _MARK_BYTES
    keys: list[int] = []
    for place in _key_turns(turns):
        least = min(sizes[place], _MIN_TURN_BYTES) + _MARK_BYTES
        if not keys or least <= left:
            keys.append(place)
            left -= least
    space = room - _MARK_BYTES * (len(keys) + 1)
    rooms = dict(zip(keys, share_bytes([sizes[place] for place in keys], space), strict=True))
    left = space - sum(rooms.values())
    for place in reversed(range(len(turns))):
        around = 1 if place + 1 in rooms else _MARK_BYTES
        granted = min(sizes[place], left - around)
        if place not in rooms and granted >= min(sizes[place], _MIN_TURN_BYTES):
            rooms[place] = granted
            left -= granted + around
    return "\n".join(_join_with_gaps(texts, rooms))


def _key_turns(turns: Sequence[Turn]) -> list[int]:
    last = len(turns) - 1
    user = next((i for i, turn in enumerate(turns) if turn.role == "user"), 0)
    answer = next((i for i in range(last, -1, -1) if turns[i].role == "assistant"), last)
    decisive = [i for i in range(last, -1, -1) if _is_decisive(turns, i)]
    return list(dict.fromkeys((0, user, last, answer, max(0, answer - 1), *decisive)))


def _is_decisive(turns: Sequence[Turn], place: int) -> bool:
    if turns[place].role not in {"user", "tool"}:
        return False
    following = turns[place + 1] if place + 1 < len(turns) else None
    turnabout = (
        following is not None and following.role == "assistant" and _TURNABOUT.search(following.content)
    )
    return bool(turnabout or _TROUBLE.search(turns[place].content))


def _join_with_gaps(texts: Sequence[str], rooms: Mapping[int, int]) -> Iterator[str]:
    skipped: list[str] = []
    for place, text in enumerate(texts):
        if place not in rooms:
            skipped.append(text)
            continue
        if skipped:
            yield _gap_mark(skipped)
            skipped = []
        yield truncate(text, rooms[place])
    if skipped:
        yield _gap_mark(skipped)


def _format_turn(turn: Turn) -> str:
    return f"{turn.role}: {turn.content}"


def _cut_mark(characters: int) -> str:
    return f"[... {characters:,} characters cut ...]"


def _gap_mark(texts: Sequence[str]) -> str:
    turns = "1 turn" if len(texts) == 1 else f"{len(texts):,} turns"
    return f"[... {turns} of {sum(map(len, texts)):,} characters left out ...]"


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
