"""Several runs as one: ordinary runs below one folder, at once, within one budget, compared by item."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest

from reflact import train_many
from reflact.config.loading import load_config
from reflact.errors import UsageError
from reflact.events import Event
from reflact.sweep import SweepSummary, plan_sweep
from reflact.testing import ScriptedLLM, toy_optimizer
from reflact.types import Split
from served import assert_refused, configured, reflact, say_four_and_append, serving
from toy_runs import WORLD, Actor


async def test_seeds_and_settings_are_ordinary_runs_and_resume(tmp_path: Path) -> None:
    """Each combination is a run that `runs` lists; scores are means over seeds; the same call pays nothing again."""
    target, optimizer = Actor(), ScriptedLLM(toy_optimizer())
    config = {"out_dir": tmp_path, "seed": 7, "train": {"num_epochs": 1}}
    seen = list[tuple[str, Event]]()

    async def start() -> SweepSummary:
        return await train_many(
            config,
            seeds=2,
            vary={"train.batch_size": [4, 8]},
            on_event=lambda name, event: seen.append((name, event)),
            environment=WORLD,
            target=target,
            optimizer=optimizer,
        )

    sweep = await start()
    names = [f"train.batch_size={size},seed={seed}" for size in (4, 8) for seed in (7, 8)]
    assert [run.name for run in sweep.runs] == names
    assert {run.summary.status for run in sweep.runs} == {"completed"}
    assert len({run.summary.run_id for run in sweep.runs}) == 4
    assert {name for name, _ in seen} == set(names)
    assert [(score.setting, score.n, score.split) for score in sweep.scores] == [
        ("train.batch_size=4", 2, Split.test),
        ("train.batch_size=8", 2, Split.test),
    ]
    assert sweep.scores[0].best > sweep.scores[0].baseline
    assert sweep.scores[0].spread is not None
    assert sweep.comparison is not None
    assert len(sweep.comparison.runs) == 4
    assert {gain.split for gain in sweep.comparison.gains} == {Split.val, Split.test}
    asked, calls = len(target.asked), len(optimizer.calls)
    again = await start()
    assert again.scores == sweep.scores
    assert (len(target.asked), len(optimizer.calls)) == (asked, calls)
    listed = await anyio.to_thread.run_sync(reflact, "runs", tmp_path, "--json")
    assert len(listed.stdout.splitlines()) == 4


def test_the_budget_is_shared_equally(tmp_path: Path) -> None:
    budget = {"max_calls": 11, "max_tokens": 1000, "max_usd": 1.0, "max_seconds": 60.0}
    models = {"target": {"model": "gpt-4o-mini", "max_tokens": 10}}
    config = load_config({"out_dir": tmp_path, "budget": budget, "models": models})
    shares = [each.budget for each in plan_sweep(config, seeds=5, vary={}).values()]
    assert len(shares) == 5
    for share in shares:
        assert (share.max_calls, share.max_tokens, share.max_usd) == (2, 200, 0.2)
        assert share.max_seconds == 60


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"seeds": 1, "vary": {}}, "at least two seeds"),
        ({"seeds": 2, "vary": {"seed": [1]}}, "exclude each other"),
        ({"seeds": 1, "vary": {"train.batchsize": [1, 2]}}, "did you mean batch_size"),
        ({"seeds": 9, "vary": {}}, "budget.max_calls is too small for 9 runs"),
        ({"seeds": 1, "vary": {"budget.max_calls": [1, 2]}}, "budget.max_calls cannot be varied"),
        ({"seeds": 1, "vary": {"models.target.model": ["a/b", "a:b"]}}, "two runs would be named"),
    ],
)
def test_a_sweep_that_cannot_be_is_refused(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    config = load_config({"out_dir": tmp_path, "budget": {"max_calls": 8}})
    with pytest.raises(UsageError, match=words):
        plan_sweep(config, **options)


def test_the_command_shows_all_runs_with_mean_and_spread(tmp_path: Path) -> None:
    with serving(say_four_and_append) as url:
        path = configured(tmp_path, url)
        result = reflact("train", path, "--seeds", 2, "--set", "train.num_epochs=1")
        refused = reflact("train", path, "--vary", "seed")
    assert result.exit_code == 0, result.output
    assert "seed=42: run r" in result.stdout
    assert "seed=43: run r" in result.stdout
    (row,) = [line.split() for line in result.stdout.splitlines() if line.startswith("all ")]
    assert row[1:3] == ["2", "test"]
    assert_refused(refused, "--vary takes section.key=value,value")
    listed = reflact("runs", tmp_path / "run", "--json").stdout.splitlines()
    assert len(listed) == 2
