"""The environment of ScienceWorld: many turns, partial scores, and a process that ends."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from shutil import which

import pytest

from processes import is_gone, list_children, status
from reflact import Trainer
from reflact.errors import ConfigError
from reflact.integrations.scienceworld import ScienceWorldEnvironment
from reflact.testing import ScriptedLLM, append_reply
from reflact.types import Skill, Split, Turn
from toy_runs import settings

INSTALLED = find_spec("scienceworld") is not None and which("java") is not None
needs_package = pytest.mark.skipif(not INSTALLED, reason="scienceworld needs Java")


class Plays:
    """A session that plays a list of actions, and then waits."""

    def __init__(self, actions: Iterator[str]) -> None:
        self.actions = actions
        self.heard: list[str] = []
        self.turns: tuple[Turn, ...] = ()

    async def reply(self, message: str) -> str:
        self.heard.append(message)
        return next(self.actions, "wait1")


@needs_package
@pytest.mark.filterwarnings("ignore")  # py4j leaves sockets to the garbage collector
async def test_a_world_is_played_to_its_end() -> None:
    """The known solution scores 1, a part of it a part, and the world can be set up again after its end."""
    environment = ScienceWorldEnvironment("find-animal", train=2, val=1, test=1, max_turns=20)
    ids = [item.id for split in Split for item in environment.items(split)]
    assert len(set(ids)) == 4
    item = environment.items(Split.train)[1]
    assert find_java() == set()
    await environment.set_up()
    try:
        environment._world.load("find-animal", item.input, "easy", generateGoldPath=True)
        path = list(environment._world.get_gold_action_sequence())
        await environment.close()
        await environment.set_up()
        session = Plays(iter(path))
        assert (await environment.run(item, session, seed=0)).score.hard == 1
        assert session.heard[0].startswith("Your task is to find")
        grade = await environment.run(item, Plays(iter(path[:-2])), seed=0)
        assert grade.score.hard == 0
        assert 0 < grade.score.soft < 1
        assert "20 actions were not enough" in str(grade.feedback)
    finally:
        await environment.close()


@needs_package
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
async def test_worlds_are_played_in_worker_processes(tmp_path: Path) -> None:
    """A run in two workers has the scores of one in the loop; each worker has a Java of its own, and none is left."""
    scores, javas = [], set[str]()

    class Explores(Plays):
        async def reply(self, message: str) -> str:
            javas.update(find_java())
            return await super().reply(message)

    class Explorer:
        identity = "explorer"

        def session(self, skill: Skill, *, rollout: str) -> Plays:
            return Explores(iter(["open door to hallway", "go to hallway"] if skill.text else []))

    for name in ("local", "processes"):
        javas.clear()
        config = settings(
            tmp_path / name,
            environment={
                "name": "reflact.integrations.scienceworld:ScienceWorldEnvironment",
                "options": {"task": "find-animal", "train": 2, "val": 4, "test": 1, "max_turns": 3},
            },
            executor={"name": name, "workers": 2},
        )
        optimizer = ScriptedLLM(lambda prompt, kind, call_id: append_reply(kind, "Open doors."))
        summary = await Trainer(config, target=Explorer(), optimizer=optimizer).train()
        assert summary.status == "completed"
        scores.append([score.model_dump() for score in summary.scores])
        assert len(javas) == (1 if name == "local" else 2)
        assert find_java() == set()
    assert scores[0] == scores[1]


def find_java() -> set[str]:
    """Return the Java processes of this process and of its children."""
    children = list_children()
    below = children.union(*map(list_children, children))
    return {one for one in below if not is_gone(one) and "Name:\tjava" in status(one)}


@pytest.mark.skipif(find_spec("scienceworld") is not None, reason="scienceworld is installed")
def test_the_missing_package_is_named() -> None:
    """Without scienceworld, the error says what to install."""
    with pytest.raises(ConfigError, match=r"pip install 'reflact\[scienceworld\]'"):
        ScienceWorldEnvironment("find-animal", train=1, val=1, test=1)
