"""Answers in a stream of events, the same answers in one piece, and the usage that they report.

The openai client's own way to put the pieces together validates the whole message anew with each of them, at
twenty times the cost of reading them, and lets a piece without usage overwrite the usage; so it is done here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import JsonValue

from reflact.records import Usage

STREAM, END = "text/event-stream", "[DONE]"
LINES = re.compile(r"\r\n|\n|\r")

ANSWER_FIELDS = ("id", "created", "model", "system_fingerprint", "usage")
"""What chunks say of the answer as a whole; the last one counts."""


def is_event_stream(content_type: str) -> bool:
    """Whether an answer is a stream of events."""
    return content_type.startswith(STREAM)


class EventReader:
    """Reads a stream of events that arrives in pieces, cut anywhere."""

    def __init__(self) -> None:
        self._line: list[str] = []
        self._data: list[str] = []
        self._returned = False

    def feed(self, piece: str) -> Iterator[str]:
        """Take in a piece and yield the data of the events that end in it."""
        if not piece:
            return
        text = piece.removeprefix("\n") if self._returned else piece
        self._returned = piece.endswith("\r")
        *lines, rest = LINES.split(text)
        for end in lines:
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
    """Yield the data of all events of a stream, the last one also where no line ends it."""
    return EventReader().feed(f"{text}\n\n")


def parse_chunk(data: str) -> JsonValue:
    """Return what an event holds, None where that is no JSON."""
    try:
        value: JsonValue = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return value


def read_delta(chunk: Any) -> str:
    """Return what a chunk adds to the reply: to the arguments of the first function, or to the text."""
    match chunk:
        case {"choices": [{"delta": dict(delta)}, *_]}:
            match delta:
                case {"tool_calls": [{"function": {"arguments": str(said)}, **call}, *_]}:
                    return said if _index(call) == 0 else ""
                case {"content": str(said)}:
                    return said
    return ""


def join_stream(text: str) -> str:
    """Return a stream as the chat completion that it makes up, in JSON.

    An answer without a reason to finish was cut off: its reason is ``length``. If the stream holds no answer,
    the completion has no choice.
    """
    about: dict[str, JsonValue] = {}
    message: dict[str, Any] = {"role": "assistant", "content": None, "refusal": None}
    calls: dict[int, dict[str, str]] = {}
    finish, answered = "length", False
    for chunk in map(parse_chunk, read_events(text)):
        if not isinstance(chunk, dict):
            continue
        about |= {name: chunk[name] for name in ANSWER_FIELDS if chunk.get(name) is not None}
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
        message["tool_calls"] = [_whole_call(calls[index]) for index in sorted(calls)]
    choices = [{"index": 0, "finish_reason": finish, "message": message}] if answered else []
    return json.dumps({"object": "chat.completion", **about, "choices": choices})


def _add_calls(calls: dict[int, dict[str, str]], parts: Any) -> None:
    for part in parts if isinstance(parts, list) else ():
        match part:
            case {"function": dict(function)}:
                call = calls.setdefault(_index(part), {"id": "", "name": "", "arguments": ""})
                call["id"] = call["id"] or _text(part.get("id"))
                for name in ("name", "arguments"):
                    call[name] += _text(function.get(name))


def _whole_call(call: dict[str, str]) -> JsonValue:
    function: JsonValue = {"name": call["name"], "arguments": call["arguments"]}
    return {"id": call["id"], "type": "function", "function": function}


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _index(call: Mapping[Any, Any]) -> int:
    index = call.get("index")
    return index if isinstance(index, int) else 0


def read_usage(content_type: str, chunks: Sequence[str]) -> Usage:
    """Return what one answer consumed, as the provider counted it; a silent provider gives zeros, uncounted.

    Args:
        content_type: ``application/json``, or ``text/event-stream`` for a streamed body.
        chunks: The body's pieces.
    """
    text = "".join(chunks)
    usage: Usage | None = None
    for document in _documents(content_type, text):
        found = document.get("usage")
        if isinstance(found, dict):
            usage = _read(found)
    return usage or Usage(calls=1, uncounted=1)


def _documents(content_type: str, text: str) -> Iterator[dict[str, Any]]:
    for data in read_events(text) if is_event_stream(content_type) else [text]:
        value = parse_chunk(data)
        if isinstance(value, dict):
            yield value


def _read(usage: dict[str, Any]) -> Usage:
    given, written = _count(usage.get("prompt_tokens")), _count(usage.get("completion_tokens"))
    if given is None or written is None:
        return Usage(calls=1, uncounted=1)
    details = usage.get("prompt_tokens_details")
    cached = _count(details.get("cached_tokens")) if isinstance(details, dict) else 0
    return Usage(calls=1, input_tokens=given, cached_tokens=min(cached or 0, given), output_tokens=written)


def _count(value: Any) -> int | None:
    """A count as it was given; None for what cannot be one: negative, no number, beyond any ledger."""
    return value if type(value) is int and 0 <= value < 2**53 else None
