"""The Messages API of an agent's requests, translated to chat completions and back.

Thinking and its settings are dropped, since a chat completion takes none; so is the mark of a
tool's result as an error, whose text says so. Tools of the provider, documents and containers are
refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from reflact.agents.dialects import Dialect, build_call, count_cached, join_parts
from reflact.errors import ConfigError

# Fields that pass through, with their names in a chat completion's request.
KEPT_FIELDS = {
    "max_tokens": "max_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "stop_sequences": "stop",
}

# Fields that only the provider's own machines can serve.
REFUSED_FIELDS = ("container", "mcp_servers")

# The beginning of a system block that is no instruction.
BILLING = "x-anthropic-billing-header:"

# The date that Claude Code writes.
VOLATILE = re.compile(r"^# currentDate\nToday's date is [^\n]*\n?", re.MULTILINE)

CHOICES = {"auto": "auto", "any": "required", "none": "none"}
STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}

# About so many characters are a token, where an agent asks for a count.
CHARACTERS_OF_TOKEN = 4


def _read_request(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return a request as the body of a chat completion's request.

    Ids of sessions and marks of caches are left out, so that equal rollouts send equal requests.
    """
    for name in REFUSED_FIELDS:
        if body.get(name):
            raise ConfigError(f"the gateway cannot pass on {name}, which its provider serves")
    messages: list[dict[str, Any]] = []
    if system := _join_system(body.get("system")):
        messages.append({"role": "system", "content": system})
    for message in body["messages"]:
        messages += _read_message(message["role"], message["content"])

    request: dict[str, Any] = {"messages": messages}
    for own, name in KEPT_FIELDS.items():
        if body.get(own) is not None:
            request[name] = body[own]
    shape = (body.get("output_config") or {}).get("format") or body.get("output_format") or {}
    if shape.get("type") == "json_schema":
        schema = {"name": "output", "schema": shape["schema"]}
        request["response_format"] = {"type": "json_schema", "json_schema": schema}
    if tools := [_read_tool(tool) for tool in body.get("tools") or ()]:
        request["tools"] = tools
        choice = body.get("tool_choice") or {"type": "auto"}
        named = {"type": "function", "function": {"name": choice.get("name")}}
        request["tool_choice"] = named if choice["type"] == "tool" else CHOICES[choice["type"]]
        if choice.get("disable_parallel_tool_use"):
            request["parallel_tool_calls"] = False
    return request


def _read_message(role: str, content: Any) -> list[dict[str, Any]]:
    """Return a message as those of a chat completion, the results of tools first."""
    if role == "system":
        return [{"role": role, "content": _join_system(content)}]
    messages: list[dict[str, Any]] = []
    calls: list[Mapping[str, Any]] = []
    parts: list[dict[str, Any]] = []
    for block in _list_blocks(content):
        match block["type"]:
            case "tool_result":
                result = join_parts([*map(_read_block, _list_blocks(block.get("content")))])
                answered = {"tool_call_id": block["tool_use_id"], "content": result}
                messages.append({"role": "tool", **answered})
            case "tool_use":
                arguments = json.dumps(block["input"], ensure_ascii=False)
                calls.append(build_call(block["id"], block["name"], arguments))
            case "thinking" | "redacted_thinking":
                pass
            case _:
                parts.append(_read_block(block))
    if parts or calls:
        message: dict[str, Any] = {"role": role, "content": join_parts(parts) or None}
        if calls:
            message["tool_calls"] = calls
        messages.append(message)
    return messages


def _list_blocks(content: Any) -> Sequence[Mapping[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return content or ()


def _read_block(block: Mapping[str, Any]) -> dict[str, Any]:
    if block["type"] == "text":
        return {"type": "text", "text": block["text"]}
    if block["type"] == "image":
        source = block["source"]
        url = source.get("url") or f"data:{source['media_type']};base64,{source['data']}"
        return {"type": "image_url", "image_url": {"url": url}}
    raise ConfigError(f"the gateway cannot translate a block of type {block['type']}")


def _join_system(content: Any) -> str:
    texts = [block["text"] for block in _list_blocks(content)]
    return "\n".join(text for text in texts if not text.startswith(BILLING))


def _read_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool.get("type", "custom") != "custom":
        raise ConfigError(
            f"the tool {tool.get('name')} of type {tool['type']} runs at its provider: turn it off"
        )
    function = {"name": tool["name"], "parameters": tool["input_schema"]}
    description = tool.get("description", "")
    return {"type": "function", "function": {**function, "description": description}}


def _write_message(completion: Mapping[str, Any], body: Mapping[str, Any]) -> dict[str, Any]:
    """Return a chat completion as a message of the model that a request named."""
    choice = completion["choices"][0]
    message = choice["message"]
    content: list[dict[str, Any]] = []
    if text := message.get("content") or message.get("refusal"):
        content.append({"type": "text", "text": text})
    for call in message.get("tool_calls") or ():
        block = {"type": "tool_use", "id": call["id"], "name": call["function"]["name"]}
        content.append({**block, "input": _read_arguments(call["function"]["arguments"])})
    reason = "tool_calls" if message.get("tool_calls") else choice.get("finish_reason")
    usage = completion.get("usage") or {}
    cached = count_cached(usage)
    return {
        "id": f"msg_{completion.get('id', '')}",
        "type": "message",
        "role": "assistant",
        "model": body.get("model", completion["model"]),
        "content": content,
        "stop_reason": STOP_REASONS.get(str(reason), "end_turn"),
        "stop_sequence": None,
        "usage": {
            "input_tokens": usage.get("prompt_tokens", 0) - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": usage.get("completion_tokens", 0),
        },
    }


def _read_arguments(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text or "{}")
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {"arguments": text}


def _split_message(message: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a whole message as the events of a stream."""
    usage = {**message["usage"], "output_tokens": 0}
    begun = {**message, "content": [], "stop_reason": None, "usage": usage}
    yield {"type": "message_start", "message": begun}
    for index, block in enumerate(message["content"]):
        if block["type"] == "text":
            empty: dict[str, Any] = {"text": ""}
            delta = {"type": "text_delta", "text": block["text"]}
        else:
            empty = {"input": {}}
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
        yield {"type": "content_block_start", "index": index, "content_block": {**block, **empty}}
        yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    end = {name: message[name] for name in ("stop_reason", "stop_sequence")}
    yield {"type": "message_delta", "delta": end, "usage": message["usage"]}
    yield {"type": "message_stop"}


def _count_tokens(completion: Mapping[str, Any], body: Mapping[str, Any]) -> dict[str, Any]:
    """Return an estimate of a request's tokens, without asking a provider."""
    request = _read_request(body)
    size = len(json.dumps([request["messages"], request.get("tools")]))
    return {"input_tokens": size // CHARACTERS_OF_TOKEN}


DIALECT = Dialect("the Messages API", _read_request, _write_message, _split_message, VOLATILE)
COUNTING = DIALECT._replace(write=_count_tokens, asks_model=False)
