"""The values of model calls: prompts, call ids, replies, drafts, reservations and stored responses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Generic, Literal, NamedTuple, Self, TypeVar
from urllib.parse import quote

from pydantic import Field, JsonValue

from reflact.records import Usage
from reflact.types import FrozenModel

SYSTEM_ROLES = frozenset({"system", "developer"})

CHAT_FIELDS = frozenset({"input", "question", "reference", "answers", "answer"})
"""Columns that say what a row's task or answer is, so that its chat is something else."""


class ReplyModel(FrozenModel):
    """Base of all reply types. Raise ``version``, part of a reply's key, if a field or a rule changes its meaning."""

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
    """The messages of a prompt, with the name and version of its file."""

    name: str
    version: int
    messages: tuple[Message, ...]


class CallId(FrozenModel):
    """The logical identity of a call: its position in the run's plan, independent of time.

    A call inside a rollout has the rollout's key and its number instead of a step, so that steps can share
    rollouts.
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
        """The call id as one line of ASCII text."""
        source = f"step={self.step}"
        if self.rollout is not None:
            source = f"rollout={quote(self.rollout, safe='')}/{self.number}"
        part = f"part={quote(self.part, safe='')}/trial={self.trial}/attempt={self.attempt}"
        return f"{self.role}/{self.purpose}/{source}/{part}"


class Reply(FrozenModel, Generic[R_co]):
    """A validated reply, with the number of attempts and their usage."""

    value: R_co
    attempts: int = 1
    usage: Usage = Usage()


class NoReply(FrozenModel):
    """No valid reply to a model call, with the reason."""

    reason: str


class Draft(FrozenModel, Generic[R_co]):
    """The part of a streamed reply that has arrived.

    Args:
        attempt: From 1. Within an attempt drafts only grow. A new attempt starts empty, after an invalid reply
            or a broken stream.
        value: The reply so far, as JSON. Texts may be incomplete; lists end with the last complete element.
            Only the types are validated.
        reply: The validated reply, in the last draft only.
    """

    attempt: int
    value: JsonValue
    reply: Reply[R_co] | None = None


class CallReservation(FrozenModel):
    """A call before its response: its worst-case usage stays reserved until the actual usage is known.

    ``step`` and ``stage`` are what the run worked on when the call was sent; no key depends on them.
    """

    key: str
    run_id: str
    call_id: str
    role: str
    purpose: str
    endpoint: str
    model: str
    worst_case: Usage = Usage(calls=1)
    step: int = 0
    stage: str = ""


class StoredResponse(FrozenModel):
    """A provider's response: status, content type, usage and the body's decoded chunks.

    A streamed body has one chunk for each piece that arrived.
    """

    key: str
    status: int
    content_type: str
    chunks: tuple[str, ...]
    usage: Usage = Usage()


class AgentAnswer(FrozenModel):
    """An answer that reflact's own client did not fetch, such as one of an agent's model.

    Args:
        text: The answer as its caller needs it again.
        usage: The tokens that the provider counted.
        truncated: Whether a cap on tokens cut the answer off.
    """

    text: str
    usage: Usage = Usage(calls=1, uncounted=1)
    truncated: bool = False

    @classmethod
    def from_counts(
        cls, text: str, input_tokens: int, output_tokens: int, cached_tokens: int, *, truncated: bool = False
    ) -> Self:
        """Return an answer with the tokens that a provider counted; zeros mean that it counted none."""
        if not input_tokens and not output_tokens:
            return cls(text=text, truncated=truncated)
        usage = Usage(
            calls=1,
            input_tokens=input_tokens,
            cached_tokens=min(cached_tokens, input_tokens),
            output_tokens=output_tokens,
        )
        return cls(text=text, usage=usage, truncated=truncated)


class CallTime(NamedTuple):
    """When a call ran, in seconds since 1970; ``ended`` is None if it has no stored reply."""

    role: str
    stage: str
    started: float
    ended: float | None


def unfold_chat(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a row that holds only a chat, as in files for fine-tuning, as a row of its task and its right answer.

    The chat is a list ``messages`` of texts with roles. The answer of its end is the ``reference``. The user's message
    is the ``input``; if there are several turns before the end, all of them are. System messages become the column
    ``system``. Any other row is returned as it is.
    """
    messages = row.get("messages")
    if CHAT_FIELDS & row.keys() or not isinstance(messages, list) or not all(map(_is_message, messages)):
        return row
    system = [message["content"] for message in messages if message["role"] in SYSTEM_ROLES]
    turns = [message for message in messages if message["role"] not in SYSTEM_ROLES]
    if len(turns) < 2 or (turns[0]["role"], turns[-1]["role"]) != ("user", "assistant"):
        return row
    *before, last = turns
    texts = [f"{turn['role']}: {turn['content']}" for turn in before]
    found = {"input": before[0]["content"] if len(before) == 1 else "\n\n".join(texts)}
    found["reference"] = last["content"]
    if system:
        found["system"] = "\n\n".join(system)
    return {name: value for name, value in row.items() if name != "messages"} | found


def _is_message(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(name), str) for name in ("role", "content"))
