"""Server-sent events, read from pieces that may be cut anywhere."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import JsonValue

JSON, EVENT_STREAM, END_MARK = "application/json", "text/event-stream", "[DONE]"
PIECE_CHARACTERS = 2**16
"""How much of a whole text is read at once, since each of its lines takes memory."""

LINES = re.compile(r"\r\n|\n|\r")


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
    reader = EventReader()
    for at in range(0, len(text), PIECE_CHARACTERS):
        yield from reader.feed(text[at : at + PIECE_CHARACTERS])
    yield from reader.feed("\n\n")


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


def is_last_chunk(chunk: Any) -> bool:
    """Whether a chunk says why the answer ended; only its usage and the end mark can follow."""
    match chunk:
        case {"choices": [{"finish_reason": str(reason)}, *_]}:
            return reason != ""
    return False


def _read_index(call: Mapping[Any, Any]) -> int:
    index = call.get("index")
    return index if isinstance(index, int) else 0
