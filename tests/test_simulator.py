"""Simulators: worlds are made from seeds, and the plan deals the seeds."""

from __future__ import annotations

from pathlib import Path

import pytest

from reflact import Grade, Score, Session, Split
from reflact.environments.simulators import SimulatorEnvironment
from reflact.errors import ConfigError
from reflact.store.runs import open_store
from reflact.testing import toy_optimizer
from toy_runs import build_trainer

NAMES = ("double", "square")


async def play(seed: int, session: Session) -> Grade:
    """Ask the toy target for a rule that the seed draws, and grade its answer."""
    name, number = NAMES[seed % 2], 10 + seed
    answer = await session.reply(f"{name} {number}")
    right = answer == str(number * 2 if name == "double" else number * number)
    feedback = None if right else f"missing rule: {name}"
    return Grade(score=Score.of(right), answer=answer, feedback=feedback)


def world(**sizes: int) -> SimulatorEnvironment:
    """Return a simulator of toy questions."""
    return SimulatorEnvironment(play, name="toy-worlds", **{"train": 8, "val": 4, "test": 4, **sizes})


def test_every_seed_is_in_one_split() -> None:
    seeds = [item.input for split in Split for item in world().items(split)]
    assert seeds == list(range(16))


async def test_a_run_deals_seeds(tmp_path: Path) -> None:
    trainer = build_trainer(
        {"out_dir": tmp_path, "search": {"sources": ["edits"]}, "train": {"batch_size": 4, "num_epochs": 1}},
        environment=world(),
        script=toy_optimizer(edits=2),
    )
    summary = await trainer.train()
    best = summary.score("best", Split.test)
    assert best.hard == 1
    async with open_store(tmp_path / "run.db") as store:
        records = await store.records(summary.run_id)
    assert sorted(i for r in records for i in r.item_ids) == sorted(f"seed-{n}" for n in range(8))


def test_a_split_needs_worlds() -> None:
    with pytest.raises(ConfigError, match="val split needs at least one world"):
        world(val=0)
