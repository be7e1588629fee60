"""An environment of many turns: ScienceWorld, a text world. Run `pip install scienceworld`; it needs Java.

python examples/text_world.py my-small-model my-large-model
"""

import asyncio
import sys
from typing import Any

from reflact import Grade, Item, Score, Session, Split, Trainer

SIZES = {Split.train: 10, Split.val: 20, Split.test: 20}


class TextWorld:
    """Variations of one task; each message of the agent is one action, and the world answers what it sees.

    The world plays one variation at a time, so rollouts wait for each other.
    """

    def __init__(self, world: Any, task: str, *, max_turns: int = 30) -> None:
        self._world, self._task, self._max_turns = world, task, max_turns
        self._lock = asyncio.Lock()
        self.identity = f"ScienceWorld, {task}, {max_turns} actions, version 1"
        self.description = (
            f"The agent acts in a text world to do the task {task}, one action in each message."
        )
        world.load(task, 0, "easy")
        self._variations = {
            Split.train: world.get_variations_train(),
            Split.val: world.get_variations_dev(),
            Split.test: world.get_variations_test(),
        }

    def items(self, split: Split) -> list[Item]:
        return [
            Item(id=f"{self._task}-{n}", input=n) for n in self._variations[split][: SIZES[split]]
        ]

    async def run(self, item: Item, session: Session, *, seed: int) -> Grade:
        async with self._lock:
            message = await asyncio.to_thread(self._begin, item.input)
            for _ in range(self._max_turns):
                action = (await session.reply(message)).strip()
                message, _, is_done, state = await asyncio.to_thread(self._world.step, action)
                if is_done:
                    break
        score = max(state["score"], 0) / 100  # it is below 0 after a fatal mistake
        return Grade(
            score=Score(hard=float(score == 1), soft=score), answer=action, feedback=message
        )

    def _begin(self, variation: Any) -> str:
        self._world.load(self._task, variation, "easy")
        observation, _ = self._world.reset()
        return f"{self._world.get_task_description()}\n\n{observation}"


if __name__ == "__main__":
    from scienceworld import ScienceWorldEnv

    models = {"target": {"model": sys.argv[1]}, "optimizer": {"model": sys.argv[2]}}
    environment = TextWorld(ScienceWorldEnv(""), "find-animal")
    trainer = Trainer({"out_dir": "runs/world", "models": models}, environment=environment)
    print(asyncio.run(trainer.train()).verdict)
