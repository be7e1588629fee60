"""Answers in the shape that the stages ask for, for scripts that play an optimizer.

Which edits a stage offers, and how many, stands in the reply type: a document without text can only be
appended to, and a reply type that offers nothing else asks for the content alone.
"""

from __future__ import annotations

from typing import get_args

from pydantic import JsonValue

from reflact.calls import ReplyModel
from reflact.stages.replies import AnalystReply, EditReply


def append_reply(reply_type: type[ReplyModel], *contents: str) -> JsonValue:
    """Return an analyst's whole reply that appends texts to the document; as many as it may hold.

    Args:
        reply_type: What the stage asks for: an ``AnalystReply`` or a ``SuccessReply``.
        contents: The texts, most important first.
    """
    _, most = find_bounds(reply_type, "edits")
    edits: list[JsonValue] = [append_edit(reply_type, content) for content in contents[:most]]
    if not issubclass(reply_type, AnalystReply):
        return {"strengths": "As it should be.", "edits": edits}
    pattern: JsonValue = {"type": "missing rule", "count": 1, "description": "The document lacks a rule."}
    return {"patterns": [pattern], "edits": edits}


def append_edit(reply_type: type[ReplyModel], content: str) -> dict[str, JsonValue]:
    """Return one edit that appends a text, in the shape of the reply type's edits."""
    (kind,) = get_args(reply_type.model_fields["edits"].annotation)
    if isinstance(kind, type) and issubclass(kind, EditReply):
        return {"op": "append", "target": "", "content": content}
    return {"content": content}


def find_bounds(reply_type: type[ReplyModel], field: str) -> tuple[int, int | None]:
    """Return how many elements a list of the reply type must and may have; None: any number."""
    schema = reply_type.model_json_schema()["properties"][field]
    return schema.get("minItems", 0), schema.get("maxItems")
