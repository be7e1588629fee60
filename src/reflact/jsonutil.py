"""JSON values: their size and equality, differences, and reading stored and foreign ones."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import Any, TypeVar

from pydantic import JsonValue, ValidationError

from reflact.errors import StoreError
from reflact.types import CANONICAL_ENCODER, canonical_json

S = TypeVar("S")
T = TypeVar("T")
# A value with more values and characters is written in Python, which lets other threads run;
# json's C code holds them, the event loop's too, until a value is written as a whole.
CHUNK_SIZE = 20_000


def build_object(pairs: Sequence[tuple[str, JsonValue]]) -> dict[str, JsonValue]:
    """Return an object of JSON; ValueError if it has a name twice, since one would be lost."""
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
    """Whether values have at most ``limit`` values and characters together."""
    return measure_size([*values], limit + 1) <= limit + 1


def is_same_json(one: JsonValue, other: JsonValue) -> bool:
    """Whether two values have the same canonical JSON; 1, 1.0 and true are different."""
    if one is other or (isinstance(one, str) and isinstance(other, str)):
        return one == other
    return one == other and all(
        a == b for a, b in zip_longest(iter_json_chunks(one), iter_json_chunks(other))
    )


def iter_json_chunks(value: JsonValue) -> Iterator[str]:
    """Yield a value in chunks that make its canonical JSON together; a short one is one chunk."""
    if measure_size(value, CHUNK_SIZE) <= CHUNK_SIZE:
        return iter([canonical_json(value)])
    return CANONICAL_ENCODER.iterencode(value)


def flatten_fields(value: JsonValue, prefix: str = "") -> Iterator[tuple[str, JsonValue]]:
    """Yield the innermost fields of an object with their dotted names."""
    for key, inner in (value if isinstance(value, dict) else {}).items():
        if isinstance(inner, dict) and inner:
            yield from flatten_fields(inner, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", inner


def list_field_differences(values: Sequence[JsonValue]) -> dict[str, tuple[JsonValue, ...]]:
    """Return the dotted fields in which texts of JSON objects differ, with the value in each.

    A missing field is None. Nothing is returned if a value is no such text.
    """
    objects: list[dict[str, JsonValue]] = []
    for value in values:
        try:
            parsed = json.loads(value) if isinstance(value, str) else None
        except ValueError:
            return {}
        if not isinstance(parsed, dict):
            return {}
        objects.append(dict(flatten_fields(parsed)))
    differences = {}
    for name in sorted(set().union(*objects)):
        pair = tuple(fields.get(name) for fields in objects)
        if len(set(map(canonical_json, pair))) > 1:
            differences[name] = pair
    return differences


def replace_surrogates(text: str) -> str:
    """Return text with U+FFFD in place of lone surrogates, which files cannot store."""
    if text.isascii():
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


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
        message = problem["msg"]
        if isinstance(cause, ValueError) and not location:
            message = str(cause)
        if location:
            message = f"{location}: {message}"
        problems.append(message)
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
