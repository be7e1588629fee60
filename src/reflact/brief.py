"""Values whose ``repr`` is one short line: figures rounded, texts cut, long lists counted."""

from __future__ import annotations

from pydantic import BaseModel

from reflact.types import FrozenModel

MAX_TEXT_LENGTH = 60
"""Characters of a text that are shown at most."""

MAX_LIST_ITEMS = 3
"""Things of a list that are shown; of a longer one their number is."""


FIELD_TEXT_LENGTHS = {"reason": 240, "message": 240}
"""Characters of fields that say what went wrong: what to do about it often stands at their end."""


class ShortReprModel(FrozenModel):
    """A value that shows itself in one short line, without the fields that are as they are by default."""

    def __repr__(self) -> str:
        return short_repr(self)

    def __str__(self) -> str:
        return repr(self)


def short_repr(value: BaseModel) -> str:
    """Return a value in one short line."""
    fields = type(value).model_fields
    said = ((name, getattr(value, name)) for name in fields)
    shown = [
        f"{name}={_format_value(one, FIELD_TEXT_LENGTHS.get(name, MAX_TEXT_LENGTH))}"
        for name, one in said
        if one != fields[name].default
    ]
    return f"{type(value).__name__}({', '.join(shown)})"


def _format_value(value: object, longest: int = MAX_TEXT_LENGTH) -> str:
    match value:
        case float():
            return f"{value:.3g}"
        case str():
            return repr(value if len(value) <= longest else f"{value[: longest - 3]}...")
        case tuple():
            return _format_sequence(value)
        case BaseModel() if not isinstance(value, ShortReprModel):
            return short_repr(value)
    return repr(value)


def _format_sequence(values: tuple[object, ...]) -> str:
    if len(values) > MAX_LIST_ITEMS:
        return f"<{len(values):,}>"
    return f"({', '.join(map(_format_value, values))}{',' if len(values) == 1 else ''})"
