"""Graders of answers in JSON: their fields, a part of a value, and a schema."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import regex
from pydantic import JsonValue

from reflact.environments.comparison import json_equal, parse_strict_json, quote_json
from reflact.environments.graders import MATCH_SECONDS, ReferenceGrader
from reflact.errors import EnvironmentFailure

# Maximum length of an answer in JSON, in characters.
MAX_JSON_CHARS = 500_000

# Stands for a value that is not there.
MISSING = object()


def read_json_answer(answer: str, what: str) -> Any:
    """Return the value of an answer in JSON, read strictly; ValueError says why it is none.

    Nothing may stand around the value, no name may be repeated, and NaN and infinity are no
    numbers. An answer of more than ``MAX_JSON_CHARS`` is refused. ``what`` is expected, in words.
    """
    if len(answer) > MAX_JSON_CHARS:
        raise ValueError(f"the answer has more than {MAX_JSON_CHARS} characters")
    try:
        return parse_strict_json(answer)
    except RecursionError:
        raise ValueError("the answer is nested too deeply to be read as JSON") from None
    except ValueError as error:
        raise ValueError(f"the answer is not {what} ({error})") from None


class JsonFieldsGrader(ReferenceGrader[dict[str, JsonValue]]):
    """The answer is a JSON object with the reference's fields; further fields are ignored.

    Soft is the share of the reference's fields that are present with an equal value; hard is 1 if
    all are. Numbers are equal by value (1 and 1.0), but never to true, false or text; objects and
    lists are compared as a whole. The answer is read as ``read_json_answer`` does. References are
    objects with at least one field.
    """

    name = "json_fields"
    meaning = (
        "An answer is a JSON object; it is right if it has the reference's fields with their "
        "values."
    )
    is_deep: ClassVar[bool] = False

    def _read(self, reference: JsonValue) -> dict[str, JsonValue]:
        if not isinstance(reference, dict) or not reference:
            raise ValueError(f"the reference {quote_json(reference)} is not an object with fields")
        return reference

    def _write(self, accepted: dict[str, JsonValue]) -> str | None:
        return json.dumps(accepted, sort_keys=True, ensure_ascii=False)

    def _match(self, expected: dict[str, JsonValue], answer: str) -> tuple[float, str]:
        try:
            value = read_json_answer(answer, "a JSON object")
        except ValueError as error:
            return 0.0, str(error)
        if not isinstance(value, dict):
            return 0.0, "the answer is not a JSON object (it is JSON of another kind)"
        problems: list[str | None] = []
        for name, field in expected.items():
            problems += _compare_parts(field, value.get(name, MISSING), name, self.is_deep)
        wrong = [problem for problem in problems if problem is not None]
        return 1 - len(wrong) / len(problems), "; ".join(wrong)


class JsonSubsetGrader(JsonFieldsGrader):
    """The answer is a JSON object that has all of the reference, at any depth.

    Objects may have further fields; lists must be of equal length. Soft is the share of the
    reference's innermost values that are there; hard is 1 if all are.
    """

    name = "json_subset"
    meaning = (
        "An answer is a JSON object; it is right if it has all fields and values of the reference, "
        "also the inner ones."
    )
    is_deep = True


def _compare_parts(
    expected: JsonValue, value: Any, where: str, is_deep: bool
) -> Iterator[str | None]:
    """Yield for each part that is compared what is wrong with the answer's, or None."""
    if is_deep and isinstance(expected, dict) and expected:
        fields = value if isinstance(value, dict) else {}
        for name, part in expected.items():
            yield from _compare_parts(part, fields.get(name, MISSING), f"{where}.{name}", is_deep)
    elif is_deep and isinstance(expected, list) and expected:
        is_alike = isinstance(value, list) and len(value) == len(expected)
        parts = value if is_alike else [MISSING] * len(expected)
        for n, part in enumerate(expected):
            yield from _compare_parts(part, parts[n], f"{where}[{n}]", is_deep)
    elif value is MISSING:
        yield f"{quote_json(where)} is missing"
    else:
        yield None if json_equal(expected, value) else f"{quote_json(where)} is {quote_json(value)}"


class JsonSchemaGrader(JsonFieldsGrader):
    """The answer is a JSON value that fits a JSON schema.

    References are schemas with the keywords of ``RULES``, ``PARTS`` and ``NOTES``, as structured
    outputs use them. Another keyword is refused, because an answer that breaks it would be right.
    """

    name = "json_schema"
    meaning = "An answer is JSON; it is right if it fits the reference, which is a JSON schema."

    # A pattern may take long.
    inline_limit = 0

    def _read(self, reference: JsonValue) -> dict[str, JsonValue]:
        _check_schema(reference)
        return super()._read(reference)

    def _write(self, accepted: dict[str, JsonValue]) -> None:
        return None

    def _match(self, expected: dict[str, JsonValue], answer: str) -> tuple[float, str]:
        try:
            value = read_json_answer(answer, "JSON")
        except ValueError as error:
            return 0.0, str(error)
        problem = find_problem(expected, value)
        return float(problem is None), problem or ""


def is_number(value: Any) -> bool:
    """Whether a value of JSON is a number."""
    return isinstance(value, int | float) and not isinstance(value, bool)


# The types of values, by their names in schemas.
TYPES: Mapping[str, Callable[[Any], bool]] = {
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "string": lambda value: isinstance(value, str),
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
    "number": is_number,
    "integer": lambda value: is_number(value) and value == int(value),
}

# What a schema says of a value, by keyword. Those of texts, lists and numbers hold for these alone.
RULES: Mapping[str, Callable[[Any, Any], bool]] = {
    "type": lambda rule, value: any(TYPES[name](value) for name in _list_names(rule)),
    "enum": lambda rule, value: any(json_equal(one, value) for one in rule),
    "const": json_equal,
    "anyOf": lambda rule, value: any(find_problem(one, value) is None for one in rule),
    "required": lambda rule, value: not isinstance(value, dict) or set(rule) <= set(value),
    "minLength": lambda rule, value: not isinstance(value, str) or len(value) >= rule,
    "maxLength": lambda rule, value: not isinstance(value, str) or len(value) <= rule,
    "pattern": lambda rule, value: not isinstance(value, str) or _matches(rule, value),
    "minItems": lambda rule, value: not isinstance(value, list) or len(value) >= rule,
    "maxItems": lambda rule, value: not isinstance(value, list) or len(value) <= rule,
    "minimum": lambda rule, value: not is_number(value) or value >= rule,
    "maximum": lambda rule, value: not is_number(value) or value <= rule,
}

# Keywords with schemas of parts, and keywords that say nothing of a value.
PARTS = frozenset({"properties", "additionalProperties", "items"})
NOTES = frozenset({"$schema", "$id", "title", "description", "default", "examples", "format"})


def _check_schema(schema: JsonValue) -> None:
    """Raise ValueError if a schema has a keyword that is not read, or a wrong value of one."""
    if isinstance(schema, bool):
        return
    unknown = (
        sorted(schema.keys() - RULES.keys() - PARTS - NOTES) if isinstance(schema, dict) else []
    )
    if not isinstance(schema, dict) or unknown:
        keyword = f", because {unknown[0]!r} is no keyword that is read" if unknown else ""
        raise ValueError(f"{quote_json(schema)} cannot be used as a JSON schema{keyword}")
    inner: list[Any] = [
        schema[name] for name in ("additionalProperties", "items") if name in schema
    ]
    try:  # a rule with a wrong value fails on a value of its kind
        inner += [*schema.get("properties", {}).values(), *schema.get("anyOf", ())]  # type: ignore[union-attr,misc]
        for part in inner:
            _check_schema(part)
        for sample in SAMPLES:
            find_problem(schema, sample)
    except (KeyError, TypeError, AttributeError, regex.error) as error:
        raise ValueError(f"{quote_json(schema)} is no JSON schema: {error!r}") from None


# A value of each kind.
SAMPLES: tuple[JsonValue, ...] = ({}, [], "", 0, None)


def find_problem(schema: Any, value: Any, where: str = "the answer") -> str | None:
    """Return why a value does not fit a schema that was checked, or None."""
    if isinstance(schema, bool):
        return None if schema else f"{where} is not allowed"
    for name, rule in schema.items():
        if name in RULES and not RULES[name](rule, value):
            return f"{where} is {quote_json(value)}, against {name}: {quote_json(rule)}"
    parts: list[tuple[Any, Any, str]] = []
    if isinstance(value, dict):
        known = schema.get("properties", {})
        rest = schema.get("additionalProperties", True)
        parts = [(known.get(name, rest), value[name], f"{where}.{name}") for name in value]
    elif isinstance(value, list):
        items = schema.get("items", True)
        parts = [(items, part, f"{where}[{n}]") for n, part in enumerate(value)]
    problems = (find_problem(*part) for part in parts)
    return next((problem for problem in problems if problem is not None), None)


def _list_names(rule: Any) -> list[str]:
    return rule if isinstance(rule, list) else [rule]


def _matches(pattern: str, text: str) -> bool:
    try:
        return regex.search(pattern, text, timeout=MATCH_SECONDS) is not None
    except TimeoutError:
        raise EnvironmentFailure(
            f"the pattern {quote_json(pattern)} took more than {MATCH_SECONDS} s on a text of "
            f"{len(text)} characters: rewrite it without nested repetitions"
        ) from None
