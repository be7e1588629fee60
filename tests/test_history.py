"""A run is read back from its store: while it is under way, after it, and by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from reflact import Trainer, read_run
from reflact.errors import UsageError
from reflact.events import StepCommitted
from reflact.testing import ScriptedLLM, ToyEnvironment, ToyTarget, toy_optimizer

pytestmark = pytest.mark.anyio


def trainer(folder: Path, *, seed: int = 0, store: Path | None = None) -> Trainer:
    """Return a small run; another seed is another run."""
    return Trainer(
        {"out_dir": folder, "store": store, "seed": seed, "train": {"num_epochs": 1, "batch_size": 4}},
        environment=ToyEnvironment(train=8, val=4, test=4),
        target=ToyTarget(),
        optimizer=ScriptedLLM(toy_optimizer()),
    )


async def test_a_run_is_read_back_as_it_was_told(tmp_path: Path) -> None:
    """Summary, steps, versions and events are those of the run, from its folder and from its file."""
    run = trainer(tmp_path)
    told = [event async for event in run.stream()]
    found = await read_run(tmp_path)
    assert found == await read_run(str(tmp_path / "run.db"), run.run_id)
    assert (found.run_id, found.status, found.summary.steps) == (run.run_id, "completed", len(found.steps))
    assert found.summary.best in found.versions
    assert [event for event in told if event.durable and event.kind != "run_finished"] == [
        event for event in found.events if event.kind != "run_finished"
    ]


async def test_a_run_under_way_is_read_as_far_as_it_is(tmp_path: Path) -> None:
    """What is committed can be read beside the run; it has no status and no summary yet."""
    async with trainer(tmp_path).stream() as happenings:
        async for event in happenings:
            if isinstance(event, StepCommitted):
                found = await read_run(tmp_path)
                break
    assert found.steps[0].step == 1
    assert (found.status, found.summary) == (None, None)


async def test_a_run_of_several_is_named(tmp_path: Path) -> None:
    """Of runs in one file the newest is taken where none is named; an unknown name is told the others."""
    store = tmp_path / "all.db"
    runs = [trainer(tmp_path / str(seed), seed=seed, store=store) for seed in range(2)]
    for run in runs:
        await run.train()
    assert (await read_run(store)).run_id == runs[1].run_id
    assert (await read_run(store, runs[0].run_id)).run_id == runs[0].run_id
    with pytest.raises(UsageError, match=f"holds no run x; it holds {runs[0].run_id}"):
        await read_run(store, "x")


async def test_where_nothing_is_nothing_is_made(tmp_path: Path) -> None:
    """A folder without a run is an error, and stays empty."""
    with pytest.raises(UsageError, match="there is no run at"):
        await read_run(tmp_path)
    assert not (tmp_path / "run.db").exists()


async def test_a_summary_is_short_in_print(tmp_path: Path) -> None:
    """What `print` shows of a summary leaves its configuration out; the value has it."""
    summary = await trainer(tmp_path).train()
    assert "config" not in repr(summary)
    assert summary.config is not None
