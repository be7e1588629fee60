"""Checks of what callers pass in, so that an error names the wrong argument."""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import AbstractAsyncContextManager

from pydantic import ValidationError

from reflact.errors import ConfigError, DataError

# At most so many characters of a wrong value stand in a message.
MAX_SHOWN_INPUT = 40

# What to pass instead, by the expected type.
TYPE_DESCRIPTIONS = {
    "str": "text",
    "Transition": "a Transition(before=..., action=Action(name=...), after=...)",
    "Evaluation": "what critic.score returns, or an Evaluation; a label has a name, record(step, "
    "label=...)",
    "Label": 'a Label(progress_after=..., source="program")',
    "Trace": "a Trace(purpose), or Trace.load(path) for a file of one",
}


def require_type(value: object, *expected_types: type, subject: str) -> None:
    """Raise ``DataError`` unless a value has one of the types; ``subject`` begins its sentence."""
    if not isinstance(value, expected_types):
        raise DataError(
            f"{subject} is {describe_type(value)}; give "
            f"{TYPE_DESCRIPTIONS[expected_types[0].__name__]}"
        )


def require_trace_id(name: object, *, subject: str = "the id of a trace") -> str:
    """Return the id of a trace; raise ``DataError`` unless it is printable text on one line."""
    if not isinstance(name, str):
        raise DataError(f"{subject} is {describe_type(name)}; give text")
    if not name.strip() or not name.isprintable():
        raise DataError(f"{subject} is {name!r}; give it letters, digits and signs on one line")
    return name


def require_traces(traces: object, trace_type: type, *, subject: str) -> None:
    """Raise ``DataError`` unless a value is a list of traces."""
    if not isinstance(traces, Iterable) or isinstance(traces, str | bytes):
        raise DataError(
            f"{subject} is {describe_type(traces)}; give a list of traces, such as "
            "Trace.load_all(folder)"
        )
    for number, trace in enumerate(traces):
        require_type(trace, trace_type, subject=f"{subject}, number {number},")


def require_model(llm: object, *, caller: str) -> None:
    """Raise ``ConfigError`` unless a value is a connected model."""
    if callable(getattr(llm, "ask", None)):
        return
    if isinstance(llm, AbstractAsyncContextManager):
        raise ConfigError(
            f"the model of {caller} is not connected yet: use `async with connect(...) as llm` and "
            "pass llm"
        )
    raise ConfigError(
        f"{caller} needs a connected model and got {describe_type(llm)}: use `async with "
        "connect(ModelConfig(model=...), store=...) as llm`"
    )


def require_memory(memory: object, *, caller: str) -> None:
    """Raise ``ConfigError`` unless a value is an open memory."""
    if not callable(getattr(memory, "promoted_pairs", None)):
        raise ConfigError(
            f"{caller} needs an open memory and got {describe_type(memory)}: use `async with "
            "MemoryStore(path) as memory`"
        )


def describe_type(value: object) -> str:
    """Return the type of a value with its article, such as ``a float``."""
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"


def describe_first_error(error: ValidationError) -> str:
    """Return the first error of a value from JSON: its field, the reason and the wrong value."""
    first = error.errors()[0]
    name = ".".join(map(str, first["loc"]))
    field = f"`{name}`: " if name else ""
    match first["type"]:
        case "missing":
            return f"{field}is missing"
        case "extra_forbidden":
            return f"{field}is not a known field"
        case "json_invalid":
            return f"{field}it is not complete JSON"
        case "model_type":
            reason = "expected a JSON object"
        case _:
            reason = first["msg"][:1].lower() + first["msg"][1:]
    wrong = json.dumps(first["input"])
    return field + (reason if len(wrong) > MAX_SHOWN_INPUT else f"{reason}, got {wrong}")
