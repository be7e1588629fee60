"""The Responses API of an agent's requests, translated to chat completions and back.

Reasoning items are dropped, since a chat completion takes none. A freeform tool becomes a function
of one text, and a tool of a namespace one with a longer name. Tools that run at the provider are
refused, and so is what only a server with memory can answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from reflact.agents.dialects import Dialect, build_call, count_cached, join_parts
from reflact.errors import ConfigError

FUNCTION_FIELDS = ("description", "parameters", "strict")
KEPT_FIELDS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_logprobs": "top_logprobs",
    "seed": "seed",
    "max_output_tokens": "max_tokens",
}

# Fields that name what a server has stored.
REFUSED_FIELDS = ("previous_response_id", "conversation", "prompt")

# The text of each kind of call, and the events that hold it.
CALL_FIELDS = {
    "function_call": ("arguments", "function_call_arguments"),
    "custom_tool_call": ("input", "custom_tool_call_input"),
}

# The date that Codex writes, and the ids and times of its commands.
VOLATILE = re.compile(
    r"[ \t]*<current_date>[^<]*</current_date>\n?|^Chunk ID: \w+\nWall time: [\d.]+ seconds\n",
    re.MULTILINE,
)

# The parameters of a function that stands for a freeform tool.
TEXT_PARAMETERS = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}


def _read_request(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return a request as the body of a chat completion's request.

    Ids of items, sessions and caches are left out, so that equal rollouts send equal requests.
    """
    for name in REFUSED_FIELDS:
        if body.get(name):
            raise ConfigError(f"the gateway stores no responses, so it cannot use {name}")
    items = body.get("input")
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    if not isinstance(items, list):
        raise ConfigError("input is neither a text nor a list of items")
    messages: list[dict[str, Any]] = []
    if body.get("instructions"):
        messages.append({"role": "system", "content": str(body["instructions"])})
    for item in items:
        _add_item(messages, item)

    request: dict[str, Any] = {"messages": messages}
    for own, name in KEPT_FIELDS.items():
        if body.get(own) is not None:
            request[name] = body[own]
    if effort := (body.get("reasoning") or {}).get("effort"):
        request["reasoning_effort"] = effort
    shape = (body.get("text") or {}).get("format") or {}
    if shape.get("type", "text") != "text":
        request["response_format"] = _read_format(shape)
    if tools := _list_tools(body.get("tools") or ()):
        request["tools"] = [_write_tool(name, tool) for name, tool in tools.items()]
        request["tool_choice"] = _read_choice(body.get("tool_choice", "auto"))
        if "parallel_tool_calls" in body:
            request["parallel_tool_calls"] = body["parallel_tool_calls"]
    return request


def _add_item(messages: list[dict[str, Any]], item: Any) -> None:
    """Add an item of a conversation to the messages of a chat completion."""
    kind = item.get("type", "message") if isinstance(item, dict) else type(item).__name__
    match kind:
        case "message":
            role = "system" if item["role"] == "developer" else item["role"]
            messages.append({"role": role, "content": _read_content(item.get("content"))})
        case "function_call" | "custom_tool_call":
            if kind == "function_call":
                arguments = item["arguments"]
            else:
                arguments = json.dumps({"input": item["input"]}, ensure_ascii=False)
            name = _join_name(item.get("namespace"), item["name"])
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": None})
            calls = messages[-1].setdefault("tool_calls", [])
            calls.append(build_call(item["call_id"], name, arguments))
        case "function_call_output" | "custom_tool_call_output":
            content = _read_content(item["output"])
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": content})
        case "reasoning":
            pass
        case _:
            raise ConfigError(f"the gateway cannot translate an item of type {kind}")


def _read_content(content: Any) -> str | Sequence[Mapping[str, Any]]:
    if isinstance(content, list):
        return join_parts([_read_part(part) for part in content])
    return str(content or "")


def _read_part(part: Mapping[str, Any]) -> dict[str, Any]:
    kind = part.get("type")
    if kind in {"input_text", "output_text", "refusal"}:
        return {"type": "text", "text": part.get("text") or part.get("refusal") or ""}
    if kind == "input_image" and part.get("image_url"):
        return {"type": "image_url", "image_url": {"url": part["image_url"]}}
    raise ConfigError(f"the gateway cannot translate a part of type {kind}")


def _read_format(shape: Mapping[str, Any]) -> dict[str, Any]:
    if shape["type"] != "json_schema":
        return {"type": shape["type"]}
    schema = {name: shape[name] for name in shape if name != "type" and shape[name] is not None}
    return {"type": "json_schema", "json_schema": schema}


def _list_tools(
    tools: Sequence[Mapping[str, Any]], namespace: str | None = None
) -> dict[str, dict[str, Any]]:
    """Return the tools by their names in a chat completion, each with its namespace."""
    listed: dict[str, dict[str, Any]] = {}
    for tool in tools:
        if tool["type"] == "namespace" and namespace is None:
            listed |= _list_tools(tool["tools"], tool["name"])
        elif tool["type"] in {"function", "custom"}:
            listed[_join_name(namespace, tool["name"])] = {**tool, "namespace": namespace}
        else:
            raise ConfigError(f"a tool of type {tool['type']} runs at its provider: turn it off")
    return listed


def _join_name(namespace: str | None, name: str) -> str:
    return f"{namespace}__{name}" if namespace else name


def _write_tool(name: str, tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool as a function of a chat completion."""
    function: dict[str, Any] = {"name": name}
    function |= {field: tool[field] for field in FUNCTION_FIELDS if tool.get(field) is not None}
    if tool["type"] == "custom":
        description = tool.get("description", "")
        if grammar := (tool.get("format") or {}).get("definition"):
            description += f"\n\nThe input follows this grammar:\n{grammar}"
        function |= {"description": description, "parameters": TEXT_PARAMETERS}
    return {"type": "function", "function": function}


def _read_choice(choice: Any) -> Any:
    if isinstance(choice, str):
        return choice
    if choice["type"] not in {"function", "custom"}:
        raise ConfigError(f"the gateway cannot translate a tool_choice of type {choice['type']}")
    name = _join_name(choice.get("namespace"), choice["name"])
    return {"type": "function", "function": {"name": name}}


def _write_response(completion: Mapping[str, Any], body: Mapping[str, Any]) -> dict[str, Any]:
    """Return a chat completion as the response to a request."""
    choice = completion["choices"][0]
    message = choice["message"]
    is_cut = choice.get("finish_reason") == "length"
    status = "incomplete" if is_cut else "completed"
    parts: list[dict[str, Any]] = []
    if message.get("content"):
        parts.append({"type": "output_text", "text": message["content"], "annotations": []})
    if message.get("refusal"):
        parts.append({"type": "refusal", "refusal": message["refusal"]})
    output: list[dict[str, Any]] = []
    if parts:
        output.append({"type": "message", "id": "msg_0", "role": "assistant", "content": parts})
    tools = _list_tools(body.get("tools") or ())
    for number, call in enumerate(message.get("tool_calls") or ()):
        ids = {"id": f"fc_{number}", "call_id": call["id"]}
        output.append({**ids, **_write_call(call["function"], tools)})
    return {
        "id": f"resp_{completion.get('id', '')}",
        "object": "response",
        "created_at": 0,
        "model": completion["model"],
        "status": status,
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "error": None,
        "instructions": None,
        "metadata": {},
        "output": [{**item, "status": status} for item in output],
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "usage": _write_usage(completion.get("usage") or {}),
    }


def _write_call(
    function: Mapping[str, Any], tools: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """Return a call of a function as that of the tool it stands for."""
    tool = tools.get(function["name"], {"type": "function", "name": function["name"]})
    call = {"name": tool["name"]}
    if tool.get("namespace"):
        call["namespace"] = tool["namespace"]
    arguments = function["arguments"]
    if tool["type"] == "function":
        return {"type": "function_call", **call, "arguments": arguments}
    text = arguments  # a model that forgets the field has written the text itself
    try:
        match json.loads(arguments):
            case {"input": str(text)}:
                pass
    except ValueError:
        pass
    return {"type": "custom_tool_call", **call, "input": text}


def _write_usage(usage: Mapping[str, Any]) -> dict[str, Any]:
    asked = usage.get("prompt_tokens", 0)
    answered = usage.get("completion_tokens", 0)
    thought = (usage.get("completion_tokens_details") or {}).get("reasoning_tokens") or 0
    return {
        "input_tokens": asked,
        "input_tokens_details": {"cached_tokens": count_cached(usage), "cache_write_tokens": 0},
        "output_tokens": answered,
        "output_tokens_details": {"reasoning_tokens": thought},
        "total_tokens": asked + answered,
    }


def _split_response(response: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a whole response as the events of a stream."""
    for number, event in enumerate(_list_events(response)):
        yield {**event, "sequence_number": number}


def _list_events(response: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    unknown = {"usage": None, "incomplete_details": None}
    begun = {**response, "status": "in_progress", "output": [], **unknown}
    yield {"type": "response.created", "response": begun}
    yield {"type": "response.in_progress", "response": begun}
    for index, item in enumerate(response["output"]):
        place = {"output_index": index, "item_id": item["id"]}
        field, kind = CALL_FIELDS.get(item["type"], ("content", ""))
        empty: dict[str, Any] = {**item, field: "" if kind else [], "status": "in_progress"}
        yield {"type": "response.output_item.added", "output_index": index, "item": empty}
        if kind:
            name = {"name": item["name"]} if field == "arguments" else {}
            yield {"type": f"response.{kind}.delta", **place, "delta": item[field]}
            yield {"type": f"response.{kind}.done", **place, **name, field: item[field]}
        for number, part in enumerate(item.get("content", ())):
            yield from _list_part_events({**place, "content_index": number}, part)
        yield {"type": "response.output_item.done", "output_index": index, "item": item}
    yield {"type": f"response.{response['status']}", "response": response}


def _list_part_events(
    place: Mapping[str, Any], part: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    name = "text" if part["type"] == "output_text" else "refusal"
    kind = f"response.{part['type']}"
    logprobs: dict[str, Any] = {"logprobs": []} if name == "text" else {}
    yield {"type": "response.content_part.added", **place, "part": {**part, name: ""}}
    yield {"type": f"{kind}.delta", **place, "delta": part[name], **logprobs}
    yield {"type": f"{kind}.done", **place, name: part[name], **logprobs}
    yield {"type": "response.content_part.done", **place, "part": part}


DIALECT = Dialect("the Responses API", _read_request, _write_response, _split_response, VOLATILE)
