"""Server-sent events, joined to one chat completion; the openai client would be slow and lose the usage."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import JsonValue

JSON, EVENT_STREAM, END_MARK = "application/json", "text/event-stream", "[DONE]"
LINES = re.compile(r"\r\n|\n|\r")

ANSWER_FIELDS = ("id", "created", "model", "system_fingerprint", "usage")
"""Fields of a chunk that describe the whole answer; the last value counts."""


class EventReader:
    """Reads a stream of events from pieces that may be cut anywhere."""

    def __init__(self) -> None:
        self._line: list[str] = []
        self._data: list[str] = []
        self._returned = False

    def feed(self, piece: str) -> Iterator[str]:
        """Take a piece and yield the data of the events that end in it."""
        if not piece:
            return
        text = piece.removeprefix("\n") if self._returned else piece
        self._returned = piece.endswith("\r")
        *ends, rest = LINES.split(text)
        for end in ends:
            line = "".join([*self._line, end])
            self._line.clear()
            if line.startswith("data:"):
                self._data.append(line.removeprefix("data:").removeprefix(" "))
            elif not line and self._data:
                yield "\n".join(self._data)
                self._data.clear()
        if rest:
            self._line.append(rest)


def read_events(text: str) -> Iterator[str]:
    """Yield the data of all events of a stream, including a last event without a line end."""
    return EventReader().feed(f"{text}\n\n")


def parse_chunk(data: str) -> JsonValue:
    """Return the JSON value of an event; None if it is no JSON."""
    try:
        value: JsonValue = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return value


def read_delta(chunk: Any) -> str:
    """Return the text that a chunk adds to the reply: arguments of the first function, or content."""
    match chunk:
        case {
            "choices": [{"delta": {"tool_calls": [{"function": {"arguments": str(text)}, **call}, *_]}}, *_]
        }:
            return text if _read_index(call) == 0 else ""
        case {"choices": [{"delta": {"content": str(text)}}, *_]}:
            return text
    return ""


def join_stream(text: str) -> str:
    """Return a stream as one chat completion, in JSON.

    An answer without a finish reason was cut off, so its reason is ``length``. If the stream holds no answer,
    the completion has no choice.
    """
    fields: dict[str, JsonValue] = {}
    message: dict[str, Any] = {"role": "assistant", "content": None, "refusal": None}
    calls: dict[int, dict[str, str]] = {}
    finish, answered = "length", False
    for chunk in map(parse_chunk, read_events(text)):
        if not isinstance(chunk, dict):
            continue
        fields |= {name: chunk[name] for name in ANSWER_FIELDS if chunk.get(name) is not None}
        match chunk:
            case {"choices": [{"finish_reason": str(reason)}, *_]}:
                finish = reason
        match chunk:
            case {"choices": [{"delta": dict(delta)}, *_]}:
                answered = True
                for name in ("content", "refusal"):
                    if isinstance(part := delta.get(name), str):
                        message[name] = (message[name] or "") + part
                _add_calls(calls, delta.get("tool_calls"))
    if calls:
        message["tool_calls"] = [
            {"id": call.pop("id"), "type": "function", "function": call} for _, call in sorted(calls.items())
        ]
    choices = [{"index": 0, "finish_reason": finish, "message": message}] if answered else []
    return json.dumps({"object": "chat.completion", **fields, "choices": choices})


def _add_calls(calls: dict[int, dict[str, str]], parts: Any) -> None:
    for part in parts if isinstance(parts, list) else ():
        match part:
            case {"function": dict(function)}:
                call = calls.setdefault(_read_index(part), {"id": "", "name": "", "arguments": ""})
                for name, value in (("id", part.get("id")), *function.items()):
                    if name in call and isinstance(value, str):
                        call[name] = (call[name] or value) if name == "id" else call[name] + value


def _read_index(call: Mapping[Any, Any]) -> int:
    index = call.get("index")
    return index if isinstance(index, int) else 0
