"""An agent that speaks the Agent Client Protocol, made with its package; asks its model once for each prompt.

acp_agent.py [BEHAVIOUR]
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

from acp import (
    PROTOCOL_VERSION,
    InitializeResponse,
    NewSessionResponse,
    PromptResponse,
    RequestError,
    run_agent,
    start_tool_call,
    text_block,
    tool_content,
    update_agent_message_text,
    update_tool_call,
)
from acp.schema import PermissionOption, ToolCallUpdate

from command_agent import ask

OPTIONS = [
    PermissionOption(option_id="yes", name="Allow", kind="allow_once"),
    PermissionOption(option_id="no", name="Reject", kind="reject_once"),
]


class WordAgent:
    """Looks into its notes and asks its model."""

    def __init__(self, behaviour: str) -> None:
        self._behaviour = behaviour
        self._client: Any = None
        self._folder = Path()

    def on_connect(self, client: Any) -> None:
        """Keep the client."""
        self._client = client

    async def initialize(self, protocol_version: int, **rest: Any) -> InitializeResponse:
        """Agree on a version."""
        return InitializeResponse(protocol_version=PROTOCOL_VERSION)

    async def new_session(self, cwd: str, **rest: Any) -> NewSessionResponse:
        """Start the only session."""
        self._folder = Path(cwd)
        return NewSessionResponse(session_id="s")

    async def prompt(self, prompt: list[Any], session_id: str, **rest: Any) -> PromptResponse:
        """Answer a task, or misbehave."""
        await self._misbehave()
        await self._say("Let me ")
        await self._say("look.")
        skill = (self._folder / "SKILL.md").read_text(encoding="utf-8")
        call = start_tool_call("t", f"look at {self._folder}", raw_input={"file": "SKILL.md"})
        await self._client.session_update(session_id="s", update=call)
        found = [tool_content(text_block(f"{len(skill)} characters"))]
        await self._client.session_update(session_id="s", update=update_tool_call("t", content=found))
        messages = [{"role": "system", "content": skill}, {"role": "user", "content": prompt[0].text}]
        await self._say(await asyncio.to_thread(ask, messages))
        return PromptResponse(stop_reason="end_turn")

    async def _say(self, text: str) -> None:
        await self._client.session_update(session_id="s", update=update_agent_message_text(text))

    async def _misbehave(self) -> None:
        if self._behaviour == "permission":
            call = ToolCallUpdate(tool_call_id="p", title="delete all")
            reply = await self._client.request_permission(session_id="s", tool_call=call, options=OPTIONS)
            await self._say(f"permission: {reply.outcome.option_id}. ")
        if self._behaviour == "read":
            try:
                await self._client.read_text_file(session_id="s", path="/etc/hostname")
            except RequestError as error:
                await self._say(f"no file: {error}. ")
        if self._behaviour == "noise":
            for line in (
                "not json",
                "[1]",
                '{"method": 1}',
                '{"method": "session/update", "params": {}}',
                '{"id": []}',
            ):
                os.write(1, line.encode() + b"\n")
        if self._behaviour == "half":
            params = {
                "sessionId": "s",
                "update": {"sessionUpdate": "tool_call", "toolCallId": "h", "title": "cut"},
            }
            params["update"]["rawInput"] = {"a": "\ud83d"}
            line = {"jsonrpc": "2.0", "method": "session/update", "params": params}
            os.write(1, json.dumps(line).encode() + b"\n")
        if self._behaviour == "half error":
            raise RequestError.internal_error({"details": "half \ud83d"})
        if self._behaviour == "error":
            raise RequestError.internal_error({"details": "no tools"})
        if self._behaviour == "end":
            os.write(2, b"out of order")
            os._exit(3)
        if self._behaviour == "hang":
            await asyncio.sleep(600)
        if self._behaviour == "flood":
            while True:
                await self._say("x" * 65536)


if __name__ == "__main__":
    asyncio.run(run_agent(WordAgent(sys.argv[1] if len(sys.argv) > 1 else "")))  # type: ignore[arg-type]
