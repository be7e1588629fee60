"""Long texts in a budget: what fits stays whole, and every cut is marked with its size. Pure.

Budgets are given in estimated tokens. There is no tokenizer here, since each model has its own; a token is
taken to be three bytes of UTF-8. The analyst prompts of the recorded demo, English and SQL, have 3.6 to 3.9
bytes a token, so that the estimate is on the safe side for such text. Digits, random letters and scripts
that a tokenizer does not know well cost more; a request that is too long after all meets the model's own
limit, and is made once more with half the budget.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from reflact.types import FrozenModel, Turn

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
