"""Own targets and environments of a wrong shape end with one sentence and the line to write, as early as it is known."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bank_agent import BankModel, make_agent
from reflact import Grade, Item, Score, Session, Split, Trainer, read_run
from reflact.adapters import load_named_environment
from reflact.config.loading import load_config
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
    """Return an object of a changed class ``Agent``."""
    return type("MyAgent", (Agent,), parts)()


def talking(**parts: Any) -> Any:
    """Return an agent whose sessions are of a changed class ``Talk``."""
    return agent(talk=type("MySession", (Talk,), parts))


def opening(make: Callable[[], Any]) -> Any:
    """Return an agent whose sessions a function makes."""
    return agent(session=lambda self, skill, *, rollout: make())


def world(**parts: Any) -> Any:
    """Return an object of a changed class ``World``."""
    return type("MyWorld", (World,), parts)()


def without(kind: type, *names: str) -> Any:
    """Return an object with the parts of a class but some."""
    parts = {name: part for name, part in vars(kind).items() if name[:2] != "__" and name not in names}
    return type(f"My{kind.__name__}", (), parts)()


def returning(value: Any) -> Any:
    """Return an async method that ignores its arguments."""

    async def method(self: Any, *args: Any, **named: Any) -> Any:
        return value

    return method


async def start_talk(self: Any, skill: Skill, *, rollout: str) -> Talk:
    return Talk()


def fail(self: Any, *args: Any, **named: Any) -> Any:
    raise KeyError("no such key")


async def list_mappings(self: Any, message: str) -> str:
    """Reply, and keep turns that are mappings."""
    Talk.asked += 1
    self.turns = [{"role": "user", "content": message}]
    return "a"


def build(folder: Path, *, target: Any = None, environment: Any = None, **settings: Any) -> Trainer:
    """Return a run of one epoch."""
    return Trainer(
        {"out_dir": folder, "search": {"sources": ["edits"]}, "train": {"num_epochs": 1, **settings}},
        target=Agent() if target is None else target,
        environment=World() if environment is None else environment,
        optimizer=OPTIMIZER,
    )


AT_CONSTRUCTION = [
    ("target", without(Agent, "identity"), 'has no `identity`; add identity = "MyAgent, version 1"'),
    ("target", without(Agent, "session"), "has no `session`; add def session(self, skill, *, rollout):"),
    ("target", Agent, "the target is the class Agent; pass an object: target=Agent()"),
    ("target", "gpt-5", "the target is the text 'gpt-5'; in Trainer, pass an object, or name it"),
    ("target", make_agent(BankModel()), "target=PydanticAITarget(agent)"),
    ("target", fail, "the target is the function fail; if it calls your agent, wrap it"),
    ("target", agent(session=start_talk), "is async (test_own_objects.py, line "),
    ("target", agent(session=lambda self, skill: Talk()), "unexpected keyword argument 'rollout'"),
    ("target", agent(session_for=lambda self, item: Talk()), "write def session_for(self, item, skill,"),
    ("environment", without(World, "run"), "add async def run(self, item, session, *, seed):"),
    ("environment", world(items=[1]), "MyWorld, is a list, and no method; write def items("),
    ("environment", world(items=returning([])), "and reflact does not wait for it; write def items("),
    ("environment", world(set_up=returning(None)), "has no `close`; add async def close(self):"),
]


@pytest.mark.parametrize(("role", "value", "words"), AT_CONSTRUCTION)
def test_a_wrong_object_is_refused_at_construction(tmp_path: Path, role: str, value: Any, words: str) -> None:
    """A missing part, other arguments, or another thing in its place is one sentence with the line to write."""
    with pytest.raises(ConfigError) as caught:
        build(tmp_path, **{role: value})
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


BEFORE_THE_RUN = [
    ("target", agent(identity=3), "is of type int, and no text; write identity ="),
    ("environment", world(description=lambda self: "x"), "write @property above def description(self)"),
    (
        "environment",
        world(identity=property(fail)),
        "of type MyWorld, failed: KeyError: 'no such key' (test_",
    ),
    ("environment", world(items=lambda self, split: {"a": 1}), "a value of type dict for the train split"),
    ("environment", world(items=lambda self, split: ["a"]), "no Item at place 0 of the train split, but 'a'"),
    ("environment", world(items=fail), "`items` of MyWorld failed: KeyError: 'no such key' (test_own_obj"),
]


@pytest.mark.parametrize(("role", "value", "words"), BEFORE_THE_RUN)
async def test_a_wrong_text_or_item_is_refused_before_the_run(
    tmp_path: Path, role: str, value: Any, words: str
) -> None:
    """Properties are read and items are made when the run begins; nothing is stored or asked before."""
    with pytest.raises(ConfigError) as caught:
        await build(tmp_path, **{role: value}).train()
    assert words in str(caught.value)
    assert not (tmp_path / "run.db").exists()


async def test_an_exception_before_the_run_is_the_cause_or_raised(tmp_path: Path) -> None:
    """The sentence about an own exception has it as cause; `raise_on_exception` raises it as it is."""
    with pytest.raises(ConfigError) as caught:
        await build(tmp_path, environment=world(items=fail)).train()
    assert isinstance(caught.value.__cause__, KeyError)
    with pytest.raises(KeyError, match="no such key"):
        await build(tmp_path, environment=world(items=fail), raise_on_exception=True).train()


async def overrate() -> Grade:
    """Grade above 1."""
    return Grade(score=Score.of(2), answer="a")


IN_THE_RUN = [
    ("target", opening(lambda: None), "of type NoneType, which has no `reply`; add async def reply("),
    ("target", opening(lambda: returning(1)(1)), "is async, and reflact does not wait for it; write def"),
    ("target", opening(lambda: without(Talk)), "which has no `turns`, the conversation that the opt"),
    ("target", talking(turns=lambda self: (), __init__=lambda self: None), "write @property above def turns"),
    (
        "target",
        talking(reply=list_mappings),
        "has a dict in place of a Turn; write self.turns += (Turn(role=",
    ),
    ("target", talking(reply=lambda self, message: "a"), "`reply` of MySession is not async; write async"),
    ("environment", world(run=lambda self, item, session, *, seed: 1), "`run` of MyWorld is not async: it"),
    ("environment", world(run=returning(None)), "of type NoneType for item train-0 in place of a Grade"),
    ("environment", world(run=returning(Grade.model_construct(score=1.0, answer="a"))), GRADE_LINE),
    ("environment", world(set_up=lambda self: 1, close=returning(None)), "`set_up` of MyWorld is not async"),
    ("environment", world(run=lambda *_, seed: overrate()), "hard: Input should be less than or equal to 1"),
]


@pytest.mark.parametrize(("role", "value", "words"), IN_THE_RUN)
async def test_a_wrong_result_ends_the_run(tmp_path: Path, role: str, value: Any, words: str) -> None:
    """A session, turns, reply or grade of another type is the reason of the run's end; few or no calls were made."""
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
    """If the environment is reflact's own, the agent is named."""
    summary = await build(tmp_path, target=talking(reply=reply), environment=ToyEnvironment()).train()
    assert (summary.status, words in str(summary.reason)) == ("failed", True)


@pytest.mark.parametrize("part", ["session", "reply"])
async def test_an_exception_of_an_agent_is_the_agents(tmp_path: Path, part: str) -> None:
    """An agent that raises, also when a session begins, leaves items unmeasured; the reason and the traceback say so."""
    target = agent(session=fail) if part == "session" else talking(reply=broken_reply)
    summary = await build(tmp_path, target=target).train()
    assert "the agent failed on item val-0: KeyError: 'no such key'" in str(summary.reason)
    history = await read_run(tmp_path)
    assert {failure.item_id for failure in history.failures} >= {"val-0", "val-1", "val-2"}
    assert all("in fail" in failure.traceback for failure in history.failures)


async def broken_reply(self: Any, message: str) -> str:
    """Raise below a further function, as a framework would."""
    return str(fail(self))


async def test_an_exception_of_an_environment_stays_its_own(tmp_path: Path) -> None:
    """An environment that fails after a reply is named."""
    summary = await build(tmp_path, environment=world(run=stumble)).train()
    assert "the environment failed on item val-0: KeyError" in str(summary.reason)


async def stumble(self: Any, item: Item, session: Session, *, seed: int) -> Grade:
    """Fail after the agent has answered."""
    await session.reply("")
    raise KeyError("no such key")


def test_a_named_object_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An object that a configuration names is checked when it is loaded."""
    (tmp_path / "my_world.py").write_text(
        "class Half:\n    identity = 'half'\n    async def run(self, item, session, *, seed): pass\n", "utf-8"
    )
    monkeypatch.syspath_prepend(tmp_path)
    config = load_config({"out_dir": tmp_path, "environment": {"name": "my_world:Half"}})
    with pytest.raises(
        ConfigError, match=r"of type my_world\.Half, has no `items`; add def items\(self, split\):"
    ):
        load_named_environment(config)


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"environment": {"template": "{input}?", "description": "Sums."}}, "environment.template"),
        ({"data": {"path": "items.jsonl"}}, "data.path"),
        ({"target": {"preamble": "Hello", "deterministic": True}}, "target.preamble"),
        ({"models": {"target": {"temperature": 1}}}, "models.target.temperature"),
        ({"data": {"ratio": "1:1:1"}, "environment": {"tolerance": 1}}, "data.ratio, environment.tolerance"),
    ],
)
def test_a_key_whose_place_an_object_takes_is_refused(keys: dict[str, Any], named: str) -> None:
    """It would have no effect; keys that still have one are accepted."""
    with pytest.raises(ConfigError) as refusal:
        Trainer(keys, environment=ToyEnvironment(), target=ToyTarget(), optimizer=OPTIMIZER)
    assert str(refusal.value).partition(":")[0] == named


def test_a_key_that_a_preset_or_a_file_sets_is_not_refused(tmp_path: Path) -> None:
    """A preset's keys, paths that a file leaves out, and keys that another role inherits are no mistakes."""
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


def test_keys_beside_lists_of_items_are_refused() -> None:
    """The items and the grading function of a caller take the place of data and graders."""
    with pytest.raises(ConfigError, match=r"^environment\.grader: no effect"):
        Trainer.from_items(
            train=[("1", "1")],
            val=[("2", "2")],
            grade=lambda item, answer: 1.0,
            target="m",
            optimizer="m",
            environment__grader="numeric",
        )
