"""JSON values: their size and equality, writing long ones in chunks, and reading stored ones.

A function of C blocks other threads until it returns, the event loop's thread too. So these
functions never pass it a long value as a whole.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import Any, TypeVar

from pydantic import JsonValue, ValidationError

from reflact.errors import StoreError
from reflact.types import canonical_json

S = TypeVar("S")
T = TypeVar("T")

# Approximate number of values and characters in a chunk.
CHUNK_SIZE = 20_000


def build_object(pairs: Sequence[tuple[str, JsonValue]]) -> dict[str, JsonValue]:
    """Return an object of JSON; ValueError if it has a name twice, of which a reader sees only the
    last.
    """
    result = dict(pairs)
    if len(result) < len(pairs):
        name = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"an object has the name {name[:100]!r} twice")
    return result


def measure_size(value: JsonValue, limit: int) -> int:
    """Return the number of values and characters in a value; counting stops beyond ``limit``."""
    size = 0
    waiting = [value]
    while waiting and size <= limit:
        part = waiting.pop()
        size += 1
        if isinstance(part, str):
            size += len(part)
        elif isinstance(part, list):
            waiting.extend(part)
        elif isinstance(part, dict):
            size += sum(map(len, part))
            waiting.extend(part.values())
    return size


def is_short(values: Iterable[JsonValue], limit: int) -> bool:
    """Whether values have at most ``limit`` values and characters together; counting stops beyond
    it.
    """
    for value in values:
        limit -= measure_size(value, limit)
        if limit < 0:
            return False
    return True


def is_same_json(one: JsonValue, other: JsonValue) -> bool:
    """Whether two values have the same canonical JSON; 1, 1.0 and true are different."""
    if one is other or (isinstance(one, str) and isinstance(other, str)):
        return one == other
    return one == other and all(
        a == b for a, b in zip_longest(iter_json_chunks(one), iter_json_chunks(other))
    )


def iter_json_chunks(value: JsonValue) -> Iterator[str]:
    """Yield a value in chunks that make its canonical JSON together."""
    if not isinstance(value, dict | list) or measure_size(value, CHUNK_SIZE) <= CHUNK_SIZE:
        yield canonical_json(value)
        return
    open_, close = "{}" if isinstance(value, dict) else "[]"
    yield open_
    parts: Iterator[JsonValue] = (
        _group_fields(value) if isinstance(value, dict) else _group_items(value)
    )
    for number, part in enumerate(parts):
        yield "," if number else ""
        if isinstance(part, dict) and len(part) == 1:
            ((name, only),) = part.items()
            yield f"{canonical_json(name)}:"
            yield from iter_json_chunks(only)
        elif isinstance(part, list) and len(part) == 1:
            yield from iter_json_chunks(part[0])
        else:
            yield canonical_json(part)[1:-1]
    yield close


def flatten_fields(value: JsonValue, prefix: str = "") -> Iterator[tuple[str, JsonValue]]:
    """Yield the innermost fields of an object with their dotted names."""
    for key, inner in (value if isinstance(value, dict) else {}).items():
        if isinstance(inner, dict) and inner:
            yield from flatten_fields(inner, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", inner


def list_field_differences(values: Sequence[JsonValue]) -> dict[str, tuple[JsonValue, ...]]:
    """Return the fields in which objects, as texts of JSON, differ, each with the value in every
    object.

    The name is dotted, and a missing field is None. Nothing is returned if a value is no such text.
    """
    objects = []
    for value in values:
        try:
            found = json.loads(value) if isinstance(value, str) else None
        except ValueError:
            found = None
        if not isinstance(found, dict):
            return {}
        objects.append(dict(flatten_fields(found)))
    names = sorted({name for fields in objects for name in fields})
    found_values = {name: tuple(fields.get(name) for fields in objects) for name in names}
    return {
        name: each for name, each in found_values.items() if len(set(map(canonical_json, each))) > 1
    }


def _group_fields(value: dict[str, JsonValue]) -> Iterator[dict[str, JsonValue]]:
    for names in _group(
        sorted(value), lambda name: len(name) + measure_size(value[name], CHUNK_SIZE)
    ):
        yield {name: value[name] for name in names}


def _group_items(value: list[JsonValue]) -> Iterator[list[JsonValue]]:
    return _group(value, lambda item: measure_size(item, CHUNK_SIZE))


def _group(values: Sequence[T], size: Callable[[T], int]) -> Iterator[list[T]]:
    """Yield groups of consecutive values, each of at most ``CHUNK_SIZE``, or of one value."""
    group: list[T] = []
    total = 0
    for value in values:
        added = size(value)
        if group and total + added > CHUNK_SIZE:
            yield group
            group = []
            total = 0
        group.append(value)
        total += added
    if group:
        yield group


def replace_surrogates(text: str) -> str:
    """Return text with U+FFFD in place of lone surrogates, which JSON can express and files cannot
    store.
    """
    return (
        text
        if text.isascii()
        else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    )


def parse_foreign(text: bytes) -> Any:
    """Return the value of another program's JSON, with U+FFFD in place of lone surrogates.

    Raises:
        ValueError: It is no JSON; NaN and infinities are none.
        RecursionError: It is too deep.
    """
    value = json.loads(text)
    written = json.dumps(value, ensure_ascii=False, allow_nan=False)
    cleaned = replace_surrogates(written)
    return value if cleaned == written else json.loads(cleaned)


def describe_problems(error: ValidationError) -> str:
    """Return the problems of a JSON value, each with its location."""
    problems = []
    for problem in error.errors(include_url=False, include_input=False):
        location = ".".join(str(part) for part in problem["loc"])
        cause = problem.get("ctx", {}).get("error")
        message = str(cause) if isinstance(cause, ValueError) and not location else problem["msg"]
        problems.append(f"{location}: {message}" if location else message)
    return "; ".join(problems)


def parse_stored(validate: Callable[[S], T], stored: S, what: str) -> T:
    """Return the value of a stored text, or of stored JSON.

    Raises:
        StoreError: It does not validate; names ``what`` it is and the first problem.
    """
    try:
        return validate(stored)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        place = f" at {where}" if where else ""
        raise StoreError(
            f"the stored {what} cannot be read by this version of reflact{place}: {first['msg']}; "
            "use the version that wrote it, or choose another out_dir"
        ) from None
    except (ValueError, TypeError, RecursionError) as error:
        raise StoreError(
            f"the stored {what} is damaged ({error}); put back a copy of the file"
        ) from None
