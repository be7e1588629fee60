"""Encodes values for the store: ASCII JSON, which can represent any text, and times that sort as texts."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import TypeVar

from pydantic import BaseModel, JsonValue

from reflact.errors import DataError
from reflact.memory.models import ContrastPair, ScoreEvent
from reflact.memory.protocols import StoredTrace
from reflact.store.database import parse_stored
from reflact.types import canonical_json, join_canonical_json

Value = TypeVar("Value", bound=BaseModel)


def format_time(at: datetime) -> str:
    """Return a time as stored text: UTC with microseconds, so texts sort in the order of times."""
    return at.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def parse_time(text: str) -> datetime:
    """Return the time of a stored text."""
    return datetime.fromisoformat(text)


def encode_value(value: BaseModel, what: str = "a value") -> str:
    """Return a value as stored text; lone surrogates are escaped, since SQLite cannot store them.

    Raises:
        DataError: A number has more digits than Python reads from JSON; names ``what`` the value is.
    """
    try:
        if not isinstance(value, ContrastPair | ScoreEvent):
            return canonical_json(to_json_object(value))
        texts = {
            name: canonical_json(field)
            for name, field in to_json_object(value).items()
            if name != "transition"
        }
        return join_canonical_json({**texts, "transition": value.transition.canonical_json})
    except ValueError as error:
        raise _build_number_error(what, error) from None


def require_pair_id(pair: ContrastPair) -> str:
    """Return a pair's id.

    Raises:
        DataError: A number in the pair has more digits than Python reads from JSON.
    """
    try:
        return pair.id
    except ValueError as error:
        origin = pair.provenance
        raise _build_number_error(
            f"a pair made of step {origin.step} of trace {origin.trace_id}", error
        ) from None


def _build_number_error(subject: str, error: ValueError) -> DataError:
    reason = str(error).partition(";")[0]
    return DataError(f"{subject} cannot be stored: {reason}; write the number as a text")


def to_json_object(value: BaseModel) -> dict[str, JsonValue]:
    """Return a value as a JSON object that shares its states.

    pydantic would visit each value of a state, and would replace lone surrogates in field names.
    """
    if isinstance(value, StoredTrace):
        return {
            "id": value.id,
            "purpose": value.purpose,
            "events": [to_json_object(event) for event in value.events],
        }
    if isinstance(value, ContrastPair | ScoreEvent):
        rest = {
            **value.model_dump(mode="json", exclude={"transition"}),
            "transition": value.transition.json_object,
        }
        return {name: rest[name] for name in type(value).model_fields}
    return value.model_dump(mode="json")


def decode_value(kind: type[Value], text: str, what: str) -> Value:
    """Return a stored value.

    Raises:
        StoreError: The text does not validate.
    """
    return parse_stored(lambda stored: kind.model_validate(json.loads(stored)), text, what)
