"""The Responses API of an agent's requests, translated to the chat completions that a run forwards,
and back.

Reasoning items are dropped, since a chat completion takes none. A freeform tool becomes a function
of one text, and a tool of a namespace one with a longer name. Tools that run at the provider are
refused, and so is what only a server with memory can answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import JsonValue

from reflact.errors import ConfigError

FUNCTION_FIELDS = ("name", "description", "parameters", "strict")
KEPT_FIELDS = ("temperature", "top_p", "top_logprobs", "seed")

# The text of each kind of call, and the events that hold it.
CALL_FIELDS = {
    "function_call": ("arguments", "function_call_arguments"),
    "custom_tool_call": ("input", "custom_tool_call_input"),
}

# Fields that name what a server has stored.
REFUSED_FIELDS = ("previous_response_id", "conversation", "prompt")

# The parameters of a function that stands for a freeform tool.
TEXT_PARAMETERS = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}

# What Codex writes into texts and what differs between equal rollouts: the date, and ids and times
# of commands.
VOLATILE = re.compile(
    r"[ \t]*<current_date>[^<]*</current_date>\n?|^Chunk ID: \w+\nWall time: [\d.]+ seconds\n",
    re.MULTILINE,
)


def read_request(body: Mapping[str, Any]) -> dict[str, JsonValue]:
    """Return a request of the Responses API as the body of a chat completion's request.

    Ids of items, sessions and caches are left out, so that equal rollouts send equal requests.

    Raises:
        ConfigError: It needs stored responses, or has an item that a chat completion cannot hold.
    """
    for name in REFUSED_FIELDS:
        if body.get(name):
            raise ConfigError(f"the gateway stores no responses, so it cannot use {name}")
    given = body.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not isinstance(items, list):
        raise ConfigError("input is neither a text nor a list of items")
    request: dict[str, Any] = {"messages": _read_items(items)}
    if body.get("instructions"):
        request["messages"].insert(
            0, {"role": "system", "content": _clean(str(body["instructions"]))}
        )
    request |= {name: body[name] for name in KEPT_FIELDS if body.get(name) is not None}
    if body.get("max_output_tokens") is not None:
        request["max_tokens"] = body["max_output_tokens"]
    if effort := (body.get("reasoning") or {}).get("effort"):
        request["reasoning_effort"] = effort
    if shape := _read_format((body.get("text") or {}).get("format") or {}):
        request["response_format"] = shape
    tools = [
        _nest({**tool, "name": name}) for name, tool in _list_tools(body.get("tools") or ()).items()
    ]
    if tools:
        request["tools"] = tools
        request["tool_choice"] = _read_choice(body.get("tool_choice", "auto"))
        if "parallel_tool_calls" in body:
            request["parallel_tool_calls"] = body["parallel_tool_calls"]
    return request


def write_response(completion: Mapping[str, Any], body: Mapping[str, Any]) -> dict[str, JsonValue]:
    """Return a chat completion as a response to a request of the Responses API."""
    tools = _list_tools(body.get("tools") or ())
    choice = completion["choices"][0]
    message = choice["message"]
    parts: list[dict[str, Any]] = []
    if message.get("content"):
        parts.append({"type": "output_text", "text": message["content"], "annotations": []})
    if message.get("refusal"):
        parts.append({"type": "refusal", "refusal": message["refusal"]})
    output: list[dict[str, Any]] = []
    if parts:
        output.append({"type": "message", "id": "msg_0", "role": "assistant", "content": parts})
    for number, call in enumerate(message.get("tool_calls") or ()):
        output.append(
            {"id": f"fc_{number}", "call_id": call["id"], **_write_call(call["function"], tools)}
        )
    cut = choice.get("finish_reason") == "length"
    status = "incomplete" if cut else "completed"
    return {
        "id": f"resp_{completion.get('id', '')}",
        "object": "response",
        "created_at": 0,
        "model": completion["model"],
        "status": status,
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "error": None,
        "instructions": None,
        "metadata": {},
        "output": [{**item, "status": status} for item in output],
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "usage": _write_usage(completion.get("usage") or {}),
    }


def split_response(response: Mapping[str, Any]) -> Iterator[dict[str, JsonValue]]:
    """Yield a whole response as the events of a stream."""
    events: list[dict[str, Any]] = []
    begun = {
        **response,
        "status": "in_progress",
        "output": [],
        "usage": None,
        "incomplete_details": None,
    }
    events += [
        {"type": kind, "response": begun} for kind in ("response.created", "response.in_progress")
    ]
    for index, item in enumerate(response["output"]):
        place = {"output_index": index, "item_id": item["id"]}
        field, kind = CALL_FIELDS.get(item["type"], ("content", ""))
        empty: dict[str, Any] = {field: "" if kind else []}
        events.append(
            {
                "type": "response.output_item.added",
                "output_index": index,
                "item": {**item, **empty, "status": "in_progress"},
            }
        )
        if kind:
            events.append({"type": f"response.{kind}.delta", **place, "delta": item[field]})
            named = {"name": item["name"]} if field == "arguments" else {}
            events.append({"type": f"response.{kind}.done", **place, **named, field: item[field]})
        for number, part in enumerate(item.get("content", ())):
            events += _split_part({**place, "content_index": number}, part)
        events.append({"type": "response.output_item.done", "output_index": index, "item": item})
    events.append({"type": f"response.{response['status']}", "response": response})
    for number, event in enumerate(events):
        yield {**event, "sequence_number": number}


def _split_part(place: Mapping[str, Any], part: Mapping[str, Any]) -> list[dict[str, Any]]:
    name = "text" if part["type"] == "output_text" else "refusal"
    kind = f"response.{part['type']}"
    logprobs: dict[str, Any] = {"logprobs": []} if name == "text" else {}
    return [
        {"type": "response.content_part.added", **place, "part": {**part, name: ""}},
        {"type": f"{kind}.delta", **place, "delta": part[name], **logprobs},
        {"type": f"{kind}.done", **place, name: part[name], **logprobs},
        {"type": "response.content_part.done", **place, "part": part},
    ]


def _read_items(items: Sequence[Any]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    for item in items:
        kind = item.get("type", "message") if isinstance(item, dict) else type(item).__name__
        if kind == "message":
            role = {"developer": "system"}.get(item["role"], item["role"])
            messages.append({"role": role, "content": _read_content(item.get("content"))})
        elif kind in CALL_FIELDS:
            name = _join_name(item.get("namespace"), item["name"])
            free = kind == "custom_tool_call"
            arguments = (
                json.dumps({"input": item["input"]}, ensure_ascii=False)
                if free
                else item["arguments"]
            )
            function = {"name": name, "arguments": arguments}
            call = {"id": item["call_id"], "type": "function", "function": function}
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": None})
            messages[-1].setdefault("tool_calls", []).append(call)
        elif kind in {"function_call_output", "custom_tool_call_output"}:
            content = _read_content(item["output"])
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": content})
        elif kind != "reasoning":
            raise ConfigError(
                f"the gateway cannot translate an item of type {kind} to a chat completion"
            )
    return messages


def _read_content(content: Any) -> str | list[dict[str, Any]]:
    """Return a content as one text, or as parts if it has an image."""
    if not isinstance(content, list):
        return _clean(str(content or ""))
    parts = [_read_part(part) for part in content]
    if all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return parts


def _read_part(part: Mapping[str, Any]) -> dict[str, Any]:
    kind = part.get("type")
    if kind in {"input_text", "output_text", "refusal"}:
        return {"type": "text", "text": _clean(part.get("text") or part.get("refusal") or "")}
    if kind == "input_image" and part.get("image_url"):
        return {"type": "image_url", "image_url": {"url": part["image_url"]}}
    raise ConfigError(f"the gateway cannot translate a part of type {kind} to a chat completion")


def _read_format(given: Mapping[str, Any]) -> dict[str, Any] | None:
    kind = given.get("type", "text")
    if kind != "json_schema":
        return None if kind == "text" else {"type": kind}
    return {
        "type": kind,
        "json_schema": {
            name: value for name, value in given.items() if name != "type" and value is not None
        },
    }


def _list_tools(
    tools: Sequence[Mapping[str, Any]], namespace: str | None = None
) -> dict[str, dict[str, Any]]:
    """Return the tools by their names in a chat completion, each with its namespace if it
    has one.
    """
    listed: dict[str, dict[str, Any]] = {}
    for tool in tools:
        if tool["type"] == "namespace" and namespace is None:
            listed |= _list_tools(tool["tools"], tool["name"])
        elif tool["type"] in {"function", "custom"}:
            listed[_join_name(namespace, tool["name"])] = {**tool, "namespace": namespace}
        else:
            raise ConfigError(
                f"a tool of type {tool['type']} runs at its provider, and the gateway cannot offer "
                "it: turn it off in the agent"
            )
    return listed


def _join_name(namespace: str | None, name: str) -> str:
    return f"{namespace}__{name}" if namespace else name


def _nest(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool as a function of a chat completion."""
    function = {name: tool[name] for name in FUNCTION_FIELDS if tool.get(name) is not None}
    if tool["type"] == "custom":
        grammar = (tool.get("format") or {}).get("definition")
        rule = f"\n\nThe input follows this grammar:\n{grammar}" if grammar else ""
        function |= {
            "description": f"{tool.get('description', '')}{rule}",
            "parameters": TEXT_PARAMETERS,
        }
    return {"type": "function", "function": function}


def _read_choice(choice: Any) -> Any:
    if isinstance(choice, str):
        return choice
    if choice["type"] not in {"function", "custom"}:
        raise ConfigError(f"the gateway cannot translate a tool_choice of type {choice['type']}")
    return {
        "type": "function",
        "function": {"name": _join_name(choice.get("namespace"), choice["name"])},
    }


def _write_call(
    function: Mapping[str, Any], tools: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """Return a call of a function as that of the tool it stands for."""
    tool = tools.get(function["name"], {"type": "function", "name": function["name"]})
    named = {
        "name": tool["name"],
        **({"namespace": tool["namespace"]} if tool.get("namespace") else {}),
    }
    if tool["type"] == "function":
        return {"type": "function_call", **named, "arguments": function["arguments"]}
    return {"type": "custom_tool_call", **named, "input": _read_input(function["arguments"])}


def _read_input(arguments: str) -> str:
    """Return the text for a freeform tool; a model that forgets its field has written the text
    itself.
    """
    try:
        value = json.loads(arguments)
    except ValueError:
        value = None
    text = value.get("input") if isinstance(value, dict) else None
    return text if isinstance(text, str) else arguments


def _write_usage(usage: Mapping[str, Any]) -> dict[str, Any]:
    asked = usage.get("prompt_tokens", 0)
    answered = usage.get("completion_tokens", 0)
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    thought = (usage.get("completion_tokens_details") or {}).get("reasoning_tokens") or 0
    return {
        "input_tokens": asked,
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": answered,
        "output_tokens_details": {"reasoning_tokens": thought},
        "total_tokens": asked + answered,
    }


def _clean(text: str) -> str:
    return VOLATILE.sub("", text)
