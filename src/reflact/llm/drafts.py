"""Drafts: partial replies while the model still writes.

The task that reads an answer passes its pieces on and never waits. A second task parses them. Nothing else in
a run depends on drafts.
"""

from __future__ import annotations

import codecs
import re
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import anyio
from pydantic import JsonValue, ValidationError
from pydantic_core import from_json, to_json

from reflact.concurrency import run_beside
from reflact.errors import ReflactError
from reflact.events import DraftDiscarded, DraftUpdated
from reflact.llm.redaction import Scrubber
from reflact.llm.sse import EventReader, parse_chunk, read_delta
from reflact.messages import CallId, Draft, Reply, ReplyModel, Text
from reflact.protocols import EventCallback

R = TypeVar("R", bound=ReplyModel)

MIN_GROWTH = 48
"""Characters by which a text grows at least between two drafts."""

TEXT_GROWTH, CLOSED_GROWTH = 8, 64
"""A reply grows by 1/8 of its length between two drafts, or by 1/64 if an object or a list has closed.

So the number of drafts grows with the logarithm of the reply's length, and their total cost with the length.
"""

WORD_AT_END = re.compile(r"[-+.0-9A-Za-z]+\Z")
"""A number or a word that may continue."""

NAME_AT_END = re.compile(r',\s*"(?:[^"\\]|\\.)*\\?"?\s*:?\s*\Z')
"""The name of a member whose value has not begun."""

NO_NAME = "\0reflact"
NEXT_ELEMENT, NEXT_MEMBER = ",0", ',"\\u0000reflact":0'
"""Texts that can only follow if the last element, or the last member, has closed."""


class Reset(NamedTuple):
    """The drafts of an attempt are void."""

    attempt: int
    reason: str


class DraftStream(Generic[R]):
    """The drafts of one call: takes its answers while they arrive, and passes drafts to a subscriber.

    Attributes:
        attempt: Number of the attempt, from 1. It grows if a reply is sent back or an answer breaks off.
    """

    def __init__(self, reply_type: type[R]) -> None:
        self._type = reply_type
        self._queue: deque[tuple[int, str] | Reset | Draft[R]] = deque()
        self._wake = anyio.Event()
        self._closed = False
        self.attempt = 1
        self._start_attempt()

    def _start_attempt(self) -> None:
        self._begun = False
        self._text = [""]
        self._length = self._queued = 0
        self._something_closed = False
        self._events = EventReader()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def begin(self, keys: Sequence[str]) -> None:
        """Start reading an answer; a second answer within an attempt replaces one that broke off.

        Args:
            keys: API keys, which drafts never show.
        """
        if self._begun:
            self.reset("the answer broke off, and is asked for again")
        self._begun = True
        self._scrubber = Scrubber(keys)

    def feed(self, piece: bytes) -> None:
        """Take the next piece of the answer's body."""
        if self._closed:
            return
        for data in self._events.feed(self._decoder.decode(piece)):
            added = self._scrubber.feed(read_delta(parse_chunk(data)))
            self._text.append(added)
            self._length += len(added)
            self._something_closed |= "}" in added or "]" in added
            if self._has_grown():
                self._text = ["".join(self._text)]
                self._queued, self._something_closed = self._length, False
                self._put((self.attempt, self._text[0]))

    def reset(self, reason: str) -> None:
        """End an attempt that gave no reply."""
        self._put(Reset(self.attempt, reason))
        self.attempt += 1
        self._start_attempt()

    def finish(self, reply: Reply[R]) -> None:
        """Queue the final draft, which carries the reply."""
        self._put(build_final_draft(self.attempt, reply))

    def close(self) -> None:
        """End the stream."""
        self._closed = True
        self._wake.set()

    async def send(self, subscriber: Callable[[Draft[R] | Reset], Awaitable[None]]) -> None:
        """Pass all drafts and resets to a subscriber in order, until the stream is closed."""
        shown: JsonValue = None
        while self._queue or not self._closed:
            if not self._queue:
                self._wake = anyio.Event()
                await self._wake.wait()
                continue
            match self._queue.popleft():
                case Reset() as reset:
                    if shown is not None:
                        await subscriber(reset)
                    shown = None
                case Draft() as draft:
                    await subscriber(draft)
                case attempt, text:
                    value = read_partial(text, self._type)
                    if value is not None and value != shown and extends(value, shown):
                        shown = value
                        await subscriber(Draft(attempt=attempt, value=value))

    def _put(self, item: tuple[int, str] | Reset | Draft[R]) -> None:
        self._queue.append(item)
        self._wake.set()

    def _has_grown(self) -> bool:
        grown = self._length - self._queued
        if self._something_closed:
            return grown * CLOSED_GROWTH >= self._queued
        return grown >= max(MIN_GROWTH, self._queued // TEXT_GROWTH)


def read_partial(text: str, reply_type: type[ReplyModel]) -> JsonValue:
    """Return the visible part of an unfinished reply; None if it is no object or does not fit the type.

    Texts are visible as far as they are written, lists up to the last closed element, other values once they
    are complete. All elements are valid. Members may be missing and texts too short.
    """
    try:
        value: JsonValue = from_json(text, allow_inf_nan=False)
    except (ValueError, TypeError):
        value = _read_open(NAME_AT_END.sub("", WORD_AT_END.sub("", text)).rstrip(" \t\r\n,"))
    if not isinstance(value, dict):
        return None
    try:
        reply_type.model_validate_json(to_json(value), strict=True)
    except ValidationError as error:
        problems = error.errors(include_url=False, include_input=False, include_context=False)
        if any(isinstance(name, int) for problem in problems for name in problem["loc"]):
            return None
    return value


def _read_open(text: str) -> JsonValue:
    """Return the value of an unfinished text, without its unfinished element."""
    for more in (NEXT_ELEMENT, NEXT_MEMBER, ""):
        try:
            value = from_json(text + more, allow_inf_nan=False, allow_partial="trailing-strings")
        except (ValueError, TypeError):
            continue
        return _drop_last(value)
    return None


def _drop_last(value: JsonValue) -> JsonValue:
    """Return a value without the last element of the list at its end, and without the added suffix."""
    match value:
        case dict() if value:
            name, last = value.popitem()
            if name == NO_NAME:
                return value
            part = _drop_last(last)
            return value if part == [] else {**value, name: part}
        case list():
            return value[:-1]
        case str():
            return value.removesuffix(NEXT_ELEMENT)
    return value


def extends(value: JsonValue, before: JsonValue) -> bool:
    """Whether a value continues an earlier one."""
    match before, value:
        case None, _:
            return True
        case dict(), dict():
            return all(name in value and extends(value[name], part) for name, part in before.items())
        case list(), list():
            return value[: len(before)] == before
        case str(), str():
            return value.startswith(before)
    return value == before


class DraftSubscribers(Generic[R]):
    """The receivers of a call's drafts: the run's events, and the caller of ``draft``.

    Args:
        on_event: Takes events.
        on_draft: Takes drafts.
        run_id: The run.
        call_id: The call.
    """

    def __init__(
        self,
        on_event: EventCallback | None,
        on_draft: Callable[[Draft[R]], Awaitable[None]] | None,
        *,
        run_id: str,
        call_id: CallId,
    ) -> None:
        self._on_event = on_event
        self._on_draft = on_draft
        self._call: dict[str, Any] = {
            "run_id": run_id,
            "step": call_id.step or 0,
            "role": call_id.role,
            "purpose": call_id.purpose,
            "call_id": call_id.label,
        }
        self._drafted = False

    async def send(self, item: Draft[R] | Reset) -> None:
        """Pass an item on; a reply without earlier drafts is no event."""
        if self._on_event is not None:
            if isinstance(item, Reset):
                await self._on_event(DraftDiscarded(attempt=item.attempt, reason=item.reason, **self._call))
            elif item.reply is None or self._drafted:
                await self._on_event(DraftUpdated(attempt=item.attempt, draft=item.value, **self._call))
        self._drafted = isinstance(item, Draft)
        if self._on_draft is not None and isinstance(item, Draft):
            await self._on_draft(item)

    def open_stream(self, reply_type: type[R]) -> DraftStream[R] | None:
        """Return a stream of drafts; None for plain text, or if nobody subscribed."""
        unread = self._on_event is None and self._on_draft is None
        return None if unread or issubclass(reply_type, Text) else DraftStream(reply_type)

    async def follow(
        self, stream: DraftStream[R] | None, call: Callable[[], Awaitable[Reply[R]]]
    ) -> Reply[R]:
        """Make a call and return its reply after all its drafts were passed on."""
        if stream is None:
            reply = await call()
            if self._on_draft is not None:
                await self.send(build_final_draft(reply.attempts, reply))
            return reply

        async def work() -> Reply[R] | ReflactError:
            try:
                reply = await call()
            except ReflactError as error:
                stream.reset(str(error))
                return error
            else:
                stream.finish(reply)
                return reply
            finally:
                stream.close()

        outcome = await run_beside(work, lambda: stream.send(self.send), wait=True)
        if isinstance(outcome, ReflactError):
            raise outcome
        return outcome


def build_final_draft(attempt: int, reply: Reply[R]) -> Draft[R]:
    """Return the draft that carries the reply."""
    return Draft(attempt=attempt, value=reply.value.model_dump(mode="json"), reply=reply)
