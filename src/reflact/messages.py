"""The values of model calls: prompts, call ids, replies, reservations and stored
responses.
"""

from __future__ import annotations

from typing import ClassVar, Generic, Literal, Self, TypeVar
from urllib.parse import quote

from pydantic import Field

from reflact.records import Usage
from reflact.types import FrozenModel


class ReplyModel(FrozenModel):
    """Base of all reply types; raise ``version``, part of a reply's key, if a meaning changes."""

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


SOURCE_WORDS = {"failure": "failures", "success": "successes"}


class CallId(FrozenModel):
    """The logical identity of a call: its position in the run's plan, independent of time.

    A call inside a rollout has the rollout's key and its number instead of a step, so that steps
    can share rollouts.
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

    @property
    def title(self) -> str:
        """The call in words, such as ``merge of successes, level 1, group 2 in step 3``."""
        words = describe_call(self.purpose, self.part)
        return words if self.step is None else f"{words} in step {self.step}"


def describe_call(purpose: str, part: str) -> str:
    """Return the purpose and the part of a call of the optimizer in words, with numbers from 1.

    ========================= ======================== =====================================
    purpose                   part                     words
    ========================= ======================== =====================================
    ``analyst_failure``       ``failure/1``            analyst of minibatch 2 of the failures
    ``lapse_success``         ``success/2/0``          triage of minibatch 1 ... in batch 3
    ``merge``                 ``success/1/0``          merge of successes, level 1, group 1
    ``write_document``        ``3``                    rewrite 4
    any other, ``slow_update``                         slow update
    ========================= ======================== =====================================
    """
    kind, *sources = purpose.split("_")
    numbers = [int(number) for number in part.split("/") if number.isdecimal()]
    if kind in {"analyst", "lapse"} and sources and numbers:
        *batch, index = numbers
        minibatch = name_minibatch(sources[0], index, *batch)
        return f"{'triage' if kind == 'lapse' else kind} of {minibatch}"
    if "merge" in purpose and len(numbers) == 2:
        level, group = numbers
        return f"merge of {SOURCE_WORDS[part.partition('/')[0]]}, level {level}, group {group + 1}"
    if purpose == "write_document" and numbers:
        return f"rewrite {numbers[0] + 1}"
    return purpose.replace("_", " ")


def name_minibatch(source: str, index: int, batch: int = 0) -> str:
    """Return a minibatch of a step's cases in words: ``minibatch 2 of the failures in batch 3``."""
    words = f"minibatch {index + 1} of the {SOURCE_WORDS[source]}"
    return f"{words} in batch {batch + 1}" if batch else words


class Reply(FrozenModel, Generic[R_co]):
    """A validated reply, with the number of attempts and their usage."""

    value: R_co
    attempts: int = 1
    usage: Usage = Usage()


# In the message of a ``ReplyError``; other messages of missing replies name their own remedy.
NO_VALID_REPLY = "gave no valid reply in"
# Begins the reason of a run without a single report, which cannot be resumed.
NO_REPORTS = "no analyst gave a valid reply"
# In the reason of a reply that reached ``max_tokens``.
CUT_OFF = "cut off at the token limit"
# The broken streams after which a role asks for no more streams.
MAX_BROKEN_STREAMS = 2


class NoReply(FrozenModel):
    """No valid reply to a model call, with the reason."""

    reason: str


class CallReservation(FrozenModel):
    """A call before its response; its worst-case usage is reserved until the actual one is known.

    No key depends on ``step`` and ``stage``, which the run worked on when the call was sent.
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
    """An answer under the key of its request: a chat completion in JSON, and its usage."""

    key: str
    text: str
    usage: Usage = Usage()


class AgentAnswer(FrozenModel):
    """An answer that reflact's client did not fetch, such as one of an agent's model.

    ``text`` is the answer as its caller needs it again; a cap on tokens cut a ``truncated`` one.
    """

    text: str
    usage: Usage = Usage(calls=1, uncounted=1)
    truncated: bool = False

    @classmethod
    def from_counts(
        cls,
        text: str,
        input_tokens: int,
        output_tokens: int,
        cached_tokens: int,
        *,
        truncated: bool = False,
    ) -> Self:
        """Return an answer with a provider's counts of tokens; zeros mean that it has none."""
        if not input_tokens and not output_tokens:
            return cls(text=text, truncated=truncated)
        usage = Usage(
            calls=1,
            input_tokens=input_tokens,
            cached_tokens=min(cached_tokens, input_tokens),
            output_tokens=output_tokens,
        )
        return cls(text=text, usage=usage, truncated=truncated)
