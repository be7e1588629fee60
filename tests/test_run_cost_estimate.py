"""What a run will take, said before anything is asked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from reflact import Trainer
from reflact.config.loading import load_config
from reflact.messages import CallId, RenderedPrompt, ReplyModel
from reflact.testing import ScriptedLLM, ToyEnvironment, append_reply, toy_optimizer
from reflact.testing.llm import Script, ScriptedAnswer
from reflact.training.cost_estimate import RunCostEstimate, estimate_run
from reflact.training.plan import Overrides, prepare_run
from served import reflact
from toy_runs import Actor

DEMO = Path(__file__).parent.parent / "fixtures" / "demo" / "demo.yaml"
PLAIN: dict[str, Any] = {
    "search": {"sources": ["edits"]},
    "train": {"batch_size": 4, "num_epochs": 2},
    "reflect": {"minibatch_size": 2},
}
STRICT: dict[str, Any] = {"gate": {"policy": "strict"}, "select": {"max_edits": 1}}


def always_proposing() -> Script:
    """Return a script whose every analyst adds a line that no document has yet."""
    usual = toy_optimizer()

    def answer(prompt: RenderedPrompt, reply_type: type[ReplyModel], call_id: CallId) -> ScriptedAnswer:
        if "edits" in reply_type.model_fields and reply_type.__name__ != "ReasonedMergeReply":
            return append_reply(reply_type, f"- a line of {call_id.label}")
        if reply_type.__name__ == "ReasonedMergeReply":
            return "no merge"
        return usual(prompt, reply_type, call_id)

    return answer


async def measured(
    folder: Path, config: Mapping[str, Any], script: Script, *, noise: float = 0.0, rules: int = 4
) -> tuple[RunCostEstimate, dict[str, int]]:
    """Return what was foreseen of a toy run, and the calls that it made by purpose."""
    environment, target = ToyEnvironment(train=12, val=6, test=6, rules=rules), Actor(noise=noise)
    optimizer = ScriptedLLM(script)
    settings = {"out_dir": folder, **config}
    passed = Overrides(environment=environment, target=target, optimizer=optimizer)
    foreseen = estimate_run(prepare_run(load_config(settings), passed))
    summary = await Trainer(settings, environment=environment, target=target, optimizer=optimizer).train()
    assert summary.status == "completed"
    asked = Counter(call.call_id.purpose for call in optimizer.calls)
    return foreseen, {"rollout": len(target.asked), **asked}


@pytest.mark.parametrize(
    ("noise", "config"),
    [
        (0.0, {**PLAIN}),
        (0.2, {**PLAIN}),
        (0.2, {**PLAIN, **STRICT}),
        (0.0, {**PLAIN, "train": {"batch_size": 2, "num_epochs": 3, "accumulation": 2}}),
        (0.0, {**PLAIN, "update": {"mode": "rewrite"}, "select": {"lr_control": "autonomous"}}),
        (0.2, {**PLAIN, "update": {"mode": "full_rewrite"}}),
        (0.0, {**PLAIN, "slow_update": {"gated": False, "pair_policy": "changed", "samples": 3}}),
        (0.2, {**PLAIN, "gate": {"enabled": False}}),
        (0.2, {**PLAIN, "search": {"sources": ["rewrite"]}}),
        (0.2, {**PLAIN, "search": {"sources": ["examples", "rewrite", "edits"]}}),
    ],
)
async def test_a_run_takes_what_was_foreseen(tmp_path: Path, config: dict[str, Any], noise: float) -> None:
    """A run that may end early takes at most 1.5 times the calls."""
    foreseen, actual = await measured(tmp_path, config, toy_optimizer(edits=2), noise=noise)
    assert {row.role for row in foreseen.rows} == {"target", "optimizer"}
    assert sum(actual.values()) <= 1.5 * sum(row.calls for row in foreseen.rows)


@pytest.mark.parametrize(("epochs", "learns"), [(1, False), (1, True), (2, True)])
async def test_the_expected_number_is_close(tmp_path: Path, epochs: int, learns: bool) -> None:
    config = {**PLAIN, **STRICT, "train": {"batch_size": 4, "num_epochs": epochs}}
    config["test"] = {
        "placebo": learns
    }  # without a better skill it is as empty as the initial document, and stored
    script = toy_optimizer() if learns else always_proposing()
    foreseen, actual = await measured(tmp_path, config, script, rules=6)
    rollouts = next(row.calls for row in foreseen.rows if row.purpose == "rollout")
    assert abs(rollouts - actual["rollout"]) <= 0.25 * actual["rollout"]


PRICES = [f"models.{role}.price={{input: 1.0, output: 2.0}}" for role in ("target", "optimizer")]


def test_money_is_tokens_times_prices() -> None:
    foreseen = estimate_run(prepare_run(load_config(DEMO, overrides=PRICES), Overrides()))
    given = sum(row.input_tokens for row in foreseen.rows)
    written = sum(row.output_tokens for row in foreseen.rows)
    assert foreseen.usd == pytest.approx((given + 2 * written) / 1e6, rel=0.01)


def test_a_dry_run_calls_and_writes_nothing(tmp_path: Path) -> None:
    out = tmp_path / "run"
    result = reflact("train", DEMO, "--dry-run", "--set", f"out_dir={out}")
    assert result.exit_code == 0, result.output
    assert "steps to take, 0 taken" in result.output
    assert "train.max_rollouts pays for about 11 candidates" in " ".join(result.output.split())
    assert "no limit: set budget.max_usd" in result.output
    assert "can confirm a gain of about 17 points" in " ".join(result.output.split())
    assert not out.exists()
