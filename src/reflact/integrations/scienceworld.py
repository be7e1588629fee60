"""Tasks of ScienceWorld, a text world with many turns; ``reflact[scienceworld]``, which needs Java.

ScienceWorldEnvironment("find-animal", train=10, val=20, test=20)
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import anyio

from reflact.errors import ConfigError
from reflact.protocols import Session
from reflact.types import Grade, Item, Score, Split, canonical_json


class ScienceWorldEnvironment:
    """Variations of a task of ScienceWorld; the agent sends one action in each turn and gets what it observes.

    One Java process plays one world at a time, so rollouts wait for each other. Worker processes have one each.

    Args:
        task: The task's name, such as ``find-animal``.
        train: Variations in the train split; each split takes those that ScienceWorld has for it.
        val: Variations in the validation split.
        test: Variations in the test split.
        simplifications: ScienceWorld's simplifications, separated by commas.
        max_turns: The most actions in a rollout.

    Raises:
        ConfigError: The package or Java is missing, there is no such task, or it has too few variations.
    """

    def __init__(
        self,
        task: str,
        *,
        train: int,
        val: int,
        test: int,
        simplifications: str = "easy",
        max_turns: int = 30,
    ) -> None:
        self._task, self._simplifications, self._max_turns = task, simplifications, max_turns
        self._lock = anyio.Lock()
        self._world: Any = None
        world = _start_world()
        try:
            world.load(task, 0, simplifications)
            found = {
                Split.train: (train, world.get_variations_train()),
                Split.val: (val, world.get_variations_dev()),
                Split.test: (test, world.get_variations_test()),
            }
        except ValueError as error:
            raise ConfigError(f"ScienceWorld: {error}; name another task or simplification") from error
        finally:
            _stop_world(world)  # rollouts may take place in other processes
        for split, (size, variations) in found.items():
            if not 1 <= size <= len(variations):
                raise ConfigError(
                    f"{task} has {len(variations)} variations for {split}; ask for 1 to that many"
                )
        self._items = {
            split: tuple(Item(id=f"{task}-{n}", input=n, task_type=task) for n in variations[:size])
            for split, (size, variations) in found.items()
        }

    @property
    def identity(self) -> str:
        """Version of ScienceWorld, task, simplifications and limit, as canonical JSON."""
        return canonical_json(
            {
                "environment": "scienceworld",
                "version": version("scienceworld"),
                "task": self._task,
                "simplifications": self._simplifications,
                "max_turns": self._max_turns,
            }
        )

    @property
    def description(self) -> str:
        """What the tasks are."""
        return (
            f"The agent acts in a text world to do the task {self._task}. Each of its messages is one action, such as "
            f"'look around'. It has {self._max_turns} actions. Steps towards the goal raise the score."
        )

    def items(self, split: Split) -> Sequence[Item]:
        """Return a split's variations as items."""
        return self._items[split]

    async def set_up(self) -> None:
        """Start Java, unless it runs."""
        if self._world is None:
            self._world = await anyio.to_thread.run_sync(_start_world)

    async def close(self) -> None:
        """End Java."""
        world, self._world = self._world, None
        if world is not None:
            await anyio.to_thread.run_sync(_stop_world, world)

    async def run(self, item: Item, session: Session, *, seed: int) -> Grade:
        """Play a variation until it ends; the seed is not used."""
        async with self._lock:
            return await self._play(int(str(item.input)), session)

    async def _play(self, variation: int, session: Session) -> Grade:
        message = await anyio.to_thread.run_sync(self._load, variation)
        action, score, done = "", 0.0, False
        for _ in range(self._max_turns):
            action = (await session.reply(message)).strip()
            message, score, done = await anyio.to_thread.run_sync(self._step, action)
            if done:
                break
        reason = "the task ended" if done else f"{self._max_turns} actions were not enough"
        feedback = None if score == 1 else f"{reason} with {score:g} of 1; the last observation: {message}"
        return Grade(score=Score(hard=float(score == 1), soft=score), answer=action, feedback=feedback)

    def _load(self, variation: int) -> str:
        world = self._world
        world.load(self._task, variation, self._simplifications)
        world.server.reset()
        return f"{world.get_task_description()}\n\n{world.server.step('look around')}"

    def _step(self, action: str) -> tuple[str, float, bool]:
        """Return the observation, the score and whether the task ended; a score below 0 is an end with 0."""
        server = self._world.server
        observation, score = str(server.step(action)), float(server.getScore())
        return observation, min(max(score, 0.0), 1.0), bool(server.getCompleted()) or score < 0


def _stop_world(world: Any) -> None:
    process = world._gateway.java_process
    world.close()
    process.kill()  # it ends later by itself, or never if nobody reads its output
    process.wait()
    for stream in filter(None, (process.stdin, process.stdout)):
        stream.close()


def _start_world() -> Any:
    try:
        from scienceworld import ScienceWorldEnv
    except ImportError as error:
        raise ConfigError("this needs scienceworld: pip install 'reflact[scienceworld]'") from error
    try:
        return ScienceWorldEnv("")
    except OSError as error:
        raise ConfigError(f"ScienceWorld cannot start Java: {error}; install a Java runtime") from error
