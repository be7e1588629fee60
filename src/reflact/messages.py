"""The values of model calls: what is asked, under which identity, what comes back and what it cost."""

from __future__ import annotations

from typing import ClassVar, Generic, Literal, TypeVar
from urllib.parse import quote

from pydantic import Field, JsonValue

from reflact.records import Usage
from reflact.types import FrozenModel


class ReplyModel(FrozenModel):
    """Base of all types that a model is asked to fill in.

    ``version`` is part of the key under which replies are stored: raise it whenever a field, a
    description or a validation rule of the subclass changes its meaning.
    """

    version: ClassVar[int] = 1


class Text(ReplyModel):
    """A reply in plain text, as a target gives it; sent without any output format."""

    text: str


R_co = TypeVar("R_co", bound=ReplyModel, covariant=True)


class Message(FrozenModel):
    """One chat message of a request."""

    role: Literal["system", "user", "assistant"]
    content: str


class RenderedPrompt(FrozenModel):
    """A prompt ready to be sent, and the file version that it came from."""

    name: str
    version: int
    messages: tuple[Message, ...]


class CallId(FrozenModel):
    """The logical identity of a call: which place of the plan it fills, never when it was sent.

    Calls inside a rollout carry its key and their number in it instead of a step, so that rollouts
    can be reused across steps.
    """

    role: str = Field(pattern=r"^[a-z_]+$")
    purpose: str = Field(pattern=r"^[a-z_]+$")
    step: int | None = None
    part: str = ""
    trial: int = 0
    attempt: int = 0
    rollout: str | None = None
    number: int = 0

    @property
    def label(self) -> str:
        """The sample as one line of ASCII text: its step, or its rollout and number, then the rest."""
        place = f"step={self.step}"
        if self.rollout is not None:
            place = f"rollout={quote(self.rollout, safe='')}/{self.number}"
        words = [self.role, self.purpose, place, f"part={quote(self.part, safe='')}"]
        return "/".join([*words, f"trial={self.trial}", f"attempt={self.attempt}"])


class Reply(FrozenModel, Generic[R_co]):
    """A validated reply, how many attempts it took and what they consumed."""

    value: R_co
    attempts: int = 1
    usage: Usage = Usage()


class Draft(FrozenModel, Generic[R_co]):
    """What is seen of a reply that is being written.

    Args:
        attempt: From 1. Within an attempt drafts only grow; another one begins with nothing, because the
            reply was sent back or its answer broke off.
        value: The reply so far, as JSON: texts as far as they are written, lists up to the last element that
            has closed, each of the type asked for. Not validated otherwise.
        reply: The validated reply, in the last draft alone, whose value it is.
    """

    attempt: int
    value: JsonValue
    reply: Reply[R_co] | None = None


class CallReservation(FrozenModel):
    """A call about to be sent: booked at its worst case until its answer says what it consumed."""

    key: str
    run_id: str
    call_id: str
    role: str
    purpose: str
    endpoint: str
    model: str
    worst_case: Usage = Usage(calls=1)


class StoredResponse(FrozenModel):
    """A provider's answer as it came: status, content type and the body's decoded chunks.

    A body that was streamed keeps its chunks, one for each piece that arrived.
    """

    key: str
    status: int
    content_type: str
    chunks: tuple[str, ...]
    usage: Usage = Usage()
