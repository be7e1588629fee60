"""Answers of endpoints, whole or as streams of events, read as chat completions.

A completion has only the fields that reflact uses, each of its type. So no later code meets a value
that it does not expect. The answers of agents and of pydantic-ai's models, which no endpoint gives,
are written as completions.
"""

from __future__ import annotations

import json
import re
import string
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Annotated, Any
from urllib.parse import quote

import httpx
from pydantic import BaseModel, BeforeValidator, JsonValue, ValidationError

from reflact.llm.pricing import read_counts, write_counts
from reflact.messages import AgentAnswer
from reflact.records import FaultKind, Usage

JSON = "application/json"
EVENT_STREAM = "text/event-stream"
END_MARK = "[DONE]"
# Where chat completions are asked for, below the root of an API.
COMPLETIONS_PATH = "/chat/completions"
# About the most values of a JSON text, since small ones take far more memory than text.
MOST_VALUES = 500_000
# The reasons that openai's type of a completion knows; any other word for the end of an answer
# becomes ``stop``.
FINISH_REASONS = frozenset({"stop", "length", "tool_calls", "content_filter", "function_call"})

# Words of Mistral, Anthropic, Gemini and others for ``length``, in lower case.
CUT_REASONS = frozenset(
    {"model_length", "max_tokens", "max_output_tokens", "max_length", "token_limit"}
)

# The types of parts of a content that are thoughts, whatever texts they have.
THOUGHT_PARTS = ("thinking", "reasoning")
# Words of vLLM, SGLang, DeepSeek and others for an answer that the server gave up.
BROKEN_REASONS = frozenset({"error", "abort", "aborted", "insufficient_system_resource"})
# A stream of events begins with one of these, whatever its content type.
EVENT_STARTS = ("data:", "event:", "id:", "retry:", ":")
# Other indices are those of further choices.
FIRST_INDEX = (None, 0, "0")
# How much of a whole text is read at once, since each of its lines takes memory.
PIECE_CHARACTERS = 2**16
LINES = re.compile(r"\r\n|\n|\r")
# The most characters of an answer that an error keeps.
QUOTED_CHARACTERS = 1000
# The extension of a request that holds the function which answers it in place of the network.
ANSWERER = "reflact_answerer"

Answerer = Callable[[bytes], Awaitable[AgentAnswer]]

# The JSON of a chat completion with one choice, as ``write_completion`` writes it.
Completion = dict[str, Any]


class AnswerFault(httpx.RemoteProtocolError):
    """An answer began and cannot be used; the message is a part of it, or says why."""

    def __init__(self, message: str, fault: FaultKind = "malformed") -> None:
        super().__init__(message[:QUOTED_CHARACTERS])
        self.fault: FaultKind = fault


def select_headers(response: httpx.Response) -> dict[str, str]:
    """Return the headers that other layers need, in ASCII; the content type has no parameters."""
    content_type = response.headers.get("content-type", JSON).partition(";")[0].strip().lower()
    selected = {"content-type": content_type}
    for name in ("retry-after", "date", "location"):
        if name in response.headers:
            selected[name] = response.headers[name]
    safe = f"{string.punctuation} "
    return {name: quote(value, safe=safe) for name, value in selected.items()}


def decode_text(body: bytes) -> str:
    """Return a body as text: UTF-8, UTF-16 or UTF-32, as its bytes show."""
    return body.decode(json.detect_encoding(body), "replace").removeprefix("\ufeff")


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
    with suppress(ValueError, RecursionError):
        value: JsonValue = json.loads(data)
        return value
    return None


def read_delta(chunk: Any) -> str:
    """Return the text that a chunk adds: arguments of the first function, or content."""
    match chunk:
        case {
            "choices": [
                {"delta": {"tool_calls": [{"function": {"arguments": str(text)}, **call}, *_]}},
                *_,
            ]
        }:
            return "" if call.get("index") else text
        case {"choices": [{"delta": {"content": str(text)}}, *_]}:
            return text
    return ""


def is_last_chunk(chunk: Any) -> bool:
    """Whether a chunk says why the answer ended; only its usage and the end mark can follow."""
    match chunk:
        case {"choices": [{"finish_reason": str(reason)}, *_]}:
            return reason != ""
    return False


def _join_parts(value: Any) -> Any:
    """Return the text of a content in parts; parts of other kinds, such as thoughts, have none."""
    if not isinstance(value, list):
        return value
    texts = []
    for part in value:
        if not isinstance(part, dict):
            texts.append(part)
        elif part.get("type") not in THOUGHT_PARTS:
            texts.append(part.get("text"))
    if not all(text is None or isinstance(text, str) for text in texts):
        raise ValueError("a part that is no text")
    return "".join(text or "" for text in texts)


def _write_arguments(value: Any) -> Any:
    """Return arguments as JSON text; some servers send the object itself, or null for none."""
    return json.dumps(value) if isinstance(value, dict) else value or ""


def _refuse_error(value: Any) -> None:
    if value:
        raise ValueError("an error")


# A text that is left out if it is of another type.
Name = Annotated[str, BeforeValidator(lambda value: value if isinstance(value, str) else "")]

NoError = Annotated[None, BeforeValidator(_refuse_error)]


class _Function(BaseModel):
    name: Name = ""
    arguments: Annotated[str, BeforeValidator(_write_arguments)] = ""


class _Call(BaseModel):
    index: int | None = None
    id: Name = ""
    function: _Function


class _Message(BaseModel):
    content: Annotated[str | None, BeforeValidator(_join_parts)] = None
    refusal: str | None = None
    tool_calls: list[_Call] | None = None


class _Choice(BaseModel):
    """A choice of a completion has a message, and one of a chunk what it adds."""

    index: Any = None
    error: NoError = None
    finish_reason: Name = ""
    message: _Message | None = None
    delta: _Message | None = None


class _Completion(BaseModel):
    """A completion, or a chunk of one."""

    error: NoError = None
    model: Name = ""
    choices: list[_Choice] | None = None
    usage: Any = None


def read_completion(content_type: str, text: str) -> Completion:
    """Return the body of a successful answer as a chat completion with one choice.

    It is an ``AnswerFault`` if it is none, or a stream that is not whole.
    """
    if _is_stream(content_type, text):
        completion = _join_chunks(_read_chunks(text))
    else:
        if sum(map(text.count, ",[{")) > MOST_VALUES:
            raise AnswerFault(f"more than {MOST_VALUES:,} values", "oversized")
        try:
            document = json.loads(text)
        except (ValueError, RecursionError):
            raise AnswerFault(text, "malformed" if content_type == JSON else "unusable") from None
        completion = _validate(document, text, "unusable")
    choice = completion.choices[0] if completion.choices else _Choice()
    if choice.message is None or choice.finish_reason in BROKEN_REASONS:
        raise AnswerFault(text, "unusable")

    finish = choice.finish_reason if choice.finish_reason in FINISH_REASONS else "stop"
    if choice.finish_reason.lower() in CUT_REASONS:
        finish = "length"
    message: dict[str, Any] = {
        "content": choice.message.content,
        "refusal": choice.message.refusal or None,
    }
    if choice.message.tool_calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": call.function.model_dump()}
            for call in choice.message.tool_calls
        ]
    usage = read_counts(completion.usage)
    return write_completion(message, usage, finish=finish, model=completion.model)


def write_completion(
    message: Mapping[str, Any], usage: Usage, *, finish: str = "stop", model: str = ""
) -> Completion:
    """Return a chat completion; one whose tokens were not counted has no usage."""
    choice = {"index": 0, "finish_reason": finish, "message": {"role": "assistant", **message}}
    body = {"id": "", "object": "chat.completion", "created": 0, "model": model}
    if not usage.uncounted:
        body["usage"] = write_counts(usage)
    return {**body, "choices": [choice]}


def _is_stream(content_type: str, text: str) -> bool:
    start = text.lstrip()
    return start.startswith(EVENT_STARTS) or (
        content_type == EVENT_STREAM and not start.startswith(("{", "["))
    )


def _read_chunks(text: str) -> Iterator[_Completion]:
    """Yield the chunks of a stream, up to its end mark or the reason why the answer ended."""
    is_finished = False
    for data in read_events(text):
        if data.strip() == END_MARK:
            return
        chunk = _validate(parse_chunk(data), text, "broken stream")
        is_finished |= any(choice.finish_reason for choice in chunk.choices or ())
        yield chunk
    if not is_finished:
        raise AnswerFault(text, "broken stream")


def _validate(value: object, text: str, fault: FaultKind) -> _Completion:
    try:
        return _Completion.model_validate(value)
    except (ValidationError, RecursionError):
        raise AnswerFault(text, fault) from None


def _join_chunks(chunks: Iterable[_Completion]) -> _Completion:
    """Return the first choice of a stream, with the last usage.

    An answer without a finish reason was cut off, so its reason is ``length``. A stream without an
    answer has no choice.
    """
    contents: list[str] = []
    refusals: list[str] = []
    calls: dict[int, _Call] = {}
    arguments: dict[int, list[str]] = {}
    finish = "length"
    model = ""
    usage = None
    answered = False
    for chunk in chunks:
        model = chunk.model or model
        usage = chunk.usage or usage
        for choice in chunk.choices or ():
            if choice.index not in FIRST_INDEX:
                continue
            finish = choice.finish_reason or finish
            if (delta := choice.delta) is None:
                continue
            answered = True
            if delta.content is not None:
                contents.append(delta.content)
            refusals.append(delta.refusal or "")
            for part in delta.tool_calls or ():
                index = part.index or 0
                call = calls.setdefault(index, _Call(function=_Function()))
                call.id = call.id or part.id
                call.function.name += part.function.name
                arguments.setdefault(index, []).append(part.function.arguments)
    for index, written in arguments.items():
        calls[index].function.arguments = "".join(written)
    message = _Message(
        content="".join(contents) if contents else None,
        refusal="".join(refusals),
        tool_calls=[call for _, call in sorted(calls.items())],
    )
    choices = [_Choice(finish_reason=finish, message=message)] if answered else []
    return _Completion.model_construct(model=model, usage=usage, choices=choices)


class AgentTransport(httpx.AsyncBaseTransport):
    """Lets a request's own answerer answer it, and sends any other one through ``inner``."""

    def __init__(self, inner: httpx.AsyncBaseTransport) -> None:
        self._inner = inner

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Return the answer as a chat completion, or the refusal of its provider."""
        answerer: Answerer | None = request.extensions.get(ANSWERER)
        if answerer is None:
            return await self._inner.handle_async_request(request)
        try:
            answer = await answerer(request.content)
        except ConnectionError as error:
            raise httpx.ReadError(str(error)) from error
        except Exception as error:
            if (refusal := _read_refusal(error)) is None:
                raise
            return refusal
        finish = "length" if answer.truncated else "stop"
        message = {"content": answer.text}
        return httpx.Response(200, json=write_completion(message, answer.usage, finish=finish))


def _read_refusal(error: Exception) -> httpx.Response | None:
    """Return the refusal that a provider's library raised; None for any other error."""
    status = getattr(error, "status_code", None)
    if not isinstance(status, int) or not 300 <= status <= 599:
        return None
    headers = getattr(error, "headers", None)
    asked = headers.get("retry-after") if isinstance(headers, Mapping) else None
    body = getattr(error, "body", None)
    return httpx.Response(
        status,
        headers={} if asked is None else {"retry-after": str(asked)},
        json={"error": {"message": str(error) if body is None else str(body)}},
    )
