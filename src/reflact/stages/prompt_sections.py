"""Formats documents, trajectories and proposals for the optimizer's prompts. Pure functions."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from statistics import fmean

from pydantic import JsonValue

from reflact.prompts import fence
from reflact.records import StepBufferEntry
from reflact.skills.document import editable_text
from reflact.skills.rejected_edits import RejectedEdit
from reflact.types import (
    Case,
    Edit,
    FrozenModel,
    Item,
    Rollout,
    Skill,
    Turn,
    WorkedExample,
    canonical_json,
)

BYTES_PER_TOKEN = 3
_MIN_TURN_BYTES = 400
_MARK_BYTES = 64
_LONG_TEXTS = 5

# Words of trouble. Their first letters come first, since long texts are searched, and few letters
# begin a word.
_TROUBLE = re.compile(
    r"(?=[cdefinrtuw])(?:error|exception|traceback|\b(?:fail|invalid|illegal|unexpected|unknown"
    r"|denied|refused|forbidden|timed?[ -]?out|not found|no such|cannot|could not|unable"
    r"|nothing happens|wrong\b|incorrect))",
    re.IGNORECASE,
)

_CHANGE_OF_COURSE = re.compile(
    r"\b(?:instead|actually|wait|mistake|wrong|again|retry|differently|different|another way)\b",
    re.IGNORECASE,
)


class Passage(FrozenModel):
    """A labelled part of a case: a text, or the turns of a conversation."""

    label: str = ""
    text: str = ""
    turns: tuple[Turn, ...] = ()

    @cached_property
    def full_text(self) -> str:
        """The passage without cuts."""
        return self.label + ("\n".join(map(_format_turn, self.turns)) or self.text)

    def fit(self, max_bytes: int) -> str:
        """Return the passage in at most ``max_bytes``; cuts are marked, whatever the size."""
        if count_bytes(self.full_text) <= max_bytes:
            return self.full_text
        left = max_bytes - count_bytes(self.label)
        if self.turns:
            return self.label + fit_conversation(self.turns, left)
        return self.label + truncate(self.text, left)


def count_bytes(text: str) -> int:
    """Return a text's length in bytes of UTF-8."""
    return len(text) if text.isascii() else len(text.encode("utf-8"))


def share_bytes(sizes: Sequence[int], max_bytes: int) -> tuple[int, ...]:
    """Divide ``max_bytes`` among texts: short texts get all they need, long ones get equal parts.

    Long texts share the bytes that short texts leave over. The sum is at most ``max_bytes``, and
    equals it if the texts do not fit.
    """
    limits = [0] * len(sizes)
    left = max(0, max_bytes)
    for done, i in enumerate(sorted(range(len(sizes)), key=lambda i: sizes[i])):
        limits[i] = min(sizes[i], left // (len(sizes) - done))
        left -= limits[i]
    return tuple(limits)


def truncate(text: str, max_bytes: int) -> str:
    """Return a text in at most ``max_bytes``: two thirds from its beginning, the rest from its end.

    A mark between them states the size of the cut. If ``max_bytes`` is too small even for the mark,
    the result is the mark alone, or the text if it is shorter.
    """
    if count_bytes(text) <= max_bytes:
        return text
    space = max_bytes - len(_cut_mark(len(text))) - 2
    if space <= 0:
        return min(text, _cut_mark(len(text)), key=count_bytes)
    encoded = text.encode("utf-8")
    head = encoded[: space * 2 // 3].decode("utf-8", "ignore")
    tail = encoded[len(encoded) - (space - space * 2 // 3) :].decode("utf-8", "ignore")
    return f"{head}\n{_cut_mark(len(text) - len(head) - len(tail))}\n{tail}"


def fit_conversation(turns: Sequence[Turn], max_bytes: int) -> str:
    """Return a conversation in at most ``max_bytes``: its key turns, then others that fit.

    The key turns are, in order of priority: the first turn and the first of the user; the last
    turn, the last answer and the turn before it; turns in which the user or a tool reports trouble;
    and turns before an answer that changes course, by words such as "instead". They share the bytes
    as in ``share_bytes``. Of the others, the last ones go first. Cuts in a turn are marked; omitted
    turns are counted in a mark at their position.
    """
    texts = [_format_turn(turn) for turn in turns]
    sizes = [count_bytes(text) for text in texts]
    left = max_bytes - _MARK_BYTES
    keys: list[int] = []
    for i in _key_turns(turns):
        least = min(sizes[i], _MIN_TURN_BYTES) + _MARK_BYTES
        if not keys or least <= left:
            keys.append(i)
            left -= least
    space = max_bytes - _MARK_BYTES * (len(keys) + 1)
    limits = dict(zip(keys, share_bytes([sizes[i] for i in keys], space), strict=True))
    left = space - sum(limits.values())
    for i in reversed(range(len(turns))):
        extra = 1 if i + 1 in limits else _MARK_BYTES
        limit = min(sizes[i], left - extra)
        if i not in limits and limit >= min(sizes[i], _MIN_TURN_BYTES):
            limits[i] = limit
            left -= limit + extra
    return "\n".join(_join_with_gaps(texts, limits))


def _key_turns(turns: Sequence[Turn]) -> list[int]:
    last = len(turns) - 1
    user = next((i for i, turn in enumerate(turns) if turn.role == "user"), 0)
    answer = next((i for i in range(last, -1, -1) if turns[i].role == "assistant"), last)
    first = dict.fromkeys((0, user, last, answer, max(0, answer - 1)))
    return [*first, *(i for i in range(last, -1, -1) if i not in first and _is_decisive(turns, i))]


def _is_decisive(turns: Sequence[Turn], index: int) -> bool:
    if turns[index].role not in {"user", "tool"}:
        return False
    if _TROUBLE.search(turns[index].content):
        return True
    return any(
        turn.role == "assistant" and _CHANGE_OF_COURSE.search(turn.content)
        for turn in turns[index + 1 : index + 2]
    )


def _join_with_gaps(texts: Sequence[str], limits: Mapping[int, int]) -> Iterator[str]:
    skipped: list[str] = []
    for i, text in enumerate(texts):
        if i not in limits:
            skipped.append(text)
            continue
        if skipped:
            yield _gap_mark(skipped)
            skipped = []
        yield truncate(text, limits[i])
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
    """Return the document's editable text, fenced; nothing if empty: small models quote tags."""
    text = editable_text(skill.text).strip("\n")
    return fence("document", text) if text.strip() else ""


def show_cases(
    rollouts: Sequence[Rollout], items: Sequence[Item], *, failed: bool, tokens: int
) -> str:
    """Return a minibatch's trajectories, numbered; failed ones with feedback and reference.

    ``tokens`` is the maximum of their estimated tokens. Short cases leave unused tokens to long
    ones.
    """
    pairs = zip(rollouts, items, strict=True)
    cases = [_case_passages(rollout, item, failed) for rollout, item in pairs]
    return "\n\n".join(_fence_cases(cases, tokens))


def show_step_cases(failures: Sequence[Case], successes: Sequence[Case], *, tokens: int) -> str:
    """Return all cases of a step, failures first, numbered throughout, in at most ``tokens``."""
    cases = [_case_passages(c.rollout, c.item, c.failed) for c in (*failures, *successes)]
    shown = _fence_cases(cases, tokens)
    if successes:
        shown.insert(len(failures), "Cases in which the agent succeeded:")
    if failures:
        shown.insert(0, "Cases in which the agent failed:")
    return "\n\n".join(shown)


def _fence_cases(cases: Sequence[Sequence[Passage]], tokens: int) -> list[str]:
    sizes = [sum(map(_size, case)) + len(case) - 1 for case in cases]
    limits = share_bytes(sizes, tokens * BYTES_PER_TOKEN)
    return [
        fence(f"case_{n}", _show_passages(case, limit))
        for n, (case, limit) in enumerate(zip(cases, limits, strict=True), 1)
    ]


def show_case(rollout: Rollout, item: Item, *, failed: bool, tokens: int) -> str:
    """Return one trajectory in at most ``tokens`` estimated tokens, without tags around it."""
    return _show_passages(_case_passages(rollout, item, failed), tokens * BYTES_PER_TOKEN)


def list_material(items: Sequence[Item], rollouts: Sequence[Rollout]) -> tuple[str, ...]:
    """Return all texts of cases in full, without labels and tags."""
    values = [show_json(value) for item in items for value in (item.input, item.reference)]
    remarks = [rollout.feedback for rollout in rollouts if rollout.feedback]
    return (*values, *remarks, *(turn.content for rollout in rollouts for turn in rollout.turns))


def show_right_answers(examples: Sequence[WorkedExample], *, max_bytes: int) -> str:
    """Return further tasks with their right answers as a note, as many as fit.

    A text longer than a part of ``max_bytes`` is cut, so that at least some examples fit.
    """
    lines: list[str] = []
    longest = max_bytes // _LONG_TEXTS
    left = max_bytes
    for example in examples:
        task = truncate(example.task, longest)
        answer = truncate(example.answer, longest)
        line = f"task: {task}\nright answer: {answer}\n"
        left -= count_bytes(line)
        if left >= 0:
            lines.append(line)
    return _show_note("Further tasks with their right answers", "answers", lines)


def show_edits(edits: Sequence[Edit]) -> str:
    """Return numbered proposals, each fenced, and then a line with the number of cases behind each.

    The line is separate because small models copy text beside a proposal along with it.
    """
    fenced = "\n\n".join(fence(f"proposal_{n}", _show_edit(e)) for n, e in enumerate(edits, 1))
    if any(e.evidence for e in edits):
        lines = [f"proposal {n}, {_show_support(e)}: {e.evidence}" for n, e in enumerate(edits, 1)]
        return f"{fenced}\n\nThe evidence for them:\n{fence('evidence', chr(10).join(lines))}"
    support = ", ".join(f"proposal {n} from {_show_support(e)}" for n, e in enumerate(edits, 1))
    return f"{fenced}\n\nCases behind them: {support}."


def show_task(*descriptions: str) -> str:
    """Return what is known of the tasks, the score and the agent as a note; empty if nothing is."""
    lines = filter(None, map(str.strip, descriptions))
    return _show_note("Background, not part of the document", "background", lines)


def show_figures(
    rollouts: Sequence[Rollout], items: Sequence[Item], failed: Collection[str]
) -> str:
    """Return the figures of a step's rollouts as a note; ``failed`` are ids of items."""
    scores = [r.score for r in rollouts if r.score is not None]
    lines = [f"{len(rollouts)} tasks under the document as it is: {len(failed)} failed"]
    if scores:
        hard = fmean(s.hard for s in scores)
        soft = fmean(s.soft for s in scores)
        credit = f", with partial credit {soft:.3f}" if soft != hard else ""
        lines.append(f"mean score {hard:.3f}{credit}")
    if len(rollouts) > len(scores):
        lines.append(f"{len(rollouts) - len(scores)} could not be measured")
    kinds = Counter(item.task_type for item in items if item.task_type is not None)
    lost = Counter(item.task_type for item in items if item.id in failed)
    if len(kinds) > 1:
        lines += [f"{kind}: {lost[kind]} of {n} failed" for kind, n in sorted(kinds.items())]
    return _show_note("This step", "figures", lines)


def show_buffer(buffer: Sequence[StepBufferEntry]) -> str:
    """Return the attempts of the epoch's earlier steps as a note; empty if there are none."""
    return _show_note("Earlier attempts in this round", "attempts", map(_show_buffer_entry, buffer))


def show_memory(edits: Sequence[RejectedEdit]) -> str:
    """Return rejected edits as a note; empty if there are none."""
    lines = map(_show_rejected_edit, edits)
    return _show_note("Edits tried before that did not help", "rejected", lines)


def show_meta(meta: str) -> str:
    """Return the optimizer's memory from earlier epochs as a note; empty if there is none."""
    return _show_note("What earlier epochs taught about edits here", "advice", [meta.strip()])


def join_sections(*sections: str) -> str:
    """Return the sections that are not empty, with an empty line between them."""
    return "\n\n".join(section for section in sections if section)


def _show_note(heading: str, tag: str, lines: Iterable[str]) -> str:
    text = "\n".join(lines)
    return f"{heading}:\n{fence(tag, text)}" if text else ""


def _case_passages(rollout: Rollout, item: Item, failed: bool) -> tuple[Passage, ...]:
    answer = "wrong answer: " if failed else "answer: "
    if [turn.role for turn in rollout.turns] == ["user", "assistant"]:
        task, reply = rollout.turns
        parts = [
            Passage(label="task: ", text=task.content),
            Passage(label=answer, text=reply.content),
        ]
    else:
        parts = [Passage(turns=rollout.turns), Passage(label=answer, text=rollout.answer)]
    if failed and rollout.feedback:
        parts.append(Passage(label="remark: ", text=rollout.feedback))
    if failed and item.reference is not None:
        parts.append(Passage(label="right answer: ", text=show_json(item.reference)))
    return tuple(parts)


def show_json(value: JsonValue) -> str:
    """Return a value as text: a text as it is, nothing for None, anything else as JSON."""
    if value is None:
        return ""
    return value if isinstance(value, str) else canonical_json(value)


def _size(passage: Passage) -> int:
    return count_bytes(passage.full_text)


def _show_passages(case: Sequence[Passage], max_bytes: int) -> str:
    limits = share_bytes([_size(part) for part in case], max_bytes - (len(case) - 1))
    return "\n".join(part.fit(limit) for part, limit in zip(case, limits, strict=True))


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


def _show_rejected_edit(edit: RejectedEdit) -> str:
    parts = [f"{edit.op}: {truncate(edit.target or edit.content, _SHOWN_EDIT_BYTES)}"]
    if edit.target and edit.content:
        parts.append(f"content: {truncate(edit.content, _SHOWN_EDIT_BYTES)}")
    return "\n  ".join([*parts, *_show_scores(edit)])


def _show_buffer_entry(entry: StepBufferEntry) -> str:
    parts = [
        f"step {entry.step}: {entry.n_failures} of {entry.n_total} cases failed; outcome "
        f"{entry.action}"
    ]
    parts += _show_scores(entry)
    parts += [f"pattern ({p.count}): {p.type}: {p.description}" for p in entry.patterns]
    parts += [
        f"did not help: {e.op} {truncate(e.content or e.target, _SHOWN_EDIT_BYTES)}"
        for e in entry.rejected_edits
    ]
    return "\n  ".join(parts)


def _show_scores(tried: RejectedEdit | StepBufferEntry) -> list[str]:
    if tried.score_before is None or tried.score_after is None:
        return []
    return [f"validation score {tried.score_before:.3f} before, {tried.score_after:.3f} after"]
