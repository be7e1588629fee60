"""What the environment says about an answer: for training trajectories alone, and never for the target."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from reflact.store.runs import open_store
from reflact.testing import ToyEnvironment
from reflact.types import Rollout, Split, is_failure
from toy_runs import Ran, run

pytestmark = pytest.mark.anyio


async def trained(folder: Path) -> tuple[Ran, dict[Split, list[Rollout]]]:
    """Train with everything on, and return the stored rollouts by split."""
    world = ToyEnvironment(train=8, val=4, test=4)
    done = await run(
        folder,
        environment=world,
        train={"num_epochs": 2},
        slow_update={"enabled": True},
        meta_skill={"enabled": True},
        test={"enabled": True},
    )
    async with open_store(folder / "run.db") as store:
        rows = await store._database.fetch_rows("SELECT rollout FROM rollouts", ())
    rollouts = [Rollout.model_validate_json(text) for (text,) in rows]
    ids = {split: {item.id for item in world.items(split)} for split in Split}
    return done, {split: [r for r in rollouts if r.item_id in ids[split]] for split in Split}


async def test_feedback_is_kept_in_training_alone(tmp_path: Path) -> None:
    """Failed train items say what was missing; validation and test items never say anything."""
    _, rollouts = await trained(tmp_path)
    lost = [r for r in rollouts[Split.train] if is_failure(r, None)]
    assert lost
    assert all(r.feedback is not None and r.feedback.startswith("missing rule: ") for r in lost)
    for split in (Split.val, Split.test):
        assert any(is_failure(r, None) for r in rollouts[split])
        assert all(r.feedback is None for r in rollouts[split])


async def test_nobody_learns_from_validation_or_test_items(tmp_path: Path) -> None:
    """No prompt of a whole run shows an input, an answer or an id of an item that is kept from it."""
    done, _ = await trained(tmp_path)
    world = ToyEnvironment(train=8, val=4, test=4)
    shown = "\n".join(m.content for call in done.calls for m in call.prompt.messages)
    assert all(f"task: {item.input}" in shown for item in world.items(Split.train))
    for hidden in kept_back(world):
        assert hidden not in shown


async def test_the_target_never_sees_reference_or_feedback(tmp_path: Path) -> None:
    """What the target is told is the skill and the item's input."""
    done, _ = await trained(tmp_path)
    inputs = {
        str(item.input) for split in Split for item in ToyEnvironment(train=8, val=4, test=4).items(split)
    }
    assert {message for _, message in done.actor.asked} == inputs
    assert not any("missing rule" in text for text, _ in done.actor.asked)


def kept_back(world: ToyEnvironment) -> Iterator[str]:
    """Yield what would give validation or test items away."""
    for split in (Split.val, Split.test):
        for item in world.items(split):
            yield f"{item.input}\n"
            yield item.id
