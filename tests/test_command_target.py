"""Commands as targets: agents in processes of their own, whose model calls go through the run's gateway."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from filled_schema import fill_schema
from reflact import Trainer, compare_skill
from reflact.config.models import ModelConfig
from reflact.data import DataSet
from reflact.environments import DatasetEnvironment
from reflact.errors import ConfigError, EnvironmentFailure, ReplyError
from reflact.messages import CallId
from reflact.records import RunSummary, SkillComparison
from reflact.targets import CommandTarget
from reflact.training.setup import Overrides
from reflact.types import Item, Skill, Split

pytestmark = pytest.mark.anyio

RULE = "Answer in capitals."
AGENT = [sys.executable, "-I", "-S", str(Path(__file__).parent / "command_agent.py"), "{task}"]
WORDS = ("red", "green")
MODEL = {"model": "m", "base_url": "http://127.0.0.1:9/v1", "api_key_env": None, "mode": "json_schema"}
ITEMS = tuple(Item(id=word, input=f"Say {word}", reference=word.upper()) for word in WORDS)


def complete(content: str) -> str:
    """Return a chat completion."""
    message = {"role": "assistant", "content": content}
    usage = {"prompt_tokens": 20, "completion_tokens": 2, "total_tokens": 22}
    return json.dumps(
        {"model": "m", "choices": [{"finish_reason": "stop", "message": message}], "usage": usage}
    )


def answer(body: dict[str, Any]) -> str:
    """Play both models: the target obeys the rule if its instructions hold it, the optimizer proposes it."""
    if "response_format" in body:
        return json.dumps(fill_schema(body["response_format"]["json_schema"]["schema"], RULE))
    system, *_, user = (message["content"] for message in body["messages"])
    word = str(user).rpartition(" ")[2]
    return word.upper() if RULE in system else word


class Endpoint(httpx.AsyncBaseTransport):
    """A provider in this process; notes the bodies of its requests."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Answer a chat completion."""
        body = json.loads(await request.aread())
        self.bodies.append(body)
        return httpx.Response(200, text=complete(answer(body)), headers={"content-type": "application/json"})


class Sender:
    """The run of a session outside a run."""

    identity = "sender"

    def __init__(self) -> None:
        self.calls: list[CallId] = []

    async def forward(self, body: Any, *, call_id: CallId) -> str:
        """Answer a chat completion."""
        self.calls.append(call_id)
        return complete(answer(body))

    async def send(self, body: Any, *, call_id: CallId, answer: Any) -> str:
        """Refuse; a command only forwards."""
        raise AssertionError


def describe_run(folder: Path, **config: Any) -> tuple[dict[str, Any], DatasetEnvironment]:
    """Return the configuration and the environment of a run on two words."""
    splits = {name: (item,) for name, item in zip(("train", "val"), ITEMS, strict=True)}
    settings = {
        "out_dir": str(folder),
        "models": {"target": MODEL},
        "prompts": {"profile": "small"},
        "train": {"num_epochs": 1},
        "gate": {"policy": "strict"},
        "report": False,
        **config,
    }
    environment = DatasetEnvironment(
        DataSet(test=(), **splits), grade=lambda item, answer: answer == item.reference
    )
    return settings, environment


async def train(
    folder: Path, endpoint: httpx.AsyncBaseTransport | None, target: CommandTarget, **config: Any
) -> RunSummary:
    """Return the summary of a run on two words."""
    settings, environment = describe_run(folder, **config)
    return await Trainer(settings, environment=environment, target=target, transport=endpoint).train()


def start(target: CommandTarget, skill: str = RULE) -> Any:
    """Return a session outside a run."""
    return target.connect(Sender(), ModelConfig(model="m")).session(Skill(text=skill), rollout="r")


async def test_a_command_is_trained_and_resumed(tmp_path: Path) -> None:
    """A command that reads its skill from a file is trained; its requests are counted once, also over restarts."""
    endpoint, target = Endpoint(), CommandTarget(AGENT, skill_file="SKILL.md")
    stopped = await train(tmp_path, endpoint, target, budget={"max_calls": 3})
    assert (stopped.status, len(endpoint.bodies)) == ("budget", 3)
    summary = await train(tmp_path, endpoint, target)
    assert (summary.status, summary.best.score) == ("completed", 1.0)
    assert sum(spend.usage.calls for spend in summary.spend) == len(endpoint.bodies)
    asked = len(endpoint.bodies)
    assert (await train(tmp_path, endpoint, target)).best == summary.best
    assert len(endpoint.bodies) == asked


async def test_a_document_for_a_command_is_compared_with_others_which_are_paid_once(tmp_path: Path) -> None:
    """A document is paired with none, a placebo and constants; a training in the same folder pays none of them anew."""
    endpoint, target = Endpoint(), CommandTarget(AGENT, skill_file="SKILL.md")
    settings, environment = describe_run(tmp_path)
    overrides = Overrides(environment=environment, target=target, transport=endpoint)

    async def compare() -> SkillComparison:
        return await compare_skill(
            settings, Skill(text=RULE), ("none", "placebo", "null"), Split.val, overrides=overrides
        )

    compared = await compare()
    assert [score.hard for score in (compared.skill, *compared.others)] == [1, 0, 0, 0, 0]
    assert [gain.mean for gain in compared.improvements] == [1, 1, 1, 1]
    assert len(endpoint.bodies) == 3
    assert await compare() == compared
    await train(tmp_path, endpoint, target)
    asked = [json.dumps(body["messages"]) for body in endpoint.bodies if "response_format" not in body]
    assert len(asked) == len(set(asked)) > 3


@pytest.mark.slow
async def test_a_command_is_recorded_and_replayed(tmp_path: Path) -> None:
    """A recording replays without the provider, although the agent's requests hold the time."""
    cassette, target = str(tmp_path / "cassette.jsonl"), CommandTarget(AGENT, skill_file="SKILL.md")
    recorded = await train(
        tmp_path / "a", Endpoint(), target, replay={"cassette": cassette, "mode": "record"}
    )
    replayed = await train(tmp_path / "b", None, target, replay={"cassette": cassette})
    assert (replayed.best, replayed.status) == (recorded.best, "completed")


async def test_a_skill_replaces_the_seed() -> None:
    """The skill takes the place of the agent's instructions; if they are not there once, the rollout is unmeasured."""
    replaced = start(CommandTarget(AGENT, seed="Be helpful."))
    assert await replaced.reply("Say red") == "RED"
    assert [turn.content for turn in replaced.turns] == ["Say red"]
    with pytest.raises(EnvironmentFailure, match="has the seed 0 times instead of once"):
        await start(CommandTarget(AGENT, seed="Be rude.")).reply("Say red")


async def test_answers_come_from_a_file_and_streams_are_answered() -> None:
    """The answer may be a file of the agent, and the agent may ask for a stream."""
    target = CommandTarget([*AGENT, "stream"], skill_file="SKILL.md", answer_file="answer.txt")
    assert await start(target).reply("Say red") == "RED"
    with pytest.raises(ReplyError, match=r"wrote no file other\.txt"):
        await start(CommandTarget(AGENT, skill_file="SKILL.md", answer_file="other.txt")).reply("Say red")


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("hang", "the command was ended after 0.2 seconds"),
        ("flood", "the command was ended after 100,000 bytes of output"),
        ("fail", "the command ended with 1: no such tool"),
    ],
)
async def test_a_command_that_misbehaves_scores_nothing(how: str, words: str) -> None:
    """A command that hangs, floods or fails is ended and counts as a failure of the agent."""
    target = CommandTarget(
        [*AGENT, how], skill_file="SKILL.md", seconds=0.2 if how == "hang" else 60, output_bytes=100_000
    )
    with pytest.raises(ReplyError, match=words):
        await start(target).reply("Say red")


async def test_children_end_with_the_command() -> None:
    """A child that keeps the output open does not keep the rollout."""
    with anyio.fail_after(60):
        assert await start(CommandTarget([*AGENT, "fork"], skill_file="SKILL.md")).reply("Say red") == "RED"


async def test_a_command_sees_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process has a folder, a HOME and a token of its own, and none of the caller's variables."""
    monkeypatch.setenv("OPENAI_API_KEY", "sk-canary-1234567890")
    monkeypatch.setenv("AWS_SECRET", "canary")
    shown = await start(CommandTarget([*AGENT, "environment"], skill_file="SKILL.md")).reply("Say red")
    seen = json.loads(shown)
    assert "canary" not in shown
    assert seen["OPENAI_BASE_URL"].startswith("http://127.0.0.1:")
    assert seen["HOME"].endswith("/home")


def test_a_command_needs_a_place_for_its_skill() -> None:
    """Without a file or a seed, with both, or with a path out of the folder, the target is refused."""
    wrong: list[dict[str, Any]] = [
        {},
        {"skill_file": "a", "seed": "b"},
        {"skill_file": "../a"},
        {"skill_file": "/a"},
        {"seed": " \n"},
        {"skill_file": "a", "workspace": "no-such-folder"},
        {"skill_file": "a", "command": "my-agent {task}"},
        {"profile": "no-such-agent"},
        {"skill_file": "a", "skill_name": "counting"},
        {"skill_file": "a", "skill_name": "No Name", "skill_description": "Counts."},
        {"seed": "a", "skill_name": "counting", "skill_description": "Counts."},
    ]
    for arguments in wrong:
        with pytest.raises(ConfigError):
            CommandTarget(**{"command": AGENT, **arguments})


async def test_a_setup_that_cannot_work_is_no_failure_of_the_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A missing program, a file outside the rollout's folder, no request or a refused one leaves no score."""
    (tmp_path / "agent.sh").write_text("echo red", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    setups: list[tuple[dict[str, Any], str]] = [
        ({"command": ["no-such-agent"], "skill_file": "a"}, "no-such-agent cannot be started: No such file"),
        ({"command": ["sh", "agent.sh"], "skill_file": "a"}, r"agent\.sh is not in the folder of its own"),
        ({"command": ["true"], "seed": "Be helpful."}, "the command asked the gateway nothing"),
        (
            {"command": [*AGENT, "at", "/embeddings"], "skill_file": "a"},
            "the gateway refused a request of the agent: the gateway has no /v1/embeddings",
        ),
        (
            {"command": [*AGENT, "at", "/responses"], "skill_file": "a"},
            "the gateway refused a request of the agent: input is neither a text nor a list",
        ),
    ]
    for arguments, words in setups:
        with pytest.raises(EnvironmentFailure, match=words):
            await start(CommandTarget(**arguments)).reply("Say red")
    here = CommandTarget(["sh", "agent.sh"], skill_file="a", workspace=".")
    assert await start(here).reply("Say red") == "red"


async def test_links_do_not_lead_out_of_the_folder(tmp_path: Path) -> None:
    """Neither the skill nor the answer follows a link in the workspace out of the rollout's folder."""
    outside, workspace = tmp_path / "outside", tmp_path / "workspace"
    outside.mkdir()
    workspace.mkdir()
    (outside / "answer.txt").write_text("secret", encoding="utf-8")
    (workspace / "notes").symlink_to(outside)
    target = CommandTarget(AGENT, skill_file="notes/SKILL.md", workspace=str(workspace))
    with pytest.raises(EnvironmentFailure, match=r"leads skill_file notes/SKILL\.md out of"):
        await start(target).reply("Say red")
    assert [path.name for path in outside.iterdir()] == ["answer.txt"]
    target = CommandTarget(["true"], skill_file="a", workspace=str(workspace), answer_file="notes/answer.txt")
    with pytest.raises(ReplyError, match=r"wrote no file notes/answer\.txt"):
        await start(target).reply("Say red")


async def test_a_request_asks_for_one_answer_under_the_cap_of_the_run(tmp_path: Path) -> None:
    """``n`` of the agent's request is dropped, and the run's cap replaces one under another name."""
    endpoint = Endpoint()
    fields = json.dumps({"n": 3, "max_completion_tokens": 9000})
    target = CommandTarget([*AGENT, "with", fields], skill_file="SKILL.md")
    await train(tmp_path, endpoint, target, models={"target": {**MODEL, "max_tokens": 50}})
    asked = [body for body in endpoint.bodies if "response_format" not in body]
    assert {(b.get("n"), b.get("max_tokens"), b.get("max_completion_tokens")) for b in asked} == {
        (None, 50, None)
    }


def test_a_profile_knows_where_an_agent_reads_its_instructions() -> None:
    """A profile brings what the agent needs; what is given replaces or extends it."""
    plain = CommandTarget(profile="codex", arguments=["--config=a=1"], variables={"NO_COLOR": "1"})
    assert (plain.command[:2], plain.command[-1]) == (("codex", "exec"), "--config=a=1")
    assert (plain.skill_file, plain.answer_file) == ("AGENTS.md", "LAST.txt")
    assert plain.variables == {"OPENAI_API_KEY": "{token}", "NO_COLOR": "1"}
    named = CommandTarget(profile="claude-code", skill_name="counting", skill_description="Counts: fruit.")
    assert named.skill_file == ".claude/skills/counting/SKILL.md"
    text = named.write_skill(Skill(text=RULE))
    assert text == f'---\nname: "counting"\ndescription: "Counts: fruit."\n---\n\n{RULE}'
    assert CommandTarget(profile="opencode", seed="Be brief.").skill_file is None


async def test_a_side_call_needs_no_seed_and_is_no_turn() -> None:
    """A request that is no part of the task, such as for a title, is answered and booked under its own purpose."""
    sender = Sender()
    target = CommandTarget([*AGENT, "title"], seed="Be helpful.", side_call="You write titles.")
    session = target.connect(sender, ModelConfig(model="m")).session(Skill(text=RULE), rollout="r")
    assert await session.reply("Say red") == "RED"
    assert [turn.content for turn in session.turns] == ["Say red"]
    assert [call_id.purpose for call_id in sender.calls] == ["side_call", "rollout"]


def test_a_workspace_is_read_once_in_a_run(tmp_path: Path) -> None:
    """The identity of a connected target is that of its start; the next run sees the changed file."""
    notes = tmp_path / "notes.md"
    notes.write_text("a", encoding="utf-8")
    target = CommandTarget(AGENT, skill_file="a", workspace=str(tmp_path))
    connected = target.connect(Sender(), ModelConfig(model="m"))
    before = connected.identity
    notes.write_text("b", encoding="utf-8")
    assert connected.identity == before
    assert target.connect(Sender(), ModelConfig(model="m")).identity != before


def test_what_a_command_is_decides_its_identity(tmp_path: Path) -> None:
    """Another command, workspace or limit makes another target."""
    (tmp_path / "notes.md").write_text("a", encoding="utf-8")
    first = CommandTarget(AGENT, skill_file="a", workspace=str(tmp_path)).identity
    (tmp_path / "notes.md").write_text("b", encoding="utf-8")
    second = CommandTarget(AGENT, skill_file="a", workspace=str(tmp_path)).identity
    assert len({first, second, CommandTarget(AGENT, skill_file="a", seconds=1).identity}) == 3
