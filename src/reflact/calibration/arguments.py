"""What callers hand in, looked at where it comes in, so that a slip is told there and not deep inside."""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import AbstractAsyncContextManager

from pydantic import ValidationError

from reflact.errors import ConfigError, DataError

MAX_SHOWN_INPUT = 40
"""Characters of a wrong value that a message repeats at most."""

TYPE_DESCRIPTIONS = {
    "str": "text",
    "Transition": "a Transition(before=..., action=Action(name=...), after=...)",
    "Evaluation": "what critic.score returns, or an Evaluation; gold has a name, record(step, gold=...)",
    "Label": 'a Label(progress_after=..., source="program")',
    "Trace": "a Trace(purpose), or Trace.load(path) for a file of one",
}
"""What to give where something else was given."""


def require_type(value: object, *kinds: type, subject: str) -> None:
    """Make sure that a value is of one of these kinds.

    Args:
        value: What was given.
        kinds: What it may be; the first is one of ``FORMS``.
        subject: What it stands for, at the beginning of a sentence.

    Raises:
        DataError: It is of another kind.
    """
    if not isinstance(value, kinds):
        raise DataError(f"{subject} is {describe_type(value)}; give {TYPE_DESCRIPTIONS[kinds[0].__name__]}")


def require_trace_id(name: object, *, subject: str = "the id of a trace") -> str:
    """Return the id of a trace: text on one line, since lists and messages show it, and files hold it.

    Raises:
        DataError: It is no text, empty, or holds what cannot be seen.
    """
    if not isinstance(name, str):
        raise DataError(f"{subject} is {describe_type(name)}; give text")
    if not name.strip() or not name.isprintable():
        raise DataError(f"{subject} is {name!r}; give it letters, digits and signs on one line")
    return name


def require_traces(traces: object, trace_type: type, *, subject: str) -> None:
    """Make sure that a value is a list of traces.

    Raises:
        DataError: It is a single one, or holds something else.
    """
    if not isinstance(traces, Iterable) or isinstance(traces, str | bytes):
        raise DataError(
            f"{subject} is {describe_type(traces)}; give a list of traces, such as Trace.load_all(folder)"
        )
    for number, trace in enumerate(traces):
        require_type(trace, trace_type, subject=f"{subject}, number {number},")


def require_model(llm: object, *, caller: str) -> None:
    """Make sure that a model can be asked.

    Raises:
        ConfigError: It is none, or one that was not connected.
    """
    if callable(getattr(llm, "ask", None)):
        return
    if isinstance(llm, AbstractAsyncContextManager):
        raise ConfigError(
            f"the model of {caller} is not connected yet: `async with connect(...) as llm`, then pass llm"
        )
    raise ConfigError(
        f"{caller} needs a connected model and got {describe_type(llm)}: `async with connect(ModelConfig(model=...), "
        "store=...) as llm` gives one"
    )


def require_memory(memory: object, *, caller: str) -> None:
    """Make sure that pairs can be found in a memory.

    Raises:
        ConfigError: It is none, such as a path.
    """
    if not callable(getattr(memory, "promoted_pairs", None)):
        raise ConfigError(
            f"{caller} needs an open memory and got {describe_type(memory)}: `async with MemoryStore(path) as memory` gives "
            "one"
        )


def describe_type(value: object) -> str:
    """Return what a value is, in words."""
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"


def describe_first_error(error: ValidationError) -> str:
    """Return what is wrong first with a value that was read from JSON: the field, and what stands there."""
    first = error.errors()[0]
    name = ".".join(map(str, first["loc"]))
    field = f"`{name}`: " if name else ""
    match first["type"]:
        case "missing":
            return f"{field}is missing"
        case "extra_forbidden":
            return f"{field}no such field is known here"
        case "json_invalid":
            return f"{field}it is no whole JSON"
        case "model_type":
            said = "expected a JSON object"
        case _:
            said = first["msg"][:1].lower() + first["msg"][1:]
    given = json.dumps(first["input"])
    return field + (said if len(given) > MAX_SHOWN_INPUT else f"{said}, got {given}")
