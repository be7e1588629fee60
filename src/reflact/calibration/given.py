"""What callers hand in, looked at where it comes in, so that a slip is told there and not deep inside."""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import AbstractAsyncContextManager

from pydantic import ValidationError

from reflact.errors import ConfigError, DataError

GIVEN_SHOWN = 40
"""Characters of a wrong value that a message repeats at most."""

FORMS = {
    "str": "text",
    "Transition": "a Transition(before=..., action=Action(name=...), after=...)",
    "Evaluation": "what critic.score returns, or an Evaluation; gold has a name, record(step, gold=...)",
    "Gold": 'a Gold(phi_after=..., source="program")',
    "Trace": "a Trace(purpose), or Trace.load(path) for a file of one",
}
"""What to give where something else was given."""


def require(value: object, *kinds: type, what: str) -> None:
    """Make sure that a value is of one of these kinds.

    Args:
        value: What was given.
        kinds: What it may be; the first is one of ``FORMS``.
        what: What it stands for, at the beginning of a sentence.

    Raises:
        DataError: It is of another kind.
    """
    if not isinstance(value, kinds):
        raise DataError(f"{what} is {a(value)}; give {FORMS[kinds[0].__name__]}")


def one_line(name: object, *, what: str = "the id of a trace") -> str:
    """Return the id of a trace: text on one line, since lists and messages show it, and files hold it.

    Raises:
        DataError: It is no text, empty, or holds what cannot be seen.
    """
    if not isinstance(name, str):
        raise DataError(f"{what} is {a(name)}; give text")
    if not name.strip() or not name.isprintable():
        raise DataError(f"{what} is {name!r}; give it letters, digits and signs on one line")
    return name


def require_traces(traces: object, kind: type, *, what: str) -> None:
    """Make sure that a value is a list of traces.

    Raises:
        DataError: It is a single one, or holds something else.
    """
    if not isinstance(traces, Iterable) or isinstance(traces, str | bytes):
        raise DataError(f"{what} is {a(traces)}; give a list of traces, such as Trace.load_all(folder)")
    for number, trace in enumerate(traces):
        require(trace, kind, what=f"{what}, number {number},")


def require_model(llm: object, *, who: str) -> None:
    """Make sure that a model can be asked.

    Raises:
        ConfigError: It is none, or one that was not connected.
    """
    if callable(getattr(llm, "ask", None)):
        return
    if isinstance(llm, AbstractAsyncContextManager):
        raise ConfigError(
            f"the model of {who} is not connected yet: `async with connect(...) as llm`, then pass llm"
        )
    raise ConfigError(
        f"{who} needs a connected model and got {a(llm)}: `async with connect(ModelConfig(model=...), "
        "store=...) as llm` gives one"
    )


def require_memory(memory: object, *, who: str) -> None:
    """Make sure that pairs can be found in a memory.

    Raises:
        ConfigError: It is none, such as a path.
    """
    if not callable(getattr(memory, "promoted", None)):
        raise ConfigError(
            f"{who} needs an open memory and got {a(memory)}: `async with MemoryStore(path) as memory` gives "
            "one"
        )


def a(value: object) -> str:
    """Return what a value is, in words."""
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"


def wrong(error: ValidationError) -> str:
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
    return field + (said if len(given) > GIVEN_SHOWN else f"{said}, got {given}")
