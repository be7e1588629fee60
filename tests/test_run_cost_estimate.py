"""What a run will take, said before anything is asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from reflact import Trainer
from reflact.config.loading import load_config
from reflact.testing import ScriptedLLM, toy_optimizer
from reflact.training.check import SetupCheck
from reflact.training.cost_estimate import estimate_run
from reflact.training.plan import Overrides, prepare_run
from served import configured, reflact
from toy_runs import WORLD, Actor

DEMO = Path(__file__).parent.parent / "fixtures" / "demo" / "demo.yaml"
PLAIN: dict[str, Any] = {
    "search": {"sources": ["edits"]},
    "train": {"batch_size": 4, "num_epochs": 2},
    "reflect": {"minibatch_size": 2},
}


@pytest.mark.parametrize(
    ("noise", "config"),
    [
        (0.0, PLAIN),
        (0.2, {**PLAIN, "gate": {"policy": "strict"}}),
        (0.0, {**PLAIN, "train": {"batch_size": 2, "num_epochs": 3, "accumulation": 2}}),
        (0.2, {**PLAIN, "update": {"mode": "full_rewrite"}}),
        (0.2, {**PLAIN, "search": {"sources": ["examples", "rewrite", "edits"]}}),
    ],
)
async def test_a_run_takes_what_was_foreseen(tmp_path: Path, config: dict[str, Any], noise: float) -> None:
    target = Actor(noise=noise)
    optimizer = ScriptedLLM(toy_optimizer(edits=2))
    config = {"out_dir": tmp_path, **config}
    passed: dict[str, Any] = {"environment": WORLD, "target": target, "optimizer": optimizer}
    foreseen = estimate_run(prepare_run(load_config(config), Overrides(**passed)))
    assert (await Trainer(config, **passed).train()).status == "completed"
    rows = {row.role: row.calls for row in foreseen.rows}
    assert set(rows) == {"target", "optimizer"}
    assert len(target.asked) + len(optimizer.calls) <= 1.5 * sum(rows.values())


def test_a_dry_run_calls_and_writes_nothing(tmp_path: Path) -> None:
    out = tmp_path / "run"
    result = reflact("check", DEMO, "--dry-run", "--set", f"out_dir={out}")
    assert result.exit_code == 0, result.output
    assert "steps to take, 0 taken" in result.output
    assert "train.max_rollouts pays for about 11 candidates" in " ".join(result.output.split())
    assert "no limit: set budget.max_calls" in result.output
    assert "can confirm a gain of about 17 points" in " ".join(result.output.split())
    assert not out.exists()


@pytest.mark.parametrize(
    ("key", "limit", "steps", "passes"),
    [
        ("max_calls", 10_000, 4, True),
        ("max_calls", 70, 1, True),
        ("max_calls", 12, 0, False),
        ("max_tokens", 2_000, 0, False),
        ("max_usd", 0.0001, 0, False),
    ],
)
def test_a_check_says_what_a_budget_buys(
    tmp_path: Path, key: str, limit: float, steps: int, passes: bool
) -> None:
    """Steps and candidates, and a warning if it ends before the first step does."""
    caps = ("target.max_tokens=64", "optimizer.max_tokens=4096", "target.price={input: 1, output: 2}")
    changes = [word for cap in caps for word in ("--set", f"models.{cap}")]
    config = configured(tmp_path)
    command = ("check", config, "--dry-run", *changes, "--set", f"budget.{key}={limit}")
    found = SetupCheck.model_validate_json(reflact(*command, "--json").stdout)
    assert found.forecast is not None
    assert (found.forecast.key, found.forecast.passes_first_step) == (key, passes)
    assert found.forecast.steps == min(steps, found.estimate.steps)
    assert (
        f"warning: budget.{key} is too small for the first step" in reflact(*command).stdout
    ) is not passes
