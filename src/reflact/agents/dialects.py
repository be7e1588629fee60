"""The ways in which agents ask their models, and the one of chat completions.

The two others, in ``responses`` and ``anthropic_messages``, are translated to it and back.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple


class Dialect(NamedTuple):
    """One way in which agents ask their models.

    ``read`` returns a request as that of a chat completion, or raises ConfigError. ``write``
    returns a completion as the answer to a request, and ``split`` yields that answer as the events
    of a stream, which ``end`` follows. ``volatile`` is what its agents write into texts and what
    differs between equal rollouts. Without ``asks_model`` no completion is needed.
    """

    name: str
    read: Callable[[Mapping[str, Any]], dict[str, Any]]
    write: Callable[[Mapping[str, Any], Mapping[str, Any]], Mapping[str, Any]]
    split: Callable[[Mapping[str, Any]], Iterator[Mapping[str, Any]]]
    volatile: re.Pattern[str]
    end: str = ""
    asks_model: bool = True


def join_parts(parts: Sequence[Mapping[str, Any]]) -> str | Sequence[Mapping[str, Any]]:
    """Return the parts of a chat message as one text, or as they are if one is an image."""
    if all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return parts


def build_call(call_id: str, name: str, arguments: str) -> Mapping[str, Any]:
    """Return the call of a function in a chat message."""
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def count_cached(usage: Mapping[str, Any]) -> int:
    """Return the cached input tokens of a completion's usage."""
    return (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


def _split_completion(completion: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a whole completion as the chunks of a stream."""
    choice = completion["choices"][0]
    delta = {name: value for name, value in choice["message"].items() if value is not None}
    if calls := delta.get("tool_calls"):
        delta["tool_calls"] = [{"index": n, **call} for n, call in enumerate(calls)]
    end = {"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}
    frame = {
        "id": completion.get("id", ""),
        "object": "chat.completion.chunk",
        "created": 0,
        "model": completion["model"],
    }
    yield {**frame, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
    yield {**frame, "choices": [end]}
    if "usage" in completion:
        yield {**frame, "choices": [], "usage": completion["usage"]}


CHAT = Dialect(
    "a chat completion",
    read=lambda body: {**body},
    write=lambda completion, body: completion,
    split=_split_completion,
    # The date that opencode writes.
    volatile=re.compile(r"^ +Today's date: [^\n]*\n(?=</env>)", re.MULTILINE),
    end="data: [DONE]\n\n",
)
