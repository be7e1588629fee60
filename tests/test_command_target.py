"""Commands as targets: agents in processes of their own, whose model calls go through the run's gateway."""

from __future__ import annotations

import fcntl
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

import doubles
from doubles import completion
from filled_schema import fill_schema
from reflact import Trainer
from reflact.agents.agent_process import FOLDER_PREFIX, remove_stale_folders
from reflact.config.models import ModelConfig
from reflact.config.training import TrainerConfig
from reflact.data import DataSet
from reflact.environments import DatasetEnvironment
from reflact.errors import ConfigError, EnvironmentFailure, ReplyError
from reflact.messages import CallId
from reflact.processes.sandbox import SCOPES_VERSION, can_confine, read_landlock_version
from reflact.records import RunSummary
from reflact.targets import AgentRollout, CommandTarget, FunctionTarget
from reflact.testing import ScriptedLLM
from reflact.training.check import SetupCheck, check_setup
from reflact.training.plan import Overrides
from reflact.types import Grade, Item, Skill

RULE = "Answer in capitals."
AGENT = [sys.executable, "-I", "-S", str(Path(__file__).parent / "command_agent.py"), "{task}"]
WORDS = ("red", "green")
MODEL = {"model": "m", "base_url": "http://127.0.0.1:9/v1", "api_key_env": None, "mode": "json_schema"}
ITEMS = tuple(Item(id=word, input=f"Say {word}", reference=word.upper()) for word in WORDS)


def answer(body: dict[str, Any]) -> httpx.Response:
    """Play both models: the target obeys the rule if its instructions hold it, the optimizer proposes it."""
    if "response_format" in body:
        schema = body["response_format"]["json_schema"]["schema"]
        return completion(json.dumps(fill_schema(schema, RULE)))
    system, *_, user = (message["content"] for message in body["messages"])
    word = str(user).rpartition(" ")[2]
    return completion(word.upper() if RULE in system else word)


Endpoint = partial(doubles.Endpoint, answer)


class Sender:
    """The run of a session outside a run."""

    identity = "sender"

    def __init__(self) -> None:
        self.calls: list[CallId] = []

    async def forward(self, body: Any, *, call_id: CallId) -> str:
        self.calls.append(call_id)
        return answer(body).text

    async def send(self, body: Any, *, call_id: CallId, answer: Any) -> str:
        raise AssertionError


def describe_run(folder: Path, **config: Any) -> tuple[dict[str, Any], DatasetEnvironment]:
    """Return the configuration and the environment of a run on two words."""
    splits = {name: (item,) for name, item in zip(("train", "val"), ITEMS, strict=True)}
    settings = {
        "out_dir": str(folder),
        "models": {"target": MODEL},
        "search": {"sources": ["edits"]},
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
    settings, environment = describe_run(folder, **config)
    return await Trainer(settings, environment=environment, target=target, transport=endpoint).train()


def start(target: CommandTarget, skill: str = RULE) -> Any:
    return target.connect(Sender(), ModelConfig(model="m")).session(Skill(text=skill), rollout="r")


async def assert_trained_and_resumed(folder: Path, target: Any) -> None:
    """Check that an agent is trained, and that its requests are counted once, also over restarts."""
    endpoint = Endpoint()
    stopped = await train(folder, endpoint, target, budget={"max_calls": 3})
    assert (stopped.status, len(endpoint.bodies)) == ("budget", 3)
    summary = await train(folder, endpoint, target)
    assert (summary.status, summary.best.score) == ("completed", 1.0)
    assert sum(spend.usage.calls for spend in summary.spend) == len(endpoint.bodies)
    asked = len(endpoint.bodies)
    assert (await train(folder, endpoint, target)).best == summary.best
    assert len(endpoint.bodies) == asked


async def test_a_command_is_trained_and_resumed(tmp_path: Path) -> None:
    await assert_trained_and_resumed(tmp_path, CommandTarget(AGENT, skill_file="SKILL.md"))


@pytest.mark.slow
async def test_a_command_is_recorded_and_replayed(tmp_path: Path) -> None:
    cassette, target = str(tmp_path / "cassette.jsonl"), CommandTarget(AGENT, skill_file="SKILL.md")
    recorded = await train(
        tmp_path / "a", Endpoint(), target, replay={"cassette": cassette, "mode": "record"}
    )
    replayed = await train(tmp_path / "b", None, target, replay={"cassette": cassette})
    assert (replayed.best, replayed.status) == (recorded.best, "completed")


async def test_a_skill_replaces_the_seed() -> None:
    """It takes the place of the agent's instructions, which a request must have once."""
    replaced = start(CommandTarget(AGENT, seed="Be helpful."), skill=f'{RULE}\n"Now."')
    assert await replaced.reply("Say red") == "RED"
    assert [turn.content for turn in replaced.turns] == ["Say red"]
    with pytest.raises(EnvironmentFailure, match="has the seed 0 times instead of once"):
        await start(CommandTarget(AGENT, seed="Be rude.")).reply("Say red")
    with pytest.raises(EnvironmentFailure, match="the command sent no request to the gateway"):
        await start(CommandTarget(["true"], seed="Be helpful.")).reply("Say red")


async def test_answers_come_from_a_file_and_streams_are_answered() -> None:
    target = CommandTarget([*AGENT, "stream"], skill_file="SKILL.md", answer_file="answer.txt")
    assert await start(target).reply("Say red") == "RED"
    with pytest.raises(ReplyError, match=r"wrote no file other\.txt"):
        await start(CommandTarget(AGENT, skill_file="SKILL.md", answer_file="other.txt")).reply("Say red")


@pytest.mark.parametrize(
    ("how", "limits", "words"),
    [
        ("hang", {"seconds": 0.5}, "the command was ended after 0.5 seconds"),
        ("flood", {"output_bytes": 100_000}, "the command was ended after 100,000 bytes of output"),
        ("hoard", {"memory_mib": 100}, "the command was ended with more than 100 MiB of memory"),
        ("breed", {"processes": 20}, "the command was ended with more than 20 processes"),
        ("crowd", {"processes": 2}, r"was ended with \d+ threads, more than 16 for each of 2 processes"),
        ("write big.bin", {"file_mib": 1}, "the command ended with 1: .*File too large"),
        ("fail", {}, "the command ended with 1: no such tool"),
    ],
)
async def test_a_command_that_misbehaves_scores_nothing(how: str, limits: dict[str, Any], words: str) -> None:
    """A command that hangs, floods, takes too much memory or disk, or fails is ended: a failure of the agent."""
    target = CommandTarget([*AGENT, *how.split()], skill_file="SKILL.md", limits=limits)
    with pytest.raises(ReplyError, match=words):
        await start(target).reply("Say red")


async def test_a_run_goes_on_if_a_command_is_ended(tmp_path: Path) -> None:
    """Its items score 0, and the optimizer reads at which limit it was ended."""
    endpoint = Endpoint()
    breed = ["sh", "-c", "for n in 1 2 3 4 5; do setsid sleep 600 & done; wait"]
    target = CommandTarget(breed, skill_file="a", limits={"processes": 3}, preflight=False)
    summary = await train(tmp_path, endpoint, target)
    assert (summary.status, summary.best.score) == ("completed", 0)
    remark = "remark: the command was ended with more than 3 processes (`processes`)"
    assert remark in endpoint.bodies[0]["messages"][-1]["content"]


async def test_all_children_end_with_the_command() -> None:
    target = CommandTarget([*AGENT, "fork"], skill_file="SKILL.md", answer_file="children.txt")
    with anyio.fail_after(60):
        children = (await start(target).reply("Say red")).split()
    alive = [child for child in children if is_alive(child)]
    assert (len(children), alive) == (2, [])


@pytest.mark.skipif(not can_confine(), reason="needs Landlock")
async def test_a_confined_command_writes_in_its_folder_alone(tmp_path: Path) -> None:
    outside = tmp_path / "outside.bin"
    target = CommandTarget([*AGENT, "write", str(outside)], skill_file="SKILL.md", confine=True)
    with pytest.raises(ReplyError, match="Permission denied"):
        await start(target).reply("Say red")
    assert not outside.exists()
    inside = CommandTarget([*AGENT, "write", "inside.bin"], skill_file="SKILL.md", confine=True)
    assert await start(inside).reply("Say red") == "RED"


@pytest.mark.skipif(not read_landlock_version() >= SCOPES_VERSION, reason="needs Landlock of Linux 6.12")
@pytest.mark.parametrize("confine", [False, True])
@pytest.mark.parametrize("command", ["cat /proc/{pid}/environ", "kill -0 {pid}", "kill -9 $PPID"])
async def test_a_command_reaches_no_other_process(command: str, confine: bool) -> None:
    """A command can neither read the variables of reflact nor signal it, nor the process that holds its limits."""
    spy = CommandTarget(["sh", "-c", command.format(pid=os.getpid())], skill_file="a", confine=confine)
    with pytest.raises(ReplyError, match=r"the command ended with .*(Permission denied|not permitted)"):
        await start(spy).reply("Say red")


@pytest.mark.parametrize("version", [0, 2])
def test_a_system_that_cannot_confine_says_so(version: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Landlock, or with one that lets files be truncated, a target that is to be confined is refused."""
    monkeypatch.setattr("reflact.agents.command.read_landlock_version", lambda: version)
    with pytest.raises(
        ConfigError, match=r"this system cannot confine a command, because confine needs Linux 6\.2"
    ):
        CommandTarget(AGENT, skill_file="a", confine=True)


async def test_a_long_task_and_one_that_is_no_text_reach_a_command() -> None:
    """A task as argument has all the room of the system, in any script; half of a surrogate pair becomes U+FFFD."""
    count = CommandTarget(["sh", "-c", 'printf %s "$1" | wc -c', "sh", "{task}"], skill_file="a")
    assert await start(count).reply("\u4e09" * 40_000) == "120000"
    assert await start(count).reply("\ud83d") == "3"


def test_folders_of_killed_rollouts_are_removed(tmp_path: Path) -> None:
    names = ("stale", "locked", "new", "other", "link")
    for name in names[:4]:
        folder = tmp_path / f"{FOLDER_PREFIX if name != 'other' else ''}{name}"
        folder.mkdir()
        (folder / "lock").touch()
        if name != "new":
            os.utime(folder, (1.0, 1.0))
    (tmp_path / f"{FOLDER_PREFIX}link").symlink_to(tmp_path / "other")
    with (tmp_path / f"{FOLDER_PREFIX}locked" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        remove_stale_folders(tmp_path)
    left = {path.name.removeprefix(FOLDER_PREFIX) for path in tmp_path.iterdir()}
    assert left == {"locked", "new", "other", "link"}


@pytest.mark.slow
def test_a_command_ends_if_reflact_is_killed(tmp_path: Path) -> None:
    program = f"""
import anyio
from pathlib import Path
from reflact.agents.agent_process import CommandLimits, run_process
variables, folder = {dict(os.environ)!r}, Path({str(tmp_path)!r})
command = ["sh", "-c", "setsid sleep 600 & echo $! $$ > pids.tmp; mv pids.tmp pids; sleep 600"]
anyio.run(lambda: run_process(command, "", folder=folder, variables=variables, limits=CommandLimits(), confine=False))
"""
    (tmp_path / "work").mkdir()
    pids = tmp_path / "work" / "pids"
    with subprocess.Popen([sys.executable, "-c", program]) as process:
        wait_until(pids.exists)
        started = pids.read_text(encoding="utf-8").split()
        assert [is_alive(pid) for pid in started] == [True, True]
        process.kill()
    wait_until(lambda: not any(map(is_alive, started)))


def is_alive(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    return True


def wait_until(is_true: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not is_true():
        assert time.monotonic() < until
        time.sleep(0.02)


async def test_no_key_reaches_a_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    canary = "sk-canary-1234567890"
    for name in ("OPENAI_API_KEY", "AWS_SECRET"):
        monkeypatch.setenv(name, canary)
    endpoint, target = Endpoint(), CommandTarget([*AGENT, "spy"], skill_file="SKILL.md")
    with caplog.at_level("DEBUG"):
        await train(
            tmp_path / "run",
            endpoint,
            target,
            models={"target": {**MODEL, "api_key_env": "OPENAI_API_KEY"}},
            train={"num_epochs": 1},
            replay={"cassette": str(tmp_path / "run" / "cassette.jsonl"), "mode": "record"},
        )
    assert {request.headers["authorization"] for request in endpoint.requests} == {f"Bearer {canary}"}
    seen = json.loads(await start(target).reply("Say red"))
    assert seen["environment"]["OPENAI_BASE_URL"].startswith("http://127.0.0.1:")
    assert seen["environment"]["HOME"].endswith("/home")
    assert len(seen["files"]) > 3
    written = [path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert any(b"OPENAI_BASE_URL" in content for content in written), "the run has what the spy saw"
    for text in (json.dumps(seen).encode(), caplog.text.encode(), *written):
        assert canary.encode() not in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            {"skill_file": "AGENTS.md"},
            "no request of the agent has the skill.* it is in AGENTS.md of the rollout",
        ),
        (
            {"skill_file": "a/SKILL.md", "skill_name": "word-answers", "skill_description": "Answers."},
            "no request of the agent has the name of the skill, word-answers",
        ),
        ({"skill_file": "SKILL.md", "command": ["false"]}, "the agent sent no request to the gateway"),
    ],
)
async def test_a_skill_that_does_not_reach_the_agent_costs_nothing(
    arguments: dict[str, Any], words: str, tmp_path: Path
) -> None:
    """A training fails before its first call and says where to look, unless the test is off."""
    endpoint, target = Endpoint(), CommandTarget(**{"command": AGENT, **arguments})
    summary = await train(tmp_path, endpoint, target)
    assert (summary.status, endpoint.bodies) == ("failed", [])
    assert re.search(words, str(summary.reason))
    later = CommandTarget(AGENT, skill_file="AGENTS.md", preflight=False)
    assert (await train(tmp_path, endpoint, later)).status == "completed"


class BrokenWorld(DatasetEnvironment):
    """A world that fails before its agent is asked."""

    async def run(self, item: Item, session: Any, *, seed: int) -> Grade:
        raise OSError("no world")


async def test_the_test_of_the_skill_sends_the_message_of_a_rollout() -> None:
    """The agent gets its task as the environment words it, and another one if it fails on the first.

    If the environment fails before, a warning says that the skill was not tested.
    """
    tasks: list[str] = []
    graded: list[str] = []

    async def read_task(rollout: AgentRollout) -> str:
        tasks.append(rollout.task)
        text = json.loads(rollout.task)["text"]
        if text == "fail":
            raise KeyError("no such task")
        async with httpx.AsyncClient() as client:
            headers = {"Authorization": f"Bearer {rollout.token}"}
            body = {"messages": [{"content": rollout.skill}, {"content": text}]}
            url = f"{rollout.base_url}/chat/completions"
            return str((await client.post(url, json=body, headers=headers)).text)

    def grade(item: Item, answer: str) -> bool:
        graded.append(item.id)
        return True

    items = (Item(id="bad", input="fail"), ITEMS[0])
    data = DataSet(train=items, val=(), test=())
    world = DatasetEnvironment(data, grade=grade, template='{"text": "{input}"}')
    config, target, skill = ModelConfig(model="m"), FunctionTarget(read_task), Skill(text=RULE)
    assert await target.test_skill(world, items, skill, config) is None
    assert tasks == [json.dumps({"text": text}) for text in ("fail", "Say red")]
    assert graded == []
    with pytest.raises(EnvironmentFailure, match="the agent failed: KeyError: 'no such task'"):
        await target.test_skill(world, items[:1], skill, config)
    warning = await target.test_skill(BrokenWorld(data, grade=grade), items, skill, config)
    assert str(warning).endswith("because of the environment: OSError: no world")


async def test_a_check_says_that_the_skill_reaches_the_agent(tmp_path: Path) -> None:
    settings, environment = describe_run(tmp_path)
    endpoint = Endpoint()
    optimizer = ScriptedLLM(lambda prompt, reply_type, call_id: {"word": "ready"})

    async def check(skill_file: str) -> SetupCheck:
        target = CommandTarget(AGENT, skill_file=skill_file)
        overrides = Overrides(environment=environment, target=target, transport=endpoint, optimizer=optimizer)
        return await check_setup(TrainerConfig.model_validate(settings), overrides)

    trial = (await check("SKILL.md")).trial
    assert trial is not None
    assert trial.skill == "the agent's request has it, so it is in force"
    asked = len(endpoint.bodies)
    with pytest.raises(EnvironmentFailure, match="so the skill has no effect"):
        await check("AGENTS.md")
    assert len(endpoint.bodies) == asked == 1


async def test_a_setup_that_cannot_work_is_no_failure_of_the_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A missing program, a file outside the rollout's folder, no request or a refused one leaves no score."""
    (tmp_path / "agent.sh").write_text("echo red", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    setups: list[tuple[dict[str, Any], str]] = [
        ({"command": ["no-such-agent"], "skill_file": "a"}, "no-such-agent cannot be started: No such file"),
        (
            {"command": ["sh", "agent.sh"], "skill_file": "a"},
            r"agent\.sh is not in the folder in which it runs",
        ),
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
    endpoint = Endpoint()
    fields = json.dumps({"n": 3, "max_completion_tokens": 9000})
    target = CommandTarget([*AGENT, "with", fields], skill_file="SKILL.md")
    await train(tmp_path, endpoint, target, models={"target": {**MODEL, "max_tokens": 50}})
    asked = [body for body in endpoint.bodies if "response_format" not in body]
    assert {(b.get("n"), b.get("max_tokens"), b.get("max_completion_tokens")) for b in asked} == {
        (None, 50, None)
    }


async def test_a_side_call_is_no_turn() -> None:
    """A request that is no part of the task, such as for a title, is answered and booked under its own purpose."""
    sender = Sender()
    target = CommandTarget([*AGENT, "title"], seed="Be helpful.", side_call="You write titles.")
    session = target.connect(sender, ModelConfig(model="m")).session(Skill(text=RULE), rollout="r")
    assert await session.reply("Say red") == "RED"
    assert [turn.content for turn in session.turns] == ["Say red"]
    assert [call_id.purpose for call_id in sender.calls] == ["side_call", "rollout"]


def test_what_a_command_is_decides_its_identity(tmp_path: Path) -> None:
    """Another command, workspace or limit makes another target; a run reads the workspace once."""
    notes = tmp_path / "notes.md"
    notes.write_text("a", encoding="utf-8")
    target = CommandTarget(AGENT, skill_file="a", workspace=str(tmp_path))
    connected = target.connect(Sender(), ModelConfig(model="m"))
    identities = {target.identity, connected.identity}
    notes.write_text("b", encoding="utf-8")
    assert connected.identity in identities
    assert target.connect(Sender(), ModelConfig(model="m")).identity not in identities
    limited = CommandTarget(AGENT, skill_file="a", workspace=str(tmp_path), limits={"seconds": 1})
    assert len({*identities, target.identity, limited.identity}) == 4
