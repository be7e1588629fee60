"""Train on the generated puzzles of reasoning-gym. Run `pip install reasoning-gym`; it takes 320 MB.

python examples/generated_puzzles.py my-small-model my-large-model calendar_arithmetic
"""

import asyncio
import sys
from typing import Any

from reflact import Grade, Item, Score, Session, Split, Trainer

SIZES = {Split.train: 20, Split.val: 40, Split.test: 40}


class Puzzles:
    """Questions of one family; the package's scorer says how right a reply is.

    All splits come from one data set, because neighbouring seeds share nearly all questions. Some families, such as
    `countdown`, run the reply as Python code in this process: use them only with a model that you trust.
    """

    def __init__(self, dataset: Any, family: str) -> None:
        self._dataset = dataset
        self.identity = f"reasoning-gym, {family}, version 1"
        self.description = (
            f"The tasks are generated puzzles ({family}). Only the exact form of an answer counts."
        )
        entries = {entry["question"]: number for number, entry in enumerate(dataset)}
        numbers = iter(entries.values())
        self._items = {
            split: [self._build_item(family, next(numbers)) for _ in range(size)]
            for split, size in SIZES.items()
        }

    def _build_item(self, family: str, number: int) -> Item:
        entry = self._dataset[number]
        return Item(id=f"{family}-{number}", input=entry["question"], reference=entry["answer"])

    def items(self, split: Split) -> list[Item]:
        return self._items[split]

    async def run(self, item: Item, session: Session, *, seed: int) -> Grade:
        reply = await session.reply(str(item.input))
        number = int(item.id.rpartition("-")[2])
        try:
            soft = float(self._dataset.score_answer(reply.strip(), self._dataset[number]))
        except Exception:  # noqa: BLE001  # scorers raise anything on replies that they cannot read
            soft = 0.0
        hard = float(soft == 1)
        feedback = None if hard else f"expected {item.reference}, got {reply}"
        return Grade(score=Score(hard=hard, soft=soft), answer=reply, feedback=feedback)


if __name__ == "__main__":
    from reasoning_gym import create_dataset

    target, optimizer, family = sys.argv[1:4]
    models = {"target": {"model": target}, "optimizer": {"model": optimizer}}
    environment = Puzzles(create_dataset(family, seed=0, size=300), family)
    trainer = Trainer({"out_dir": "runs/puzzles", "models": models}, environment=environment)
    print(asyncio.run(trainer.train()).verdict)
