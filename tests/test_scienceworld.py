"""The environment of ScienceWorld: many turns, partial scores, and a process that ends."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from shutil import which

import pytest

from reflact.errors import ConfigError
from reflact.integrations.scienceworld import ScienceWorldEnvironment
from reflact.types import Split, Turn

pytestmark = pytest.mark.anyio
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
    world = environment._world
    world.load("find-animal", item.input, "easy", generateGoldPath=True)
    path = list(world.get_gold_action_sequence())
    await environment.close()
    await environment.set_up()
    try:
        session = Plays(iter(path))
        assert (await environment.run(item, session, seed=0)).score.hard == 1
        assert session.heard[0].startswith("Your task is to find")
        grade = await environment.run(item, Plays(iter(path[:-2])), seed=0)
        assert grade.score.hard == 0
        assert 0 < grade.score.soft < 1
        assert "20 actions were not enough" in str(grade.feedback)
    finally:
        await environment.close()


@pytest.mark.skipif(find_spec("scienceworld") is not None, reason="scienceworld is installed")
def test_the_missing_package_is_named() -> None:
    """Without scienceworld, the error says what to install."""
    with pytest.raises(ConfigError, match=r"pip install 'reflact\[scienceworld\]'"):
        ScienceWorldEnvironment("find-animal", train=1, val=1, test=1)
