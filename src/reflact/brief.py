"""Values whose ``repr`` is one short line: figures rounded, texts cut, long lists counted."""

from __future__ import annotations

from pydantic import BaseModel

from reflact.types import Frozen

LONGEST = 60
"""Characters of a text that are shown at most."""

MOST = 3
"""Things of a list that are shown; of a longer one their number is."""


TOLD = {"reason": 240, "message": 240}
"""Characters of fields that say what went wrong: what to do about it often stands at their end."""


class Brief(Frozen):
    """A value that shows itself in one short line, without the fields that are as they are by default."""

    def __repr__(self) -> str:
        return shortened(self)

    def __str__(self) -> str:
        return repr(self)


def shortened(value: BaseModel) -> str:
    """Return a value in one short line."""
    fields = type(value).model_fields
    said = ((name, getattr(value, name)) for name in fields)
    shown = [
        f"{name}={_short(one, TOLD.get(name, LONGEST))}" for name, one in said if one != fields[name].default
    ]
    return f"{type(value).__name__}({', '.join(shown)})"


def _short(value: object, longest: int = LONGEST) -> str:
    match value:
        case float():
            return f"{value:.3g}"
        case str():
            return repr(value if len(value) <= longest else f"{value[: longest - 3]}...")
        case tuple():
            return _listed(value)
        case BaseModel() if not isinstance(value, Brief):
            return shortened(value)
    return repr(value)


def _listed(values: tuple[object, ...]) -> str:
    if len(values) > MOST:
        return f"<{len(values):,}>"
    return f"({', '.join(map(_short, values))}{',' if len(values) == 1 else ''})"
