"""Measures documents outside a training: one document, or one beside others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from reflact.config import loading
from reflact.config.training import TrainerConfig
from reflact.errors import DataError
from reflact.protocols import EventCallback
from reflact.records import EVALUATION_LABEL, SkillComparison, SkillScore
from reflact.stages.final_test import make_placebo, measure_improvement, score_skill
from reflact.training.gating import build_metric
from reflact.training.rollouts import manage_environment
from reflact.training.run import Run
from reflact.training.setup import Overrides, ignore_event, open_runtime, prepare_run
from reflact.types import Control, Rollout, Skill, Split


async def evaluate_skill(
    config: TrainerConfig | Mapping[str, Any] | Path | str,
    skill: Skill,
    split: Split,
    *,
    overrides: Overrides | None = None,
    on_event: EventCallback = ignore_event,
) -> SkillScore:
    """Measure one document on a split under a configuration; finished rollouts are reused.

    The score is stored with the run, so that ``read_run`` and ``reflact show`` list it.

    Raises:
        UsageError: The configuration or the data is wrong, or the folder holds another run.
        ModelError, RunFailed: Too few items could be measured.
        BudgetSpent: The run's budget has no room for a call.
    """
    compared = await compare_skill(config, skill, (), split, overrides=overrides, on_event=on_event)
    return compared.skill


async def compare_skill(
    config: TrainerConfig | Mapping[str, Any] | Path | str,
    skill: Skill,
    against: Sequence[Skill | Control],
    split: Split,
    *,
    overrides: Overrides | None = None,
    on_event: EventCallback = ignore_event,
) -> SkillComparison:
    """Measure a document beside others on a split, paired by item; finished rollouts are reused, so each is paid once.

    Args:
        config: As for ``Trainer``.
        skill: The document.
        against: Other documents; ``none``: an empty one; ``placebo``: one of equal length about something else;
            ``null``: constant answers, which no model has to give.
        split: Where to measure.
        overrides: Collaborators in place of configured ones.
        on_event: Takes the events. A ``BudgetUpdated`` with what the run used before comes first.

    Raises:
        UsageError: The configuration or the data is wrong, or the folder holds another run.
        ModelError, RunFailed: Too few items could be measured.
        EnvironmentFailure: The skill does not reach the agent.
        BudgetSpent: The run's budget has no room for a call.
    """
    overrides = overrides or Overrides()
    plan = prepare_run(loading.load_config(config), overrides, needed=())
    items, metric = plan.data.items(split), build_metric(plan.config)
    if not items:
        raise DataError(
            f"there is no {split.value} split, so no document can be measured on it; choose another split"
        )
    documents = {"skill": skill}
    for number, other in enumerate(against, 1):
        if isinstance(other, Skill):
            documents[f"other_{number}"] = other
        elif other != "null":
            text = plan.prompts.prompts["placebo"].system
            documents[other] = Skill(text="") if other == "none" else make_placebo(text, skill)
    scores: list[SkillScore] = []
    rollouts: dict[str, Sequence[Rollout]] = {}
    async with open_runtime(plan, overrides, on_event) as runtime:
        run = Run(runtime, on_event)
        await run.start_or_resume(resume=False)
        runtime.budget.report_usage()
        with runtime.tracing.run("reflact.eval"):
            async with manage_environment(runtime.plan.environment, run.failures):
                await run.test_skill()
                for name, document in documents.items():
                    if split is Split.test:
                        await run.final_evaluator.open_test_split(f"eval {document.hash}")
                    rolled = await run.scheduler.roll_out_split(split, document, step=0, phase="eval")
                    rollouts[name] = rolled
                    scores.append(score_skill(name, document, split, rolled, items, metric=metric))
                for constant in run.final_evaluator.null_answers.list_all() if "null" in against else ():
                    rolled = await run.scheduler.roll_out_constant(split, items, constant, step=0)
                    rollouts[constant.name] = rolled
                    scores.append(
                        score_skill(constant.name, constant.document, split, rolled, items, metric=metric)
                    )
        label = f"{EVALUATION_LABEL}{split.value}/{skill.hash}/{scores[0].n}"
        await runtime.decision_log.put(0, label, scores[0].model_dump(mode="json"))
    gains = (
        measure_improvement(s.name, split, rollouts[s.name], rollouts["skill"], metric=metric)
        for s in scores[1:]
    )
    return SkillComparison(
        skill=scores[0], others=tuple(scores[1:]), improvements=tuple(g for g in gains if g is not None)
    )
