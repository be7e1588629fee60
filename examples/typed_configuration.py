"""A configuration in typed sections, which mypy and pyright check; it trains on toy items without an endpoint."""

import asyncio
from pathlib import Path
from tempfile import mkdtemp

from reflact import Skill, Trainer
from reflact.config import (
    GateConfig,
    ModelConfig,
    ModelsConfig,
    Price,
    SearchConfig,
    TrainConfig,
    TrainerConfig,
)
from reflact.testing import ScriptedLLM, ToyEnvironment, ToyTarget, toy_optimizer


async def main() -> None:
    """Train, and measure two documents with the same objects."""
    config = TrainerConfig(
        out_dir=Path(mkdtemp()),
        models=ModelsConfig(target=ModelConfig(price=Price(input=0.1, output=0.4))),
        train=TrainConfig(num_epochs=1, batch_size=4),
        search=SearchConfig(sources=("edits",)),
        gate=GateConfig(policy="ranked"),
    )
    trainer = Trainer(
        config,
        environment=ToyEnvironment(train=8, val=4, test=4),
        target=ToyTarget(),
        optimizer=ScriptedLLM(toy_optimizer()),
        label="example",
    )
    summary = await trainer.train()
    print(summary.status)
    score = await trainer.evaluate(Skill(text="Answer."))
    compared = await trainer.compare(Skill(text="Answer."), ["none", "placebo"])
    print(score.hard, [gain.mean for gain in compared.improvements])


asyncio.run(main())
