"""Own targets and environments of a wrong shape end with one sentence and the line to write, as early as it is known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bank_agent import BankModel, make_agent
from reflact import Grade, Item, Score, Session, Split, Trainer, read_run
from reflact.errors import ConfigError
from reflact.targets import Skill, Turn
from reflact.testing import ScriptedLLM, ToyEnvironment, ToyTarget, append_reply

pytestmark = pytest.mark.anyio

OPTIMIZER = ScriptedLLM(lambda prompt, reply_type, call_id: append_reply(reply_type, "Say a."))
GRADE_LINE = "write return Grade(score=Score.of(right), answer=answer)"


class Talk:
    """A session that counts its replies."""

    asked = 0

    def __init__(self) -> None:
        self.turns: Any = ()

    async def reply(self, message: str) -> Any:
        Talk.asked += 1
        self.turns += (Turn(role="user", content=message),)
        return "a"


class Agent:
    """A target whose sessions are of the class ``talk``."""

    identity: Any = "agent"
    talk: Any = Talk

    def session(self, skill: Skill, *, rollout: str) -> Any:
        return self.talk()


class World:
    """An environment with one message."""

    identity: Any = "world"

    def items(self, split: Split) -> Any:
        return [Item(id=f"{split}-{n}", input=f"{split} {n}", reference="a") for n in range(3)]

    async def run(self, item: Item, session: Session, *, seed: int) -> Any:
        answer = await session.reply(str(item.input))
        return Grade(score=Score.of(answer == "a"), answer=answer)


def agent(**parts: Any) -> Any:
    return type("MyAgent", (Agent,), parts)()


def talking(**parts: Any) -> Any:
    return agent(talk=type("MySession", (Talk,), parts))


def world(**parts: Any) -> Any:
    return type("MyWorld", (World,), parts)()


def returning(value: Any) -> Any:

    async def method(self: Any, *args: Any, **named: Any) -> Any:
        return value

    return method


def fail(self: Any, *args: Any, **named: Any) -> Any:
    raise KeyError("no such key")


async def list_mappings(self: Any, message: str) -> str:
    self.turns = [{"role": "user", "content": message}]
    return "a"


def build(folder: Path, *, target: Any = None, environment: Any = None, **settings: Any) -> Trainer:
    return Trainer(
        {"out_dir": folder, "search": {"sources": ["edits"]}, "train": {"num_epochs": 1, **settings}},
        target=Agent() if target is None else target,
        environment=World() if environment is None else environment,
        optimizer=OPTIMIZER,
    )


AT_CONSTRUCTION = [
    ("target", Agent, "the target is the class Agent; pass an object: target=Agent()"),
    ("target", make_agent(BankModel()), "target=reflact.targets.PydanticAITarget(agent)"),
    ("target", agent(session=lambda self, skill: Talk()), "unexpected keyword argument 'rollout'"),
    ("environment", world(run=None), "is missing; write async def run(self, item, session, *, seed):"),
]


@pytest.mark.parametrize(("role", "value", "words"), AT_CONSTRUCTION)
def test_a_wrong_object_is_refused_at_construction(tmp_path: Path, role: str, value: Any, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build(tmp_path, **{role: value})
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


BEFORE_THE_RUN = [
    ("environment", world(description=lambda self: "x"), "or @property above def description(self)"),
    ("environment", world(items=lambda self, split: {"a": 1}), "of type dict, for the train split; return a"),
    ("environment", world(items=fail), "`items` of MyWorld failed: KeyError: 'no such key' (test_own_obj"),
]


@pytest.mark.parametrize(("role", "value", "words"), BEFORE_THE_RUN)
async def test_a_wrong_text_or_item_is_refused_before_the_run(
    tmp_path: Path, role: str, value: Any, words: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        await build(tmp_path, **{role: value}).train()
    assert words in str(caught.value)
    assert not (tmp_path / "run.db").exists()


IN_THE_RUN = [
    ("target", agent(session=lambda *_, rollout: World()), "which has no `reply`; add async def reply(self,"),
    ("target", talking(reply=list_mappings), "has a dict in place of a Turn; write self.turns += (Turn("),
    ("environment", world(run=lambda self, item, session, *, seed: 1), "`run` of MyWorld is not async: it"),
    ("environment", world(run=returning(Grade.model_construct(score=1.0, answer="a"))), GRADE_LINE),
]


@pytest.mark.parametrize(("role", "value", "words"), IN_THE_RUN)
async def test_a_wrong_result_ends_the_run(tmp_path: Path, role: str, value: Any, words: str) -> None:
    Talk.asked = 0
    summary = await build(tmp_path, **{role: value}).train()
    assert summary.status == "failed"
    assert words in str(summary.reason)
    assert Talk.asked <= 6


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (lambda self, message: "a", "`reply` of MySession is not async: it returned a value of type str"),
        (returning(None), "the agent failed on item val-000: `reply` of MySession returned a value of type"),
    ],
)
async def test_a_wrong_reply_to_items_is_the_agents(tmp_path: Path, reply: Any, words: str) -> None:
    summary = await build(tmp_path, target=talking(reply=reply), environment=ToyEnvironment()).train()
    assert (summary.status, words in str(summary.reason)) == ("failed", True)


async def broken_reply(self: Any, message: str) -> str:
    return str(fail(self))


async def stumble(self: Any, item: Item, session: Session, *, seed: int) -> Grade:
    await session.reply("")
    raise KeyError("no such key")


@pytest.mark.parametrize(
    ("role", "value"),
    [
        ("target", agent(session=fail)),
        ("target", talking(reply=broken_reply)),
        ("environment", world(run=stumble)),
    ],
)
async def test_an_exception_names_whose_code_failed(tmp_path: Path, role: str, value: Any) -> None:
    who = {"target": "agent"}.get(role, role)
    summary = await build(tmp_path, **{role: value}).train()
    assert f"the {who} failed on item val-0: KeyError: 'no such key'" in str(summary.reason)
    history = await read_run(tmp_path)
    assert {failure.item_id for failure in history.failures} >= {"val-0", "val-1", "val-2"}
    assert all("KeyError" in failure.traceback for failure in history.failures)


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"environment": {"template": "{input}?", "description": "Sums."}}, "environment.template"),
        ({"data": {"ratio": "1:1:1"}, "environment": {"tolerance": 1}}, "data.ratio, environment.tolerance"),
    ],
)
def test_a_key_whose_place_an_object_takes_is_refused(keys: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        Trainer(keys, environment=ToyEnvironment(), target=ToyTarget(), optimizer=OPTIMIZER)
    assert str(refusal.value).partition(":")[0] == named


def test_a_key_that_a_preset_or_a_file_sets_is_not_refused(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("preset: skillopt\n", encoding="utf-8")
    Trainer(tmp_path / "run.yaml", environment=ToyEnvironment(), target=ToyTarget(), optimizer=OPTIMIZER)
    target = {"base_url": "http://host.test/v1", "api_key_env": None, "concurrency": 2}
    config = {"models": {"target": target, "optimizer": {"model": "large"}}}
    Trainer(config, environment=ToyEnvironment(), target=ToyTarget())
    with pytest.raises(
        ConfigError, match=r"^models\.target\.base_url, models\.target\.concurrency: no effect"
    ):
        Trainer(
            {"models": {"target": {**target, "api_key_env": None}}},
            environment=ToyEnvironment(),
            target=ToyTarget(),
            optimizer=OPTIMIZER,
        )
