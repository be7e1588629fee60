"""The stages for a loop of your own: rollouts, reports and verdicts without a run and its store."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from reflact.concurrency import fan_out
from reflact.config.training import ReflectConfig, UpdateConfig
from reflact.gate.greater_mean import GateSettings
from reflact.protocols import Environment, Target
from reflact.stages.context import Journal, StageContext
from reflact.stages.evaluate import GateMetric
from reflact.stages.evaluate import evaluate as evaluate_pass
from reflact.stages.reflect import Analyst, MinibatchDealer
from reflact.stages.rollout import RolloutRunner
from reflact.types import AnalystReport, Item, Rollout, Skill, Verdict

# Rollouts in flight.
CONCURRENCY = 8


async def roll_out(
    items: Sequence[Item],
    skill: Skill,
    *,
    target: Target,
    environment: Environment,
    journal: Journal | None = None,
    trial: int = 0,
) -> tuple[Rollout, ...]:
    """Return one rollout for each item, in their order; one that failed has no score.

    Rollouts that a ``journal`` has are not run again; without one, nothing is kept.
    """
    journal = Journal() if journal is None else journal
    runner = RolloutRunner(
        target=target,
        environment=environment,
        store=journal,
        decision_log=journal,
        step=0,
        feedback=True,
        limit=CONCURRENCY,
    )
    return await runner.roll_out(items, skill, coverage=None, trial=trial)


async def reflect(
    rollouts: Sequence[Rollout],
    items: Sequence[Item],
    skill: Skill,
    *,
    context: StageContext,
    update: UpdateConfig | None = None,
    config: ReflectConfig | None = None,
    max_edits: int = 4,
    notes: str = "",
    threshold: float | None = None,
) -> tuple[AnalystReport, ...]:
    """Return the analysts' reports on minibatches of failures and of successes.

    Args:
        rollouts: The rollouts, in the order of the items.
        items: The items.
        skill: The document that the rollouts were under.
        context: The optimizer and its prompts.
        update: Which kinds of edit are proposed; None: the defaults.
        config: How minibatches are made; None: the defaults.
        max_edits: The most edits of an analyst.
        notes: What earlier steps tried, for the analysts.
        threshold: The hard score from which a rollout is a success; None: above 0.
    """
    config = config or ReflectConfig()
    analyst = Analyst(
        context=context,
        skill=skill,
        config=update or UpdateConfig(),
        max_edits=max_edits,
        tokens=config.trajectory_tokens,
        notes=lambda _: notes,
    )
    dealer = MinibatchDealer(items, config, batch=0, threshold=threshold)
    batches = [batch for rollout in rollouts for batch in dealer.add(rollout)]
    return await fan_out(analyst.report, batches, limit=config.concurrency)


async def evaluate(
    candidate: Skill,
    current: Skill,
    items: Sequence[Item],
    *,
    roll_out: Callable[[Sequence[Item], Skill], Awaitable[Sequence[Rollout]]],
    metric: GateMetric | None = None,
) -> Verdict:
    """Return the verdict on whether a candidate has a greater mean score.

    Args:
        candidate: The new document.
        current: The document that it would replace.
        items: The validation items.
        roll_out: Returns one rollout for each of the items under a document, in their order.
        metric: How a score becomes one number; None: the hard score.
    """
    by_id = {item.id: item for item in items}

    async def run_pass(skill: Skill, trial: int, item_ids: Sequence[str]) -> Sequence[Rollout]:
        return await roll_out([by_id[item_id] for item_id in item_ids], skill)

    result = await evaluate_pass(
        candidate,
        current,
        current,
        settings=GateSettings(item_ids=tuple(by_id)),
        metric=metric or GateMetric(metric="hard"),
        run_pass=run_pass,
    )
    assert result is not None, "only a repeat, which is off, finds out that a target is noisy"
    return result.verdict
