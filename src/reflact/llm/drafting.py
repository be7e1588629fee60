"""Replies that are shown while they are written.

A draft is a by-product. Whoever reads an answer hands its pieces over and never waits; who watches is told by
another task, at his own pace; and nothing of a run depends on what he saw.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from functools import lru_cache
from inspect import isclass
from types import NoneType, UnionType
from typing import Any, Generic, NamedTuple, TypeVar, Union, get_args, get_origin

import anyio
from pydantic import BaseModel, TypeAdapter, ValidationError

from reflact.calls import Draft, Reply, ReplyModel, Sample, Text
from reflact.errors import ReflactError
from reflact.events import Drafted, DraftReset
from reflact.llm.partial import Partial
from reflact.llm.secrets import Scrubber
from reflact.llm.streamed import EventReader, chunk_of, said_in
from reflact.ports import Emit
from reflact.tasks import beside

R = TypeVar("R", bound=ReplyModel)

LEAST = 48
"""Characters by which a text grows at least between two drafts."""

TEXT_SHARE, CLOSED_SHARE = 8, 64
"""The part of itself by which a reply grows between two drafts: within a text, and where something closed.
So the number of drafts grows with the logarithm of the length, and what all of them cost with the length.
"""


class Dropped(NamedTuple):
    """What an attempt has drafted counts for nothing."""

    attempt: int
    reason: str


class Sketch(Generic[R]):
    """What is seen of a call's reply while it is written, waiting to be told.

    Attributes:
        attempt: The attempt that is being drafted, from 1: another one begins where a reply is sent back, or
            where its answer broke off.
    """

    def __init__(self, reply_type: type[R]) -> None:
        self._reply_type = reply_type
        self._news: deque[Draft[R] | Dropped] = deque()
        self._wake = anyio.Event()
        self._over = False
        self.attempt = 1
        self._begin()

    def _begin(self) -> None:
        self._begun = self._shown = False
        self._partial = Partial(self._fits)
        self._events = EventReader()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._read = self._closed = 0

    def began(self, keys: Sequence[str]) -> None:
        """An answer begins, of which the keys are never seen; one before it in this attempt broke off."""
        if self._begun:
            self.dropped("the answer broke off, and is asked for again")
        self._begun = True
        self._scrubber = Scrubber(keys)

    def heard(self, piece: bytes) -> None:
        """Take in the next piece of the answer's body."""
        if self._over:
            return
        for data in self._events.feed(self._decoder.decode(piece)):
            self._partial.feed(self._scrubber.feed(said_in(chunk_of(data))))
            if self._grown():
                self._read, self._closed = self._partial.read, self._partial.closed
                self._shown = True
                self._tell(Draft(attempt=self.attempt, value=self._partial.value))

    def dropped(self, reason: str) -> None:
        """Nothing came of the attempt."""
        if self._shown:
            self._tell(Dropped(self.attempt, reason))
        self.attempt += 1
        self._begin()

    def finished(self, reply: Reply[R]) -> None:
        """The call has its reply."""
        self._tell(_last(self.attempt, reply))

    def close(self) -> None:
        """Nothing more comes."""
        self._over = True
        self._wake.set()

    async def tell(self, audience: Callable[[Draft[R] | Dropped], Awaitable[None]]) -> None:
        """Tell an audience of everything in order, until nothing more comes."""
        while self._news or not self._over:
            if not self._news:
                self._wake = anyio.Event()
                await self._wake.wait()
            else:
                await audience(self._news.popleft())

    def _tell(self, news: Draft[R] | Dropped) -> None:
        self._news.append(news)
        self._wake.set()

    def _grown(self) -> bool:
        grown = self._partial.read - self._read
        if self._partial.closed > self._closed:
            return grown * CLOSED_SHARE >= self._read
        return self._partial.growing and grown >= max(LEAST, self._read // TEXT_SHARE)

    def _fits(self, path: tuple[str, ...], text: str) -> bool:
        element = element_of(self._reply_type, path)
        if element is None:
            return True
        try:
            element.validate_json(text, strict=True)
        except ValidationError:
            return False
        return True


@lru_cache(maxsize=256)
def element_of(reply_type: type[ReplyModel], path: tuple[str, ...]) -> TypeAdapter[Any] | None:
    """Return the type of the elements of a list within a reply, None where there is no such list."""
    note: Any = reply_type
    for name in path:
        field = note.model_fields.get(name) if isclass(note) and issubclass(note, BaseModel) else None
        if field is None:
            return None
        note = _there(field.annotation)
    return TypeAdapter(get_args(note)[0]) if get_origin(note) in {list, tuple} else None


def _there(note: Any) -> Any:
    """Return the type of what may be absent."""
    if get_origin(note) not in {Union, UnionType}:
        return note
    kinds = [kind for kind in get_args(note) if kind is not NoneType]
    return kinds[0] if len(kinds) == 1 else None


class Audience(Generic[R]):
    """Those who are told what a call drafts: whoever listens to the run's events, and who asked for drafts.

    Args:
        emit: Told of events.
        hand: Told of drafts.
        run_id: The run.
        sample: The call.
    """

    def __init__(
        self,
        emit: Emit | None,
        hand: Callable[[Draft[R]], Awaitable[None]] | None,
        *,
        run_id: str,
        sample: Sample,
    ) -> None:
        self._emit = emit
        self._hand = hand
        self._about: dict[str, Any] = {
            "run_id": run_id,
            "step": 0 if sample.step is None else sample.step,
            "role": sample.role,
            "purpose": sample.purpose,
            "sample": sample.label,
        }
        self._seen = False

    def sketch(self, reply_type: type[R]) -> Sketch[R] | None:
        """Return a sketch to be shown to them; None where there is nobody, or nothing that is drafted."""
        nobody = self._emit is None and self._hand is None
        return None if nobody or issubclass(reply_type, Text) else Sketch(reply_type)

    @property
    def asked(self) -> bool:
        """Whether anybody asked for drafts."""
        return self._hand is not None

    async def __call__(self, news: Draft[R] | Dropped) -> None:
        """Tell them; a reply of which nothing was drafted is no event."""
        if self._emit is not None:
            if isinstance(news, Dropped):
                await self._emit(DraftReset(attempt=news.attempt, reason=news.reason, **self._about))
            elif news.reply is None or self._seen:
                await self._emit(Drafted(attempt=news.attempt, draft=news.value, **self._about))
        self._seen = isinstance(news, Draft)
        if self._hand is not None and isinstance(news, Draft):
            await self._hand(news)


async def shown(
    sketch: Sketch[R] | None, work: Callable[[], Awaitable[Reply[R]]], audience: Audience[R]
) -> Reply[R]:
    """Do a call's work and return its reply, once all that was drafted on the way has been told.

    Without a sketch there is nothing but the reply to tell of.
    """
    if sketch is None:
        reply = await work()
        if audience.asked:
            await audience(_last(reply.attempts, reply))
        return reply

    async def drawn() -> Reply[R] | ReflactError:
        try:
            reply = await work()
        except ReflactError as error:
            sketch.dropped(str(error))
            return error
        else:
            sketch.finished(reply)
            return reply
        finally:
            sketch.close()

    outcome = await beside(drawn, lambda: sketch.tell(audience), wait=True)
    if isinstance(outcome, ReflactError):
        raise outcome
    return outcome


def _last(attempt: int, reply: Reply[R]) -> Draft[R]:
    return Draft(attempt=attempt, value=reply.value.model_dump(mode="json"), reply=reply)
