"""What a run will take, said before anything is asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from reflact import Trainer
from reflact.config.loading import load_config
from reflact.testing import ScriptedLLM, toy_optimizer
from reflact.training.cost_estimate import estimate_run
from reflact.training.plan import Overrides, prepare_run
from served import reflact
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
    result = reflact("train", DEMO, "--dry-run", "--set", f"out_dir={out}")
    assert result.exit_code == 0, result.output
    assert "steps to take, 0 taken" in result.output
    assert "train.max_rollouts pays for about 11 candidates" in " ".join(result.output.split())
    assert "no limit: set budget.max_usd" in result.output
    assert "can confirm a gain of about 17 points" in " ".join(result.output.split())
    assert not out.exists()
