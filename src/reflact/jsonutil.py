"""JSON values, which may be long: how much they hold, whether two are alike, how they are written in pieces.

A function of C keeps other threads waiting until it returns, that of an event loop too. So nothing here gives
it a long value whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import TypeVar

from pydantic import JsonValue

from reflact.types import canonical_json

T = TypeVar("T")

CHUNK_SIZE = 20_000
"""Values and characters that are written in one go, about."""


def measure_size(value: JsonValue, most: int) -> int:
    """Return how many values and characters a value holds together; beyond ``most`` it stops counting."""
    held, waiting = 0, [value]
    while waiting and held <= most:
        one = waiting.pop()
        held += 1
        if isinstance(one, str):
            held += len(one)
        elif isinstance(one, list):
            waiting.extend(one)
        elif isinstance(one, dict):
            held += sum(map(len, one))
            waiting.extend(one.values())
    return held


def is_short(values: Iterable[JsonValue], most: int) -> bool:
    """Whether values hold no more than so many values and characters together; looks no further."""
    for value in values:
        most -= measure_size(value, most)
        if most < 0:
            return False
    return True


def is_same_json(one: JsonValue, other: JsonValue) -> bool:
    """Whether two values have the same canonical JSON: 1, 1.0 and true are three."""
    if one is other or (isinstance(one, str) and isinstance(other, str)):
        return one == other
    return one == other and all(
        a == b for a, b in zip_longest(iter_json_chunks(one), iter_json_chunks(other))
    )


def iter_json_chunks(
    value: JsonValue,
    *,
    write: Callable[[JsonValue], str] = canonical_json,
    signs: tuple[str, str] = (",", ":"),
) -> Iterator[str]:
    """Yield a value as JSON in pieces: the same text that ``write`` gives of it, fields sorted.

    Args:
        value: What is written.
        write: Writes a short one, or a text.
        signs: What it puts between two values, and between a name and its value.
    """
    if not isinstance(value, dict | list) or measure_size(value, CHUNK_SIZE) <= CHUNK_SIZE:
        yield write(value)
        return
    open_, close = "{}" if isinstance(value, dict) else "[]"
    yield open_
    parts: Iterator[JsonValue] = _group_fields(value) if isinstance(value, dict) else _group_items(value)
    for number, part in enumerate(parts):
        yield signs[0] if number else ""
        if isinstance(part, dict) and len(part) == 1:
            ((name, only),) = part.items()
            yield write(name) + signs[1]
            yield from iter_json_chunks(only, write=write, signs=signs)
        elif isinstance(part, list) and len(part) == 1:
            yield from iter_json_chunks(part[0], write=write, signs=signs)
        else:
            yield write(part)[1:-1]
    yield close


def _group_fields(value: dict[str, JsonValue]) -> Iterator[dict[str, JsonValue]]:
    for names in _group(sorted(value), lambda name: len(name) + measure_size(value[name], CHUNK_SIZE)):
        yield {name: value[name] for name in names}


def _group_items(value: list[JsonValue]) -> Iterator[list[JsonValue]]:
    return _group(value, lambda item: measure_size(item, CHUNK_SIZE))


def _group(many: Sequence[T], size: Callable[[T], int]) -> Iterator[list[T]]:
    """Yield groups of what follows each other, each as large as a piece may be, or of one."""
    group: list[T] = []
    held = 0
    for one in many:
        more = size(one)
        if group and held + more > CHUNK_SIZE:
            yield group
            group, held = [], 0
        group.append(one)
        held += more
    if group:
        yield group
