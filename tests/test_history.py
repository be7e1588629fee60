"""A run is read back from its store: while it is under way, after it, and by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from pure_world import PureNetwork, settings, write_world
from reflact import Trainer, compare_runs, read_run
from reflact.events import StepCommitted
from reflact.protocols import Target
from reflact.records import Usage, sum_step_costs
from toy_runs import build_trainer


def trainer(
    folder: Path, *, seed: int = 0, store: Path | None = None, target: Target | None = None
) -> Trainer:
    """Return a small run; another seed is another run."""
    return build_trainer(
        {
            "out_dir": folder,
            "report": False,
            "store": store,
            "seed": seed,
            "search": {"sources": ["edits"]},
            "train": {"num_epochs": 1, "batch_size": 4},
        },
        target=target,
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


@pytest.mark.slow
async def test_tokens_calls_and_time_are_known_by_step_and_stage(tmp_path: Path) -> None:
    """A run under way has them so far; at the end the steps' sums are the run's spend, in the summary as well."""
    config = settings(write_world(tmp_path / "world"), tmp_path / "run")
    async with Trainer(config, transport=PureNetwork()).stream() as happenings:
        async for event in happenings:
            if isinstance(event, StepCommitted):
                break
    under_way = (await read_run(tmp_path / "run")).costs
    assert {cost.step for cost in under_way} == {0, 1}
    summary = await Trainer(config, transport=PureNetwork()).train()
    found = await read_run(tmp_path / "run")
    assert summary.step_costs == sum_step_costs(found.costs) == found.summary.step_costs
    assert [cost.step for cost in summary.step_costs] == list(range(1 + summary.steps))
    names = [cost.stage for cost in found.costs if cost.step == 2]
    assert names[:6] == ["rollout and reflect", "aggregate", "select", "update", "evaluate", "appendix"]
    stages = {(cost.step, cost.stage): cost for cost in found.costs}
    assert set(stages) >= {(0, "baseline"), (2, "epoch end"), (summary.steps, "final test")}
    purposes = {entry.purpose for entry in stages[1, "rollout and reflect"].spend}
    assert purposes >= {"rollout", "analyst_failure"}
    spent = sum((entry.usage for entry in summary.spend), Usage())
    assert sum((cost.usage for cost in summary.step_costs), Usage()) == spent
    assert spent.input_tokens > 0
    assert 0 < sum(cost.seconds for cost in summary.step_costs) <= summary.seconds
    kept = {(cost.step, cost.stage): cost for cost in under_way}
    assert all(stages[key].seconds >= cost.seconds for key, cost in kept.items())
    assert stages[0, "baseline"].spend == kept[0, "baseline"].spend


async def test_a_summary_is_short_in_print(tmp_path: Path) -> None:
    """What `print` shows of a summary leaves its configuration out; the value has it."""
    summary = await trainer(tmp_path).train()
    assert "config" not in repr(summary)
    assert summary.config is not None
    history = await read_run(tmp_path, items=True)
    long = summary.model_copy(update={"verdict": "x" * 9_999, "warnings": ("y" * 9_999,)})
    compared = await compare_runs([tmp_path, tmp_path])
    for value in (summary, long, history, history.model_copy(update={"summary": long}), compared):
        assert max(len(repr(value)), len(str(value))) <= 24 * 100
        assert repr(value).startswith(f"{type(value).__name__}(")
