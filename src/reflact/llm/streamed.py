"""Answers in a stream of events, and what the same answer is in one piece.

The openai client's own way to put the pieces together validates the whole message anew with each of them, at
twenty times the cost of reading them, and lets a piece without usage overwrite the usage; so it is done here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from pydantic import JsonValue

STREAM, END = "text/event-stream", "[DONE]"
LINES = re.compile(r"\r\n|\n|\r")

ABOUT = ("id", "created", "model", "system_fingerprint", "usage")
"""What chunks say of the answer as a whole; the last one counts."""


def streams(content_type: str) -> bool:
    """Whether an answer is a stream of events."""
    return content_type.startswith(STREAM)


class Listener(Protocol):
    """Hears the answers to a call while they come. It must neither wait nor raise: they are paid for."""

    def began(self, keys: Sequence[str]) -> None:
        """An answer begins, in which the keys must not be seen; of one before it nothing counts."""
        ...

    def heard(self, piece: bytes) -> None:
        """The next piece of its body."""
        ...

    def dropped(self, reason: str) -> None:
        """Nothing came of the attempt."""
        ...


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


def events_of(text: str) -> Iterator[str]:
    """Yield the data of all events of a stream, the last one also where no line ends it."""
    return EventReader().feed(f"{text}\n\n")


def chunk_of(data: str) -> JsonValue:
    """Return what an event holds, None where that is no JSON."""
    try:
        value: JsonValue = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return value


def said_in(chunk: Any) -> str:
    """Return what a chunk adds to the reply: to the arguments of the first function, or to the text."""
    match chunk:
        case {"choices": [{"delta": dict(delta)}, *_]}:
            match delta:
                case {"tool_calls": [{"function": {"arguments": str(said)}, **call}, *_]}:
                    return said if _place(call) == 0 else ""
                case {"content": str(said)}:
                    return said
    return ""


def whole_answer(text: str) -> str:
    """Return a stream as the chat completion that it makes up, in JSON.

    An answer that nobody ended, with a reason to finish, was cut off, and is told as such: ``length``. Where
    there is no answer in the stream there is no choice in the completion.
    """
    whole = _Whole()
    for data in events_of(text):
        if data != END:
            whole.take(chunk_of(data))
    return json.dumps(whole.completion())


class _Whole:
    def __init__(self) -> None:
        self._about: dict[str, JsonValue] = {}
        self._said: dict[str, list[str]] = {}
        self._calls: dict[int, _Function] = {}
        self._finish = "length"
        self._answered = False

    def take(self, chunk: Any) -> None:
        match chunk:
            case {"choices": [{"finish_reason": str(reason)}, *_]}:
                self._finish = reason
        match chunk:
            case {"choices": [{"delta": dict(delta)}, *_]}:
                self._answered = True
                for name in ("content", "refusal"):
                    if isinstance(delta.get(name), str):
                        self._said.setdefault(name, []).append(delta[name])
                calls = delta.get("tool_calls")
                for call in calls if isinstance(calls, list) else ():
                    self._call(call)
        for name in ABOUT:
            if isinstance(chunk, dict) and chunk.get(name) is not None:
                self._about[name] = chunk[name]

    def _call(self, call: Any) -> None:
        match call:
            case {"function": dict(function)}:
                made = self._calls.setdefault(_place(call), _Function())
                made.id = made.id or _text(call.get("id"))
                made.name += _text(function.get("name"))
                made.arguments.append(_text(function.get("arguments")))

    def completion(self) -> JsonValue:
        message: dict[str, JsonValue] = {"role": "assistant", "content": None, "refusal": None}
        message |= {name: "".join(parts) for name, parts in self._said.items()}
        if self._calls:
            message["tool_calls"] = [self._calls[place].made for place in sorted(self._calls)]
        choice: JsonValue = {"index": 0, "finish_reason": self._finish, "message": message}
        choices: JsonValue = [choice] if self._answered else []
        return {"object": "chat.completion", **self._about, "choices": choices}


class _Function:
    def __init__(self) -> None:
        self.id = self.name = ""
        self.arguments: list[str] = []

    @property
    def made(self) -> JsonValue:
        function: JsonValue = {"name": self.name, "arguments": "".join(self.arguments)}
        return {"id": self.id, "type": "function", "function": function}


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _place(call: Mapping[Any, Any]) -> int:
    place = call.get("index")
    return place if isinstance(place, int) else 0
