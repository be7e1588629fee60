"""An agent that speaks the Agent Client Protocol: a conversation of one prompt over its standard input and output.

The messages are those of the package ``agent-client-protocol``. The client offers no files and no terminals: the agent
works in its folder itself, under the limits of its process.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
from pydantic import ValidationError

from reflact.jsonutil import parse_foreign
from reflact.targets.agent_process import AgentPipes, LimitReached
from reflact.types import Turn

if TYPE_CHECKING:
    from acp.schema import PermissionOption, RequestPermissionResponse, ToolCallUpdate


@dataclass
class _Step:
    """A part of the agent's work: words, or the call of a tool."""

    words: str = ""
    tool: str | None = None
    title: str = ""
    arguments: Any = None
    result: str = ""

    def list_turns(self) -> list[Turn]:
        """Return the step as turns."""
        if self.tool is None:
            return [Turn(role="assistant", content=self.words)] if self.words else []
        given = "" if self.arguments is None else json.dumps(self.arguments, ensure_ascii=False)
        call = Turn(role="assistant", content=f"calls {self.title}({given})")
        return [call, Turn(role="tool", content=self.result)] if self.result else [call]


@dataclass
class ACPConversation:
    """One prompt to an agent.

    Attributes:
        prompt: The task.
        folder: The agent's working folder.
        allow_permissions: Whether a request for a permission is allowed; else it is refused.
        problem: Why there is no answer; None if there is one.
    """

    prompt: str
    folder: Path
    allow_permissions: bool
    problem: str | None = None
    _steps: list[_Step] = field(default_factory=list)

    @property
    def turns(self) -> list[Turn]:
        """The agent's messages and its calls of tools, with their results."""
        return [turn for step in self._steps for turn in step.list_turns()]

    @property
    def answer(self) -> str:
        """The agent's message after its last call of a tool."""
        last = 0
        for number, step in enumerate(self._steps, 1):
            last = number if step.tool is not None else last
        return "".join(step.words for step in self._steps[last:])

    async def run(self, pipes: AgentPipes) -> str:
        """Send the prompt and return the answer.

        Raises:
            LimitReached: The agent wrote too much.
        """
        from acp import PROTOCOL_VERSION, RequestError, text_block
        from acp.core import ClientSideConnection

        transport = _MessageTransport(pipes, self._take_update)
        connection = ClientSideConnection(self, transport)  # type: ignore[arg-type]
        try:
            await connection.initialize(protocol_version=PROTOCOL_VERSION)
            session = await connection.new_session(cwd=str(self.folder), mcp_servers=[])
            await connection.prompt(session_id=session.session_id, prompt=[text_block(self.prompt)])
        except RequestError as error:
            self.problem = f"answered with an error: {error}: {json.dumps(error.data)}"
        except ValidationError as error:
            self.problem = f"answered with no {error.title}"
        except ConnectionError:
            if transport.limit is not None:
                raise transport.limit from None
            self.problem = "ended before it answered"
            await pipes.wait()
        finally:
            with anyio.CancelScope(shield=True):
                await connection.close()
        return self.answer

    async def request_permission(
        self, session_id: str, tool_call: ToolCallUpdate, options: list[PermissionOption], **rest: Any
    ) -> RequestPermissionResponse:
        """Allow or refuse what the agent asks for."""
        from acp.schema import AllowedOutcome, DeniedOutcome, RequestPermissionResponse

        kinds = ("allow_once", "allow_always") if self.allow_permissions else ("reject_once", "reject_always")
        found = next((option for kind in kinds for option in options if option.kind == kind), None)
        if not self.allow_permissions:
            step = self._find_tool(tool_call.tool_call_id, tool_call.title)
            step.result = "(the permission was refused)"
        if found is None:
            return RequestPermissionResponse(outcome=DeniedOutcome(outcome="cancelled"))
        return RequestPermissionResponse(
            outcome=AllowedOutcome(outcome="selected", option_id=found.option_id)
        )

    def _take_update(self, params: Any) -> None:
        """Note an update of the agent; an unknown or malformed one is left out."""
        from acp.schema import (
            AgentMessageChunk,
            SessionNotification,
            TextContentBlock,
            ToolCallProgress,
            ToolCallStart,
        )

        try:
            update = SessionNotification.model_validate(params).update
        except ValidationError:
            return
        if isinstance(update, AgentMessageChunk) and isinstance(update.content, TextContentBlock):
            if not self._steps or self._steps[-1].tool is not None:
                self._steps.append(_Step())
            self._steps[-1].words += update.content.text
        elif isinstance(update, ToolCallStart | ToolCallProgress):
            step = self._find_tool(update.tool_call_id, update.title)
            step.arguments = update.raw_input or step.arguments
            parts = [getattr(part, "content", None) for part in update.content or ()]
            texts = [part.text for part in parts if isinstance(part, TextContentBlock)]
            step.result = "\n".join(texts) or step.result

    def _find_tool(self, identity: str, title: str | None) -> _Step:
        step = next((step for step in self._steps if step.tool == identity), None)
        if step is None:
            step = _Step(tool=identity)
            self._steps.append(step)
        step.title = title or step.title
        return step


class _MessageTransport:
    """The messages of an agent, one a line; other lines, such as those of a log, are left out."""

    def __init__(self, pipes: AgentPipes, on_update: Callable[[Any], None]) -> None:
        self._pipes = pipes
        self._on_update = on_update
        self._buffer = b""
        self.limit: LimitReached | None = None

    async def send(self, message: Mapping[str, Any]) -> None:
        """Write a message."""
        await self._pipes.send(json.dumps(message) + "\n")

    async def receive(self) -> Mapping[str, Any] | None:
        """Return the next request or response; None at the end."""
        while True:
            line, found, rest = self._buffer.partition(b"\n")
            if not found:
                try:
                    part = await self._pipes.receive()
                except LimitReached as error:
                    self.limit, part = error, b""
                if not part:
                    return None
                self._buffer += part
                continue
            self._buffer = rest
            message = _read_message(line)
            if message is None:
                continue
            if "method" not in message or "id" in message:
                return message
            if message["method"] == "session/update":
                self._on_update(message.get("params"))

    async def close(self) -> None:
        """Do nothing; the process is ended by its owner."""


def _read_message(line: bytes) -> dict[str, Any] | None:
    """Return a message of JSON-RPC; None for anything else."""
    try:
        message = parse_foreign(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(message, dict) or not isinstance(message.get("method", ""), str):
        return None
    is_message = isinstance(message.get("id"), int | str | None) and isinstance(
        message.get("error"), dict | None
    )
    return message if is_message else None
