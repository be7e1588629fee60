"""How typed replies are asked for on the wire, and which way an endpoint accepts."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal

from reflact.calls import Message, ReplyModel
from reflact.errors import ProviderError, UnknownModel

Body = dict[str, Any]
"""A request body, or a part of one, as it goes on the wire."""

Mode = Literal["json_schema", "tools", "json_object_with_schema", "json"]

ORDER: tuple[Mode, ...] = ("json_schema", "tools", "json_object_with_schema", "json")
"""What ``auto`` tries; the only one that adds to the prompt comes last."""

LONGEST = 256

REFUSED = frozenset({400, 404, 415, 422, 501})
"""Statuses with which an endpoint says that it does not know a format."""


def refused(error: ProviderError) -> bool:
    """Whether an endpoint's answer says that it does not know the format.

    Some local servers fail with 500 on a field they cannot read; the answer then names the field. A model
    that is not known is known in no format.
    """
    if isinstance(error, UnknownModel):
        return False
    if error.status is not None and error.status >= 500 and error.status not in REFUSED:
        return any(field in str(error) for field in ("response_format", "tool_choice"))
    return error.status in REFUSED


@lru_cache(maxsize=256)
def schema_of(reply_type: type[ReplyModel]) -> Body:
    """Return a reply type's JSON schema: definitions in place, no titles, every field required.

    Fields are required in the order of the class, since constrained samplers write them in that order.
    Bounds on the length of texts beyond ``LONGEST`` are left out and checked in the reply alone: local
    servers turn them into one grammar rule for each character, and some of those end there and then.
    """
    schema = copy.deepcopy(reply_type.model_json_schema())
    definitions = schema.pop("$defs", {})
    plain: Body = _plain(schema, definitions)
    return plain


def wire(mode: Mode, reply_type: type[ReplyModel]) -> Body:
    """Return the fields of a request that ask for a reply of this type."""
    name, schema = reply_type.__name__, schema_of(reply_type)
    if mode == "tools":
        function = {"name": name, "description": schema.get("description", ""), "parameters": schema}
        choice = {"type": "function", "function": {"name": name}}
        return {"tools": [{"type": "function", "function": function}], "tool_choice": choice}
    if mode == "json_schema":
        return {"response_format": {"type": mode, "json_schema": {"name": name, "schema": schema}}}
    if mode == "json_object_with_schema":
        return {"response_format": {"type": "json_object", "schema": schema}}
    return {"response_format": {"type": "json_object"}}


def messages_for(mode: Mode, messages: Sequence[Message], reply_type: type[ReplyModel]) -> list[Message]:
    """Return the messages to send; ``json`` alone adds the schema to the last one."""
    if mode != "json":
        return list(messages)
    schema = json.dumps(schema_of(reply_type), ensure_ascii=False)
    note = f"Reply with one JSON object, and nothing around it, that fits this JSON schema:\n{schema}"
    *first, last = messages
    return [*first, last.model_copy(update={"content": f"{last.content}\n\n{note}"})]


def _plain(node: Any, definitions: dict[str, Any]) -> Any:
    if isinstance(node, list):
        return [_plain(part, definitions) for part in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        target = definitions[node["$ref"].rpartition("/")[2]]
        return _plain({**target, **{k: v for k, v in node.items() if k != "$ref"}}, definitions)
    kept = {k: v for k, v in node.items() if not (k == "title" and isinstance(v, str)) and k != "properties"}
    plain = {k: _plain(v, definitions) for k, v in kept.items() if not (k == "maxLength" and v > LONGEST)}
    if "properties" in node:
        plain["properties"] = {k: _plain(v, definitions) for k, v in node["properties"].items()}
        plain["required"] = list(node["properties"])
        plain["additionalProperties"] = False
    return plain
