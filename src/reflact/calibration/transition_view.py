"""How a transition is shown: its states, what differs between them, and all of it fenced in a
budget of tokens. Pure.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from operator import eq
from typing import NamedTuple, TypeAlias, TypeVar

from pydantic import JsonValue

from reflact.jsonutil import is_same_json
from reflact.memory.models import Action, Transition
from reflact.prompts import fence

S = TypeVar("S")

NO_CHANGE_TEXT = "Nothing changed."

# Stands for the side of a change on which a field is not there.
ABSENT_TEXT = "(not there)"

# The path of a change that has no field.
ROOT_PATH = "state"

_NAME = re.compile(r"[^\W\d]\w*")
_MAX_DIFF_LINES = 200
_CONTEXT_CHARS = 60


class FieldChange(NamedTuple):
    """One field that differs; ``before`` and ``after`` are JSON text, None if it is not there."""

    path: str
    before: str | None
    after: str | None


def show_state(value: JsonValue) -> str:
    """Return a state as it is shown: text as it is, other values as indented JSON with sorted
    fields.

    What has no UTF-8 (half a surrogate pair) is shown as its escape.
    """
    if not isinstance(value, str):
        value = json.dumps(value, sort_keys=True, indent=1, ensure_ascii=False, allow_nan=False)
    return value.encode("utf-8", "backslashreplace").decode("utf-8")


def _show_fields(fields: Iterable[FieldChange], *, shorten: bool = False) -> str:
    """Return a line for each field that differs, ``path: before -> after``.

    ``shorten`` leaves out, marked, what long texts have in common at their beginnings and ends.
    """
    lines = []
    for path, old, new in fields:
        if shorten and old is not None and new is not None:
            old, new = _drop_common_ends(old, new)  # noqa: PLW2901
        before = ABSENT_TEXT if old is None else old
        after = ABSENT_TEXT if new is None else new
        lines.append(f"{path}: {before} -> {after}")
    return show_state("\n".join(lines)) or NO_CHANGE_TEXT


def list_changes(before: JsonValue, after: JsonValue, path: str = "") -> Iterator[FieldChange]:
    """Yield the fields in which two JSON values differ, in the order of their paths within each
    level.

    Lists are compared between what they have in common at their beginnings and ends, place by
    place.
    """
    if is_same_json(before, after):
        return
    if isinstance(before, dict) and isinstance(after, dict):
        for name in sorted(before.keys() | after.keys()):
            inner = _join_path(path, name)
            if name not in before:
                yield FieldChange(inner, None, _format_json(after[name]))
            elif name not in after:
                yield FieldChange(inner, _format_json(before[name]), None)
            else:
                yield from list_changes(before[name], after[name], inner)
    elif isinstance(before, list) and isinstance(after, list):
        start, end = _count_common_ends(before, after, is_same_json)
        for n in range(start, max(len(before), len(after)) - end):
            inner = f"{path}[{n}]"
            if n >= len(before) - end:
                yield FieldChange(inner, None, _format_json(after[n]))
            elif n >= len(after) - end:
                yield FieldChange(inner, _format_json(before[n]), None)
            else:
                yield from list_changes(before[n], after[n], inner)
    else:
        yield FieldChange(path or ROOT_PATH, _format_json(before), _format_json(after))


def _join_path(path: str, name: str) -> str:
    if not _NAME.fullmatch(name):
        return f"{path}[{_format_json(name)}]"
    return f"{path}.{name}" if path else name


def _format_json(value: JsonValue) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False, allow_nan=False)


def _drop_common_ends(old: str, new: str) -> tuple[str, str]:
    """Return two texts without most of what they share at both ends."""
    start, end = _count_common_ends(old, new)
    start = max(0, start - _CONTEXT_CHARS)
    end = max(0, end - _CONTEXT_CHARS)
    head = f"[... {start:,} equal characters ...]" if start else ""
    tail = f"[... {end:,} equal characters ...]" if end else ""
    old_middle = old[start : len(old) - end]
    new_middle = new[start : len(new) - end]
    return f"{head}{old_middle}{tail}", f"{head}{new_middle}{tail}"


def _count_common_ends(
    old: Sequence[S], new: Sequence[S], same: Callable[[S, S], bool] = eq
) -> tuple[int, int]:
    """Return how much two sequences share at the beginning, and how much of the rest at the end."""
    most = min(len(old), len(new))
    start = next((n for n in range(most) if not same(old[n], new[n])), most)
    left = most - start
    end = next((n for n in range(left) if not same(old[-1 - n], new[-1 - n])), left)
    return start, end


def _diff_texts(before: str, after: str) -> str:
    old = before.splitlines()
    new = after.splitlines()
    start, end = _count_common_ends(old, new)
    inner_old = old[start : len(old) - end]
    inner_new = new[start : len(new) - end]
    if before != after and not inner_old and not inner_new:
        return " -> ".join(_drop_common_ends(_format_json(before), _format_json(after)))
    if max(len(inner_old), len(inner_new)) > _MAX_DIFF_LINES:
        return "\n".join([*(f"-{line}" for line in inner_old), *(f"+{line}" for line in inner_new)])
    lead = old[max(0, start - 2) : start]
    trail = old[len(old) - end :][:2]
    lines = difflib.unified_diff(
        [*lead, *inner_old, *trail], [*lead, *inner_new, *trail], lineterm="", n=2
    )
    return "\n".join("@@" if line.startswith("@@") else line for line in [*lines][2:])


class TransitionView:
    """The texts of a transition, each made when it is first asked for."""

    def __init__(self, transition: Transition) -> None:
        self.transition = transition
        states = (transition.before, transition.after)
        self.has_texts = all(isinstance(state, str) for state in states)
        """Whether both states are texts."""

    @cached_property
    def before_text(self) -> str:
        """The state before, as it is shown."""
        return show_state(self.transition.before)

    @cached_property
    def after_text(self) -> str:
        """The state after, as it is shown."""
        return show_state(self.transition.after)

    @cached_property
    def change_text(self) -> str:
        """What changed."""
        if self.has_texts:
            return _diff_texts(self.before_text, self.after_text) or NO_CHANGE_TEXT
        return _show_fields(self.changed_fields)

    @property
    def short_change_text(self) -> str:
        """What changed, without most of what long texts have in common."""
        return _show_fields(self.changed_fields, shorten=True)

    @cached_property
    def changed_fields(self) -> tuple[FieldChange, ...]:
        """The fields that changed."""
        return tuple(list_changes(self.transition.before, self.transition.after))


# Returns how many tokens a text takes, at least 0; longer texts take no fewer.
TokenCounter: TypeAlias = Callable[[str], int]

_DENSE_LETTERS = b" ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_LETTERS_PER_TOKEN = 3


def estimate_tokens(text: str) -> int:
    """Return how many tokens a text takes at most, or nearly so.

    ASCII letters and spaces count three to a token, other ASCII characters one each, and everything
    else one for each byte of its UTF-8, which is the most that a tokenizer with a byte fallback can
    take.
    """
    encoded = text.encode("utf-8", "surrogatepass")
    others = len(encoded.translate(None, _DENSE_LETTERS))
    return others - (others - len(encoded)) // _LETTERS_PER_TOKEN


def truncate_to_tokens(
    text: str, max_tokens: int, *, count_tokens: TokenCounter = estimate_tokens
) -> str:
    """Return a text in at most ``max_tokens`` tokens: two thirds from its beginning, one from its
    end.

    Between them stands a mark with the number of missing characters; without room, the mark stands
    alone.
    """
    if count_tokens(text) <= max_tokens:
        return text
    least = 0
    most = len(text) - 1
    while least < most:
        kept = (least + most + 1) // 2
        if count_tokens(_truncate_to_chars(text, kept)) <= max_tokens:
            least = kept
        else:
            most = kept - 1
    return _truncate_to_chars(text, least)


def _truncate_to_chars(text: str, n_chars: int) -> str:
    tail = n_chars // 3
    head = text[: n_chars - tail]
    end = text[len(text) - tail :]
    parts = (head, f"[... {len(text) - n_chars:,} characters cut ...]", end)
    return "\n".join(part for part in parts if part)


def show_transition(
    purpose: str,
    view: TransitionView,
    *,
    max_tokens: int,
    count_tokens: TokenCounter = estimate_tokens,
) -> str:
    """Return the parts of a transition, each fenced and cut to ``max_tokens``."""
    change_fits = count_tokens(view.change_text) <= max_tokens
    parts = {
        "purpose": show_state(purpose),
        "before": view.before_text,
        "action": show_action(view.transition.action),
        "after": view.after_text,
        "change": view.change_text if change_fits else view.short_change_text,
    }
    return "\n\n".join(
        fence(tag, truncate_to_tokens(text, max_tokens, count_tokens=count_tokens))
        for tag, text in parts.items()
    )


def show_action(action: Action) -> str:
    """Return an action's name and, if there are any, its arguments below."""
    if action.arguments is None:
        return action.name
    return f"{action.name}\n{show_state(action.arguments)}"
