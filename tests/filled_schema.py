"""Replies that fit any schema, for models that a test plays."""

from __future__ import annotations

from typing import Any


def fill_schema(schema: dict[str, Any], text: str) -> Any:
    """Return a value of a schema whose texts are all the same."""
    match schema:
        case {"enum": [first, *_]} | {"const": first}:
            return first
        case {"properties": properties}:
            return {name: fill_schema(part, text) for name, part in properties.items()}
        case {"items": items}:
            return [fill_schema(items, text)]
        case {"type": "integer"}:
            return 1
    return text
