"""Replies that are shown while they are written.

A draft is a by-product. The task that reads an answer hands the pieces over and never waits; another task
parses what has come, at the rate at which drafts are shown. Nothing of a run depends on a draft.
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

TEXT_SHARE, CLOSED_SHARE = 8, 64
"""The part of itself by which a reply grows between two drafts: within a text, and after something closed.
So the number of drafts grows with the logarithm of the length, and what all of them cost with the length.
"""

WORD_AT_END = re.compile(r"[-+.0-9A-Za-z]+\Z")
"""A number or a word that may go on."""

NAME_AT_END = re.compile(r',\s*"(?:[^"\\]|\\.)*\\?"?\s*:?\s*\Z')
"""The name of a member whose value has not begun."""

NO_NAME = "\0reflact"
NEXT_ELEMENT, NEXT_MEMBER = ",0", ',"\\u0000reflact":0'
"""What can follow a text only if its last element, or its last member, has closed."""


class Reset(NamedTuple):
    """What an attempt has drafted counts for nothing."""

    attempt: int
    reason: str


class _Written(NamedTuple):
    """What an attempt has written so far."""

    attempt: int
    text: str


class DraftStream(Generic[R]):
    """The drafts of one call: takes in its answers while they come, and passes on what can be seen of them.

    Attributes:
        attempt: The attempt that is being drafted, from 1. Another one begins when a reply is sent back, or
            when its answer broke off.
    """

    def __init__(self, reply_type: type[R]) -> None:
        self._type = reply_type
        self._queue: deque[_Written | Reset | Draft[R]] = deque()
        self._wake = anyio.Event()
        self._closed = False
        self.attempt = 1
        self._start()

    def _start(self) -> None:
        self._begun = False
        self._text = [""]
        self._length = self._queued = 0
        self._something_closed = False
        self._events = EventReader()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def begin(self, keys: Sequence[str]) -> None:
        """An answer begins, whose keys are never shown; one before it in this attempt broke off."""
        if self._begun:
            self.reset("the answer broke off, and is asked for again")
        self._begun = True
        self._scrubber = Scrubber(keys)

    def feed(self, piece: bytes) -> None:
        """Take in the next piece of the answer's body."""
        if self._closed:
            return
        for data in self._events.feed(self._decoder.decode(piece)):
            said = self._scrubber.feed(read_delta(parse_chunk(data)))
            self._text.append(said)
            self._length += len(said)
            self._something_closed |= "}" in said or "]" in said
            if self._has_grown():
                self._text = ["".join(self._text)]
                self._queued, self._something_closed = self._length, False
                self._put(_Written(self.attempt, self._text[0]))

    def reset(self, reason: str) -> None:
        """Nothing came of the attempt."""
        self._put(Reset(self.attempt, reason))
        self.attempt += 1
        self._start()

    def finish(self, reply: Reply[R]) -> None:
        """The call has its reply."""
        self._put(last_draft(self.attempt, reply))

    def close(self) -> None:
        """Nothing more comes."""
        self._closed = True
        self._wake.set()

    async def send(self, subscriber: Callable[[Draft[R] | Reset], Awaitable[None]]) -> None:
        """Pass everything on in order, until nothing more comes."""
        shown: JsonValue = None
        while self._queue or not self._closed:
            if not self._queue:
                self._wake = anyio.Event()
                await self._wake.wait()
                continue
            match self._queue.popleft():
                case _Written(attempt, text):
                    value = read_partial(text, self._type)
                    if value is not None and value != shown and extends(value, shown):
                        shown = value
                        await subscriber(Draft(attempt=attempt, value=value))
                case Reset() as reset:
                    if shown is not None:
                        await subscriber(reset)
                    shown = None
                case Draft() as draft:
                    await subscriber(draft)

    def _put(self, item: _Written | Reset | Draft[R]) -> None:
        self._queue.append(item)
        self._wake.set()

    def _has_grown(self) -> bool:
        grown = self._length - self._queued
        if self._something_closed:
            return grown * CLOSED_SHARE >= self._queued
        return grown >= max(MIN_GROWTH, self._queued // TEXT_SHARE)


def read_partial(text: str, reply_type: type[ReplyModel]) -> JsonValue:
    """Return what can be seen of a reply that is being written: None if it is no object, or does not fit.

    Texts are seen as far as they are written, lists up to the last element that is known to have closed, and
    anything else once it is whole. All elements are valid; what is missing or too short may still come.
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
        found = error.errors(include_url=False, include_input=False, include_context=False)
        if any(isinstance(name, int) for problem in found for name in problem["loc"]):
            return None
    return value


def _read_open(text: str) -> JsonValue:
    """Return what an unfinished text holds, without the element that is being written."""
    for more in (NEXT_ELEMENT, NEXT_MEMBER, ""):
        try:
            value = from_json(text + more, allow_inf_nan=False, allow_partial="trailing-strings")
        except (ValueError, TypeError):
            continue
        return _drop_last(value)
    return None


def _drop_last(value: JsonValue) -> JsonValue:
    """Return a value without the last element of the list at its end, and without what was added to it."""
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
    """Whether an earlier value is a beginning of this one."""
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
    """Those who see what a call drafts: subscribers of the run's events, and the caller who asked for drafts.

    Args:
        on_event: Takes events.
        on_draft: Takes drafts.
        run_id: The run.
        sample: The call.
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
        self._about: dict[str, Any] = {
            "run_id": run_id,
            "step": 0 if call_id.step is None else call_id.step,
            "role": call_id.role,
            "purpose": call_id.purpose,
            "call_id": call_id.label,
        }
        self._drafted = False

    async def send(self, item: Draft[R] | Reset) -> None:
        """Pass an item on; a reply of which nothing was drafted is no event."""
        if self._on_event is not None:
            if isinstance(item, Reset):
                await self._on_event(DraftDiscarded(attempt=item.attempt, reason=item.reason, **self._about))
            elif item.reply is None or self._drafted:
                await self._on_event(DraftUpdated(attempt=item.attempt, draft=item.value, **self._about))
        self._drafted = isinstance(item, Draft)
        if self._on_draft is not None and isinstance(item, Draft):
            await self._on_draft(item)

    def open_stream(self, reply_type: type[R]) -> DraftStream[R] | None:
        """Return a stream of drafts; None if nobody subscribed, or for plain text, which is not drafted."""
        nobody = self._on_event is None and self._on_draft is None
        return None if nobody or issubclass(reply_type, Text) else DraftStream(reply_type)

    async def follow(
        self, stream: DraftStream[R] | None, call: Callable[[], Awaitable[Reply[R]]]
    ) -> Reply[R]:
        """Make a call and return its reply, once everything that was drafted on the way was passed on."""
        if stream is None:
            reply = await call()
            if self._on_draft is not None:
                await self.send(last_draft(reply.attempts, reply))
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


def last_draft(attempt: int, reply: Reply[R]) -> Draft[R]:
    """Return the draft that carries the reply."""
    return Draft(attempt=attempt, value=reply.value.model_dump(mode="json"), reply=reply)
