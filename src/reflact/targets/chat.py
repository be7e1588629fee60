"""The target that is a chat model with the skill as its system message."""

from __future__ import annotations

from reflact.messages import CallId, Message, RenderedPrompt, Text
from reflact.protocols import LLM
from reflact.types import Skill, Turn, canonical_json

CHAT_TARGET_VERSION = 1
"""How a conversation becomes a request. Part of every rollout's key: raised when that changes."""


class ChatTarget:
    """A chat model; its system message is the skill between a preamble and a postamble.

    Args:
        llm: The door to the model.
        preamble: Text before the skill.
        postamble: Text after the skill.
    """

    def __init__(self, llm: LLM, *, preamble: str = "", postamble: str = "") -> None:
        self._llm = llm
        self._preamble = preamble
        self._postamble = postamble

    @property
    def identity(self) -> str:
        """The model's identity, the texts around the skill and ``VERSION``, as canonical JSON."""
        return canonical_json(
            {
                "target": "chat",
                "version": CHAT_TARGET_VERSION,
                "llm": self._llm.identity,
                "preamble": self._preamble,
                "postamble": self._postamble,
            }
        )

    def session(self, skill: Skill, *, rollout: str) -> ChatSession:
        """Start a conversation under a skill; ``rollout`` is the rollout's key."""
        return ChatSession(
            self._llm, join_system_message(self._preamble, skill.text, self._postamble), rollout
        )


class ChatSession:
    """A conversation; each reply sends all of it again."""

    def __init__(self, llm: LLM, system: str, rollout: str) -> None:
        self._llm = llm
        self._system = (Message(role="system", content=system),) if system else ()
        self._rollout = rollout
        self._text: tuple[Message, ...] = ()

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The messages and answers so far, without the skill."""
        return tuple(Turn(role=message.role, content=message.content) for message in self._text)

    async def reply(self, message: str) -> str:
        """Send a message after all earlier ones and return the answer.

        A message that was not answered leaves no trace in the conversation.

        Raises:
            ModelError: There is no answer.
        """
        asked = (*self._text, Message(role="user", content=message))
        answered = len(self._text) // 2
        reply = await self._llm.ask(
            RenderedPrompt(name="target", version=CHAT_TARGET_VERSION, messages=(*self._system, *asked)),
            Text,
            call_id=CallId(role="target", purpose="rollout", rollout=self._rollout, number=answered),
        )
        self._text = (*asked, Message(role="assistant", content=reply.value.text))
        return reply.value.text


def join_system_message(*parts: str) -> str:
    """Return the parts joined by blank lines; parts of white space alone are left out."""
    return "\n\n".join(part.strip("\n") for part in parts if part.strip())
