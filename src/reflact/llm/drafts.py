"""Drafts: partial replies while the model still writes."""

from __future__ import annotations

import codecs
import re
import string
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from pydantic import JsonValue, ValidationError
from pydantic_core import from_json, to_json

from reflact.concurrency import open_outbox
from reflact.errors import ReflactError
from reflact.events import DraftDiscarded, DraftUpdated
from reflact.llm.completions import EventReader, is_last_chunk, parse_chunk, read_delta
from reflact.llm.redaction import Scrubber
from reflact.llm.structured import remove_thoughts
from reflact.messages import Reply, ReplyModel
from reflact.protocols import EventCallback

R = TypeVar("R", bound=ReplyModel)
# Characters by which a text grows at least between two drafts.
MIN_GROWTH = 48
# A reply grows by 1/8 of its length between two drafts, or by 1/64 if an object or a list has
# closed.
TEXT_GROWTH = 8
CLOSED_GROWTH = 64
# The most bytes of an answer that are read for drafts, since each draft is a copy of the text so
# far.
DRAFT_BYTES = 2**22
# Characters of a number or a word, which may continue.
WORD_CHARACTERS = f"{string.ascii_letters}{string.digits}+-."
# The name of a member whose value has not begun.
NAME_AT_END = re.compile(r',\s*+"(?:[^"\\]|\\.)*+\\?"?\s*+:?\s*+\Z')
NO_NAME = "\0reflact"
# Texts that can only follow if the last element, or the last member, has closed.
NEXT_ELEMENT = ",0"
NEXT_MEMBER = ',"\\u0000reflact":0'


@dataclass(eq=False)
class DraftStream(Generic[R]):
    """The drafts of one call, made of its answers while they arrive.

    ``fields`` are the call, as fields of its events, and ``on_event`` takes the events.
    ``is_finished`` is True once the present answer has told why it ended, so that nothing of it is
    missing.
    """

    reply_type: type[R]
    fields: dict[str, Any]
    on_event: EventCallback

    def __post_init__(self) -> None:
        self._put: Callable[[DraftUpdated | DraftDiscarded | tuple[int, str]], None] | None = None
        self._shown: JsonValue = None
        self._attempt = 1
        self._start_attempt()

    def _start_attempt(self) -> None:
        self._begun = False
        self._something_closed = False
        self.is_finished = False
        self._text = [""]
        self._length = self._queued = self._taken = 0
        self._events = EventReader()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    async def follow(self, call: Callable[[], Awaitable[Reply[R]]]) -> Reply[R]:
        """Make a call and return its reply after all its drafts were passed on."""
        async with open_outbox(self._deliver) as put:
            self._put = put
            try:
                reply = await call()
            except ReflactError as error:
                self.reset(str(error))
                failure = error
            else:
                value = reply.value.model_dump(mode="json")
                put(DraftUpdated(attempt=self._attempt, draft=value, **self.fields))
                return reply
            finally:
                self._put = None
        raise failure

    def begin(self, keys: Sequence[str]) -> None:
        """Start reading an answer, without keys; a second one replaces one that broke off."""
        if self._begun:
            self.reset("the answer broke off, and is asked for again")
        self._begun = True
        self._scrubber = Scrubber(keys)

    def feed(self, piece: bytes) -> None:
        """Take the next piece of an answer's body; beyond ``DRAFT_BYTES`` there are no drafts."""
        self._taken += len(piece)
        if self._put is None or self._taken > DRAFT_BYTES:
            return
        for data in self._events.feed(self._decoder.decode(piece)):
            chunk = parse_chunk(data)
            self.is_finished = self.is_finished or is_last_chunk(chunk)
            delta = read_delta(chunk).encode("utf-8", "surrogatepass")
            added = self._scrubber.feed(delta).decode("utf-8", "surrogatepass")
            self._text.append(added)
            self._length += len(added)
            self._something_closed |= "}" in added or "]" in added
            enough = self._queued / CLOSED_GROWTH
            if not self._something_closed:
                enough = max(MIN_GROWTH, self._queued // TEXT_GROWTH)
            if self._length - self._queued >= enough:
                self._text = ["".join(self._text)]
                self._queued = self._length
                self._something_closed = False
                self._put((self._attempt, self._text[0]))

    def reset(self, reason: str) -> None:
        """End an attempt that gave no reply."""
        if self._put is not None:
            self._put(DraftDiscarded(attempt=self._attempt, reason=reason, **self.fields))
        self._attempt += 1
        self._start_attempt()

    async def _deliver(self, item: DraftUpdated | DraftDiscarded | tuple[int, str]) -> None:
        """Post an event; a reply without earlier drafts is none."""
        if isinstance(item, tuple):
            attempt, text = item
            value = read_partial(remove_thoughts(text), self.reply_type)
            if value is None or value == self._shown or not extends(value, self._shown):
                return
            self._shown = value
            item = DraftUpdated(attempt=attempt, draft=value, **self.fields)
        if self._shown is not None:
            await self.on_event(item)
        if isinstance(item, DraftDiscarded):
            self._shown = None


def read_partial(text: str, reply_type: type[ReplyModel]) -> JsonValue:
    """Return the visible part of an unfinished reply; None if it does not fit the type.

    Texts are visible as far as they are written, lists up to the last closed element, other values
    once they are complete. All elements are valid. Members may be missing and texts too short.
    """
    try:
        value: JsonValue = from_json(text, allow_inf_nan=False)
    except (ValueError, TypeError):
        value = _read_open(NAME_AT_END.sub("", text.rstrip(WORD_CHARACTERS)).rstrip(" \t\r\n,"))
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
    """Return a value without the last element of its last list, and without the suffix."""
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
            return all(
                name in value and extends(value[name], part) for name, part in before.items()
            )
        case list(), list():
            return value[: len(before)] == before
        case str(), str():
            return value.startswith(before)
    return value == before
