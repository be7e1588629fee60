"""The target that is a chat model with the skill as its system message."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

from reflact.messages import CallId, Message, RenderedPrompt, Text
from reflact.protocols import LLM
from reflact.types import Skill, Turn, canonical_json

# Version of the request format, part of every rollout's key; raise it if the format changes.
CHAT_TARGET_VERSION = 1


@dataclass(eq=False)
class ChatTarget:
    """A chat model; its system message is the skill between a preamble and a postamble.

    Args:
        llm: The model.
        preamble: Text before the skill.
        postamble: Text after the skill.
    """

    llm: LLM
    _: KW_ONLY
    preamble: str = ""
    postamble: str = ""

    @property
    def identity(self) -> str:
        """The model's identity and the texts around the skill, as canonical JSON."""
        llm = self.llm.identity
        return identify_chat_target(llm, preamble=self.preamble, postamble=self.postamble)

    def session(self, skill: Skill, *, rollout: str) -> ChatSession:
        """Start a conversation under a skill; ``rollout`` is the rollout's key."""
        system = join_system_message(self.preamble, skill.text, self.postamble)
        return ChatSession(self.llm, system, rollout)


class ChatSession:
    """A conversation; each request sends all of it again."""

    def __init__(self, llm: LLM, system: str, rollout: str) -> None:
        self._llm = llm
        self._system = (Message(role="system", content=system),) if system else ()
        self._rollout = rollout
        self._messages: tuple[Message, ...] = ()

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The messages and answers so far, without the skill."""
        return tuple(Turn(role=message.role, content=message.content) for message in self._messages)

    async def reply(self, message: str) -> str:
        """Send a message after all earlier ones and return the answer."""
        messages = (*self._messages, Message(role="user", content=message))
        sent = (*self._system, *messages)
        number = len(self._messages) // 2
        reply = await self._llm.ask(
            RenderedPrompt(name="target", version=CHAT_TARGET_VERSION, messages=sent),
            Text,
            call_id=CallId(role="target", purpose="rollout", rollout=self._rollout, number=number),
        )
        self._messages = (*messages, Message(role="assistant", content=reply.value.text))
        return reply.value.text


def identify_chat_target(llm: str, *, preamble: str, postamble: str) -> str:
    """Return the identity of a chat target from its model's identity, as canonical JSON."""
    return canonical_json(
        {
            "target": "chat",
            "version": CHAT_TARGET_VERSION,
            "llm": llm,
            "preamble": preamble,
            "postamble": postamble,
        }
    )


def join_system_message(*parts: str) -> str:
    """Return the parts joined by blank lines, without blank parts."""
    return "\n\n".join(part.strip("\n") for part in parts if part.strip())
