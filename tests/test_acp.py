"""Commands that speak the Agent Client Protocol, played by an agent that is made with the protocol's own package."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from reflact.config.models import ModelConfig
from reflact.errors import ReplyError
from reflact.targets import CommandTarget
from reflact.types import Skill
from test_command_target import RULE, Endpoint, Sender, train

pytest.importorskip("acp", reason="needs the extra acp")


def build_target(behaviour: str = "", **options: Any) -> CommandTarget:
    """Return the agent as a target."""
    command = [sys.executable, str(Path(__file__).parent / "acp_agent.py"), behaviour]
    return CommandTarget(command, skill_file="SKILL.md", protocol="acp", **options)


def start(behaviour: str = "", **options: Any) -> Any:
    """Return a session outside a run."""
    connected = build_target(behaviour, **options).connect(Sender(), ModelConfig(model="m"))
    return connected.session(Skill(text=RULE), rollout="r")


@pytest.mark.slow
async def test_an_agent_is_trained_recorded_and_replayed(tmp_path: Path) -> None:
    """An agent that speaks the protocol is trained, and its recording replays without the provider."""
    cassette = str(tmp_path / "cassette.jsonl")
    recorded = await train(
        tmp_path / "a", Endpoint(), build_target(), replay={"cassette": cassette, "mode": "record"}
    )
    assert (recorded.status, recorded.best.score) == ("completed", 1.0)
    replayed = await train(tmp_path / "b", None, build_target(), replay={"cassette": cassette})
    assert (replayed.scores, replayed.best) == (recorded.scores, recorded.best)


async def test_messages_and_calls_of_tools_are_turns() -> None:
    """Turns are the agent's messages and calls of tools with their results; the last message is the answer."""
    session = start()
    assert await session.reply("Say red") == "RED"
    assert [(turn.role, turn.content) for turn in session.turns] == [
        ("user", "Say red"),
        ("assistant", "Let me look."),
        ("assistant", 'calls look at /reflact-rollout/work({"file": "SKILL.md"})'),
        ("tool", f"{len(RULE)} characters"),
        ("assistant", "RED"),
    ]


async def test_permissions_are_refused_unless_they_are_allowed() -> None:
    """An agent that asks for a permission does not get it by default, and the turns say so."""
    refused, allowed = start("permission"), start("permission", allow_permissions=True)
    assert (await refused.reply("Say red"), await allowed.reply("Say red")) == ("RED", "RED")
    turns = [turn.content for turn in refused.turns]
    assert turns[1:4] == [
        "calls delete all()",
        "(the permission was refused)",
        "permission: no. Let me look.",
    ]
    assert allowed.turns[1].content == "permission: yes. Let me look."


async def test_the_client_offers_no_files() -> None:
    """A request for a file by the protocol is answered with an error."""
    session = start("read")
    assert await session.reply("Say red") == "RED"
    assert session.turns[1].content == "no file: Method not found. Let me look."


async def test_lines_that_are_no_messages_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    """Other lines on the output, and updates of an unknown kind, do not disturb the conversation."""
    assert await start("noise").reply("Say red") == "RED"
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


async def test_half_a_surrogate_pair_of_an_agent_is_replaced(tmp_path: Path) -> None:
    """Half of a surrogate pair in a call or an error of an agent does not end the run: U+FFFD takes its place."""
    session = start("half")
    assert await session.reply("Say red") == "RED"
    assert session.turns[1].content == 'calls cut({"a": "\ufffd"})'
    target = build_target("half error", preflight=False)
    summary = await train(tmp_path, Endpoint(), target)
    assert (summary.status, summary.best.score) == ("completed", 0)


@pytest.mark.parametrize(
    ("behaviour", "limits", "words"),
    [
        ("error", {}, "the agent answered with an error: Internal error: .*no tools"),
        ("end", {}, "the command ended with 3: out of order"),
        ("hang", {"seconds": 3}, "the command was ended after 3 seconds"),
        ("flood", {"output_bytes": 200_000}, "the command was ended after 200,000 bytes of output"),
    ],
)
async def test_an_agent_that_misbehaves_scores_nothing(
    behaviour: str, limits: dict[str, Any], words: str
) -> None:
    """An agent that answers with an error, ends, hangs or floods fails, with the reason."""
    with pytest.raises(ReplyError, match=words):
        await start(behaviour, limits=limits).reply("Say red")


async def test_a_command_that_does_not_speak_the_protocol_fails() -> None:
    """A command that ends without an answer is a failure of the agent."""
    target = CommandTarget(["true"], skill_file="SKILL.md", protocol="acp")
    session = target.connect(Sender(), ModelConfig(model="m")).session(Skill(text=RULE), rollout="r")
    with pytest.raises(ReplyError, match="the agent ended before it answered"):
        await session.reply("Say red")
